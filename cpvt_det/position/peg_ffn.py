# SPDX-License-Identifier: Apache-2.0
"""A depthwise convolution inside the feed-forward network of every layer. GTR applies the idea of PEG at this place."""

from collections.abc import Sequence

from torch import Tensor, nn

from cpvt_det.common import defaults
from cpvt_det.common.structures import Size, has_padding
from cpvt_det.position.encoding import PositionEncoding, register_position, require_one_level


@register_position("peg_ffn")
class FeedForwardPEGEncoding(PositionEncoding):
    """A 3x3 depthwise convolution with zero padding and a bias, on the network's inner channels, before its activation.

    Padded tokens are zeroed first, so that they look like the convolution's own zero padding.

    Args:
        num_layers: number of encoder layers; each has a convolution.
        ffn_channels: F.
        kernel_size: side of the convolution's kernel, odd.
        zero_init: whether to start as the identity, so that the encoding can be added to a trained model.

    Raises:
        ValueError: a kernel size that is not odd and positive, or in ``feed`` more than one level.

    Source: arXiv 2609.26590 (GTR). There, the convolution acts on the gated half of a SwiGLU, on square maps.
    """

    def __init__(
        self,
        num_layers: int = defaults.LAYERS,
        ffn_channels: int = defaults.FFN_CHANNELS,
        kernel_size: int = 3,
        zero_init: bool = False,
    ):
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size must be odd and at least 1, so that the kernel can be centred on a token; got {kernel_size}"
            )
        self.pegs = nn.ModuleList(
            nn.Conv2d(ffn_channels, ffn_channels, kernel_size, padding=kernel_size // 2, groups=ffn_channels)
            for _ in range(num_layers)
        )
        for convolution in self.pegs if zero_init else ():
            nn.init.dirac_(convolution.weight, ffn_channels)
            nn.init.zeros_(convolution.bias)

    def feed(self, hidden: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        shape = require_one_level(level_shapes)
        if has_padding(padding_mask):
            hidden = hidden.masked_fill(padding_mask[..., None], 0)
        return self.pegs[layer](hidden.unflatten(1, shape).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)
