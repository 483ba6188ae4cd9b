# SPDX-License-Identifier: Apache-2.0
"""DETR's learned encoding: a table of vectors for rows and one for columns."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common.errors import MapSizeError
from cpvt_det.position.encoding import PositionEncoding, register_position


@register_position("learned")
class LearnedEncoding(PositionEncoding):
    """A learned vector for each column and each row; maps larger than the table are refused.

    Args:
        channels: C, even; the first half encodes the column, the second the row.
        table_size: the largest height or width of a map.

    Raises:
        ValueError: odd channels.
        MapSizeError: in ``forward``, a side of the map is longer than the table.

    Source: facebookresearch/detr ``models/position_encoding.py``.
    """

    def __init__(self, channels: int, table_size: int = 50):
        super().__init__()
        if channels % 2:
            raise ValueError(f"a learned encoding needs an even number of channels, got {channels}")
        self.row_embed = nn.Embedding(table_size, channels // 2)
        self.col_embed = nn.Embedding(table_size, channels // 2)
        nn.init.uniform_(self.row_embed.weight)
        nn.init.uniform_(self.col_embed.weight)

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor]:
        encoded, size = [], self.row_embed.num_embeddings
        for feature in features:
            batch, _, height, width = feature.shape
            if height > size or width > size:
                raise MapSizeError(
                    f"a map of {height} x {width} tokens is larger than the learned table of {size} x {size}; "
                    "set MODEL.POSITION.TABLE_SIZE, use smaller images, or an encoding without a table (sine, peg)"
                )
            columns = self.col_embed.weight[:width].expand(height, -1, -1)
            rows = self.row_embed.weight[:height, None].expand(-1, width, -1)
            table = torch.cat((columns, rows), dim=-1).permute(2, 0, 1)  # (H, W, C) -> (C, H, W)
            encoded.append(table.to(feature.dtype).expand(batch, -1, -1, -1))
        return encoded
