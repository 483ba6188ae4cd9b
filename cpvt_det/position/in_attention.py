# SPDX-License-Identifier: Apache-2.0
"""Positions inside the attention. Relative: learned vectors for the clipped offsets of rows and of columns. Rotary: queries and
keys are rotated by angles that grow with row and column, so that the product of a query and a key depends on the offset between
their cells.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common.structures import Size
from cpvt_det.position.encoding import PositionEncoding, channels_per_head, register_position, require_one_level


@register_position("relative")
class RelativeEncoding(PositionEncoding):
    """Compares each query with the sum of a key and two learned vectors, one for the offset between their rows and one for the
    offset between their columns.

    The product is ``q . (k + rows[dy] + columns[dx])``, scaled as usual. The heads of a layer share its tables.

    Args:
        channels: C.
        num_layers: number of encoder layers; each has its own tables.
        num_heads: M.
        range: K; offsets are clipped to the range from -K to K.

    Raises:
        ValueError: a number of heads that does not divide the channels, or a range below 1.

    Source: arXiv 1803.02155, equation 4, for keys only (nothing is added to the values), and on two axes as in arXiv 1904.09925.
    """

    def __init__(self, channels: int, num_layers: int, num_heads: int, range: int = 8):
        super().__init__()
        if range < 1:
            raise ValueError(f"relative positions need a range of at least 1, got {range}")
        self.range = range
        width = channels_per_head(channels, num_heads)
        self.rows, self.columns = (nn.Parameter(torch.empty(num_layers, 2 * range + 1, width)) for _ in "yx")
        for table in (self.rows, self.columns):
            nn.init.trunc_normal_(table, std=0.02)

    def place(
        self, queries: Tensor, keys: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        height, width = require_one_level(level_shapes)
        scaled = queries.unflatten(2, (height, width)) * queries.shape[-1] ** -0.5
        rows = self._products(scaled, self.rows[layer], height)  # (B, M, H, W, H)
        columns = self._products(scaled.transpose(2, 3), self.columns[layer], width).transpose(2, 3)  # (B, M, H, W, W)
        bias = rows[..., :, None] + columns[..., None, :]  # (B, M, H, W, H, W): of each query, a grid of keys
        return queries, keys, bias.flatten(4).flatten(2, 3)

    def _products(self, queries: Tensor, table: Tensor, side: int) -> Tensor:
        """(B, M, side, n, C / M) queries -> (B, M, side, n, side), their products with the vectors of all offsets on the axis."""
        place = torch.arange(side, device=queries.device)
        offset = (place - place[:, None]).clamp(-self.range, self.range) + self.range  # (side, side), of query and key
        index = offset[:, None].expand(*queries.shape[:-1], -1)
        return (queries @ table.to(queries.dtype).T).gather(-1, index)


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
