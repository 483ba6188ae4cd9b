# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of deformable attention: one pass forward, one pass backward, and nothing is stored between the two.

The channels of one head at one token are one record, so that the width of a head is part of an array's type. A kernel is compiled
for this width at first use and cached on disk. The processor's vector instructions add and multiply whole records. The compiler
may reorder sums over channels; apart from that, it must follow the rules of floating-point arithmetic exactly.

The forward pass is divided among threads by query and the backward pass by head, so that no two threads add to the same number.
Results do not depend on the number of threads.

The file is long because numba checks only this file's modification time to decide whether a cached kernel is still valid.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from cpvt_det.ops.numba_threads import Kernel, cut, inlined, run

QUERY_BLOCK = 64  # queries processed for one head before the next head; their samples overlap and are still in the cache
SUMS = ("contract", "reassoc", "nsz")  # sums over channels may be reordered to fill a register; NaN and infinity stay correct


def _record(context, builder, pointer_type, pointer, index):
    """A pointer to record ``index`` as one vector, that vector's type, and its alignment."""
    channels = pointer_type.dtype.fields["channels"].type
    vector = ir.VectorType(context.get_value_type(channels.dtype), channels.shape[0])
    data = builder.bitcast(pointer, vector.element.as_pointer())
    first = builder.gep(data, [builder.mul(index, index.type(channels.shape[0]))])
    return builder.bitcast(first, vector.as_pointer()), vector, channels.dtype.bitwidth // 8


