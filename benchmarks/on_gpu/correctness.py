# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU computes the same: the Triton kernels, whole models against the CPU, an image alone and in a batch; and waits."""

import importlib
import multiprocessing
import sys
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.equal import difference
from benchmarks.models import CONFIGS, Model, our_model
from benchmarks.on_gpu import Record, Settings, full_float32, say
from benchmarks.peers import ROOT
from benchmarks.suites import model as models
from benchmarks.suites import op
from cpvt_det import builders
from cpvt_det.common.memory import usable_cores
from cpvt_det.common.structures import PaddedBatch, Size, Targets
from cpvt_det.config import load_cfg
from cpvt_det.losses import TrainingModel
from cpvt_det.ops.deformable_attention import ms_deform_attn

NAMES = ("output", "value", "locations", "weights")
"""What the table of errors has: the output, and the gradients of the inputs."""
DTYPES = {
    "float64": (torch.float64, torch.float64),
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.float32),
    "bfloat16, weights too": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float32),
}
"""Of values, and of weights; locations are float32 at least."""
ODD: list[Size] = [(13, 17), (7, 9), (4, 5), (1, 2)]
SAME: Size = (256, 320)
"""Size of the images that the CPU computes too, in float64."""
PRECISIONS = ("float32 without TF32", "float32", "bf16", "float64")  # the last one changes the model
ALONE: tuple[Size, Size] = ((200, 256), (320, 448))
REHEARSED = ("nan_everywhere_reads_nothing", "far_and_infinite_points_are_outside")
REHEARSED_DTYPES = ("float32", "bfloat16, weights too")
REHEARSED_PRECISIONS = ("float32", "bf16")
STEPS = 3
PROCESSES = 8


def run(record: Record, settings: Settings) -> None:
    record.part("tests_of_the_kernels", partial(run_cases, settings))
    record.part("errors_of_the_kernels", partial(kernel_errors, settings))
    recipes = models.SMALL[1:2] if settings.rehearse else (*models.SMALL, models.DEFORMABLE, models.DINO, models.DETR)
    for recipe in recipes:
        size = "tiny" if recipe in models.SMALL else "R50"
        record.part(f"gpu_and_cpu {recipe.detector} {size}", partial(beside_the_cpu, recipe, settings))
    record.part("synchronisations", partial(count_waits, settings))
    for recipe in models.SMALL[: 1 if settings.rehearse else None]:
        record.part(f"alone_and_in_a_batch {recipe.detector}", partial(alone_and_in_a_batch, recipe, settings))


def run_cases(settings: Settings) -> dict[str, Any]:
    """The cases of the repository's tests of the kernels, which pytest runs one by one."""
    names = REHEARSED if settings.rehearse else tuple(_cases())
    run_one = partial(run_case, device=settings.device)
    processes = 1 if settings.rehearse else min(PROCESSES, usable_cores())
    # Most of the time is the compiler's, one kernel after the other.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        told = list(pool.map(run_one, names))
    failed = {name: error for name, error in zip(names, told, strict=True) if error}
    say(f"tests of the kernels: {len(names) - len(failed)} of {len(names)} passed; failed: {', '.join(failed) or 'none'}")
    return {"passed": len(names) - len(failed), "failed": failed}


def run_case(name: str, device: str) -> str:
    """The end of a case's traceback; empty for one that passes."""
    try:
        _cases()[name](device)
    except Exception:
        return traceback.format_exc()[-1500:]
    return ""


def _cases() -> dict[str, Any]:
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("triton_interpreter_cases").CASES


