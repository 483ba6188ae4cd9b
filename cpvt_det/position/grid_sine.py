# SPDX-License-Identifier: Apache-2.0
"""RT-DETR's sine encoding, and the variant that most public code computes. The two differ on maps that are not square."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cpvt_det.common import defaults
from cpvt_det.common.structures import require_bool
from cpvt_det.position.encoding import register_position
from cpvt_det.position.sine import SineEncoding


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
