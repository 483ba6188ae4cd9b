# SPDX-License-Identifier: Apache-2.0
"""Multi-scale deformable attention in Triton, for ``deformable_attention`` on a GPU.

The module can be imported without Triton, which only ``forward`` and ``backward`` need. All kernels share this design:

- A program handles one head of one image, and a tile of neighbouring queries times the head's D channels. A corner is then read
  as one coalesced row, with 16 bytes per thread where D allows it. Queries that are neighbours on the map sample neighbouring
  pixels, so they use the same lines of one L1 cache. Heads vary fastest over the grid, so that programs that run at the same time
  read one band of each level in whole lines of M * D values.
- Levels are unrolled, but points are not. With all L * P = 16 points unrolled, the forward took 244 registers on sm_90. With a loop
  over the points it takes 48, and five times as many warps hide the latency of its reads.
- Level sizes are passed by value, so there is no table on the device, no synchronisation, and nothing to keep alive for CUDA
  graphs. They are passed as floats (exact to 2^24), because Triton compiles a separate kernel for an integer that is 1 or a
  multiple of 16. The image sizes of one training run would then lead to up to 3^(2 L) kernels.
- Coordinates and sums are computed in at least float32, whatever dtype is stored. Coordinates are clamped to just outside the
  level before they become integers, so none can overflow. A NaN passes the clamp and fails every bounds test, so nothing is read
  for it. The NaN still reaches the result, through the bilinear weights.

The file is long because the launches and the three kernels must agree on tiles, cells and arguments.

Source: arXiv 2010.04159, section 4.1, equation 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cpvt_det.common.structures import Size

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ENTRY_BLOCK = 16  # number of samples that a program of the deterministic backward reads at a time


def is_available() -> bool:
    """Whether Triton can be imported; this does not check for a GPU."""
    return triton is not None


def forward(value: Tensor, level_shapes: Sequence[Size], sampling_locations: Tensor, attention_weights: Tensor) -> Tensor:
    """Sum bilinear samples over levels and points. Samples outside a level are zero, and pixel centres lie at (i + 0.5) / size.

    Args:
        value: (B, N, M, C / M) float16, bfloat16, float32 or float64 on a GPU; levels one after another, row by row.
        level_shapes: L pairs (H_l, W_l) whose products sum to N; not checked here.
        sampling_locations: (B, Q, M, L, P, 2) xy in [0, 1] of the level; value's dtype or float32.
        attention_weights: (B, Q, M, L, P), value's dtype or float32.

    Returns:
        (B, Q, C) in value's dtype, summed in float32 (float64 for float64). A NaN location makes its query's head NaN.
    """
    images, queries, heads, levels, points, _ = sampling_locations.shape
    output = value.new_zeros(images, queries, heads * value.shape[-1])
    if output.numel() == 0 or value.numel() == 0 or levels * points == 0:
        return output
    options = _options(value, 16 // value.element_size(), num_warps=4)
    blocks = triton.cdiv(queries, options["BLOCK_Q"])
    with torch.cuda.device_of(value):
        _forward_kernel[(heads * blocks * images,)](
            value.contiguous(),
            sampling_locations.contiguous(),
            attention_weights.contiguous(),
            output,
            _sizes(level_shapes),
            value.shape[1],
            queries,
            blocks,
            L=levels,
            P=points,
            **options,
        )
    return output


def backward(
    grad_output: Tensor,
    value: Tensor,
    level_shapes: Sequence[Size],
    sampling_locations: Tensor,
    attention_weights: Tensor,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the three tensors of ``forward``.

    Args:
        grad_output: (B, Q, C), value's dtype.
        value: as in ``forward``, like the next three arguments.
        level_shapes: L pairs (H_l, W_l).
        sampling_locations: (B, Q, M, L, P, 2).
        attention_weights: (B, Q, M, L, P).
        deterministic: whether to sort the samples and sum the samples of each pixel in sorted order, instead of using atomic
            additions. Equal inputs then give bitwise equal results. Sorting takes about 30 bytes more memory per sample, but in
            half precision it saves the float32 copy of the gradient.

    Returns:
        Gradients of value, sampling_locations and attention_weights, each in the shape and dtype of its tensor. A NaN location
        adds nothing to the gradient of value. The gradients of the location itself and of its weight are NaN.
    """
    levels, points = attention_weights.shape[-2:]
    value, sampling_locations, attention_weights, grad_output = (
        x.contiguous() for x in (value, sampling_locations, attention_weights, grad_output)
    )
    if grad_output.numel() == 0 or value.numel() == 0 or levels * points == 0:
        return torch.zeros_like(value), torch.zeros_like(sampling_locations), torch.zeros_like(attention_weights)
    grad_locations, grad_weights = torch.empty_like(sampling_locations), torch.empty_like(attention_weights)
    inputs = (grad_output, value, sampling_locations, attention_weights)
    with torch.cuda.device_of(value):
        if deterministic:
            cells = sum((height + 1) * (width + 1) for height, width in level_shapes)
            total = value.shape[0] * value.shape[2] * cells
            keys = torch.empty_like(attention_weights, dtype=torch.int32 if total < 2**31 - 1 else torch.int64)
            _launch_backward(inputs, (None, keys, grad_locations, grad_weights), level_shapes, cells)
            grad_value = _gather(inputs, level_shapes, keys, cells, total)
        else:
            accumulator = torch.zeros_like(value, dtype=torch.float64 if value.dtype == torch.float64 else torch.float32)
            _launch_backward(inputs, (accumulator, None, grad_locations, grad_weights), level_shapes, 0)
            grad_value = accumulator.to(value.dtype)
    return grad_value, grad_locations, grad_weights


