# SPDX-License-Identifier: Apache-2.0
"""ms_deform_attn, the sampling core of deformable attention: fused kernels on CPU and CUDA, pure PyTorch elsewhere.

The fused kernels are the operators ``cpvt_det::ms_deform_attn`` and ``cpvt_det::ms_deform_attn_backward``, so that compiled
programs contain one node for each.
"""

import functools
import importlib
import logging
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from cpvt_det.common.errors import UnknownNameError, first_line
from cpvt_det.common.exporting import is_exporting
from cpvt_det.common.memory import no_garbage_collection
from cpvt_det.common.structures import Size
from cpvt_det.ops import routes

logger = logging.getLogger("cpvt_det")
FUSED = {"numba": "cpu", "triton": "cuda"}  # fused implementation -> its device
HALF = (torch.float16, torch.bfloat16)
LevelShapes = list[tuple[int, int]]


def ms_deform_attn(
    value: Tensor, level_shapes: Sequence[Size], sampling_locations: Tensor, attention_weights: Tensor, implementation: str = "auto"
) -> Tensor:
    """Sum bilinear samples of the value maps for every query and head, each multiplied by its attention weight.

    A location ``x`` lies at pixel ``x * W_l - 0.5`` of its level, so that 0 and 1 are the outer borders of the map. Samples
    outside the map are zero. Sums are computed in at least float32. On the CPU, inputs in half precision are converted to
    float32, and so are all inputs under autocast. If ``torch.use_deterministic_algorithms`` is on, the backward pass is
    deterministic.

    Args:
        value: (B, N, M, D) float, the maps of all levels one after another, row by row; D is the width of one head.
        level_shapes: (H_l, W_l) of every level; their products sum to N tokens.
        sampling_locations: (B, Q, M, L, P, 2) xy, in [0, 1] of the padded map; in value's dtype, or float32 if value is in half
            precision.
        attention_weights: (B, Q, M, L, P), in value's dtype, or float32 if value is in half precision.
        implementation: ``numba`` (CPU), ``triton`` (CUDA), ``eager`` (pure PyTorch, any device), ``export`` (plain aten operators,
            which accept symbolic shapes), ``grid_sample`` (torch's operator of that name, for inference), or ``auto``. During
            ``torch.export``, ``auto`` chooses ``export``. Otherwise, it chooses the device's fused implementation if there is
            one, and else ``eager``.

    Returns:
        (B, Q, M * D) in value's dtype. A query with a NaN location gives NaN. An infinite location gives NaN on a CPU, and counts
        as outside the map on a GPU. For ``grid_sample``, NaN and infinite locations both count as outside.

    Raises:
        ValueError: shapes disagree, a level has no pixels, there are no points, tensors are on different devices, or the
            implementation is for another device.
        TypeError: an argument is not a tensor, dtypes are not float or do not match, or level shapes are not integers.
        ImportError: the package that the implementation needs cannot be imported.
        UnknownNameError: an unknown implementation.

    Source: arXiv 2010.04159, equation 3; fundamentalvision/Deformable-DETR ``models/ops``.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UnknownNameError("implementation", implementation, IMPLEMENTATIONS)
    for name, tensor in (("value", value), ("sampling_locations", sampling_locations), ("attention_weights", attention_weights)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.device != value.device:
            raise ValueError(f"{name} is on {tensor.device}, value on {value.device}; move them to one device")
    device = value.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        value = _without_half(value) if device == "cpu" else value
        sampling_locations, attention_weights = _without_half(sampling_locations), _without_half(attention_weights)
    if value.dtype not in (torch.float32, torch.float64, *HALF):
        raise TypeError(f"value must be float64, float32, float16 or bfloat16, got {value.dtype}")
    for name, tensor in (("sampling_locations", sampling_locations), ("attention_weights", attention_weights)):
        if tensor.dtype != value.dtype and not (tensor.dtype == torch.float32 and value.dtype in HALF):
            beside = f"{value.dtype} or torch.float32" if value.dtype in HALF else f"{value.dtype}"
            raise TypeError(f"{name} must be {beside} if value is {value.dtype}, got {tensor.dtype}; convert it with .to()")
    _check_shapes(value, level_shapes, sampling_locations, attention_weights)
    if implementation == "auto":
        implementation = _choose(device)
    elif implementation in FUSED:
        _check_fused(implementation, device)
    if implementation in FUSED:
        sizes = [n for shape in level_shapes for n in shape]
        return torch.ops.cpvt_det.ms_deform_attn(value, sizes, sampling_locations, attention_weights)
    return PLAIN[implementation](value, level_shapes, sampling_locations, attention_weights)


def _choose(device_type: str) -> str:
    if is_exporting():
        return "export"
    for implementation, served in FUSED.items():
        if device_type == served and not _is_left_out(implementation) and _is_available(implementation):
            return implementation
    return "eager"


@functools.cache
def _kernels(implementation: str) -> ModuleType | Exception:
    """The module of a fused implementation, or the error that importing it raised. Imports are slow, so a module is imported only
    when it is first needed.
    """
    try:
        with no_garbage_collection():
            module = importlib.import_module(f"cpvt_det.ops.deformable_{implementation}")
        if not module.is_available():
            raise ImportError(f"No module named {implementation!r}")
        return module
    except (ImportError, OSError) as error:  # OSError: a shared library that cannot be loaded
        logger.warning("Deformable attention runs without its %s kernel, which is slower: %s", implementation, first_line(error))
        return error


@torch.compiler.assume_constant_result  # torch 2.9 cannot compile this check
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


@torch.compiler.assume_constant_result
def _is_left_out(implementation: str) -> bool:
    """Whether ``CPVT_DET_WITHOUT`` switches off the kernel that would be chosen automatically."""
    return implementation == "numba" and not routes.is_on("deformable")


@torch.compiler.assume_constant_result
def _is_available(implementation: str) -> bool:
    return not isinstance(_kernels(implementation), Exception)


def _without_half(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _check_shapes(value: Tensor, level_shapes: Sequence[Size], locations: Tensor, weights: Tensor) -> None:
    if value.dim() != 4:
        raise ValueError(f"value must be (B, N, M, D), got {tuple(value.shape)}")
    if locations.dim() != 6:
        raise ValueError(f"sampling_locations must be (B, Q, M, L, P, 2), got {tuple(locations.shape)}")
    batch, tokens, heads, width = value.shape
    if not heads or not width:
        raise ValueError(f"value must have at least one head of at least one channel, got {tuple(value.shape)}")
    if not isinstance(level_shapes, (list, tuple)):
        raise TypeError(f"level_shapes must be a list of pairs of integers, got {type(level_shapes).__name__}; use .tolist()")
    if not level_shapes:
        raise ValueError("level_shapes is empty; give (H, W) of at least one level")
    total = 0
    for level, shape in enumerate(level_shapes):
        if not isinstance(shape, (list, tuple)) or not all(isinstance(side, (int, torch.SymInt)) for side in shape):
            raise TypeError(f"level_shapes[{level}] must be (H, W), two integers, got {shape!r}")
        if len(shape) != 2 or shape[0] < 1 or shape[1] < 1:
            raise ValueError(f"level_shapes[{level}] must be (H, W) of at least one pixel, got {tuple(shape)}")
        total += shape[0] * shape[1]
    if total != tokens:
        raise ValueError(f"level_shapes {[tuple(shape) for shape in level_shapes]} hold {total} tokens, value {tokens}")
    queries, points = locations.shape[1], locations.shape[4]
    if not points:
        raise ValueError(f"sampling_locations must have at least one point per head and level, got {tuple(locations.shape)}")
    expected = (batch, queries, heads, len(level_shapes), points)
    if locations.shape != (*expected, 2):
        raise ValueError(
            f"sampling_locations {tuple(locations.shape)} do not fit value {tuple(value.shape)} and {len(level_shapes)} levels; "
            f"expected (B, Q, M, L, P, 2) = {(*expected, 2)}"
        )
    if weights.shape != expected:
        raise ValueError(
            f"attention_weights {tuple(weights.shape)} do not fit sampling_locations {tuple(locations.shape)}; "
            f"expected (B, Q, M, L, P) = {expected}"
        )


def _check_fused(implementation: str, device_type: str) -> None:
    served = FUSED[implementation]
    if device_type != served:
        raise ValueError(
            f"implementation {implementation!r} supports only {served} tensors, got {device_type}; use 'auto' or 'eager'"
        )
    if not _is_available(implementation):
        error = _kernels(implementation)
        needs = f"implementation {implementation!r} needs {implementation}, which cannot be imported ({first_line(error)})"
        raise ImportError(f"{needs}; use 'auto' or 'eager'") from error


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


PLAIN = {"eager": embedding_bag_attention, "export": gather_attention, "grid_sample": grid_sample_attention}
"""Implementations in pure PyTorch. The first two sum the four rows of ``value`` around each sample, weighted by distance; a row
outside the map counts as zero. The third leaves this sum to torch's own operator."""
IMPLEMENTATIONS = ("auto", *FUSED, *PLAIN)

