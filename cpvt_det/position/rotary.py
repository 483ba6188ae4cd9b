# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: queries and keys are rotated by angles that grow with row and column, so that the product of a query and a
key depends on the offset between their cells.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common.structures import Size
from cpvt_det.position.encoding import PositionEncoding, channels_per_head, register_position, require_one_level


class RotaryEncoding(PositionEncoding):
    """Rotates each pair of neighbouring channels of a query or key by the angle that :meth:`angles` gives for its cell.

    Cells count from the upper left corner of each image, so padding changes nothing.
    """

    def place(
        self, queries: Tensor, keys: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        dtype = torch.promote_types(queries.dtype, torch.float32)  # half precision would round positions
        height, width = require_one_level(level_shapes)
        y, x = (torch.arange(side, dtype=dtype, device=queries.device) for side in (height, width))
        angles = self.angles(y, x, layer).flatten(-3, -2)  # (..., H, W, C / 2 M) -> (..., N, C / 2 M)
        sine, cosine = angles.sin(), angles.cos()
        return _turn(queries, sine, cosine), _turn(keys, sine, cosine), None

    def angles(self, y: Tensor, x: Tensor, layer: int) -> Tensor:
        """Compute the rotation angles in radians.

        Args:
            y, x: (H,) and (W,) float, rows and columns counted from 0.
            layer: the index of the layer.

        Returns:
            (H, W, C / 2 M), or (M, H, W, C / 2 M), one per pair of channels.
        """
        raise NotImplementedError


@register_position("rope")
class AxialRotaryEncoding(RotaryEncoding):
    """Rotates the first half of a head's channels by the row, and the second by the column, each with decreasing frequencies.

    Args:
        channels: C.
        num_heads: M; C / M is a multiple of 4.
        frequency_ratio: ratio of the highest frequency to the lowest, in the limit of many channels.

    Raises:
        ValueError: channels per head that are not a multiple of 4.

    Source: arXiv 2104.09864, on two axes as in arXiv 2403.13298, section 3.2.
    """

    def __init__(self, channels: int, num_heads: int, frequency_ratio: float = 100.0):
        super().__init__()
        self.num_frequencies = channels_per_head(channels, num_heads, 4) // 4
        self.frequency_ratio = frequency_ratio

    def angles(self, y: Tensor, x: Tensor, layer: int) -> Tensor:
        frequencies = self.frequency_ratio ** (
            -torch.arange(self.num_frequencies, dtype=y.dtype, device=y.device) / self.num_frequencies
        )
        rows, columns = (axis[:, None] * frequencies for axis in (y, x))
        shape = (y.shape[0], x.shape[0], -1)
        return torch.cat((rows[:, None].expand(shape), columns.expand(shape)), dim=-1)


@register_position("rope_mixed")
class MixedRotaryEncoding(RotaryEncoding):
    """Gives every pair of channels in each layer and head its own learned direction, along which its angle grows.

    Args:
        channels: C.
        num_layers: layers of the encoder.
        num_heads: M; C / M is a multiple of 4.
        frequency_ratio: ratio of the highest initial frequency to the lowest, in the limit of many channels.

    Raises:
        ValueError: channels per head that are not a multiple of 4.

    Source: arXiv 2403.13298, section 3.3. The initial values are those of naver-ai/rope-vit: a random direction per head, and the
    direction at a right angle to it.
    """

    def __init__(self, channels: int, num_layers: int, num_heads: int, frequency_ratio: float = 10.0):
        super().__init__()
        count = channels_per_head(channels, num_heads, 4) // 4
        size = frequency_ratio ** (-torch.arange(count) / count)
        direction = torch.rand(num_layers, num_heads, 1) * 2 * math.pi
        turns = torch.cat([(direction + quarter).expand(-1, -1, count) for quarter in (0, math.pi / 2)], dim=-1)
        self.freqs = nn.Parameter(torch.stack((turns.cos(), turns.sin())) * size.repeat(2))  # (2, layers, M, C / 2 M), x then y

    def angles(self, y: Tensor, x: Tensor, layer: int) -> Tensor:
        along_x, along_y = self.freqs[:, layer, :, None, None].to(y.dtype)  # (M, 1, 1, C / 2 M) each
        return x[:, None] * along_x + y[:, None, None] * along_y


def _turn(x: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
    """Rotate each pair of channels of (B, M, N, C / M) by its angle, whose sine and cosine are in (..., N, C / 2 M)."""
    first, second = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.flatten(-2).to(x.dtype)
