# SPDX-License-Identifier: Apache-2.0
"""A lower limit for the time of deformable attention's forward pass: read the same rows, add them up, and do nothing else.

Bilinear sampling reads four rows of D values for every point. Without locations, weights and borders, a gather remains, and no
kernel can be faster than it on the same machine.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cpvt_det.common.structures import Size


def corner_rows(locations: Tensor, level_shapes: list[Size]) -> Tensor:
    """The rows that bilinear sampling reads.

    Args:
        locations: (B, Q, M, L, P, 2) float, xy in [0, 1] of each level's map.
        level_shapes: (H, W) of each level.

    Returns:
        (B * Q * M, L * P * 4) int32, rows of the values seen as (B * N * M, D); corners outside a map are taken at its border.
    """
    batch, _, heads, *_ = locations.shape
    rows, start = [], 0
    tokens = sum(height * width for height, width in level_shapes)
    image = torch.arange(batch, device=locations.device).view(-1, 1, 1, 1, 1)
    head = torch.arange(heads, device=locations.device).view(1, 1, -1, 1, 1)
    for level, (height, width) in enumerate(level_shapes):
        x0, y0 = (locations[..., level, :, :] * locations.new_tensor([width, height]) - 0.5).floor().long().unbind(-1)
        x = torch.stack([x0, x0 + 1, x0, x0 + 1], -1).clamp(0, width - 1)  # (B, Q, M, P, 4)
        y = torch.stack([y0, y0, y0 + 1, y0 + 1], -1).clamp(0, height - 1)
        rows.append((((image * tokens + start + y * width + x) * heads) + head).int())
        start += height * width
    return torch.stack(rows, 3).flatten(3).flatten(0, 2)  # (B, Q, M, L, P, 4) -> (B * Q * M, L * P * 4)


def make_gather(values: Tensor, rows: Tensor) -> Callable[[], Tensor]:
    """A call that sums the rows of each bag.

    Args:
        values: (R, D) float, rows of values.
        rows: (G, K) int32 indices into ``values``; on a GPU, K is a multiple of 4.

    Returns:
        A function without arguments that returns (G, D): on a CPU torch's ``embedding_bag``, the fastest of four functions that
        were tried, on a GPU a Triton kernel.
    """
    if not values.is_cuda:
        return lambda: F.embedding_bag(rows, values, mode="sum")
    from benchmarks.gather_triton import gather

    return lambda: gather(values, rows)
