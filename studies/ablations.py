# SPDX-License-Identifier: Apache-2.0
"""What PEG is without one of its parts, or with more of one: the paper's ablations, each an encoding of its own.

They are for comparison; :mod:`cpvt_det.position.peg` is the module to use. ``python -m studies`` knows them, other commands by
``--import studies.ablations``. Kernel sizes, positions, norms and the authors' masking need no class: ``MODEL.POSITION`` has keys
for them.

Source: arXiv 2102.10882, the ablation tables on ImageNet, and of ``wide`` the code of Twins. Three are our reading of a line there:
the twelve 1x1 convolutions are depthwise, PEG without zero padding keeps its residual, and that on queries and keys is made once,
of the projected features.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cpvt_det.common.structures import Size
from cpvt_det.position.encoding import PositionEncoding, register_position
from cpvt_det.position.peg import PEGDetection, PEGEncoding, PlainPEGEncoding

NUM_SEPARABLE = 4
NUM_SINGLE_CELL = 12


class SeparablePEG(PEGDetection):
    """The depthwise convolution is followed by a pointwise one, so that channels mix: k * k * C + C * C weights.

    Args:
        channels, options, named: as in :class:`PEGDetection`.
    """

    def __init__(self, channels: int, *options: Any, **named: Any):
        super().__init__(channels, *options, **named)
        self.conv = nn.Sequential(self.conv, nn.Conv2d(channels, channels, 1, bias=False))

    @property
    def depthwise(self) -> nn.Conv2d:
        return self.conv[0]

    @property
    def last_conv(self) -> nn.Conv2d:
        return self.conv[1]


class FrozenPEG(PEGDetection):
    """The convolution keeps its random weights: what the zero padding alone encodes. The norm is trained.

    Args:
        channels, options, named: as in :class:`PEGDetection`.
    """

    def __init__(self, channels: int, *options: Any, **named: Any):
        super().__init__(channels, *options, **named)
        self.conv.requires_grad_(False)


class WidePEG(PEGDetection):
    """The convolution starts as in Twins, the only public code with a PEG of CPVT's authors: its weights are normal, of variance
    2 / k^2, 2.5 times as wide as torch's for 3x3, and a bias is 0.

    Args:
        channels, options, named: as in :class:`PEGDetection`.

    Source: Meituan-AutoML/Twins, ``gvt.py``.
    """

    def __init__(self, channels: int, *options: Any, **named: Any):
        super().__init__(channels, *options, **named)
        nn.init.normal_(self.conv.weight, std=(2 / self.conv.weight[0].numel()) ** 0.5)
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)


class BorderlessPEG(PEGDetection):
    """No zero padding: beyond the valid part of an image its border tokens are repeated, so that no token learns its position.

    Args:
        channels, options, named: as in :class:`PEGDetection`. Nothing padded is ever looked at, whatever ``mask_input`` is; it
            decides about the norm's statistics alone.
    """

    def __init__(self, channels: int, *options: Any, **named: Any):
        super().__init__(channels, *options, **named)
        self.conv.padding = (0, 0)

    def _convolve(self, tokens: Tensor, padding_mask: Tensor, shape: Size) -> Tensor:
        reach, valid = self.conv.kernel_size[0] // 2, ~padding_mask.unflatten(1, shape)
        rows, columns = (_clamped_places(valid.any(other).sum(1), size, reach) for other, size in zip((2, 1), shape, strict=True))
        places = rows[:, :, None] * shape[1] + columns[:, None, :]  # (B, H + 2 reach, W + 2 reach)
        index = places.flatten(1)[..., None].expand(-1, -1, tokens.shape[-1])
        return super()._convolve(tokens.gather(1, index), padding_mask, places.shape[1:])


def _clamped_places(extents: Tensor, size: int, reach: int) -> Tensor:
    """(B,) valid cells of an axis -> (B, ``size`` + 2 ``reach``) the cell each place shows: its own, or the nearest valid one."""
    places = torch.arange(-reach, size + reach, device=extents.device)
    return torch.minimum(places.clamp(min=0), (extents - 1).clamp(min=0)[:, None])


class StackedPEG(nn.ModuleList):
    """Several PEGs one after another, each with its residual and with the padded tokens as they came."""

    def forward(self, tokens: Tensor, padding_mask: Tensor, *level_shapes: Size) -> Tensor:
        """As :meth:`PEGDetection.forward`."""
        for peg in self:
            tokens = peg(tokens, padding_mask, *level_shapes)
        return tokens


def stacked_separable(channels: int, *options: Any, **named: Any) -> StackedPEG:
    """Four :class:`SeparablePEG`; arguments are theirs."""
    return StackedPEG(SeparablePEG(channels, *options, **named) for _ in range(NUM_SEPARABLE))


def stacked_single_cell(channels: int, kernel_size: int = 3, *options: Any, **named: Any) -> StackedPEG:
    """Twelve PEGs of one cell: more weights than one of 3x3, but they see no neighbour and so no border.

    Args:
        channels, options, named: as in :class:`PEGDetection`.
        kernel_size: the default and no other, as theirs is 1.

    Raises:
        ValueError: another kernel size.
    """
    if kernel_size != 3:
        raise ValueError(f"PEGs of one cell have a kernel of 1, got kernel_size {kernel_size}")
    return StackedPEG(PEGDetection(channels, 1, *options, **named) for _ in range(NUM_SINGLE_CELL))


class QueryKeyPEG(PositionEncoding):
    """PEG's branch on the projected features, added to queries and keys of every encoder layer as sine is: values stay without.

    Args:
        channels, kernel_size, norm, mask_input, zero_init: as in :class:`PEGDetection`.
        num_levels: L, a PEG each.
    """

    def __init__(
        self,
        channels: int,
        num_levels: int = 1,
        kernel_size: int = 3,
        norm: str = "BN",
        mask_input: bool = True,
        zero_init: bool = False,
    ):
        super().__init__()
        self.pegs = nn.ModuleList(PEGDetection(channels, kernel_size, norm, mask_input, zero_init) for _ in range(num_levels))

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor]:
        maps = zip(self.pegs, features, padding_masks, strict=True)
        return [_branch_of_map(peg, feature, mask) for peg, feature, mask in maps]


def _branch_of_map(peg: PEGDetection, feature: Tensor, padding_mask: Tensor) -> Tensor:
    """(B, C, H, W) -> the same."""
    shape = tuple(feature.shape[-2:])
    branch = peg.branch(feature.flatten(2).transpose(1, 2), padding_mask.flatten(1), shape)
    return branch.transpose(1, 2).unflatten(2, shape)


ABLATIONS: dict[str, Callable[..., nn.Module]] = {
    "separable": SeparablePEG,
    "stacked": stacked_separable,
    "frozen": FrozenPEG,
    "wide": WidePEG,
    "borderless": BorderlessPEG,
    "twelve_1x1": stacked_single_cell,
}
"""Name -> builder of one PEG; registered as ``peg_<name>``, and of the classifiers' PEG as ``peg_plain_<name>``."""
for _name, _peg in ABLATIONS.items():
    register_position(f"peg_{_name}")(functools.partial(PEGEncoding, peg=_peg))
    register_position(f"peg_plain_{_name}")(functools.partial(PlainPEGEncoding, peg=_peg))
register_position("peg_query_key")(QueryKeyPEG)
