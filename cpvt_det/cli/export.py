# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det export``: turn weights into a file that runs without this package, written only if its outputs agree with the
model's."""

import itertools
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn

from cpvt_det import builders
from cpvt_det.builders.trained import Trained, load_for_evaluation, load_trained
from cpvt_det.checkpoint.exported import INPUTS, Run, is_exported, open_program
from cpvt_det.cli import common_options
from cpvt_det.cli.train import RUN_CONTEXT
from cpvt_det.common.class_names import require_same_classes
from cpvt_det.common.errors import BadInputError, RunStoppedError, UnknownNameError, WeightsError
from cpvt_det.common.structures import Size
from cpvt_det.data.coco import CocoDataset
from cpvt_det.export import check, program
from cpvt_det.export.quantize import quantize
from cpvt_det.training.evaluate import evaluate
from cpvt_det.training.tasks.task import build_task, figure_of

TOLERANCE = 1e-4  # allowed difference of a score, and of a box coordinate as a fraction of the image's side
HALF_TOLERANCE = 2e-2
CALIBRATION, FEWEST = 100, 8  # number of images to measure the ranges of activations on, and its minimum


@click.command(context_settings=RUN_CONTEXT)
@click.argument("weights", metavar="WEIGHTS")
@click.option("--format", type=click.Choice(program.FORMATS), required=True, help="Format of FILE.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE", help="File to write.")
@click.option(
    "--dynamic", default=",".join(program.DIMENSIONS), show_default=True, help="Dimensions that may change between calls, or none."
)
@click.option("--batch", type=click.IntRange(min=1), help="Number of images per call, if batch is not dynamic.")
@click.option("--size", metavar="HEIGHTxWIDTH", help="Size of the canvas, if height or width is not dynamic.")
@click.option(
    "--sampling",
    type=click.Choice(list(program.SAMPLINGS)),
    default="gather",
    show_default=True,
    help="Sampling operator of deformable attention.",
)
@click.option(
    "--no-mask",
    "masked",
    is_flag=True,
    flag_value=False,
    default=True,
    help="No padding mask; predict and eval stretch images to the canvas.",
)
@click.option("--half", is_flag=True, help="Compute matrix products and convolutions in float16; OpenVINO: weights in float16.")
@click.option("--int8", is_flag=True, help="Compute convolutions and linear layers in int8, calibrated on training images.")
@click.option(
    "--max-loss",
    type=float,
    metavar="AP",
    help="Evaluate the model and the file, and refuse the file if it loses more than this.  [with --int8: 1]",
)
@click.option("--config-file", default="", metavar="FILE", help="Config for weights that do not contain one.")
@common_options
@click.argument("overrides", nargs=-1, metavar="[KEY VALUE]...")
def export(
    weights: str,
    format: str,
    output: Path,
    dynamic: str,
    batch: int | None,
    size: str | None,
    sampling: str,
    masked: bool,
    half: bool,
    int8: bool,
    max_loss: float | None,
    config_file: str,
    overrides: tuple[str, ...],
) -> None:
    """Convert WEIGHTS, a checkpoint of a run, to a program that runs without this package; predict and eval take it too.

    The program takes pixels and, unless --no-mask is given, a padding mask. It returns boxes, scores and labels, or for a
    classifier the scores of the classes. It is compared with the model on three batches whose sizes differ from that of the traced
    batch. FILE is written only if no box and no score differs by more than 1e-4 (with --half, 2e-2). With --int8 or --max-loss, the
    model and the program are also evaluated on the test data. KEY VALUE pairs override the config.

    \b
    Example:
      cpvt-det export output/model_best.pth --format onnx --output detector.onnx
      cpvt-det export output/model_best.pth --format openvino --output detector.xml
      cpvt-det export output/model_best.pth --format openvino --output detector.xml --int8 --max-loss 0.5
      cpvt-det export output/model_best.pth --format torch_export --output detector.pt2 --dynamic batch --size 800x1216
    """
    program.require_packages(format, int8)
    _require_usable(output, format, int8, half, max_loss)
    names = _dimensions(dynamic)
    trained = load_trained(weights, "cpu", config_file, overrides)
    detector = trained.detector
    images = _calibration_images(trained) if int8 else None
    tests = build_task(trained.cfg).load_tests() if int8 or max_loss is not None else []
    canvas = check.traced_canvas(detector, *_fixed(names, batch, size, detector))
    postprocess = builders.build_output_decoder(trained.cfg)
    module = program.ExportModule(program.prepare(detector, sampling), postprocess, half and format != "openvino")
    if names:
        click.echo(
            f"tracing a program for any {', '.join(names)}: this may take several minutes (--dynamic none is faster)", err=True
        )
    fixed = {name: side for name, side in vars(canvas).items() if name not in names}
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        path = Path(folder) / output.name
        facts = {**_metadata(trained), "fixed": fixed, "inputs": INPUTS if masked else INPUTS[:1]}
        program.write_program(program.trace(module, canvas, names, masked), format, path, facts, half, postprocess.outputs)
        run = _open(path, format)
        unseen = enumerate(check.unseen_canvases(detector, canvas, names))
        for seed, other in unseen:
            difference = check.compare(detector, postprocess, run, other, seed, masked)
            _report(other, difference, HALF_TOLERANCE if half else TOLERANCE)
        if images is not None:
            quantize(path, format, images, facts)
        if tests:
            _report_loss(trained, tests, path, 1.0 if max_loss is None else max_loss)
        for file in sorted(path.parent.iterdir()):  # the .bin with the weights comes before its .xml
            os.replace(file, output.with_name(file.name))
    click.echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB")