NAME = "cpvt_det::ms_deform_attn"
INPUTS = "Tensor value, SymInt[] level_shapes, Tensor sampling_locations, Tensor attention_weights"
torch.library.define(NAME, f"({INPUTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.define(
    f"{NAME}_backward", f"(Tensor grad_output, {INPUTS}) -> (Tensor, Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)


@torch.library.impl(NAME, "CPU")
def _forward_cpu(value, level_shapes, sampling_locations, attention_weights):
    return _kernels("numba").forward(value, level_shapes, sampling_locations, attention_weights)


@torch.library.impl(NAME, "CUDA")
def _forward_cuda(value, level_shapes, sampling_locations, attention_weights):
    return _kernels("triton").forward(value, _pairs(level_shapes), sampling_locations, attention_weights)


@torch.library.impl(f"{NAME}_backward", "CPU")
def _backward_cpu(grad_output, value, level_shapes, sampling_locations, attention_weights):
    return _kernels("numba").backward(grad_output, value, level_shapes, sampling_locations, attention_weights)


@torch.library.impl(f"{NAME}_backward", "CUDA")
def _backward_cuda(grad_output, value, level_shapes, sampling_locations, attention_weights):
    deterministic = torch.are_deterministic_algorithms_enabled()
    shapes = _pairs(level_shapes)
    return _kernels("triton").backward(grad_output, value, shapes, sampling_locations, attention_weights, deterministic)


@torch.library.register_fake(NAME)
def _forward_fake(value, level_shapes, sampling_locations, attention_weights):
    batch, _, heads, width = value.shape
    return value.new_empty(batch, sampling_locations.shape[1], heads * width)


@torch.library.register_fake(f"{NAME}_backward")
def _backward_fake(grad_output, value, level_shapes, sampling_locations, attention_weights):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (value, sampling_locations, attention_weights))


def _setup(ctx, inputs, output):
    value, ctx.level_shapes, sampling_locations, attention_weights = inputs
    ctx.save_for_backward(value, sampling_locations, attention_weights)


def _differentiate(ctx, grad_output):
    value, sampling_locations, attention_weights = ctx.saved_tensors
    grads = torch.ops.cpvt_det.ms_deform_attn_backward(grad_output, value, ctx.level_shapes, sampling_locations, attention_weights)
    return grads[0], None, grads[1], grads[2]


def _refuse_twice(ctx, *grads):
    raise NotImplementedError("ms_deform_attn has no second derivative; use implementation='export', which torch can differentiate")


torch.library.register_autograd(NAME, _differentiate, setup_context=_setup)
torch.library.register_autograd(f"{NAME}_backward", _refuse_twice)


def _pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(flat[0::2], flat[1::2], strict=True))