@intrinsic
def _memory(typing, array):
    """The raw memory of an array. If the array itself were passed on, numba would count references to it for every point."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.bitcast(data, context.get_value_type(signature.return_type))

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def _clear(typing, out, row):
    """out[row] = 0"""

    def generate(context, builder, signature, args):
        pointer, vector, align = _record(context, builder, signature.args[0], *args)
        builder.store(vector(None), pointer, align)
        return context.get_dummy_value()

    return types.void(out, row), generate


@intrinsic
def _add(typing, out, row, values, rows, weights):
    """out[row] += the sum of weight * values[row] over tuples of rows and weights"""

    def generate(context, builder, signature, args):
        pointer, vector, align = _record(context, builder, signature.args[0], *args[:2])
        total = builder.load(pointer, align=align)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
        for i in range(signature.args[3].count):
            source, _, _ = _record(context, builder, signature.args[2], args[2], builder.extract_value(args[3], i))
            weight = builder.insert_element(vector(ir.Undefined), builder.extract_value(args[4], i), ir.IntType(32)(0))
            weight = builder.shuffle_vector(weight, vector(ir.Undefined), lanes)
            product = builder.fmul(builder.load(source, align=align), weight, flags=SUMS)
            total = builder.fadd(total, product, flags=SUMS)
        builder.store(total, pointer, align)
        return context.get_dummy_value()

    return types.void(out, row, values, rows, weights), generate


@intrinsic
def _dot(typing, xs, row, values, other):
    """The sum over channels of xs[row] * values[other]"""

    def generate(context, builder, signature, args):
        x, vector, align = _record(context, builder, signature.args[0], *args[:2])
        value, _, _ = _record(context, builder, signature.args[2], *args[2:])
        product = builder.fmul(builder.load(x, align=align), builder.load(value, align=align), flags=SUMS)
        name = f"llvm.vector.reduce.fadd.v{vector.count}f{8 * align}"
        sum_type = ir.FunctionType(vector.element, [vector.element, vector])
        return builder.call(
            cgutils.get_or_insert_function(builder.module, sum_type, name), [vector.element(-0.0), product], fastmath=SUMS
        )

    return xs.dtype.fields["channels"].type.dtype(xs, row, values, other), generate


@inlined
def _pull(out, row, value, a, right, down, inside, x, y, weight, one):
    """out[row] += weight * the sample between records a, a + right, a + down and a + down + right. Records outside the map are
    left out.
    """
    w0, w1 = (one - y) * weight, y * weight
    if inside[0] and inside[1] and inside[2] and inside[3]:
        rows = a, a + right, a + down, a + down + right
        _add(out, row, value, rows, ((one - x) * w0, x * w0, (one - x) * w1, x * w1))
        return
    if inside[0] and inside[1]:
        _add(out, row, value, (a,), ((one - x) * w0,))
    if inside[0] and inside[3]:
        _add(out, row, value, (a + right,), (x * w0,))
    if inside[2] and inside[1]:
        _add(out, row, value, (a + down,), ((one - x) * w1,))
    if inside[2] and inside[3]:
        _add(out, row, value, (a + down + right,), (x * w1,))


@inlined
def _push(grad, row, value, grad_value, a, right, down, inside, x, y, weight, one):
    """Add to the gradient of the records around a sample. Return the product of grad[row] with each record, or zero outside."""
    w0, w1 = (one - y) * weight, y * weight
    at_a = at_b = at_c = at_d = one - one
    if inside[0] and inside[1]:
        at_a = _dot(grad, row, value, a)
        _add(grad_value, a, grad, (row,), ((one - x) * w0,))
    if inside[0] and inside[3]:
        at_b = _dot(grad, row, value, a + right)
        _add(grad_value, a + right, grad, (row,), (x * w0,))
    if inside[2] and inside[1]:
        at_c = _dot(grad, row, value, a + down)
        _add(grad_value, a + down, grad, (row,), ((one - x) * w1,))
    if inside[2] and inside[3]:
        at_d = _dot(grad, row, value, a + down + right)
        _add(grad_value, a + down + right, grad, (row,), (x * w1,))
    return at_a, at_b, at_c, at_d


@Kernel
def _forward(value, steps, levels, locations, weights, out, start, stop):
    """Compute queries ``start`` to ``stop`` of all B * Q. Return whether all their locations are finite."""
    value, out = _memory(value), _memory(out)
    real = weights.dtype.type
    half, one = real(0.5), real(1)
    num_queries, num_heads, num_levels, points = weights.shape[1:]
    finite = True
    for block in range(start, stop, QUERY_BLOCK):
        for m in range(num_heads):
            for query in range(block, min(block + QUERY_BLOCK, stop)):
                b, q = divmod(query, num_queries)
                row = query * num_heads + m
                _clear(out, row)
                for level in range(num_levels):
                    height, width = levels[level, 0], levels[level, 1]
                    first, right, down = b * steps[0] + m * steps[1] + levels[level, 2] * steps[2], steps[2], width * steps[2]
                    for p in range(points):
                        x = locations[b, q, m, level, p, 0] * real(width) - half
                        y = locations[b, q, m, level, p, 1] * real(height) - half
                        if x >= -one and y >= -one and x < real(width) and y < real(height):
                            x0, y0 = int(np.floor(x)), int(np.floor(y))
                            inside = y0 >= 0, x0 >= 0, y0 + 1 < height, x0 + 1 < width
                            a, x, y = first + y0 * down + x0 * right, x - real(x0), y - real(y0)
                            _pull(out, row, value, a, right, down, inside, x, y, weights[b, q, m, level, p], one)
                        else:
                            x, y = locations[b, q, m, level, p, 0], locations[b, q, m, level, p, 1]
                            finite = finite and abs(x) < np.inf and abs(y) < np.inf
    return finite


@Kernel
def _backward(grad, value, steps, levels, locations, weights, grad_value, grad_locations, grad_weights, start, stop):
    """Compute the gradients of heads ``start`` to ``stop`` of all B * M; the caller fills ``grad_value`` with zeros."""
    grad, value, grad_value = _memory(grad), _memory(value), _memory(grad_value)
    real = weights.dtype.type
    half, one, zero = real(0.5), real(1), real(0)
    num_queries, num_heads, num_levels, points = weights.shape[1:]
    for head in range(start, stop):
        b, m = divmod(head, num_heads)
        for q in range(num_queries):
            row = (b * num_queries + q) * num_heads + m
            for level in range(num_levels):
                height, width = levels[level, 0], levels[level, 1]
                first, right, down = b * steps[0] + m * steps[1] + levels[level, 2] * steps[2], steps[2], width * steps[2]
                for p in range(points):
                    x = locations[b, q, m, level, p, 0] * real(width) - half
                    y = locations[b, q, m, level, p, 1] * real(height) - half
                    grad_x = grad_y = grad_weight = zero
                    if x >= -one and y >= -one and x < real(width) and y < real(height):
                        x0, y0 = int(np.floor(x)), int(np.floor(y))
                        inside = y0 >= 0, x0 >= 0, y0 + 1 < height, x0 + 1 < width
                        a, x, y = first + y0 * down + x0 * right, x - real(x0), y - real(y0)
                        weight = weights[b, q, m, level, p]
                        at = _push(grad, row, value, grad_value, a, right, down, inside, x, y, weight, one)
                        above, below = (one - x) * at[0] + x * at[1], (one - x) * at[2] + x * at[3]
                        grad_weight = (one - y) * above + y * below
                        grad_x = weight * real(width) * ((one - y) * (at[1] - at[0]) + y * (at[3] - at[2]))
                        grad_y = weight * real(height) * (below - above)
                    grad_weights[b, q, m, level, p] = grad_weight
                    grad_locations[b, q, m, level, p, 0] = grad_x
                    grad_locations[b, q, m, level, p, 1] = grad_y


def is_available() -> bool:
    """Always true, because this module can be imported only where its kernels work."""
    return True


def forward(value: Tensor, level_shapes: Sequence[int], sampling_locations: Tensor, attention_weights: Tensor) -> Tensor:
    """``ms_deform_attn`` for checked inputs, with level shapes as flat (h0, w0, h1, w1, ...).

    Returns:
        (B, Q, M * D) in value's dtype; NaN for queries with a NaN or infinite location.
    """
    batch, _, heads, width = value.shape
    queries, points = attention_weights.shape[1], attention_weights.shape[3] * attention_weights.shape[4]
    dtype = torch.promote_types(value.dtype, torch.float32)
    out = torch.empty(batch, queries, heads * width, dtype=dtype)
    if not out.numel() or not points:
        return out.zero_().to(value.dtype)
    arrays = (
        *_value_records(value, dtype, _is_head_major(value, queries)),
        _level_table(tuple(level_shapes)),
        _array(sampling_locations, dtype),
        _array(attention_weights, dtype),
        _records(out.numpy(), width),
    )
    finite = run(_forward, arrays, cut(batch * queries, out.numel() * points))
    if not all(finite):
        out[~sampling_locations.isfinite().flatten(2).all(-1)] = torch.nan
    return out if dtype == value.dtype else out.to(value.dtype)


def backward(
    grad_output: Tensor, value: Tensor, level_shapes: Sequence[int], sampling_locations: Tensor, attention_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``forward`` with respect to value, sampling locations and attention weights, each in its own dtype."""
    batch, tokens, heads, width = value.shape
    queries, points = attention_weights.shape[1], attention_weights.shape[3] * attention_weights.shape[4]
    inputs = value, sampling_locations, attention_weights
    if not grad_output.numel() or not points:
        return tuple(x.new_zeros(x.shape) for x in inputs)
    dtype, head_major = torch.promote_types(value.dtype, torch.float32), _is_head_major(value, queries)
    grads = (
        torch.zeros((batch, heads, tokens, width) if head_major else value.shape, dtype=dtype),
        torch.empty(sampling_locations.shape, dtype=dtype),
        torch.empty(attention_weights.shape, dtype=dtype),
    )
    arrays = (
        _records(_array(grad_output, dtype), width),
        *_value_records(value, dtype, head_major),
        _level_table(tuple(level_shapes)),
        _array(sampling_locations, dtype),
        _array(attention_weights, dtype),
        _records(grads[0].numpy(), width),
        grads[1].numpy(),
        grads[2].numpy(),
    )
    run(_backward, arrays, cut(batch * heads, grad_output.numel() * points))
    if head_major:
        grads = grads[0].transpose(1, 2).contiguous(), *grads[1:]  # (B, M, N, D) -> (B, N, M, D)
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))