def _require_usable(output: Path, format: str, int8: bool, half: bool, max_loss: float | None) -> None:
    """Refuse options that cannot be used, before anything is computed."""
    if format == "openvino" and output.suffix != ".xml":
        raise BadInputError(
            f"--output {output}: the name of an OpenVINO file must end in .xml; its weights are stored beside it, in a .bin file"
        )
    if not os.access(output.parent, os.W_OK):
        raise BadInputError(f"--output {output}: the folder {output.parent} does not exist or cannot be written to")
    if int8 and format == "torch_export":
        raise BadInputError("--int8 is for --format onnx and openvino")
    if int8 and half:
        raise BadInputError("--int8 and --half exclude each other: leave one out")
    if max_loss is not None and not max_loss >= 0:
        raise BadInputError(f"--max-loss must be 0 or more, got {max_loss:g}")
    if (int8 or max_loss is not None) and not is_exported(output):
        raise BadInputError(
            f"--output {output}: with --int8 or --max-loss, its name must end in .onnx or .xml, so that it can be evaluated"
        )


def _calibration_images(trained: Trained) -> Iterator[Tensor]:
    """Training images, taken evenly from the data and prepared as in evaluation.

    Raises:
        BadInputError: too few images, or a data set with different classes.
    """
    task = build_task(trained.cfg)
    datasets, _ = task.load_splits()
    require_same_classes(trained.classes, datasets[0].classes, "the weights and DATASETS.TRAIN")
    records = task.training_records(datasets)
    if len(records) < FEWEST:
        raise BadInputError(f"--int8 needs at least {FEWEST} images for calibration, but DATASETS.TRAIN has {len(records)}")
    chosen = np.zeros(len(records), dtype=bool)
    chosen[np.linspace(0, len(records) - 1, min(CALIBRATION, len(records))).round().astype(int)] = True
    loader = task.build_test_loader(replace(datasets[0], records=records.select(chosen)))
    return (sample["image"] for sample in itertools.chain.from_iterable(loader))


