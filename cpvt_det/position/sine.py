# SPDX-License-Identifier: Apache-2.0
"""Sine encodings: DETR's; Deformable-DETR's, which is shifted by half a cell; RT-DETR's; and the variant of RT-DETR's that most
public code computes, which differs on maps that are not square."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cpvt_det.common import defaults
from cpvt_det.common.structures import require_bool
from cpvt_det.position.encoding import PositionEncoding, register_position


class SineEncoding(PositionEncoding):
    """Sines and cosines of the row and the column, by default relative to the size of the valid part of the map.

    The computation is in float32 even under autocast, because half precision would round positions; for float64 features, it is
    in float64.

    Args:
        channels: C, a multiple of 4; the first half encodes the row, the second the column.
        offset: number added to the cell index, which counts from 1: 0 in DETR, -0.5 in Deformable-DETR.
        temperature: ratio of the longest wavelength to the shortest, in the limit of many channels.
        normalize: whether to scale angles so that the valid part of the map spans a full turn. With ``False``, each cell spans
            one radian, whatever the image's size.

    Raises:
        ValueError: channels that are not a multiple of 4, or a temperature that is not above 0.
        TypeError: in ``forward``, a mask that is not bool.

    Source: arXiv 2005.12872, appendix A.4; the offset from fundamentalvision/Deformable-DETR ``models/position_encoding.py``.
    """

    def __init__(self, channels: int, offset: float = 0.0, temperature: float = defaults.TEMPERATURE, normalize: bool = True):
        super().__init__()
        if channels % 4:
            raise ValueError(f"a sine encoding needs channels in multiples of 4, got {channels}")
        if not temperature > 0:
            raise ValueError(f"the temperature of a sine encoding must be above 0, got {temperature}")
        self.channels_per_axis = channels // 2
        self.offset = offset
        self.temperature = temperature
        self.normalize = normalize

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor]:
        encoded = []
        for feature, mask in zip(features, padding_masks, strict=True):
            require_bool(mask)
            axes = []
            for dim in (1, 2):
                index = (~mask).cumsum(dim).to(torch.promote_types(feature.dtype, torch.float32))  # (B, H, W), of cells from 1
                angle = index + self.offset
                if self.normalize:
                    angle = angle / (index.narrow(dim, index.shape[dim] - 1, 1) + 1e-6) * (2 * math.pi)
                axes.append(sines(angle, self.channels_per_axis, self.temperature))
            encoded.append(torch.cat(axes, dim=-1).permute(0, 3, 1, 2).to(feature.dtype))  # (B, H, W, C) -> (B, C, H, W)
        return encoded


def sines(angle: Tensor, channels: int, temperature: float = defaults.TEMPERATURE) -> Tensor:
    """Alternating sines and cosines, with wavelengths that rise from 2 pi to nearly ``temperature`` times that.

    Args:
        angle: (...) float, in radians.
        channels: number of channels, even.
        temperature: ratio of the longest wavelength to the shortest, in the limit of many channels.

    Returns:
        (..., ``channels``).
    """
    exponent = torch.arange(channels, dtype=angle.dtype, device=angle.device)
    wavelength = temperature ** (2 * torch.div(exponent, 2, rounding_mode="floor") / channels)
    phase = angle[..., None] / wavelength
    return torch.stack((phase[..., 0::2].sin(), phase[..., 1::2].cos()), dim=-1).flatten(-2)


register_position("sine")(SineEncoding)
register_position("sine_offset")(functools.partial(SineEncoding, offset=-0.5))


@register_position("sine_grid")
class GridSineEncoding(SineEncoding):
    """Sines and then cosines of a cell's row, followed by sines and then cosines of its column. Rows and columns count from 0 in
    images of any size.

    Args:
        channels: C, a multiple of 4.
        temperature: ratio of the longest wavelength to the shortest, in the limit of many channels.

    Raises:
        ValueError: channels that are not a multiple of 4, or a temperature that is not above 0.
        TypeError: in ``forward``, a mask that is not bool.

    Source: arXiv 2304.08069, section 4.2; the order of the channels is that of lyuwenyu/RT-DETR on square maps.
    """

    def __init__(self, channels: int, temperature: float = defaults.TEMPERATURE):
        super().__init__(channels, temperature=temperature)
        self.num_frequencies = channels // 4

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor]:
        encoded = []
        for feature, mask in zip(features, padding_masks, strict=True):
            require_bool(mask)
            dtype = torch.promote_types(feature.dtype, torch.float32)
            exponent = torch.arange(self.num_frequencies, dtype=dtype, device=mask.device) / self.num_frequencies
            angles = [cells.to(dtype)[..., None] * self.temperature**-exponent for cells in self.cells(mask)]
            waves = torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=-1)  # (B, H, W, C)
            encoded.append(waves.permute(0, 3, 1, 2).to(feature.dtype))
        return encoded

    def cells(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of every cell of a (B, H, W) mask, counted from 0; (B, H, W) int64 each."""
        rows, columns = (torch.arange(side, device=mask.device) for side in mask.shape[1:])
        return rows[:, None].expand(mask.shape), columns.expand(mask.shape)


@register_position("sine_scrambled")
class ScrambledSineEncoding(GridSineEncoding):
    """On square maps, this equals :class:`GridSineEncoding`. On other maps, tokens are laid out as if the map had H columns and W
    rows, so that cells get the positions of other cells.

    It is for comparison only: this is what lyuwenyu/RT-DETR, Peterande/D-FINE and code derived from them compute. In this
    implementation, H and W count only an image's own cells, so that padding changes nothing.

    Args:
        channels: C, a multiple of 4.
        temperature: ratio of the longest wavelength to the shortest, in the limit of many channels.
    """

    def cells(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers used as row and column of every cell."""
        rows, columns = super().cells(mask)
        height, width = ((~mask).any(dim).sum(1).clamp(min=1)[:, None, None] for dim in (2, 1))
        number = rows * width + columns
        return torch.div(number, height, rounding_mode="floor"), number % height