def _is_head_major(value: Tensor, num_queries: int) -> bool:
    """Whether to copy the maps so that each head is contiguous. The copy pays off if there are many queries, because a cache then
    holds M times as much of a head.
    """
    return 2 * num_queries >= value.shape[1] and value.shape[2] > 1


def _value_records(value: Tensor, dtype: torch.dtype, head_major: bool) -> tuple[np.ndarray, tuple[int, int, int]]:
    """The maps as records, and the strides from one image, head and token to the next, counted in records."""
    _, tokens, heads, width = value.shape
    records = _records(_array(value.transpose(1, 2).contiguous() if head_major else value, dtype), width)
    return records, (tokens * heads, tokens, 1) if head_major else (tokens * heads, 1, heads)


def _array(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    if x.requires_grad:
        x = x.detach()
    return np.ascontiguousarray((x if x.dtype == dtype else x.to(dtype)).numpy())


def _records(array: np.ndarray, width: int) -> np.ndarray:
    """A view of the same memory as one row of records, each with ``width`` channels."""
    return array.reshape(-1).view(_record_type(array.dtype, width))


@functools.lru_cache(64)
def _record_type(dtype: np.dtype, width: int) -> np.dtype:
    return np.dtype([("channels", dtype, (width,))])


@functools.lru_cache(256)
def _level_table(level_shapes: tuple[int, ...]) -> np.ndarray:
    """(L, 3) int64: height, width and first token of each level."""
    table = np.empty((len(level_shapes) // 2, 3), dtype=np.int64)
    table[:, 0], table[:, 1] = level_shapes[0::2], level_shapes[1::2]
    table[:, 2] = np.cumsum(table[:, 0] * table[:, 1]) - table[:, 0] * table[:, 1]
    return table
