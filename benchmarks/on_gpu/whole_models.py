# SPDX-License-Identifier: Apache-2.0
"""Training steps and inference of DETR-R50, Deformable-DETR-R50 and DINO-R50 under bf16, with the peers' code in the same loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.at_best import AT_BEST, channels_last, compiled, fused_attention, has_fusable_attention
from benchmarks.harness import ROUNDS, Contender, Plan, Work
from benchmarks.models import Model, Recipe, our_model
from benchmarks.on_gpu import Record, Settings, full_float32, measure, say
from benchmarks.suites import model as models
from cpvt_det.common.structures import Size

SIZE, BATCH = (800, 1333), 2
PLAN = Plan(warm_up=2, rounds=ROUNDS, most_rounds=15, seconds=3.0)
QUICK = Plan(warm_up=0, rounds=2, most_rounds=2)
PROFILED = 1  # steps
ALSO_FLOAT32 = ("official", "cpvt_det")  # the official op of deformable attention has no bf16
REHEARSED = Recipe(channels=32, layers=2, queries=20)  # of one layer transformers makes no model
FOR_COMPILING = 60.0  # seconds that must be left for a compiled training step


@dataclass
class Fleet:
    """The models of one detector, all with the same weights: name -> model, peers first."""

    recipe: Recipe
    peers: dict[str, Model]
    ours: dict[str, Model]
    left_out: dict[str, str]

    @property
    def all(self) -> dict[str, Model]:
        return self.peers | self.ours


def run(record: Record, settings: Settings) -> None:
    recipes = (REHEARSED,) if settings.rehearse else (models.DEFORMABLE, models.DINO, models.DETR)
    for recipe in recipes:
        made: list[Fleet] = []
        record.part(f"{recipe.detector}, models", partial(_keep, made, recipe, settings))
        for passes in reversed(models.PASSES) if made else ():
            record.part(f"{recipe.detector}, {passes}", partial(time_models, made[0], passes, settings))
        made.clear()
        _give_back(settings)
    for recipe in (replace(REHEARSED, detector="DETR"),) if settings.rehearse else (models.DEFORMABLE, models.DETR):
        if settings.rehearse or settings.seconds_left > FOR_COMPILING:
            record.part(f"{recipe.detector}, compiled", partial(time_compiled, recipe, settings))
        else:
            record.leave_out(f"{recipe.detector}, compiled", "no time was left")
    if settings.more:
        for size, batch in (((640, 640), 8), (SIZE, 8))[: 1 if settings.rehearse else None]:
            for recipe in recipes:
                record.part(f"{recipe.detector}, {size}, {batch} images", partial(time_more, recipe, size, batch, settings))


def _keep(made: list[Fleet], recipe: Recipe, settings: Settings) -> list[str]:
    made.append(build(recipe, settings))
    return list(made[0].all)


def build(recipe: Recipe, settings: Settings) -> Fleet:
    """Peers that can be had, and ours: with the encoding of the others, and with PEG, as it ships."""
    ours = {"cpvt_det": our_model(recipe, settings.device, mask_padding=False)}
    ours["cpvt_det PEG"] = our_model(recipe, settings.device, "peg")
    left_out: dict[str, str] = {}
    peers = {}
    for name, make in models.peers_of(recipe, ours["cpvt_det"], settings.options, left_out).items():
        try:
            peers[name] = make()
            if name == "official":
                best = channels_last(make())
                peers[name + AT_BEST] = fused_attention(best) if has_fusable_attention(best.module) else best
        except Exception as error:  # of code that is not ours
            left_out[name] = f"{type(error).__name__}: {error}"[-600:]
            say(f"left out: {name}: {left_out[name][:300]}")
    return Fleet(recipe, peers, ours, left_out)


def time_models(fleet: Fleet, passes: str, settings: Settings, size: Size = SIZE, batch: int = BATCH) -> dict[str, Any]:
    """Rows with times under bf16, images a second, peak memory, and the share of the time in which the GPU works.

    What is compared is computed in float32 without TF32, as half precision chooses other proposals.
    """
    shape = models.Shape(fleet.recipe, size, batch, passes)
    shape = shape.tiny if settings.rehearse else shape
    inputs = models.make_inputs(shape, settings.device)
    make, bf16 = partial(contender_of, shape, inputs), not settings.rehearse
    contenders = [make(name, model, name in fleet.peers, bf16) for name, model in fleet.all.items()]
    for name, model in fleet.all.items() if bf16 else ():
        if name in ALSO_FLOAT32:
            contenders.append(replace(make(name, model, name in fleet.peers, False), name=f"{name}, float32"))
    left_out = dict(fleet.left_out)
    work = Work(contenders, models.FEW_OTHERS[passes] if shape.recipe.is_dino else 1e-3, left_out)
    measured = measure(work, QUICK if settings.rehearse else PLAN, settings.device, partial(_drop_gradients, fleet))
    return _with_shares(shape, contenders, measured, settings, passes == models.PASSES[1])


def contender_of(shape: models.Shape, inputs: Any, name: str, model: Model, peer: bool, bf16: bool = True) -> Contender:
    """A model that is timed under bf16 and compared in float32."""
    other_work = models.PEG if name.startswith("cpvt_det PEG") else ""
    timed = models.make_contender(shape, *inputs, name, model, peer=peer, bf16=bf16, other_work=other_work)
    compared = models.make_contender(shape, *inputs, name, model, peer=peer)
    return replace(timed, tolerance=None, check=partial(_in_float32, compared))


def _in_float32(contender: Contender) -> Any:
    with full_float32():
        return contender.output()


def _with_shares(
    shape: models.Shape, contenders: list[Contender], measured: dict[str, Any], settings: Settings, profiled: bool = True
) -> dict[str, Any]:
    """The rows with images a second and, if they are profiled, the share of the GPU's work."""
    calls = {contender.name: contender.call for contender in contenders}
    for row in measured["rows"][: 1 if settings.rehearse else None]:
        seconds = row["wall"]["median"]
        row["images_per_second"] = shape.batch / seconds
        if not profiled:
            say(f"{shape.name}, {row['name']}: {row['images_per_second']:.2f} images/s")
            continue
        try:
            row |= busy(calls[row["name"]], seconds, settings.device)
            share = f", the GPU works {row['busy']:.0%}, {row['kernels']:.0f} kernels"
        except Exception as error:
            share, row["busy_left_out"] = "", f"{type(error).__name__}: {error}"[:300]
        say(f"{shape.name}, {row['name']}: {row['images_per_second']:.2f} images/s{share}")
    return {"case": shape.name, **measured}


