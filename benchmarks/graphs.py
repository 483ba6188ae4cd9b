#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What makes a GPU wait, counted without one: ``python benchmarks/graphs.py --output DIR``.

Graphs of each detector's forward under ``torch.compile(dynamic=True)``: between two of them Python runs. And the reads of device
values in a training step, each of which waits until the device has done all that it was given before.
"""

import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from fvcore.common.config import CfgNode
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

import cpvt_det
from benchmarks.models import CONFIGS, ORIGINS
from benchmarks.records import about_run
from cpvt_det import builders
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.files import write_json
from cpvt_det.common.structures import Sample, Size, Targets
from cpvt_det.config import load_cfg
from cpvt_det.losses import TrainingModel

PACKAGE = Path(cpvt_det.__file__).parent
DETECTORS = ("DETR", "Deformable-DETR", "DINO")
SHALLOW = {"ENC_LAYERS": 1, "DEC_LAYERS": 2}
"""Every part once, and a decoder layer after another: what came with each layer would be seen."""
SIZES: tuple[Size, ...] = ((96, 128), (64, 100))
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
"""Operations whose outcome, or its shape, the host reads; ``item`` and ``bool`` are the first of them."""
COPIES = ("cpu", "tolist")
"""Methods of tensors that do it without an operation, on a CPU."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("output/graphs"), show_default=True)
@common_options
@report_errors
def main(output: Path) -> None:
    """Count graphs and reads of DETR, Deformable-DETR and DINO with PEG, and write OUTPUT/graphs.json.

    Networks are narrow and shallow, as neither number depends on that.

    \b
    Example:
      python benchmarks/graphs.py --output output/graphs
    """
    torch.set_num_threads(1)
    content: dict[str, Any] = {"graphs": {}, "reads": {}}
    for name in DETECTORS:
        cfg = small_config(name)
        content["reads"][name] = dict(count_reads(cfg))
        click.echo(f"{name}: reads of a training step: {content['reads'][name]}")
        for mode in ("inference", "training"):
            content["graphs"][f"{name}, {mode}"] = found = count_graphs(cfg, training=mode == "training")
            click.echo(f"{name}, {mode}: graphs: {found}")
    output.mkdir(parents=True, exist_ok=True)
    write_json({**about_run("graphs.py --output DIR", 1, False, None), **content}, output / "graphs.json", indent=1)


def small_config(name: str) -> CfgNode:
    """The shipped config of a detector with PEG, a key of ``ORIGINS``; small, and on the CPU."""
    words = ["MODEL.DEVICE", "cpu", "MODEL.NUM_CLASSES", "80", "MODEL.BACKBONE.NAME", "resnet10", "MODEL.BACKBONE.WEIGHTS", ""]
    words += ["MODEL.DETR.HIDDEN_DIM", "32", "MODEL.DETR.DIM_FEEDFORWARD", "32", "MODEL.DETR.NUM_OBJECT_QUERIES", "20"]
    words += [
        "SOLVER.AMP.ENABLED",
        "False",
        *(word for key, number in SHALLOW.items() for word in (f"MODEL.DETR.{key}", str(number))),
    ]
    return load_cfg(str(CONFIGS / f"{ORIGINS[name].config.format('peg')}.yaml"), words)


def draw_samples(seed: int) -> list[Sample]:
    """Samples as the loader gives them, with three objects and more."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number, size in enumerate(SIZES):
        image = torch.randint(256, (3, *size), dtype=torch.uint8, generator=generator)
        labels = torch.randint(80, (3 + 2 * number,), generator=generator)
        targets = Targets(labels, 0.2 + 0.2 * torch.rand(len(labels), 4, generator=generator))
        samples.append({"image": image, "image_id": number, "targets": targets})
    return samples


def count_graphs(cfg: CfgNode, training: bool) -> int:
    """Graphs of a forward.

    Args:
        cfg: config of a detector.
        training: True: with targets, in training mode, as in a training step.
    """
    detector = builders.build_detector(cfg).train(training)
    graphs: list[nn.Module] = []

    def count(graph: nn.Module, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    samples = draw_samples(0)
    batch = detector.preprocess([sample["image"] for sample in samples])
    targets = [sample["targets"] for sample in samples] if training else None
    with torch.set_grad_enabled(training):
        torch.compile(detector, dynamic=True, backend=count)(batch.images, batch.padding_mask, targets)
    return len(graphs)


def count_reads(cfg: CfgNode) -> Counter[str]:
    """Reads of device values in a training step without logging: line of the package -> number. The first step is not counted."""
    torch.manual_seed(0)
    detector = builders.build_detector(cfg)
    model = TrainingModel(detector, builders.build_criterion(cfg))
    schedule = builders.build_schedule(cfg, 1000)
    step = builders.build_step(cfg, model, builders.build_optimizer(cfg, detector), schedule, seed=0)
    step(draw_samples(0), 0)
    samples = draw_samples(1)
    with counted_reads() as reads:
        step(samples, 1)
    return reads


@contextlib.contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count the reads of this block by the line of the package that asks.

    Masks on a CPU are looked at, as they are at hand; on other devices, and where code is compiled, they are not, and so not here.
    What is copied by ``to`` is not seen, as here all is on one device.
    """
    reads: Counter[str] = Counter()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.removeprefix("aten::")
            if name in READS or (name.startswith("index") and _has_mask(args)):
                reads[_line(name)] += 1
            return func(*args, **(kwargs or {}))

    class Methods(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if (name := getattr(func, "__name__", "")) in COPIES:
                reads[_line(name)] += 1
            return func(*args, **(kwargs or {}))

    with mock.patch.object(torch.compiler, "is_compiling", return_value=True), Operations(), Methods():
        yield reads


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether an operation's second argument is a list of indices with a mask among them."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _line(name: str) -> str:
    """The innermost line of the package, and what it calls."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)]
    return f"{Path(frames[-1].filename).relative_to(PACKAGE).as_posix()}:{frames[-1].lineno} {name}"


if __name__ == "__main__":
    main(prog_name="benchmarks/graphs.py")