def _launch_backward(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor | None, ...], level_shapes: Sequence[Size], cells: int
) -> None:
    value, locations = inputs[1], inputs[2]
    images, queries, heads, levels, points, _ = locations.shape
    # Four channels per thread, for halves too: the widest float32 atomic addition. Rows are read in the layout in which they are
    # added, so no data moves between threads. Two warps, because with scalar atomics (sm_80) rows do pass a barrier.
    options = _options(value, 4, num_warps=2)
    blocks = triton.cdiv(queries, options["BLOCK_Q"])
    _backward_kernel[(heads * blocks * images,)](
        *inputs,
        *outputs,
        _sizes(level_shapes),
        value.shape[1],
        queries,
        blocks,
        cells,
        L=levels,
        P=points,
        BLOCK_S=triton.next_power_of_2(levels * points),
        **options,
    )


def _gather(inputs: tuple[Tensor, ...], level_shapes: Sequence[Size], keys: Tensor, cells: int, total: int) -> Tensor:
    """The gradient of value from the samples' cells, (B, Q, M, L, P): one program per pixel and head, one launch per level."""
    grad_output, value, locations, weights = inputs
    images, tokens, heads = value.shape[:3]
    ordered, order = torch.sort(keys.flatten(), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(total + 1, dtype=keys.dtype, device=keys.device))
    grad_value = torch.empty_like(value)
    first_token = first_cell = 0
    options = {name: x for name, x in _options(value, 4, num_warps=1).items() if name != "BLOCK_Q"}
    for height, width in level_shapes:
        if height * width > 0:
            _gather_kernel[(images * heads * height * width,)](
                grad_output,
                locations,
                weights,
                order,
                starts,
                grad_value,
                float(height),
                float(width),
                tokens,
                cells,
                first_token,
                first_cell,
                POINTS=weights.shape[-2] * weights.shape[-1],
                BLOCK_E=ENTRY_BLOCK,
                **options,
            )
        first_token += height * width
        first_cell += (height + 1) * (width + 1)
    return grad_value


