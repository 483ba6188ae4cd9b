# SPDX-License-Identifier: Apache-2.0
"""The Positional Encoding Generator (PEG) of CPVT's detection experiment, and the position encodings that are built from it."""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common import defaults
from cpvt_det.common.structures import Size, has_padding, require_bool
from cpvt_det.layers.norm import MaskedBatchNorm2d, NoNorm, fold_norm, make_norm
from cpvt_det.position.encoding import PositionEncoding, register_position, require_one_level


class PEGDetection(nn.Module):
    """A depthwise convolution that tells every token where the border is, and thereby its own position.

    It computes ``tokens + ReLU(norm(conv(tokens)))`` on the map of the tokens, with zero padding and no bias. Padded tokens are
    returned unchanged. A 3x3 kernel has 9 C weights, in addition to the weights of the norm.

    Args:
        channels: C.
        kernel_size: k, odd.
        norm: ``BN``, ``SyncBN``, ``GN`` or ``none``.
        mask_input: whether to zero the padded tokens before the convolution and leave them out of the norm's statistics, so that
            an image's tokens do not depend on its padding. With ``False``, padded tokens leak into their neighbours and into the
            statistics, as in the authors' code; only the tokens in the padding are restored afterwards.
        zero_init: whether to multiply the branch by a learned scale per channel that starts at 0, so that a PEG added to a trained
            model does not change its outputs at first. The scale comes after the activation, because a zero before the ReLU would
            have no gradient.
        plain: whether to use the form of CPVT's classifiers, in which the convolution has a bias and there is no ReLU. It should
            be combined with the norm ``none``. It has 10 C weights.

    Raises:
        ValueError: a kernel size that is not odd and positive, or fewer than one channel.
        UnknownNameError: an unknown norm.

    Source: arXiv 2102.10882, appendix (PEG for detection) and algorithm 1 (plain). The initial values of the plain form are not
    published, so torch's defaults are used.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 3,
        norm: str = "BN",
        mask_input: bool = True,
        zero_init: bool = False,
        plain: bool = False,
    ):
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels must be at least 1, got {channels}")
        _require_odd(kernel_size)
        self.mask_input, self.plain = mask_input, plain
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=plain)
        self.norm = make_norm(norm, channels)
        if zero_init:
            self.scale = nn.Parameter(torch.zeros(channels))
        else:
            self.register_parameter("scale", None)

    def forward(self, tokens: Tensor, padding_mask: Tensor, *level_shapes: Size) -> Tensor:
        """Add the encoding to the tokens of one or several maps. Each map is convolved separately, and the norm covers all maps
        together.

        Args:
            tokens: (B, N, C) float, row by row, the levels one after another.
            padding_mask: (B, N) bool, True = padded.
            level_shapes: (H, W) of the map, or of each map.

        Returns:
            (B, N, C), with padded tokens bit for bit unchanged.

        Raises:
            ValueError: tokens, mask and shapes that do not agree.
            TypeError: a mask that is not bool.
        """
        branch = self.branch(tokens, padding_mask, *level_shapes)
        if not has_padding(padding_mask):
            return tokens + branch
        return torch.where(padding_mask[..., None], tokens, tokens + branch)

    def branch(self, tokens: Tensor, padding_mask: Tensor, *level_shapes: Size) -> Tensor:
        """The encoding that is added to the tokens; arguments as in :meth:`forward`.

        Returns:
            (B, N, C); values at padded tokens are meaningless.
        """
        require_bool(padding_mask)
        lengths = [height * width for height, width in level_shapes]
        if tokens.ndim != 3 or padding_mask.shape != tokens.shape[:2] or sum(lengths) != tokens.shape[1]:
            shapes = " and ".join(str(tuple(shape)) for shape in level_shapes)
            raise ValueError(
                f"tokens {tuple(tokens.shape)}, padding_mask {tuple(padding_mask.shape)} and shape {shapes} disagree; "
                "expected (B, H * W, C), (B, H * W) and (H, W)"
            )
        is_masked = self.mask_input and has_padding(padding_mask)
        x = tokens.masked_fill(padding_mask[..., None], 0) if is_masked else tokens
        levels = zip(x.split(lengths, dim=1), padding_mask.split(lengths, dim=1), level_shapes, strict=True)
        branches = [self._convolve(*level) for level in levels]
        branch = branches[0] if len(branches) == 1 else torch.cat(branches, dim=1)
        branch = branch.transpose(1, 2)[..., None]  # (B, N, C) -> (B, C, N, 1), a map for the norm
        branch = self.norm(branch, ~padding_mask[:, None, :, None] if is_masked else None)
        branch = branch[..., 0].transpose(1, 2)  # (B, C, N, 1) -> (B, N, C)
        branch = branch if self.plain else F.relu(branch)
        return branch if self.scale is None else branch * self.scale

    def _convolve(self, tokens: Tensor, padding_mask: Tensor, shape: Size) -> Tensor:
        """(B, H * W, C) -> the same. Batch-first tokens are the channels-last view of their map, so nothing is copied."""
        return self.conv(tokens.unflatten(1, shape).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)

    @property
    def depthwise(self) -> nn.Conv2d:
        """The convolution over neighbouring tokens."""
        return self.conv

    @property
    def last_conv(self) -> nn.Conv2d:
        """The convolution into which the norm can be folded."""
        return self.conv

    def fold(self) -> "PEGDetection":
        """Merge the norm into the convolution, in place, for inference; outputs change only by rounding.

        Returns:
            This module, without a norm and with a bias in its convolution.

        Raises:
            ValueError: the module is in training mode, or it has a norm whose statistics depend on the input (GN).
        """
        self.check_foldable()
        if isinstance(self.norm, NoNorm):
            return self
        fold_norm(self.last_conv, self.norm)
        self.norm = NoNorm()
        return self

    def check_foldable(self) -> None:
        """Raise the errors that :meth:`fold` would raise, and change nothing."""
        is_foldable = isinstance(self.norm, MaskedBatchNorm2d) and not self.training
        if not is_foldable and not isinstance(self.norm, NoNorm):
            raise ValueError(f"only a batch norm in evaluation mode can be folded, got {type(self.norm).__name__}; call eval()")


def encode_levels(pegs: Sequence[PEGDetection], tokens: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size]) -> Tensor:
    """Add the encoding of a single PEG for all levels, or of one PEG per level; arguments as in :meth:`PEGDetection.forward`.

    Raises:
        ValueError: a number of PEGs other than one or the number of levels.
    """
    if len(pegs) == 1:
        return pegs[0](tokens, padding_mask, *level_shapes)
    lengths = [height * width for height, width in level_shapes]
    levels = zip(pegs, tokens.split(lengths, 1), padding_mask.split(lengths, 1), level_shapes, strict=True)
    return torch.cat([peg(part, mask, shape) for peg, part, mask, shape in levels], dim=1)


class PEGEncoding(PositionEncoding):
    """:class:`PEGDetection` after chosen encoder layers, alone or together with an encoding that is additive or acts inside layers.

    Args:
        channels: C.
        num_levels: L.
        num_layers: number of encoder layers, which limits ``positions``.
        additive: function that builds the other encoding from the channels; ``None`` for no other encoding.
        peg: function that builds one PEG from the channels and the last four arguments. It is :class:`PEGDetection` or a function
            of ``studies/ablations.py``.
        positions: the layers after which a PEG acts; -1 means before the first layer. The default, 0, is CPVT's choice.
        share_levels: whether all levels share one PEG at each position, whose norm covers all levels. Otherwise, each level has
            its own PEG.
        kernel_size: side of the convolution's kernel, odd.
        norm: norm after the convolution: BN, SyncBN, GN or none.
        mask_input: whether to keep padded tokens out of the convolution and the norm's statistics; ``False`` includes them, as the
            authors' code does.
        zero_init: whether to start as the identity, so that the encoding can be added to a trained model.

    Raises:
        ValueError: there is no position, a position is outside [-1, ``num_layers`` - 1], or a position is repeated.
    """

    def __init__(
        self,
        channels: int,
        num_levels: int = 1,
        num_layers: int = defaults.LAYERS,
        additive: Callable[[int], PositionEncoding] | None = None,
        peg: Callable[..., nn.Module] = PEGDetection,
        positions: Sequence[int] = (0,),
        share_levels: bool = False,
        kernel_size: int = 3,
        norm: str = "BN",
        mask_input: bool = True,
        zero_init: bool = False,
    ):
        super().__init__()
        if not positions or len(set(positions)) != len(positions) or not all(-1 <= p < num_layers for p in positions):
            raise ValueError(
                f"PEG positions must be different layers from -1 (before the first) to {num_layers - 1}, got {list(positions)}"
            )
        self.mask_input = mask_input
        self.additive = None if additive is None else additive(channels)
        self.acts_in_attention = self.additive is not None and self.additive.acts_in_attention
        self.acts_in_ffn = self.additive is not None and self.additive.acts_in_ffn
        self.names = {layer: "before" if layer < 0 else str(layer) for layer in positions}
        self.pegs = nn.ModuleDict(
            {
                name: nn.ModuleList(
                    peg(channels, kernel_size, norm, mask_input, zero_init) for _ in range(1 if share_levels else num_levels)
                )
                for name in self.names.values()
            }
        )

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor] | None:
        return None if self.additive is None else self.additive(features, padding_masks)

    def inject(self, tokens: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        if layer not in self.names:
            return tokens
        return encode_levels(self.pegs[self.names[layer]], tokens, padding_mask, level_shapes)

    def acts_after(self, layer: int) -> bool:
        return layer in self.names or type(self).inject is not PEGEncoding.inject

    @property
    def looks_at_padding(self) -> bool:
        return not self.mask_input or type(self).inject is not PEGEncoding.inject

    def place(
        self, queries: Tensor, keys: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs = (queries, keys, padding_mask, level_shapes, layer)
        return super().place(*inputs) if self.additive is None else self.additive.place(*inputs)

    def feed(self, hidden: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        inputs = (hidden, padding_mask, level_shapes, layer)
        return super().feed(*inputs) if self.additive is None else self.additive.feed(*inputs)


class PlainPEGEncoding(PEGEncoding):
    """PEGs as in CPVT's classifiers, with a bias, without norm and activation, after chosen encoder layers, alone or with another
    encoding.

    Args:
        channels, num_levels, num_layers, additive, positions, share_levels, kernel_size, mask_input, zero_init: as in
            :class:`PEGEncoding`.
        peg: function that builds one PEG, as in :class:`PEGEncoding`, and also takes ``plain``.

    Source: arXiv 2102.10882, algorithm 1.
    """

    def __init__(
        self,
        channels: int,
        num_levels: int = 1,
        num_layers: int = defaults.LAYERS,
        additive: Callable[[int], PositionEncoding] | None = None,
        peg: Callable[..., nn.Module] = PEGDetection,
        positions: Sequence[int] = (0,),
        share_levels: bool = False,
        kernel_size: int = 3,
        mask_input: bool = True,
        zero_init: bool = False,
    ):
        peg = functools.partial(peg, plain=True)
        acts = (positions, share_levels, kernel_size, "none", mask_input, zero_init)
        super().__init__(channels, num_levels, num_layers, additive, peg, *acts)


class FeedForwardPEGEncoding(PositionEncoding):
    """A 3x3 depthwise convolution with zero padding and a bias inside the feed-forward network of every layer, on the network's
    inner channels, before its activation. GTR applies the idea of PEG at this place.

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
        _require_odd(kernel_size)
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


def _require_odd(kernel_size: int) -> None:
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd and at least 1, so that the kernel can be centred on a token; got {kernel_size}")


register_position("peg")(PEGEncoding)
register_position("peg_plain")(PlainPEGEncoding)
register_position("peg_ffn")(FeedForwardPEGEncoding)
