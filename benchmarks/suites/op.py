# SPDX-License-Identifier: Apache-2.0
"""The op: multi-scale deformable attention, without projections, against every public way to do it without a compiler.

M = 8 heads of D = 32, L = 4 levels, P = 4 points, as in Deformable-DETR. Sampling locations lie N(0, 2.5 pixels) about each query's
reference point, as in a trained model, or, in the ``uniform`` cases, anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gather import corner_rows, make_gather
from benchmarks.harness import ROUNDS, Case, Contender, Plan, Work
from benchmarks.machine import free_bytes
from benchmarks.peers import detrex_core, official_core, official_cuda_op, transformers_module
from benchmarks.suites import Options
from cpvt_det.common.structures import Size
from cpvt_det.ops.deformable_attention import ms_deform_attn

TITLE = "Multi-scale deformable attention"
PLANS = {"quick": Plan(seconds=1.5), "full": Plan(rounds=ROUNDS, seconds=6.0)}

HEADS, WIDTH, POINTS, STRIDES = 8, 32, 4, (8, 16, 32, 64)
IMAGES: dict[str, Size] = {"640x640": (640, 640), "800x1333": (800, 1333)}
BATCHES = (1, 2, 4, 8)
FEW_QUERIES = 300
OFFSET_PIXELS = 2.5
PASSES = ("forward", "forward+backward")
TINY: list[Size] = [(4, 5), (2, 3), (1, 2), (1, 1)]
FLOAT_TOLERANCE, HALF_TOLERANCE = 1e-4, 3e-2
FREE_SHARE = 0.8  # largest share of the free memory that a contender is expected to need


@dataclass(frozen=True)
class Shape:
    """One case: an image's size by name, images, queries (0 = one for each token), where the points lie, and which passes."""

    image: str
    batch: int
    queries: int
    spread: str
    passes: str

    @property
    def name(self) -> str:
        return f"{self.image} b{self.batch} q{self.queries or 'all'} {self.spread} {self.passes}"

    @property
    def level_shapes(self) -> list[Size]:
        height, width = IMAGES[self.image]
        return [(-(-height // stride), -(-width // stride)) for stride in STRIDES]


def shapes(size: str, device: str) -> list[Shape]:
    """The cases: ``quick`` one image of 640 pixels, ``default`` what one core does in ten minutes, ``all`` everything.

    A GPU does everything in less time, so there ``default`` is all.
    """
    everything = [
        Shape(image, batch, queries, spread, passes)
        for image, spread, queries, batch, passes in product(IMAGES, ("near", "uniform"), (0, FEW_QUERIES), BATCHES, PASSES)
        if spread == "near" or batch == 1
    ]
    first = next(iter(IMAGES))
    if size == "quick":
        return [shape for shape in everything if (shape.image, shape.batch, shape.spread) == (first, 1, "near")]
    if size == "default" and device == "cpu":
        return [shape for shape in everything if shape.image == first or (shape.batch == 1 and shape.spread == "near")]
    return everything


def cases(options: Options) -> list[Case]:
    return [make_case(shape, options) for shape in shapes(options.size, options.device)]


def make_case(shape: Shape, options: Options) -> Case:
    about = {
        "image": shape.image,
        "images": shape.batch,
        "queries": shape.queries or "all",
        "points": shape.spread,
        "pass": shape.passes,
    }
    tokens = sum(height * width for height, width in shape.level_shapes)
    return Case(
        name=shape.name,
        about=about,
        build=partial(make_work, shape, shape.level_shapes, options),
        counts=count(shape.batch, tokens, shape.queries or tokens, shape.passes),
        memory=options.device == "cuda" or measures_memory(shape, options),
        warm=partial(make_work, shape, TINY, options, tiny=True),
    )


def measures_memory(shape: Shape, options: Options) -> bool:
    """On a CPU each figure costs a process, and memory grows with the batch as it should: so one image, and not every case."""
    if options.size == "quick" or shape.batch > 1 or shape.spread != "near":
        return False
    return shape.image == next(iter(IMAGES)) or (not shape.queries and shape.passes == "forward+backward")


def count(batch: int, tokens: int, queries: int, passes: str, item: int = 4) -> dict[str, float]:
    """Computed numbers of bytes and operations.

    ``compulsory_bytes`` pass the border of the chip at least once: every input read, every output written, and backward the same
    for the gradients. ``gathered_bytes`` are the rows of four corners a point, which a cache mostly serves; backward reads
    them again and adds to as many rows of the gradient. Points that lie outside are counted as if inside.
    """
    points = batch * queries * HEADS * len(STRIDES) * POINTS
    value, output, positions = batch * tokens * HEADS * WIDTH, batch * queries * HEADS * WIDTH, points * 3
    gathered = points * 4 * WIDTH * item
    value = min(value, gathered // item)  # few queries do not need all of it
    if passes == "forward":
        return {
            "compulsory_bytes": (value + positions + output) * item,
            "gathered_bytes": gathered,
            "flop": points * 8 * WIDTH,
        }
    return {
        "compulsory_bytes": (3 * value + 3 * positions + 2 * output) * item,
        "gathered_bytes": 4 * gathered,
        "flop": points * 24 * WIDTH,
    }


@dataclass(frozen=True)
class Inputs:
    """The inputs of every contender, and the gradient of the output for the backward pass."""

    level_shapes: list[Size]
    value: Tensor
    locations: Tensor
    weights: Tensor
    grad_output: Tensor

    def to(self, value_dtype: torch.dtype, weights_dtype: torch.dtype) -> "Inputs":
        """Locations stay float32: half precision cannot tell pixels apart."""
        value, weights = self.value.detach().to(value_dtype), self.weights.detach().to(weights_dtype)
        grad_output = self.grad_output.to(value_dtype)
        return Inputs(self.level_shapes, value.requires_grad_(), self.locations, weights.requires_grad_(), grad_output)


def make_inputs(level_shapes: list[Size], batch: int, queries: int, spread: str, device: str) -> Inputs:
    """Inputs drawn from a fixed seed.

    Args:
        level_shapes: (H, W) of each level.
        batch: number of images B.
        queries: number of queries Q, or 0 for one query at the centre of every token.
        spread: distribution of the points, ``near`` or ``uniform``.
        device: device of the tensors.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = sum(height * width for height, width in level_shapes)
    sizes = torch.tensor([(width, height) for height, width in level_shapes], dtype=torch.float32)
    num = queries or tokens
    points = (batch, num, HEADS, len(level_shapes), POINTS)
    if spread == "uniform":
        locations = torch.rand(*points, 2, generator=generator)
    else:
        centres = torch.rand(batch, num, 2, generator=generator) if queries else token_centres(level_shapes).expand(batch, -1, -1)
        offsets = OFFSET_PIXELS * torch.randn(*points, 2, generator=generator) / sizes[:, None]
        locations = centres[:, :, None, None, None] + offsets
    locations = off_the_borders(locations, sizes)
    value = torch.randn(batch, tokens, HEADS, WIDTH, generator=generator)
    weights = torch.randn(points, generator=generator).flatten(3).softmax(-1).view(points)
    grad_output = torch.randn(batch, num, HEADS * WIDTH, generator=generator)
    leaves = [tensor.to(device).requires_grad_() for tensor in (value, locations, weights)]
    return Inputs(level_shapes, *leaves, grad_output.to(device))


def token_centres(level_shapes: list[Size]) -> Tensor:
    """(1, N, 2), xy in [0, 1], row by row."""
    centres = []
    for height, width in level_shapes:
        y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
        centres.append(torch.stack([x, y], -1).flatten(0, 1))
    return torch.cat(centres)[None]


def off_the_borders(locations: Tensor, sizes: Tensor) -> Tensor:
    """Move points that lie within 0.01 pixels of a border between pixels by 0.02.

    There the gradient of the location jumps, and which side rounding falls on is not a difference between contenders.
    """
    pixels = locations * sizes[:, None] - 0.5
    pixels = torch.where((pixels - pixels.round()).abs() < 0.01, pixels + 0.02, pixels)
    return (pixels + 0.5) / sizes[:, None]


def make_work(shape: Shape, level_shapes: list[Size], options: Options, tiny: bool = False) -> Work:
    """The inputs of a case and all contenders; the first one is the official CUDA op if it is available, then the official core.

    Args:
        tiny: True: use maps of a few tokens, to load and compile what a contender needs.
    """
    inputs = make_inputs(level_shapes, shape.batch, min(shape.queries, 8) if tiny else shape.queries, shape.spread, options.device)
    left_out: dict[str, str] = {}
    candidates = [*_peers(inputs, options, left_out), *_ours(inputs, options)]
    samples_bytes = inputs.weights.numel() * WIDTH * 4
    kept = []
    for name, call, peer, tolerance, held in candidates:
        reason = _too_much(held[shape.passes != "forward"] * samples_bytes, options) or _too_slow(name, shape, options)
        if reason and not tiny:
            left_out[name] = reason
        else:
            run = partial(run_passes, call[0], call[1], shape.passes)
            kept.append(Contender(name, run, peer, tolerance))
    if shape.passes == "forward":
        kept.append(Contender("limit: gather only", _lazy_gather(inputs), limit=True))
    return Work(kept, FLOAT_TOLERANCE, left_out)


def run_passes(op: Callable[[Inputs], Tensor], inputs: Inputs, passes: str) -> tuple[Tensor, ...]:
    """The output, and after a backward pass the gradients of value, locations and weights."""
    if passes == "forward":
        with torch.no_grad():
            return (op(inputs),)
    output = op(inputs)
    return (output.detach(), *torch.autograd.grad(output, (inputs.value, inputs.locations, inputs.weights), inputs.grad_output))


Candidate = tuple[str, tuple[Callable[[Inputs], Tensor], Inputs], bool, float | None, tuple[float, float]]
"""Name, op and inputs, True for a peer, tolerance, and measured peak memory as a multiple of that of all samples: forward, and with
backward."""


def _peers(inputs: Inputs, options: Options, left_out: dict[str, str]) -> list[Candidate]:
    found: list[Candidate] = []
    shapes_tensor = torch.tensor(inputs.level_shapes, device=inputs.value.device)
    starts = torch.cat([shapes_tensor.new_zeros(1), shapes_tensor.prod(1).cumsum(0)[:-1]])
    checkout = options.peers.get("deformable_detr")
    if checkout is None:
        left_out["official core"] = "no checkout given: --peer deformable_detr=PATH"
    else:
        if options.device == "cuda":
            op = official_cuda_op(checkout)
            if op is None:
                left_out["official CUDA op"] = "not built, or not for this torch: run models/ops/make.sh of the checkout"
            else:
                call = partial(_official_cuda, op, shapes_tensor, starts)
                found.append(("official CUDA op", (call, inputs), True, None, (0, 0)))
        found.append(("official core", (partial(_official_core, official_core(checkout)), inputs), True, None, (3.2, 3.3)))
    if "detrex" in options.peers:
        found.append(
            ("detrex", (partial(_detrex, detrex_core(options.peers["detrex"]), shapes_tensor), inputs), True, None, (3.2, 3.3))
        )
    else:
        left_out["detrex"] = "no checkout given: --peer detrex=PATH"
    if "transformers" in options.peers:
        call = partial(_transformers, transformers_module(), shapes_tensor, starts)
        found.append(("transformers", (call, inputs), True, None, (3.2, 3.3)))
    else:
        left_out["transformers"] = "not installed"
    return found


def _official_cuda(op: Callable[..., Tensor], shapes_tensor: Tensor, starts: Tensor, inputs: Inputs) -> Tensor:
    return op(inputs.value, shapes_tensor, starts, inputs.locations, inputs.weights, 64)


def _official_core(core: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    return core(inputs.value, inputs.level_shapes, inputs.locations, inputs.weights)


def _detrex(core: Callable[..., Tensor], shapes_tensor: Tensor, inputs: Inputs) -> Tensor:
    return core(inputs.value, shapes_tensor, inputs.locations, inputs.weights)


def _transformers(module: Any, shapes_tensor: Tensor, starts: Tensor, inputs: Inputs) -> Tensor:
    return module(inputs.value, shapes_tensor, inputs.level_shapes, starts, inputs.locations, inputs.weights, 64)


def _own(implementation: str, inputs: Inputs) -> Tensor:
    return ms_deform_attn(inputs.value, inputs.level_shapes, inputs.locations, inputs.weights, implementation=implementation)


def _ours(inputs: Inputs, options: Options) -> list[Candidate]:
    """The default implementation, the other ones, and on a GPU half precision."""
    found: list[Candidate] = [
        ("cpvt_det", (partial(_own, "auto"), inputs), False, None, (0, 0)),
        ("cpvt_det eager", (partial(_own, "eager"), inputs), False, None, (1.6, 3.1)),
        ("cpvt_det export", (partial(_own, "export"), inputs), False, None, (9.2, 13.6)),
    ]
    if options.device == "cuda":
        for name, value, weights in (
            ("bf16", torch.bfloat16, torch.float32),
            ("bf16, weights too", torch.bfloat16, torch.bfloat16),
            ("fp16", torch.float16, torch.float32),
        ):
            found.append((f"cpvt_det {name}", (partial(_own, "auto"), inputs.to(value, weights)), False, HALF_TOLERANCE, (0, 0)))
    return found


def _lazy_gather(inputs: Inputs) -> Callable[[], Tensor]:
    """The gather; its rows are computed at the first call: measuring another contender's memory does not need them."""
    made: list[Callable[[], Tensor]] = []

    def call() -> Tensor:
        if not made:
            with torch.no_grad():
                rows = corner_rows(inputs.locations, inputs.level_shapes)
                made.append(make_gather(inputs.value.detach().view(-1, WIDTH), rows))
        return made[0]()

    return call


def _too_much(needed: float, options: Options) -> str:
    free = free_bytes(options.device)
    return f"needs about {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free" if needed > FREE_SHARE * free else ""


def _too_slow(name: str, shape: Shape, options: Options) -> str:
    """On a CPU, and unless everything is asked for."""
    if options.device == "cuda" or options.size == "all" or shape.batch == 1:
        return ""
    if name == "transformers":
        return "the official core's arithmetic line by line; timed at one image (--all times it everywhere)"
    return "not meant for speed; timed at one image (--all times it everywhere)" if name == "cpvt_det export" else ""
