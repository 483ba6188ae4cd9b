# SPDX-License-Identifier: Apache-2.0
"""``gather.make_gather`` on a GPU; importing it needs Triton."""

import os

import triton
import triton.language as tl
from torch import Tensor

SHAPES = [triton.Config({"BAGS": bags}, num_warps=warps) for bags, warps in ((16, 4), (4, 1), (8, 2), (32, 4), (32, 8), (64, 8))]


@triton.autotune(SHAPES[:1] if os.environ.get("TRITON_INTERPRET") else SHAPES, key=["width", "per_bag"])
@triton.jit
def _kernel(values, rows, out, bags, width, per_bag, BAGS: tl.constexpr, WIDTH: tl.constexpr):
    bag = (tl.program_id(0) * BAGS + tl.arange(0, BAGS)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = bag < bags
    mask = inside[:, None] & (column < width)[None, :]
    total = tl.zeros((BAGS, WIDTH), tl.float32)
    for k in range(0, per_bag, 4):
        for i in tl.static_range(4):
            row = tl.load(rows + bag * per_bag + k + i, mask=inside, other=0).to(tl.int64)
            total += tl.load(values + row[:, None] * width + column[None, :], mask=mask, other=0).to(tl.float32)
    tl.store(out + bag[:, None] * width + column[None, :], total, mask=mask)


def gather(values: Tensor, rows: Tensor) -> Tensor:
    """Sum the rows of each bag, in float32: (R, D) and (G, K) int32, K a multiple of 4, to (G, D)."""
    out = values.new_empty(rows.shape[0], values.shape[1])
    _kernel[lambda meta: (triton.cdiv(rows.shape[0], meta["BAGS"]),)](
        values, rows, out, rows.shape[0], values.shape[1], rows.shape[1], WIDTH=triton.next_power_of_2(values.shape[1])
    )
    return out
