# SPDX-License-Identifier: Apache-2.0
"""Relative positions inside the attention: learned vectors for the clipped offsets of rows and of columns."""

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