def kernel_errors(settings: Settings) -> list[dict[str, Any]]:
    """Largest errors of Triton and of the eager code against the eager code in float64, relative to the largest value."""
    shapes, dtypes = {"odd": (ODD, 2, 19)}, DTYPES
    if settings.rehearse:
        shapes, dtypes = {"tiny": (op.TINY[-2:], 1, 1)}, {name: DTYPES[name] for name in REHEARSED_DTYPES}
    else:
        levels = op.Shape("800x1333", 2, 0, "near", "forward+backward").level_shapes
        shapes |= {"encoder 800x1333": (levels, 2, 0), "decoder 300": (levels, 2, 300), "decoder 900": (levels, 2, 900)}
    rows = []
    for shape, (levels, batch, queries) in shapes.items():
        drawn = op.make_inputs(levels, batch, queries, "near", settings.device)
        for dtype, (of_value, of_weights) in dtypes.items():
            inputs = [drawn.value.to(of_value), drawn.locations.to(torch.promote_types(of_weights, torch.float32))]
            inputs = [x.detach().requires_grad_() for x in (*inputs, drawn.weights.to(of_weights))]
            slope = drawn.grad_output.to(of_value)
            wide = [x.detach().double().requires_grad_() for x in inputs]
            expected = _eager(wide, levels, slope.double())
            for name, call in (("triton", _triton), ("eager", _eager)):
                row = {"shape": shape, "dtype": dtype, "implementation": name}
                try:
                    found = call(inputs, levels, slope)
                    row |= {what: difference(a.double(), e) for what, a, e in zip(NAMES, found, expected, strict=True)}
                except Exception as error:
                    row["left_out"] = f"{type(error).__name__}: {error}"[:300]
                rows.append(row)
                if name == "triton":
                    say(f"{shape}, {dtype}: {row.get('left_out') or ', '.join(f'{what} {row[what]:.1g}' for what in NAMES)}")
    return rows


def _with_gradients(output: Tensor, inputs: list[Tensor], slope: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, inputs, slope)]


def _triton(inputs: list[Tensor], levels: list[Size], slope: Tensor) -> list[Tensor]:
    """By the operator on a GPU; in a rehearsal by Triton's interpreter, which takes tensors of the CPU."""
    if inputs[0].is_cuda:
        return _with_gradients(ms_deform_attn(inputs[0], levels, *inputs[1:], implementation="triton"), inputs, slope)
    from cpvt_det.ops import deformable_triton as kernels

    value, locations, weights = (x.detach() for x in inputs)
    output = kernels.forward(value, levels, locations, weights)
    return [output, *kernels.backward(slope, value, levels, locations, weights, False)]


def _eager(inputs: list[Tensor], levels: list[Size], slope: Tensor) -> list[Tensor]:
    return _with_gradients(ms_deform_attn(inputs[0], levels, *inputs[1:], implementation="eager"), inputs, slope)


def beside_the_cpu(recipe: Any, settings: Settings) -> dict[str, Any]:
    """Differences of logits, boxes, loss and norm of gradients from those of the CPU in float64, relative to the largest."""
    shape = models.Shape(recipe, models.TINY if settings.rehearse else SAME, 2, models.PASSES[1])
    shape = shape.tiny if settings.rehearse else shape
    expected = _outcome(shape, our_model(shape.recipe, "cpu", "peg"), "cpu", "float64")
    model, found = our_model(shape.recipe, settings.device, "peg"), {}
    for precision in REHEARSED_PRECISIONS if settings.rehearse else PRECISIONS:
        outcome = _outcome(shape, model, settings.device, precision)
        found[precision] = {name: difference(outcome[name].cpu(), expected[name]) for name in expected}
        say(f"{recipe.detector}, {precision}: {', '.join(f'{name} {gap:.1g}' for name, gap in found[precision].items())}")
    return found


def _outcome(shape: models.Shape, model: Model, device: str, precision: str) -> dict[str, Tensor]:
    batch, targets = models.make_inputs(shape, device)
    if precision == "float64":
        model.module.double()
        batch = replace(batch, images=batch.images.double())
        targets = [replace(target, boxes_cxcywh=target.boxes_cxcywh.double()) for target in targets]
    contender = models.make_contender(shape, batch, targets, precision, model, bf16=precision == "bf16")
    if precision == "float32":
        return contender.output()
    with full_float32():
        return contender.output()


