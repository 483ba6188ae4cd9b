# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels are held to, on any device; as a program, all of it through Triton's interpreter.

A program, because the interpreter must be chosen before Triton is first imported: ``TRITON_INTERPRET=1 python THIS_FILE``
prints a JSON object, case -> traceback or null.
"""

import json
import math
import sys
import traceback
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from cpvt_det.ops import deformable_triton as kernels

LEVELS = [(2, 4), (1, 1), (3, 2)]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest value
CASES: dict[str, Callable[[str], None]] = {}


def reference(value: Tensor, level_shapes: list, locations: Tensor, weights: Tensor) -> Tensor:
    """Equation 3 pixel by pixel: every pixel counts by the hat function of its distance to the point. All float64.

    Nothing is cut out or indexed by a location, so there is no border to get wrong: outside there are no pixels.
    """
    sampled, start = 0, 0
    for level, (height, width) in enumerate(level_shapes):
        pixels = value[:, start : start + height * width].unflatten(1, (height, width))
        x = locations[:, :, :, level, :, 0] * width - 0.5  # (B, Q, M, P)
        y = locations[:, :, :, level, :, 1] * height - 0.5
        hat_x = (1 - (x[..., None] - torch.arange(width).to(x)).abs()).clamp(min=0)
        hat_y = (1 - (y[..., None] - torch.arange(height).to(y)).abs()).clamp(min=0)
        sampled = sampled + torch.einsum("bqmp,bqmpy,bqmpx,byxmd->bqmd", weights[:, :, :, level], hat_y, hat_x, pixels)
        start += height * width
    return sampled.flatten(2)


def guard(x: Tensor) -> Tensor:
    """The same, in the middle of a thousand NaN on either side, so that a read beyond its ends shows."""
    buffer = x.new_full((x.numel() + 2048,), math.nan)
    buffer[1024 : 1024 + x.numel()] = x.flatten()
    return buffer[1024 : 1024 + x.numel()].view(x.shape)


def make(
    device: str,
    dtype: torch.dtype = torch.float32,
    images: int = 1,
    queries: int = 5,
    heads: int = 2,
    channels: int = 8,
    points: int = 2,
    levels: list = LEVELS,
    locations_dtype: torch.dtype = torch.float32,
    reach: float = 0.4,
) -> tuple[list[Tensor], Tensor]:
    """Value, locations (up to ``reach`` beyond the levels) and weights, and a gradient of the output."""
    generator = torch.Generator().manual_seed(channels + 100 * queries)
    tokens = sum(height * width for height, width in levels)
    value = torch.randn(images, tokens, heads, channels, generator=generator)
    locations = torch.rand(images, queries, heads, len(levels), points, 2, generator=generator) * (1 + 2 * reach) - reach
    weights = torch.rand(images, queries, heads, len(levels), points, generator=generator) + 0.1
    grad_output = torch.randn(images, queries, heads * channels, generator=generator)
    if dtype == torch.float64:
        locations_dtype = dtype
    inputs = [value.to(device, dtype), locations.to(device, locations_dtype), weights.to(device, locations_dtype)]
    return [guard(x) for x in inputs], guard(grad_output.to(device, dtype))


def expect(inputs: list[Tensor], grad_output: Tensor, levels: list = LEVELS) -> list[Tensor]:
    """The reference's output and three gradients, in float64 from the stored values."""
    value, locations, weights = (x.double().cpu().requires_grad_() for x in inputs)
    output = reference(value, levels, locations, weights)
    return [output.detach(), *torch.autograd.grad(output, (value, locations, weights), grad_output.double().cpu())]


def compute(inputs: list[Tensor], grad_output: Tensor, deterministic: bool, levels: list = LEVELS) -> list[Tensor]:
    value, locations, weights = inputs
    gradients = kernels.backward(grad_output, value, levels, locations, weights, deterministic)
    return [kernels.forward(value, levels, locations, weights), *gradients]


def check(actual: list[Tensor], expected: list[Tensor], inputs: list[Tensor]) -> None:
    """Shapes and dtypes of the inputs, values of the reference."""
    for name, a, e, like in zip(("output", "value", "locations", "weights"), actual, expected, (inputs[0], *inputs), strict=True):
        assert a.dtype == like.dtype and a.shape == e.shape, f"{name}: {a.dtype} {tuple(a.shape)}, not {tuple(e.shape)}"
        if e.numel():
            error, scale = (a.double().cpu() - e).abs().max().item(), e.abs().max().item() + 1e-3
            assert error <= TOLERANCE[a.dtype] * scale, f"{name}: off by {error:.3g} where values reach {scale:.3g}"


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    CASES[function.__name__] = function
    return function


def both_backwards(device: str, **sizes: object) -> None:
    inputs, grad_output = make(device, **sizes)
    levels = sizes.get("levels", LEVELS)
    expected = expect(inputs, grad_output, levels)
    for deterministic in (False, True):
        check(compute(inputs, grad_output, deterministic, levels), expected, inputs)


