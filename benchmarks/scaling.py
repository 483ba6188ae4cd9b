#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Growth of the time and memory of a training step with image size, batch, queries, objects and processes.

``python benchmarks/scaling.py``. Every point is measured in a separate process, which takes a tiny step first. Time is CPU seconds
of one thread, memory the peak above the memory of the process before the step. ``--processes`` compares two DDP processes with one,
by wall time, and needs two free cores.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from benchmarks.threads import thread_environment
from cpvt_det.cli import common_options, report_errors

ROOT = Path(__file__).resolve().parent.parent
QUERIES = {"DETR": 100, "Deformable-DETR": 300}
LEAST_STEPS, MOST_STEPS, MOST_SECONDS = 2, 5, 6.0  # per point, which is repeated until the seconds are used up


@dataclass(frozen=True)
class Point:
    """One training step's work.

    Args:
        detector: ``DETR`` or ``Deformable-DETR``, with ResNet-50.
        position: ``sine``, which is the official encoding of the detector, or ``peg``.
        side: side of the square images in pixels.
        batch: number of images.
        queries: number of queries Q; 0 for the detector's default.
        objects: number of objects per image.
    """

    detector: str
    position: str
    side: int = 320
    batch: int = 1
    queries: int = 0
    objects: int = 10


SWEEPS: dict[str, tuple[Point, tuple[int, ...]]] = {
    "side": (Point("", "", batch=1), (320, 480, 640, 960, 1280, 1600)),
    "batch": (Point("", "", side=320), (1, 2, 4, 8, 16, 32)),
    "queries": (Point("", "", side=320), (100, 300, 500, 900)),
    "objects": (Point("", "", side=320, batch=4), (1, 10, 30, 100)),
}
"""Varied quantity -> all other settings, and its values."""
EXPECTED = {
    "side": "2: every part is linear in the area, but DETR's self-attention, which is 4",
    "batch": "1",
    "queries": "under 1: the backbone has no queries; the decoder's self-attention is 2",
    "objects": "0: the matcher's and the losses' share is small",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("output/benchmarks"), show_default=True)
@click.option("--quick", is_flag=True, help="Measure only the two smallest values of each sweep.")
@click.option("--processes", is_flag=True, help="Compare two DDP processes of one thread with one process, instead of the sweeps.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@click.option("--point", hidden=True, help="Measure one point and print it as JSON.")
@common_options
@report_errors
def main(output: Path, quick: bool, processes: bool, busy: bool, point: str | None) -> None:
    """Measure how time and memory of a training step grow, with PEG and with sine; write a table, JSON and a figure."""
    os.environ.update(thread_environment(1))
    if point:
        click.echo(json.dumps(measure(Point(**json.loads(point)))))
        return
    load_average = check_load(busy)
    rows = compare_processes(rounds=1 if quick else 7) if processes else sweep(quick)
    table = shares(rows) if processes else tables(rows)
    from benchmarks.records import about_run, write_record

    words = " ".join(["scaling.py", *["--quick"] * quick, *["--processes"] * processes])
    name = "processes" if processes else "scaling"
    title, _, rest = table.partition("\n\n")
    written, _ = write_record(output, name, about_run(words, 1, busy, load_average), {"rows": rows}, [title.lstrip("# "), rest])
    click.echo(table)
    if not processes:
        draw(rows, written.with_suffix(".png"))


def sweep(quick: bool) -> list[dict]:
    """All points, each measured in a separate process: their fields, ``varied``, ``seconds`` and ``megabytes``."""
    rows = []
    for varied, (rest, values) in SWEEPS.items():
        for value in values[:2] if quick else values:
            for detector in QUERIES:
                for position in ("sine", "peg"):
                    chosen = replace(rest, detector=detector, position=position, **{varied: value})
                    found = _in_process("--point", json.dumps(asdict(chosen)))
                    rows.append({**asdict(chosen), "varied": varied, **json.loads(found)})
                    click.echo(json.dumps(rows[-1]), err=True)
    return rows


def measure(point: Point) -> dict[str, float]:
    """Peak megabytes of the first step, and the fewest CPU seconds of the later ones: the first step is slowed by new memory."""
    import torch

    from cpvt_det.common.memory import peak, reset_peak, resident, trim_heap

    step, tiny = make_step(point), make_step(replace(point, side=64, batch=1))
    torch.set_num_threads(1)
    tiny()
    trim_heap()
    reset_peak()
    before = resident()
    step()
    most = peak() - before
    seconds: list[float] = []
    while len(seconds) < LEAST_STEPS or (len(seconds) < MOST_STEPS and sum(seconds) < MOST_SECONDS):
        seconds.append(_cpu_seconds(step))
    return {"seconds": min(seconds), "megabytes": most / 1e6}


def make_step(point: Point) -> Callable[[], None]:
    """A training step on noise: gradients to None, forward, criterion, backward."""
    import torch

    from benchmarks.models import Recipe, our_model
    from cpvt_det.common.structures import PaddedBatch, Targets

    recipe = Recipe(point.detector, queries=point.queries or QUERIES[point.detector])
    model = our_model(recipe, position="peg" if point.position == "peg" else "")
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(3, point.side, point.side, generator=generator) for _ in range(point.batch)]
    batch = PaddedBatch.from_images(images, 64)
    targets = [
        Targets(torch.randint(recipe.classes, (point.objects,), generator=generator), 0.2 + 0.2 * torch.rand(point.objects, 4))
        for _ in range(point.batch)
    ]

    def step() -> None:
        model.module.zero_grad(set_to_none=True)
        model.learn(batch, targets)[2].backward()

    return step


