# SPDX-License-Identifier: Apache-2.0
"""DETR's sine encoding, and Deformable-DETR's version, which is shifted by half a cell."""

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