def _report_loss(trained: Trained, tests: list[CocoDataset], path: Path, max_loss: float) -> None:
    """Evaluate the model and the exported file, and refuse a file that loses more than ``max_loss`` AP."""
    task = build_task(trained.cfg)
    cfg = trained.cfg.clone()
    cfg.MODEL.WEIGHTS = str(path)
    exported, _ = load_for_evaluation(cfg, tests[0].classes)
    found = []
    for name, model in (("model", trained.detector), ("exported", exported)):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            value = figure_of(task.main_figure, evaluate(task, model, tests, Path(folder)))
        found.append((name, value, time.perf_counter() - start))
    rows = [(name, f"{value:.2f}", f"{seconds:.1f}") for name, value, seconds in found]
    click.echo(tabulate(rows, ("", f"{task.main_figure} on {tests[0].name}", "seconds"), tablefmt="github", disable_numparse=True))
    lost = found[0][1] - found[1][1]
    if not lost <= max_loss:  # written so that NaN fails too
        raise RunStoppedError(
            f"the exported program loses {lost:.2f} {task.main_figure}, but --max-loss allows only {max_loss:g}; no file was "
            "written"
        )


def _open(path: Path, format: str) -> Run:
    try:
        if format != "torch_export":
            return open_program(path, format).run
        loaded = torch.export.load(path)
        module, count = loaded.module(), len(loaded.graph_signature.user_inputs)
        return lambda *inputs: module(*inputs[:count])
    except WeightsError as error:
        raise RunStoppedError(f"the converted program cannot be run: {error}") from error


def _dimensions(text: str) -> list[str]:
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in program.DIMENSIONS:
            raise UnknownNameError("--dynamic", name, [*program.DIMENSIONS, "none"])
    return names


def _fixed(dynamic: Collection[str], batch: int | None, size: str | None, detector: nn.Module) -> tuple[int | None, Size | None]:
    """The fixed batch and canvas from ``--batch`` and ``--size``; ``None`` for dynamic ones. The default of a fixed batch is 1."""
    is_fixed = not {"height", "width"} <= set(dynamic)
    for option, value, fits in (("batch", batch, "batch" not in dynamic), ("size", size, is_fixed)):
        if value is not None and not fits:
            raise BadInputError(f"--{option} {value} contradicts --dynamic {','.join(dynamic)}: remove one of them")
    batch = None if "batch" in dynamic else batch or 1
    if size is None:
        if is_fixed:
            raise BadInputError("height or width is not dynamic: add --size HEIGHTxWIDTH")
        return batch, None
    if (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size)) is None:
        raise BadInputError(f"--size {size} is not HEIGHTxWIDTH, such as 800x1216")
    sides = int(match[1]), int(match[2])
    stride, largest = detector.size_divisibility, program.largest_sides(detector)
    if any(side % stride for side in sides):
        whole = "x".join(str(-(-side // stride) * stride) for side in sides)
        raise BadInputError(f"--size {size}: sides must be multiples of the model's stride {stride}; use {whole}")
    if largest is not None and max(sides) > largest * stride:
        raise BadInputError(
            f"--size {size}: the model's learned encoding covers only {largest * stride} pixels (MODEL.POSITION.TABLE_SIZE)"
        )
    return batch, sides


def _metadata(trained: Trained) -> dict[str, Any]:
    """The metadata that a script needs to run the program, with the rule by which images were resized in evaluation. Thresholds are
    missing if the weights have none."""
    kept, resizing = trained.thresholds, trained.cfg.INPUT
    if builders.is_classifier(trained.cfg):
        sizes = {"size": resizing.CLASSIFY.TEST_SIZE, "crop_ratio": resizing.CLASSIFY.CROP_RATIO}
    else:
        sizes = {"min_size": resizing.MIN_SIZE_TEST, "max_size": resizing.MAX_SIZE_TEST}
    return {
        **({} if kept is None else {"threshold": kept.overall, "class_thresholds": list(kept.classes)}),
        "stride": trained.detector.size_divisibility,
        **sizes,
        "class_names": list(trained.classes.names),
        "class_ids": list(trained.classes.ids),
        "config": trained.cfg.dump(),
    }


def _report(canvas: program.Canvas, difference: float, tolerance: float) -> None:
    click.echo(f"{canvas}: boxes and scores differ from the model's by up to {difference:.1e}")
    if not difference <= tolerance:  # written so that NaN fails too
        raise RunStoppedError(
            f"the exported program differs from the model by up to {difference:.1e}, but only {tolerance:.0e} is allowed; no file "
            "was written"
        )