def _options(value: Tensor, channels_per_thread: int, num_warps: int) -> dict:
    """Tile sizes that give each thread one vector of one row. They are fixed, because tuning would take seconds per new size."""
    heads, channels = value.shape[2:]
    block_d = triton.next_power_of_2(channels)
    return {
        "M": heads,
        "D": channels,
        "BLOCK_Q": max(1, 32 * channels_per_thread // block_d) * num_warps,
        "BLOCK_D": block_d,
        "COMPUTE": tl.float64 if value.dtype == torch.float64 else tl.float32,
        "num_warps": num_warps,
        "enable_fp_fusion": True,  # Triton 3.9 warns if it is not set
    }


def _sizes(level_shapes: Sequence[Size]) -> tuple[float, ...]:
    return tuple(float(size) for shape in level_shapes for size in shape)


def _jit(*integers: str) -> Callable:
    """``triton.jit`` if Triton is installed. ``integers`` names the arguments for whose values Triton must not specialise the
    code.
    """
    return (lambda kernel: kernel) if triton is None else triton.jit(do_not_specialize=integers)


@_jit()
def _pixel(pointer, mask, size, COMPUTE: tl.constexpr):
    """Coordinates on an axis of ``size`` pixels, clamped to [-2, size + 1], just outside the level; masked rows get -2."""
    pixel = tl.load(pointer, mask=mask, other=-2.0).to(COMPUTE) * size - 0.5
    pixel = tl.maximum(pixel, -2.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(pixel, size + 1.0, propagate_nan=tl.PropagateNan.ALL)


@_jit()
def _sample(locations_ptr, weights_ptr, sample, real, height, width, COMPUTE: tl.constexpr):
    """The pixel to the upper left of each point, the point's offset from it in x and y, and its weight."""
    x = _pixel(locations_ptr + 2 * sample, real, width, COMPUTE)
    y = _pixel(locations_ptr + 2 * sample + 1, real, height, COMPUTE)
    weight = tl.load(weights_ptr + sample, mask=real, other=0.0).to(COMPUTE)
    left, top = tl.floor(x), tl.floor(y)
    return left, top, x - left, y - top, weight


@_jit()
def _rows(queries, blocks, M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """Image and head of this program, its rows, the mask of rows that exist, and the channels' lanes."""
    head, rest = tl.program_id(0) % M, tl.program_id(0) // M
    image = (rest // blocks).to(tl.int64)
    query = (rest % blocks) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    return image, head, query < queries, (image * queries + query) * M + head, tl.arange(0, BLOCK_D)[None, :]


@_jit()
def _tile(rows, lanes, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mask of a tile, from the mask of its rows. The mask varies by lane only if D is padded, because a mask that varies by
    lane prevents vector reads.
    """
    mask = rows[:, None]
    if D != BLOCK_D:
        mask = mask & (lanes < D)
    return mask


@_jit()
def _corners(left, top, height, width, first_token, lanes, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of each point's left corners, first the upper, then the lower, and masks that say which of its four pixels exist.
    For NaN, none exist.
    """
    in_left, in_right = (left >= 0) & (left < width), (left >= -1) & (left < width - 1)
    in_top, in_bottom = (top >= 0) & (top < height), (top >= -1) & (top < height - 1)
    columns = tl.cast(width, tl.int32)
    token = first_token + tl.cast(top, tl.int32) * columns + tl.cast(left, tl.int32)
    upper = token.to(tl.int64)[:, None] * (M * D) + lanes
    lower = upper + columns.to(tl.int64) * (M * D)
    m00, m01 = _tile(in_left & in_top, lanes, D, BLOCK_D), _tile(in_right & in_top, lanes, D, BLOCK_D)
    m10, m11 = _tile(in_left & in_bottom, lanes, D, BLOCK_D), _tile(in_right & in_bottom, lanes, D, BLOCK_D)
    return upper, lower, m00, m01, m10, m11


@_jit()
def _read(value_ptr, upper, lower, m00, m01, m10, m11, NEXT: tl.constexpr, COMPUTE: tl.constexpr):
    """Tiles of the four pixels, with zeros for a pixel that does not exist."""
    v00 = tl.load(value_ptr + upper, mask=m00, other=0.0).to(COMPUTE)
    v01 = tl.load(value_ptr + upper + NEXT, mask=m01, other=0.0).to(COMPUTE)
    v10 = tl.load(value_ptr + lower, mask=m10, other=0.0).to(COMPUTE)
    v11 = tl.load(value_ptr + lower + NEXT, mask=m11, other=0.0).to(COMPUTE)
    return v00, v01, v10, v11


@_jit()
def _slopes(grad, v00, v01, v10, v11, fx, fy, weight, height, width):
    """Gradients of each point's weight, x and y, from its row's gradient and the tiles of its four pixels."""
    dot00, dot01 = tl.sum(grad * v00, 1), tl.sum(grad * v01, 1)
    dot10, dot11 = tl.sum(grad * v10, 1), tl.sum(grad * v11, 1)
    by_weight = (1 - fy) * ((1 - fx) * dot00 + fx * dot01) + fy * ((1 - fx) * dot10 + fx * dot11)
    by_x = weight * width * ((1 - fy) * (dot01 - dot00) + fy * (dot11 - dot10))
    by_y = weight * height * ((1 - fx) * (dot10 - dot00) + fx * (dot11 - dot01))
    return by_weight, by_x, by_y


@_jit()
def _scatter(target, grad, upper, lower, m00, m01, m10, m11, fx, fy, weight, NEXT: tl.constexpr):
    """Add each point's share of its row's gradient to its four pixels."""
    above, below = ((1 - fy) * weight)[:, None] * grad, (fy * weight)[:, None] * grad
    tl.atomic_add(target + upper, (1 - fx)[:, None] * above, mask=m00, sem="relaxed")
    tl.atomic_add(target + upper + NEXT, fx[:, None] * above, mask=m01, sem="relaxed")
    tl.atomic_add(target + lower, (1 - fx)[:, None] * below, mask=m10, sem="relaxed")
    tl.atomic_add(target + lower + NEXT, fx[:, None] * below, mask=m11, sem="relaxed")


@_jit()
def _cell(left, top, height, width, first_cell, no_cell):
    """The cell of each point. A point that is in no cell gets ``no_cell``, the number after the last cell.

    Cells are the (H_l + 1) x (W_l + 1) squares between pixel centres, ordered by image, head, level and row. A point reads the
    four corners of its cell.
    """
    in_cell = (left >= -1) & (left < width) & (top >= -1) & (top < height)
    cell = first_cell + (tl.cast(top, tl.int32) + 1) * (tl.cast(width, tl.int32) + 1) + (tl.cast(left, tl.int32) + 1)
    return tl.where(in_cell, cell, no_cell)


@_jit()
def _store(pointer, row, slots, tile, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the first ``WIDTH`` columns of the rows of a tile."""
    tl.store(pointer + row[:, None] * WIDTH + slots, tile.to(pointer.dtype.element_ty), mask=_tile(real, slots, WIDTH, BLOCK))


@_jit("tokens", "queries", "blocks")
def _forward_kernel(
    value_ptr,
    locations_ptr,
    weights_ptr,
    output_ptr,
    sizes,
    tokens,
    queries,
    blocks,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    image, head, real, row, lanes = _rows(queries, blocks, M, BLOCK_Q, BLOCK_D)
    value_ptr += (image * tokens * M + head) * D
    total = tl.zeros((BLOCK_Q, BLOCK_D), COMPUTE)
    first_token = 0
    for level in tl.static_range(L):
        height, width = tl.cast(sizes[2 * level], COMPUTE), tl.cast(sizes[2 * level + 1], COMPUTE)
        for point in range(P):
            sample = row * (L * P) + (level * P + point)
            left, top, fx, fy, weight = _sample(locations_ptr, weights_ptr, sample, real, height, width, COMPUTE)
            upper, lower, m00, m01, m10, m11 = _corners(left, top, height, width, first_token, lanes, M, D, BLOCK_D)
            v00, v01, v10, v11 = _read(value_ptr, upper, lower, m00, m01, m10, m11, M * D, COMPUTE)
            above, below = (1 - fy) * weight, fy * weight
            total += ((1 - fx) * above)[:, None] * v00 + (fx * above)[:, None] * v01
            total += ((1 - fx) * below)[:, None] * v10 + (fx * below)[:, None] * v11
        first_token += tl.cast(height, tl.int32) * tl.cast(width, tl.int32)
    _store(output_ptr, row, lanes, total, real, D, BLOCK_D)


@_jit("tokens", "queries", "blocks", "cells")
def _backward_kernel(
    grad_output_ptr,
    value_ptr,
    locations_ptr,
    weights_ptr,
    grad_value_ptr,
    keys_ptr,
    grad_locations_ptr,
    grad_weights_ptr,
    sizes,
    tokens,
    queries,
    blocks,
    cells,
    M: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Write gradients of locations and weights. In the same loop, add atomically to grad_value_ptr, or write cells to keys_ptr."""
    image, head, real, row, lanes = _rows(queries, blocks, M, BLOCK_Q, BLOCK_D)
    grad = tl.load(grad_output_ptr + row[:, None] * D + lanes, mask=_tile(real, lanes, D, BLOCK_D), other=0.0).to(COMPUTE)
    # Results are collected in tiles as wide as a query's samples and stored as whole rows. Stored one by one, they would be
    # L * P * 3 scattered words, each sent through shared memory to its thread.
    slots, pairs = tl.arange(0, BLOCK_S)[None, :], tl.arange(0, 2 * BLOCK_S)[None, :]
    grad_weights = tl.zeros((BLOCK_Q, BLOCK_S), COMPUTE)
    grad_locations = tl.zeros((BLOCK_Q, 2 * BLOCK_S), COMPUTE)
    keys = tl.zeros((BLOCK_Q, BLOCK_S), tl.int64)
    no_cell = (tl.num_programs(0) // blocks).to(tl.int64) * cells
    value_ptr += (image * tokens * M + head) * D
    if keys_ptr is None:
        grad_value_ptr += (image * tokens * M + head) * D
    first_token, first_cell = 0, (image * M + head) * cells
    for level in tl.static_range(L):
        height, width = tl.cast(sizes[2 * level], COMPUTE), tl.cast(sizes[2 * level + 1], COMPUTE)
        rows, columns = tl.cast(height, tl.int32), tl.cast(width, tl.int32)
        for point in range(P):
            slot = level * P + point
            left, top, fx, fy, weight = _sample(locations_ptr, weights_ptr, row * (L * P) + slot, real, height, width, COMPUTE)
            upper, lower, m00, m01, m10, m11 = _corners(left, top, height, width, first_token, lanes, M, D, BLOCK_D)
            v00, v01, v10, v11 = _read(value_ptr, upper, lower, m00, m01, m10, m11, M * D, COMPUTE)
            by_weight, by_x, by_y = _slopes(grad, v00, v01, v10, v11, fx, fy, weight, height, width)
            grad_weights = tl.where(slots == slot, by_weight[:, None], grad_weights)
            grad_locations = tl.where(pairs == 2 * slot, by_x[:, None], grad_locations)
            grad_locations = tl.where(pairs == 2 * slot + 1, by_y[:, None], grad_locations)
            if keys_ptr is None:
                _scatter(grad_value_ptr, grad, upper, lower, m00, m01, m10, m11, fx, fy, weight, M * D)
            else:
                cell = _cell(left, top, height, width, first_cell, no_cell)
                keys = tl.where(slots == slot, cell[:, None], keys)
        first_token += rows * columns
        first_cell += (rows + 1) * (columns + 1)
    _store(grad_weights_ptr, row, slots, grad_weights, real, L * P, BLOCK_S)
    if keys_ptr is not None:
        _store(keys_ptr, row, slots, keys, real, L * P, BLOCK_S)
    _store(grad_locations_ptr, row, pairs, grad_locations, real, 2 * L * P, 2 * BLOCK_S)


@_jit("tokens", "cells", "first_token", "first_cell")
def _gather_kernel(
    grad_output_ptr,
    locations_ptr,
    weights_ptr,
    order_ptr,
    starts_ptr,
    grad_value_ptr,
    height,
    width,
    tokens,
    cells,
    first_token,
    first_cell,
    M: tl.constexpr,
    D: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """A pixel's gradient from the samples of its four cells. Samples are sorted by cell, so the samples of two neighbouring cells
    of a row form one segment.
    """
    height, width = tl.cast(height, COMPUTE), tl.cast(width, COMPUTE)
    rows, columns = tl.cast(height, tl.int32), tl.cast(width, tl.int32)
    pixel, pair = tl.program_id(0) % (rows * columns), (tl.program_id(0) // (rows * columns)).to(tl.int64)
    row, column = pixel // columns, pixel % columns
    lanes = tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros((BLOCK_E, BLOCK_D), COMPUTE)
    for side in tl.static_range(2):
        cell = pair * cells + first_cell + (row + side) * (columns + 1) + column
        begin, end = tl.load(starts_ptr + cell), tl.load(starts_ptr + cell + 2)
        while begin < end:  # not range(): Triton 3.5's interpreter cannot read its bounds with a new numpy
            entry = begin + tl.arange(0, BLOCK_E)
            real = entry < end
            sample = tl.load(order_ptr + entry, mask=real, other=0)
            x = _pixel(locations_ptr + 2 * sample, real, width, COMPUTE)
            y = _pixel(locations_ptr + 2 * sample + 1, real, height, COMPUTE)
            weight = tl.load(weights_ptr + sample, mask=real, other=0.0).to(COMPUTE)
            part = (1 - tl.abs(x - column)) * (1 - tl.abs(y - row)) * weight
            grad_row = grad_output_ptr + (sample // POINTS)[:, None] * D + lanes
            grad = tl.load(grad_row, mask=_tile(real, lanes, D, BLOCK_D), other=0.0)
            total += part[:, None] * grad.to(COMPUTE)
            begin += BLOCK_E
    token = (pair // M) * tokens + first_token + pixel
    offset = (token * M + pair % M) * D + tl.arange(0, BLOCK_D)
    gathered = tl.sum(total, 0).to(grad_value_ptr.dtype.element_ty)
    tl.store(grad_value_ptr + offset, gathered, mask=tl.arange(0, BLOCK_D) < D)
