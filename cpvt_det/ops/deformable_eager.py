# SPDX-License-Identifier: Apache-2.0
"""Deformable attention in pure PyTorch: for devices without one of our kernels, and for exported programs.

The first two functions sum the four rows of ``value`` around each sample, weighted by distance. A row outside the map counts as
zero. The third function leaves this sum to torch's own operator.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LevelShapes = list[tuple[int, int]]


def embedding_bag_attention(value: Tensor, level_shapes: LevelShapes, locations: Tensor, weights: Tensor) -> Tensor:
    """``ms_deform_attn`` computed by one weighted ``embedding_bag``, which never stores the samples."""
    batch, _, heads, width = value.shape
    dtype = torch.promote_types(value.dtype, torch.float32)
    corners, factors = _corners(value.shape, level_shapes, locations.to(dtype), weights.to(dtype))
    rows = value.to(dtype).reshape(-1, width)  # (B, N, M, D) -> (B * N * M, D)
    out = F.embedding_bag(corners.flatten(0, 2), rows, mode="sum", per_sample_weights=factors.flatten(0, 2))
    return out.view(batch, locations.shape[1], heads * width).to(value.dtype)


def gather_attention(value: Tensor, level_shapes: LevelShapes, locations: Tensor, weights: Tensor) -> Tensor:
    """``ms_deform_attn`` computed by operations that every exporter supports; shapes may be symbolic."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    corners, factors = _corners(value.shape, level_shapes, locations.to(dtype), weights.to(dtype))
    rows = value.to(dtype).reshape(-1, value.shape[3])  # (B, N, M, D) -> (B * N * M, D)
    samples = rows.index_select(0, corners.flatten()).view(*corners.shape, value.shape[3])  # (B, Q, M, 4 * L * P, D)
    # Not a matrix product: autocast would round it to half precision.
    return (factors.unsqueeze(-1) * samples).sum(-2).flatten(2).to(value.dtype)


def grid_sample_attention(value: Tensor, level_shapes: LevelShapes, locations: Tensor, weights: Tensor) -> Tensor:
    """``ms_deform_attn`` computed by ``grid_sample``, for runtimes that have a kernel for ``grid_sample``. NaN locations count as
    outside the map.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    maps = value.to(dtype).permute(0, 2, 3, 1).flatten(0, 1)  # (B, N, M, D) -> (B * M, D, N)
    grids = (2 * locations.to(dtype) - 1).transpose(1, 2).flatten(0, 1)  # -> (B * M, Q, L, P, 2), [-1, 1] of the map
    cells = [height * width for height, width in level_shapes]
    samples = [
        F.grid_sample(level.unflatten(2, shape), grids[:, :, index], align_corners=False)  # (B * M, D, Q, P)
        for index, (level, shape) in enumerate(zip(maps.split(cells, dim=2), level_shapes, strict=True))
    ]
    factors = weights.to(dtype).transpose(1, 2).flatten(0, 1)[:, None]  # (B, Q, M, L, P) -> (B * M, 1, Q, L, P)
    out = (torch.stack(samples, dim=3) * factors).sum((3, 4))  # (B * M, D, Q)
    return out.view(*value.shape[::2], value.shape[3], -1).permute(0, 3, 1, 2).flatten(2).to(value.dtype)


def _corners(shape: torch.Size, level_shapes: LevelShapes, locations: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The four neighbours of every sample: row indices in the flattened value, and weights, both (B, Q, M, 4 * L * P)."""
    batch, tokens, heads, _ = shape
    device = locations.device
    heights, widths = zip(*level_shapes, strict=True)
    starts = [0]
    for rows, columns in level_shapes[:-1]:
        starts.append(starts[-1] + rows * columns)
    # (L, 1) int64 each, made by ``full``, because it accepts symbolic numbers and needs no copy.
    height, width, first = (
        torch.cat([torch.full((1, 1), n, device=device) for n in column]) for column in (heights, widths, starts)
    )
    x = locations[..., 0] * width - 0.5
    y = locations[..., 1] * height - 0.5
    x0, y0 = x.detach().floor(), y.detach().floor()
    right, below = x - x0, y - y0
    image = torch.arange(batch, device=device).view(-1, 1, 1, 1, 1) * tokens
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    corners, factors = [], []
    for row, vertical in ((y0, 1 - below), (y0 + 1, below)):
        for column, horizontal in ((x0, 1 - right), (x0 + 1, right)):
            inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
            # The factor is 0 outside the map, and stays NaN for a NaN location. Integers are clamped, because NaN has none.
            factors.append(weights * vertical * horizontal * inside)
            cell = row.long().clamp(min=0).minimum(height - 1) * width + column.long().clamp(min=0).minimum(width - 1)
            corners.append((image + first + cell) * heads + head)
    return torch.stack(corners, -1).flatten(3), torch.stack(factors, -1).flatten(3)
