#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""detectron2's RetinaNet on a CPVT-Ti, trained for 200 iterations by detectron2's own script: whether the loss falls.

As in ``python benchmarks/detectron2_cpvt.py detectron2/tools/train_net.py --output benchmarks/results``, with detectron2, and the
shapes in ``datasets/shapes`` (``cpvt-det shapes datasets/shapes``).
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.machine import machine, versions
from benchmarks.origin import commit_of
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.errors import RunStoppedError
from cpvt_det.common.files import write_json

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/plug/retinanet_cpvt_tiny_shapes.yaml"
SMALL = "SOLVER.IMS_PER_BATCH 2 SOLVER.STEPS () INPUT.MIN_SIZE_TRAIN (64,) INPUT.MAX_SIZE_TRAIN 96 DATASETS.TEST ()"
"""Images of 64 pixels on the short side, so that an iteration takes a fraction of a second on one core."""

SETTLED = 40
"""Iterations after which RetinaNet's losses can be compared: it divides by a moving average of the matched anchors that starts at
100 and keeps nine tenths of itself per iteration."""


def train(train_net: Path, iterations: int, output: Path) -> float:
    """Train by detectron2's script; returns its CPU seconds.

    Raises:
        RunStoppedError: the script ended with an error.
    """
    words = [*SMALL.split(), "SOLVER.MAX_ITER", str(iterations), "OUTPUT_DIR", str(output)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "DETECTRON2_ENV_MODULE": "cpvt_det.d2", "PYTHONPATH": paths}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(train_net), "--config-file", str(ROOT / CONFIG), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunStoppedError(f"{train_net} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def losses_of(metrics: Path) -> dict[str, dict[str, float]]:
    """Iteration -> losses by name, from detectron2's ``metrics.json``."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {
        str(line["iteration"] + 1): {key: value for key, value in line.items() if "loss" in key}
        for line in lines
        if "total_loss" in line
    }


def require_falling(losses: Mapping[str, Mapping[str, float]]) -> None:
    """Refuse losses of which one is not finite, or whose total, once settled, has not fallen from the first fifth to the last.

    Raises:
        RunStoppedError: such losses, or none that has settled.
    """
    if not all(math.isfinite(value) for values in losses.values() for value in values.values()):
        raise RunStoppedError("a loss is not finite")
    totals = [values["total_loss"] for iteration, values in losses.items() if int(iteration) > SETTLED]
    part = max(1, len(totals) // 5)
    if len(totals) < 2 or statistics.mean(totals[-part:]) >= statistics.mean(totals[:part]):
        raise RunStoppedError(f"the loss did not fall after {SETTLED} iterations: {totals}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("train_net", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the record.")
@click.option("--iterations", default=200, show_default=True, type=click.IntRange(min=2))
@common_options
@report_errors
def main(train_net: Path, output: Path, iterations: int) -> None:
    """Train with detectron2's script TRAIN_NET, and write the losses to detectron2_cpvt.json; they have to fall."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        seconds = train(train_net, iterations, Path(folder))
        losses = losses_of(Path(folder) / "metrics.json")
    record: dict[str, Any] = {
        "command": f"python benchmarks/detectron2_cpvt.py {'/'.join(train_net.parts[-3:])}",
        "config": f"{CONFIG} {SMALL}",
        "commit": commit_of(ROOT / "cpvt_det"),
        "versions": versions(),
        "machine": machine("cpu", load),
        "iterations": iterations,
        "cpu_seconds": round(seconds, 1),
        "losses": losses,
    }
    output.mkdir(parents=True, exist_ok=True)
    write_json(record, output / "detectron2_cpvt.json", indent=1)
    click.echo(output / "detectron2_cpvt.json")
    require_falling(losses)


if __name__ == "__main__":
    main()
