#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""The time of ``make quickstart``: its step with one thread and with two, and with ``--whole`` its training and evaluation.

``cpvt-det shapes datasets/shapes``, then ``python benchmarks/quickstart_time.py``. One step is what a run does between two reads of
the loader: forward, losses, backward, clipping and the optimiser. Blocks of steps with one thread and with two take turns.

``--beside`` measures it alone and beside one busy process per core instead, each in a process of its own. Threads that wait for
each other spin briefly before they sleep, as in ``cpvt-det``; or sleep at once; or spin as long as by default.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.memory import SPIN_COUNT

CONFIG = "quickstart/deformable_peg.yaml"
ROOT = Path(__file__).resolve().parent.parent
THREADS = (1, 2)
WARM_UP = 20  # steps


def one_step(config: str) -> Callable[[], float]:
    """A function that trains for one step and returns its wall time in seconds, without that of the loader."""
    import torch

    from cpvt_det import builders
    from cpvt_det.config import load_cfg
    from cpvt_det.training.tasks.task import build_task

    cfg = load_cfg(config)
    torch.manual_seed(0)
    task = build_task(cfg)
    records = task.training_records(task.load_splits()[0])
    detector = builders.build_detector(cfg)
    model, optimizer = task.build_training_model(detector), builders.build_optimizer(cfg, detector)
    schedule = builders.build_schedule(cfg, len(records))
    step = builders.build_step(cfg, model, optimizer, schedule, 0, builders.build_ema(cfg, detector))
    model.train()
    return _timed(step, _endless(lambda: task.build_train_loader(records, 0)))


def _endless(build: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from build()


def _timed(step: Callable[[Any, int], Any], batches: Iterator[Any]) -> Callable[[], float]:
    number = 0

    def run() -> float:
        nonlocal number
        samples = next(batches)
        begin = time.perf_counter()
        step(samples, number)
        number += 1
        return time.perf_counter() - begin

    return run


def step_times(run: Callable[[], float], rounds: int, steps: int) -> dict[int, list[float]]:
    """Threads -> mean time of a step in each round, in seconds.

    Args:
        run: outcome of :func:`one_step`.
        rounds: number of blocks per number of threads.
        steps: number of steps in a block.
    """
    import torch

    before = torch.get_num_threads()
    found: dict[int, list[float]] = {threads: [] for threads in THREADS}
    try:
        for _ in range(WARM_UP if steps > 1 else 1):
            run()
        for _ in range(rounds):
            for threads, times in found.items():
                torch.set_num_threads(threads)
                run()  # the first one with other threads
                times.append(sum(run() for _ in range(steps)) / steps)
    finally:
        torch.set_num_threads(before)
    return found


def _spin() -> None:
    os.setsid()  # some systems share cores between sessions, then within them
    while True:
        pass


def beside_times(config: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Mean time of a step in seconds in each round, alone and beside busy processes, for three ways to wait."""
    code = (
        f"from benchmarks.quickstart_time import one_step; run = one_step({config!r}); times = [run() for _ in range({3 + steps})]"
    )
    command = [sys.executable, "-c", f"{code}; print(sum(times[3:]) / {steps})"]
    spinning = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environments = {"spin briefly": {"GOMP_SPINCOUNT": SPIN_COUNT}, "sleep": {"OMP_WAIT_POLICY": "PASSIVE"}, "spin": {}}
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for busy in (0, os.cpu_count() or 1):
            others = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(busy)]
            for other in others:
                other.start()
            for policy, environment in environments.items():
                done = subprocess.run(command, env=spinning | environment, check=True, capture_output=True, text=True, cwd=ROOT)
                found.setdefault(f"{policy}, {'beside' if busy else 'alone'}", []).append(float(done.stdout.split()[-1]))
            for other in others:
                other.kill()
    return found


def whole_run(config: str) -> dict[str, float]:
    """The quickstart's training and evaluation with all threads, in a folder that is not kept: minutes, and figures in percent."""
    from cpvt_det.config import load_cfg
    from cpvt_det.training.tasks.task import flatten
    from cpvt_det.training.train import run

    with tempfile.TemporaryDirectory() as folder:
        cfg = load_cfg(config)
        cfg.OUTPUT_DIR = folder
        begin = time.perf_counter()
        results = flatten(run(cfg, resume=False))
        minutes = (time.perf_counter() - begin) / 60
    return {"minutes": round(minutes, 2), **{name: round(results[f"bbox/{name}"], 2) for name in ("AP", "AP50")}}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps in a block.")
@click.option("--whole", is_flag=True, help="Also train and evaluate to the end, with all threads.")
@click.option("--beside", is_flag=True, help="Measure beside other work instead, for three ways to wait.")
@click.option("--config-file", "config", default=CONFIG, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for a JSON.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(rounds: int, steps: int, whole: bool, beside: bool, config: str, output: Path | None, busy: bool) -> None:
    """Print the time of the quickstart's training step with one thread and with two, and how many times as fast two are."""
    load_average = check_load(busy)
    from benchmarks.harness import Spread
    from benchmarks.machine import machine, versions
    from benchmarks.origin import commit_of
    from benchmarks.report import file_stem

    words = " ".join([f"--rounds {rounds}", f"--steps {steps}", *["--whole"] * whole, *["--beside"] * beside, *["--busy"] * busy])
    record: dict[str, Any] = {"command": f"python benchmarks/quickstart_time.py {words}", "config": config, "busy": busy}
    record |= {
        "commit": commit_of(Path(__file__).parent, short=True),
        "machine": machine("cpu", load_average),
        "versions": versions(),
    }
    times = beside_times(config, rounds, steps) if beside else step_times(one_step(config), rounds, steps)
    record["ms"] = {name: [round(1000 * value, 2) for value in values] for name, values in times.items()}
    for name, values in times.items():
        click.echo(f"{name} thread(s): {1000 * Spread.of(values).median:.1f} ms per step")
    if not beside:
        ratio = Spread.of([one / two for one, two in zip(times[1], times[2], strict=True)])
        record["times_as_fast"] = {"median": round(ratio.median, 3), "q1": round(ratio.q1, 3), "q3": round(ratio.q3, 3)}
        click.echo(f"two threads are {ratio.median:.2f} ({ratio.q1:.2f}-{ratio.q3:.2f}) times as fast as one; {rounds} rounds")
    if whole:
        record["whole"] = whole_run(config)
        click.echo(f"training and evaluation: {json.dumps(record['whole'])}")
    if output:
        output.mkdir(parents=True, exist_ok=True)
        name = "quickstart_beside" if beside else "quickstart_time"
        path = output / f"{file_stem(name, 'cpu', 1, record['machine'])}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        click.echo(f"written: {path}")


if __name__ == "__main__":
    main()