def alone_and_in_a_batch(recipe: Any, settings: Settings) -> dict[str, Any]:
    """Differences of an image's logits and boxes alone and beside a larger one, which pads it, relative to the largest."""
    sizes = tuple((height // 4, width // 4) for height, width in ALONE) if settings.rehearse else ALONE
    recipe = replace(recipe, queries=min(recipe.queries, models.FEW_QUERIES))
    generator, found = torch.Generator().manual_seed(0), {}
    images = [torch.randn(3, *size, generator=generator) for size in sizes]
    for device in dict.fromkeys(("cpu", settings.device)):
        for dtype in (torch.float32,) if settings.rehearse else (torch.float64, torch.float32):
            model = our_model(recipe, device, "peg")
            model.module.to(dtype).eval()
            given = [image.to(device, dtype) for image in images]
            with torch.no_grad(), full_float32():
                alone, together = (model.predict(PaddedBatch.from_images(part, models.STRIDE)) for part in (given[:1], given))
            gaps = {name: difference(b[:1], a) for name, a, b in zip(("logits", "boxes"), alone, together, strict=True)}
            found[f"{device} {str(dtype)[6:]}"] = gaps
            say(f"{recipe.detector} alone and in a batch, {device} {dtype}: {', '.join(f'{k} {v:.1g}' for k, v in gaps.items())}")
    return found


def count_waits(settings: Settings) -> dict[str, Any]:
    """Waits of the host for the GPU in a training step with bf16, and the lines that wait; after steps that are not counted."""
    found = {}
    for recipe in (models.DEFORMABLE,) if settings.rehearse else (models.DETR, models.DEFORMABLE, models.DINO):
        words = ["MODEL.NUM_CLASSES", "80", "SOLVER.AMP.ENABLED", "True", "SOLVER.IMS_PER_BATCH", "2"]
        words += ["MODEL.DEVICE", settings.device, "MODEL.BACKBONE.WEIGHTS", ""]
        if settings.rehearse:
            words += ["MODEL.DETR.HIDDEN_DIM", "32", "MODEL.DETR.ENC_LAYERS", "1", "MODEL.DETR.DEC_LAYERS", "2"]
            words += ["MODEL.DETR.NUM_OBJECT_QUERIES", "20", "SOLVER.AMP.ENABLED", "False"]
            words += ["MODEL.BACKBONE.NAME", "resnet10"]
        cfg = load_cfg(str(CONFIGS / f"{recipe.origin.config.format('peg')}.yaml"), words)
        torch.manual_seed(0)
        detector = builders.build_detector(cfg)
        model = TrainingModel(detector, builders.build_criterion(cfg))
        schedule = builders.build_schedule(cfg, 1000)
        step = builders.build_step(cfg, model, builders.build_optimizer(cfg, detector), schedule, seed=0)
        counts: Counter[str] = Counter()
        for iteration in range(2 if settings.rehearse else 2 + STEPS):
            samples = _samples(settings, iteration)
            if iteration < 2:
                step(samples, iteration)
            else:
                counts += _waits_of(partial(step, samples, iteration))
        steps = STEPS if counts else 1
        lines = {line: count / steps for line, count in counts.most_common(12)}
        found[recipe.detector] = {"a_step": sum(counts.values()) / steps, "lines": lines}
        say(f"{recipe.detector}: the host waits {found[recipe.detector]['a_step']:.1f} times a step: {dict(counts.most_common(4))}")
        del step, model, detector
    return found


def _samples(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Two images as the loader gives them, in pinned memory where there is a GPU."""
    generator, side = torch.Generator().manual_seed(seed), 96 if settings.rehearse else 480
    found = []
    for number in range(2):
        image = torch.randint(256, (3, side, side + 32 * number), dtype=torch.uint8, generator=generator)
        targets = Targets(torch.randint(80, (10,), generator=generator), 0.2 + 0.2 * torch.rand(10, 4, generator=generator))
        if settings.device == "cuda":
            image, targets = image.pin_memory(), targets.pin_memory()
        found.append({"image": image, "image_id": number, "targets": targets})
    return found


def _waits_of(call: Any) -> Counter[str]:
    """The lines of Python during which torch reports that the host waits."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in caught if "synchronizing" in str(one.message)]
    return Counter(f"{one.filename.removeprefix(f'{ROOT}/')}:{one.lineno}" for one in waits)