def busy(call: Callable[[], Any], seconds: float, device: str) -> dict[str, float]:
    """Seconds of kernels and copies in a call, by the profiler, and their share of the call's time without it."""
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        for _ in range(PROFILED):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in recorded.events() if event.device_type == wanted]
    events = [event for event in events if not getattr(event, "is_user_annotation", False)]  # spans, not work
    total = sum(event.time_range.elapsed_us() for event in events) / 1e6 / PROFILED
    return {"kernel_seconds": total, "busy": total / seconds, "kernels": len(events) / PROFILED}


def time_compiled(recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Ours in a training step, as it is and compiled, and the seconds of its first step."""
    shape = models.Shape(recipe, SIZE, BATCH, models.PASSES[1])
    shape = shape.tiny if settings.rehearse else shape
    inputs = models.make_inputs(shape, settings.device)
    fleet = Fleet(recipe, {}, {}, {})
    fleet.ours = {"cpvt_det PEG": our_model(recipe, settings.device, "peg")}
    if settings.rehearse:  # a compiler of C++ takes minutes
        other = our_model(recipe, settings.device, "peg")
        other.module.compile(backend="eager")
    else:
        other = compiled(our_model(recipe, settings.device, "peg"))
    fleet.ours["cpvt_det PEG, compiled"] = other
    contenders = [contender_of(shape, inputs, name, model, False, not settings.rehearse) for name, model in fleet.ours.items()]
    contenders = [replace(contender, check=lambda: 0.0) for contender in contenders]
    measured = measure(Work(contenders), QUICK if settings.rehearse else PLAN, settings.device, partial(_drop_gradients, fleet))
    return _with_shares(shape, contenders, measured, settings)


def time_more(recipe: Recipe, size: Size, batch: int, settings: Settings) -> dict[str, Any]:
    """Training steps of another size, in bf16 and in float32."""
    _give_back(settings)
    shape = models.Shape(recipe, size, batch, models.PASSES[1])
    shape = shape.tiny if settings.rehearse else shape
    inputs = models.make_inputs(shape, settings.device)
    fleet = build(recipe, settings)
    contenders = []
    for name, model in fleet.all.items():
        for bf16 in (False,) if settings.rehearse else (True, False):
            one = contender_of(shape, inputs, name, model, name in fleet.peers, bf16)
            contenders.append(replace(one, name=f"{name}, {'bf16' if bf16 else 'float32'}", check=lambda: 0.0))
    work = Work(contenders, left_out=fleet.left_out)
    measured = measure(work, QUICK if settings.rehearse else PLAN, settings.device, partial(_drop_gradients, fleet))
    return _with_shares(shape, contenders, measured, settings)


def _drop_gradients(fleet: Fleet) -> None:
    """Memory of gradients counts as part of a step's peak."""
    for model in fleet.all.values():
        model.module.zero_grad(set_to_none=True)


def _give_back(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.empty_cache()
