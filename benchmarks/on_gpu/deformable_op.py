# SPDX-License-Identifier: Apache-2.0
"""Multi-scale deformable attention at the sizes of Deformable-DETR and DINO: ours, the official CUDA op, and ``grid_sample``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import ROUNDS, Contender, Plan, Work
from benchmarks.machine import limits
from benchmarks.on_gpu import Record, Settings, measure
from benchmarks.peers import official_core, official_cuda_op
from benchmarks.suites import op
from cpvt_det.ops.deformable_attention import ms_deform_attn

QUERIES = {"encoder": 0, "decoder of Deformable-DETR": 300, "decoder of DINO": 900}
PLAN = Plan(warm_up=3, rounds=2 * ROUNDS, most_rounds=40, seconds=2.5, sample_seconds=0.02)
QUICK = Plan(warm_up=1, rounds=2, most_rounds=2)
ROUNDED = "locations rounded to bf16: it has one type for all"
Inputs = op.Inputs


def run(record: Record, settings: Settings) -> None:
    for passes in reversed(op.PASSES):
        for name, queries in QUERIES.items():
            for precision in ("float32", "bf16"):
                record.part(f"{name}, {precision}, {passes}", partial(time_case, queries, passes, precision, settings))
    record.part("limits", partial(limits, settings.device))
    if settings.more:
        for batch in (1, 8):
            record.part(f"encoder, float32, batch {batch}", partial(time_case, 0, op.PASSES[1], "float32", settings, batch))


def time_case(queries: int, passes: str, precision: str, settings: Settings, batch: int = 2) -> dict[str, Any]:
    """Times, ratios and peak memory of all contenders for two images of 800x1333, points near their queries."""
    shape = op.Shape("800x1333", batch, queries, "near", passes)
    levels = op.TINY if settings.rehearse else shape.level_shapes
    inputs = op.make_inputs(levels, batch, min(queries, 8) if settings.rehearse else queries, shape.spread, settings.device)
    tokens = sum(height * width for height, width in levels)
    half = precision == "bf16"
    if half:
        inputs = inputs.to(torch.bfloat16, torch.float32)
    contenders, left_out = _contenders(inputs, passes, half, settings)
    work = Work(contenders, op.HALF_TOLERANCE if half else op.FLOAT_TOLERANCE, left_out)
    measured = measure(work, QUICK if settings.rehearse else PLAN, settings.device)
    counts = op.count(batch, tokens, queries or tokens, passes, 2 if half else 4)
    return {"images": batch, "tokens": tokens, "queries": queries or tokens, "counts": counts, **measured}


def _contenders(inputs: Inputs, passes: str, half: bool, settings: Settings) -> tuple[list[Contender], dict[str, str]]:
    """The official CUDA op first, where it is built; every one returns the output and the gradients."""
    checkout = settings.options.peers.get("deformable_detr")
    found, left_out = [], {}

    def add(name: str, call: Callable[[Inputs], Tensor], given: Inputs = inputs, peer: bool = False, other_work: str = "") -> None:
        found.append(Contender(name, partial(op.run_passes, call, given, passes), peer, other_work=other_work))

    if checkout is None:
        left_out["official"] = "no checkout given: --peer deformable_detr=PATH"
    else:
        compiled, core = official_cuda_op(checkout), official_core(checkout)
        if compiled is None or settings.device == "cpu":
            left_out["official CUDA op"] = "not built, see build"
        else:
            sizes = torch.tensor(inputs.level_shapes, device=settings.device)
            starts = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]])
            add("official CUDA op" + ", in float32" * half, partial(_compiled, compiled, sizes, starts), peer=True)
        add("grid_sample" + ", in float32 as under autocast" * half, partial(_sampled, core), peer=True)
        if half:
            rounded = inputs.to(torch.bfloat16, torch.bfloat16)
            add("grid_sample, all in bf16", partial(_sampled_as_it_is, core), rounded, True, ROUNDED)
    add("cpvt_det", partial(_own, "auto"))
    if half:
        add("cpvt_det, weights too in bf16", partial(_own, "auto"), inputs.to(torch.bfloat16, torch.bfloat16))
    else:
        add("cpvt_det eager", partial(_own, "eager"))
        call = partial(_deterministically, partial(op.run_passes, partial(_own, "auto"), inputs, passes))
        found.append(Contender("cpvt_det deterministic", call))
    return found, left_out


def _compiled(call: Callable[..., Tensor], sizes: Tensor, starts: Tensor, inputs: Inputs) -> Tensor:
    """The official op, which has no half precision: under autocast its callers give it float32."""
    output = call(inputs.value.float(), sizes, starts, inputs.locations, inputs.weights.float(), 64)
    return output.to(inputs.value.dtype)


def _sampled(core: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    output = core(inputs.value.float(), inputs.level_shapes, inputs.locations, inputs.weights.float())
    return output.to(inputs.value.dtype)


def _sampled_as_it_is(core: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    return core(inputs.value, inputs.level_shapes, inputs.locations.to(inputs.value.dtype), inputs.weights)


def _own(implementation: str, inputs: Inputs) -> Tensor:
    locations, weights = inputs.locations, inputs.weights
    return ms_deform_attn(inputs.value, inputs.level_shapes, locations, weights, implementation=implementation)


def _deterministically(call: Callable[[], Any]) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)