def add_sizes() -> None:
    """One case per combination that decides how a tile is laid out or what is stored."""
    variants = {
        "30_channels_are_padded_to_32": {"channels": 30},
        "32_channels": {"channels": 32, "images": 2},
        "64_channels": {"channels": 64, "heads": 1},
        "71_channels_are_padded_to_128": {"channels": 71, "heads": 1, "queries": 3},
        "1_channel_and_1_head": {"channels": 1, "heads": 1},
        "3_heads_and_3_points": {"heads": 3, "points": 3, "images": 2},
        "1_level_of_1x1": {"levels": [(1, 1)], "points": 1, "reach": 0.9},
        "1_row_and_1_column": {"levels": [(1, 6), (7, 1)]},
        "a_level_without_pixels": {"levels": [(0, 3), (2, 3)]},
        "more_queries_than_a_tile": {"channels": 64, "heads": 1, "queries": 11, "levels": [(2, 3)]},
        "queries_of_2_images_in_several_tiles": {"channels": 32, "queries": 19, "images": 2, "levels": [(2, 3)], "points": 1},
    }
    for name, sizes in variants.items():
        CASES[f"equals_the_reference_with_{name}"] = lambda device, sizes=sizes: both_backwards(device, **sizes)
    stored = (torch.float64, torch.float16, torch.bfloat16)
    for dtype, locations_dtype in [*product(stored, (torch.float32,)), *((x, x) for x in stored[1:])]:
        sizes = {"dtype": dtype, "locations_dtype": locations_dtype, "channels": 16}
        own = "own" if dtype == locations_dtype else "float32"
        name = f"equals_the_reference_in_{str(dtype)[6:]}" + ("" if dtype == torch.float64 else f"_with_{own}_locations")
        CASES[name] = lambda device, sizes=sizes: both_backwards(device, **sizes)


add_sizes()


@case
def equals_the_reference_on_borders_and_pixel_centres(device):
    """Points on edges, on centres and at the end of a pixel's reach; gradients of locations jump there, so not compared."""
    inputs, grad_output = make(device, queries=6, levels=[(2, 4)])
    edges = [-0.125, 0.0, 0.125, 0.375, 0.5, 0.875, 1.0, 1.125]
    grid = torch.tensor(edges).tile(6).view(1, 6, 2, 1, 2, 2)
    inputs[1] = torch.stack((grid[..., 0], grid.flip(1)[..., 1]), -1).to(device)
    expected = expect(inputs, grad_output, [(2, 4)])
    for deterministic in (False, True):
        actual = compute(inputs, grad_output, deterministic, [(2, 4)])
        expected[2] = actual[2].double().cpu()
        check(actual, expected, inputs)


@case
def far_and_infinite_points_are_outside(device):
    inputs, grad_output = make(device, queries=4)
    inputs[1].copy_(torch.tensor([1e9, -1e30, math.inf, -math.inf])[None, :, None, None, None, None])
    for deterministic in (False, True):
        for result in compute(inputs, grad_output, deterministic):
            assert (result == 0).all(), result


@case
def nan_stays_in_its_own_query_and_head(device):
    inputs, grad_output = make(device, queries=6, channels=6)
    inputs[1][0, 2, 1, 0, 1, 0] = math.nan
    inputs[1][0, 4, 0, 2, 0, 1] = math.nan
    clean = [inputs[0], inputs[1].clone(), inputs[2]]
    clean[1][inputs[1].isnan().any(-1)] = 9.0  # outside: as good as no point
    nan = torch.zeros(1, 6, 2, dtype=torch.bool)
    nan[0, 2, 1] = nan[0, 4, 0] = True
    for deterministic in (False, True):
        actual, expected = compute(inputs, grad_output, deterministic), expect(clean, grad_output)
        output = actual[0].unflatten(-1, (2, 6)).cpu()
        assert output[nan].isnan().all() and not output[~nan].isnan().any()
        assert (actual[2].isnan().any(-1) == inputs[1].isnan().any(-1)).all()
        assert (actual[3].isnan() == inputs[1].isnan().any(-1)).all()
        for a, e in zip(actual, expected, strict=True):
            a[a.isnan()] = e.to(a)[a.isnan()]
        check(actual, expected, inputs)


@case
def nan_everywhere_reads_nothing(device):
    inputs, grad_output = make(device)
    inputs[1].fill_(math.nan)
    for deterministic in (False, True):
        output, grad_value, grad_locations, grad_weights = compute(inputs, grad_output, deterministic)
        assert output.isnan().all() and (grad_value == 0).all()
        assert grad_locations.isnan().all() and grad_weights.isnan().all()


@case
def the_deterministic_gradient_repeats_bit_for_bit(device):
    """Many queries on few pixels, so that sums are long, and more samples a cell than a program reads at a time."""
    inputs, grad_output = make(device, queries=40, heads=1, levels=[(1, 2)])
    first, second = (compute(inputs, grad_output, True, [(1, 2)]) for _ in range(2))
    check(first, expect(inputs, grad_output, [(1, 2)]), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@case
def no_images_no_queries_no_points_or_no_pixels_give_zeros(device):
    for sizes in ({"images": 0}, {"queries": 0}, {"points": 0}, {"levels": [(0, 4)]}, {"heads": 0}):
        inputs, grad_output = make(device, **sizes)
        for result, like in zip(
            compute(inputs, grad_output, False, sizes.get("levels", LEVELS)), (grad_output, *inputs), strict=True
        ):
            assert result.shape == like.shape and (result == 0).all(), sizes


@case
def strided_inputs_equal_their_copies(device):
    inputs, grad_output = make(device, images=2)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    strided_grad = grad_output.repeat_interleave(2, dim=-1)[..., ::2]
    assert not any(x.is_contiguous() for x in (*strided, strided_grad))
    for a, b in zip(compute(strided, strided_grad, True), compute(inputs, grad_output, True), strict=True):
        assert torch.equal(a, b)


def run(names: list[str]) -> dict[str, str | None]:
    results: dict[str, str | None] = {}
    for name in names:
        try:
            CASES[name]("cpu")
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(run(sys.argv[1:] or list(CASES)), sys.stdout)