def _cpu_seconds(call: Callable[[], None]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def exponents(rows: list[dict]) -> dict[tuple[str, str, str, str], tuple[float, float]]:
    """(varied, detector, position, figure) -> the exponent fitted over all values, and that of the last two."""
    groups = defaultdict(list)
    for row in rows:
        value = row["queries"] or QUERIES[row["detector"]] if row["varied"] == "queries" else row[row["varied"]]
        for figure in ("seconds", "megabytes"):
            groups[row["varied"], row["detector"], row["position"], figure].append((math.log(value), math.log(row[figure])))
    fitted = {}
    for key, points in groups.items():
        x, y = zip(*points, strict=True)
        (x1, y1), (x2, y2) = points[-2:]
        fitted[key] = (statistics.linear_regression(x, y).slope, (y2 - y1) / (x2 - x1))
    return fitted


def tables(rows: list[dict]) -> str:
    """A Markdown table for each sweep, and one of the exponents."""
    from tabulate import tabulate

    parts = ["# How a training step grows, cpu, 1 thread"]
    columns = [(detector, position) for detector in QUERIES for position in ("sine", "peg")]
    for varied, (rest, values) in SWEEPS.items():
        fixed = {name: value for name, value in asdict(rest).items() if value and name != varied}
        parts.append(f"## {varied}; " + ", ".join(f"{name} {value}" for name, value in fixed.items()))
        found = {(row[varied], row["detector"], row["position"]): row for row in rows if row["varied"] == varied}
        body = []
        for value in values:
            cells = [found.get((value, *column)) for column in columns]
            if all(cells):
                body.append([value, *(f"{c['seconds']:.2f} s, {c['megabytes']:.0f} MB" for c in cells)])
        parts.append(tabulate(body, [varied, *(" ".join(column) for column in columns)], tablefmt="pipe"))
    fitted, body = exponents(rows), []
    for varied in SWEEPS:
        for figure in ("seconds", "megabytes"):
            slopes = [fitted[(varied, *column, figure)] for column in columns]
            body.append([varied, figure, *(f"{whole:.2f} ({last:.2f})" for whole, last in slopes), EXPECTED[varied]])
    parts.append("## Exponents, fitted over all values (of the last two)")
    parts.append(tabulate(body, ["varied", "figure", *(" ".join(c) for c in columns), "expected of time"], tablefmt="pipe"))
    return "\n\n".join(parts) + "\n"


def draw(rows: list[dict], path: Path) -> None:
    """Time above, memory below, one column for each sweep."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(SWEEPS), figsize=(16, 7))
    for column, varied in enumerate(SWEEPS):
        for line, (name, unit) in enumerate((("seconds", "CPU s per step"), ("megabytes", "peak MB"))):
            axis = axes[line][column]
            for detector, colour in zip(QUERIES, ("tab:blue", "tab:orange"), strict=True):
                for position, style in (("sine", "--"), ("peg", "-")):
                    chosen = [r for r in rows if (r["varied"], r["detector"], r["position"]) == (varied, detector, position)]
                    x, y = [r[varied] for r in chosen], [r[name] for r in chosen]
                    axis.plot(x, y, style, color=colour, marker=".", label=f"{detector}, {position}")
            axis.set(xscale="log", yscale="log", xlabel=varied, ylabel=unit if column == 0 else "")
            axis.grid(True, which="both", alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def compare_processes(rounds: int) -> list[dict]:
    """Images per second, by wall time, of one process and of two with DDP (gloo), one thread each, measured alternately."""
    return [
        {"detector": detector, **{str(count): _images_per_second(detector, count) for count in (1, 2)}}
        for detector in QUERIES
        for _ in range(rounds)
    ]


def shares(rows: list[dict]) -> str:
    """A Markdown table of the speed of two processes, relative to twice the speed of one."""
    from tabulate import tabulate

    body = []
    for detector in QUERIES:
        one, two = zip(*((row["1"], row["2"]) for row in rows if row["detector"] == detector), strict=True)
        found = [b / (2 * a) for a, b in zip(one, two, strict=True)]
        by_round = ", ".join(f"{share:.2f}" for share in found)
        body.append([detector, *(f"{statistics.median(values):.3f}" for values in (one, two)), by_round, statistics.median(found)])
    head = ["detector", "images/s, 1 process", "images/s, 2 processes", "share of twice one, by round", "median"]
    table = tabulate(body, head, tablefmt="pipe", floatfmt=("", "", "", "", ".2f"), disable_numparse=[1, 2, 3])
    return f"# Two processes with DDP against one, cpu, 1 thread each\n\n{table}\n"


def _images_per_second(detector: str, count: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["-m", "benchmarks.ddp_steps", detector]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{count} processes of {detector}: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.strip().splitlines()[-1])


def _in_process(*words: str) -> str:
    done = subprocess.run([sys.executable, str(Path(__file__)), *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stderr.strip() or 'killed').splitlines()[-1]}")
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main(prog_name="benchmarks/scaling.py")
