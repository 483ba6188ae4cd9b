# SPDX-License-Identifier: Apache-2.0
"""Learned tables: DETR's two, with one vector per row and one per column, and DeiT's, with one vector per cell of a grid that is
interpolated to each image's own grid."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common.errors import MapSizeError
from cpvt_det.common.structures import Size, require_bool
from cpvt_det.layers.heads import without_autocast
from cpvt_det.position.encoding import PositionEncoding, register_position

CUBIC, CUBIC_ANTIALIASED = -0.75, -0.5
"""The constant in the kernel of torch's bicubic interpolation, without and with ``antialias``."""


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


@register_position("table")
class TableEncoding(PositionEncoding):
    """A learned vector for each cell of a grid, which is stretched over the valid part of each image, whatever its canvas.

    Args:
        channels: C.
        grid: (height, width) of the table; an image with exactly this grid gets the table itself, bit for bit.
        antialias: whether to interpolate like torch's bicubic interpolation with ``antialias=True``, as timm does. ``False``
            interpolates without antialiasing, as in DeiT's fine-tuning. The results differ even if the table is enlarged.

    Raises:
        ValueError: a grid without cells.
        TypeError: in ``forward``, a mask that is not bool.

    Source: arXiv 2012.12877, sections 3 and 6; initial values from facebookresearch/deit.
    """

    def __init__(self, channels: int, grid: Size = (14, 14), antialias: bool = False):
        super().__init__()
        if len(grid) != 2 or min(grid) < 1:
            raise ValueError(f"the grid of a table has a height and a width of at least 1, got {tuple(grid)}")
        self.antialias = antialias
        self.table = nn.Parameter(torch.empty(channels, *grid))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor]:
        for mask in padding_masks:
            require_bool(mask)
        return [stretch(self.table, mask, self.antialias).to(x.dtype) for x, mask in zip(features, padding_masks, strict=True)]


def stretch(table: Tensor, mask: Tensor, antialias: bool = False) -> Tensor:
    """Interpolate a table (C, I, J) to the grid of each image's valid cells, in at least float32.

    Args:
        table: float.
        mask: (B, H, W) bool, True = padded.
        antialias: as in :class:`TableEncoding`.

    Returns:
        (B, C, H, W); values in padded cells are meaningless.
    """
    table, valid = table.to(torch.promote_types(table.dtype, torch.float32)), ~mask
    rows, columns = (
        cubic_weights(valid.any(other).sum(1), valid.shape[axis], table.shape[axis], table.dtype, antialias)
        for axis, other in ((1, 2), (2, 1))
    )
    with without_autocast(table):
        return rows[:, None] @ (table @ columns.mT[:, None])  # (B, 1, H, I) by (C, I, J) by (B, 1, J, W)


def cubic_weights(extents: Tensor, side: int, size: int, dtype: torch.dtype, antialias: bool = False) -> Tensor:
    """Express bicubic interpolation along one axis as a matrix per image, so that no loop over images is needed.

    Args:
        extents: (B,) int, number of valid cells along the axis.
        side: number of cells along the axis, valid or not.
        size: number of entries of the table along the axis.
        dtype: dtype of the result.
        antialias: as in ``torch.nn.functional.interpolate``.

    Returns:
        (B, ``side``, ``size``) float; rows of valid cells sum to 1.
    """
    step = size / extents.clamp(min=1).to(dtype)[:, None]  # (B, 1), entries per cell
    center = (torch.arange(side, dtype=dtype, device=extents.device) + 0.5) * step - 0.5  # (B, side), half-pixel centres
    center = center.clamp(max=size - 0.5)  # for padded cells, which lie beyond the table
    entries = torch.arange(size, dtype=dtype, device=extents.device)
    if antialias:
        wide = step.clamp(min=1)[..., None]
        weights = _cubic((entries - center[..., None]) / wide, CUBIC_ANTIALIASED)
        return weights / weights.sum(-1, keepdim=True)
    first = center.floor()[..., None] + torch.arange(-1, 3, dtype=dtype, device=extents.device)  # (B, side, 4), four entries each
    weights = _cubic(first - center[..., None], CUBIC)
    is_entry = first.clamp(0, size - 1)[..., None] == entries  # beyond the table, its border is repeated
    return (weights[..., None] * is_entry).sum(2)


def _cubic(x: Tensor, a: float) -> Tensor:
    """The kernel of cubic convolution (Keys 1981), for distances measured in entries of the table."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return near.where(x <= 1, far.where(x < 2, 0))
