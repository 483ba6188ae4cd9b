#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's training step with one thread and two, alone and beside a busy process: how long threads wait awake.

``cpvt-det shapes datasets/shapes``, then ``python benchmarks/waiting.py``. Commands of the package let threads that wait fall
asleep sooner than GCC's OpenMP does (cpvt_det/threads.py). Each measurement is a process of its own, by ``quickstart_time.py``,
and both settings take turns.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from cpvt_det.cli import common_options, report_errors
from cpvt_det.threads import SPIN_COUNT

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"GCC's own": "300000", "ours": SPIN_COUNT}
"""Name -> ``GOMP_SPINCOUNT``."""
BESIDE = (0, 1)


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep so many processes busy within the block."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def step_of(spin_count: str, steps: int, config: str) -> dict[str, float]:
    """Number of threads -> milliseconds of a step, in a process whose threads wait so long awake.

    Args:
        spin_count: ``GOMP_SPINCOUNT`` of the process.
        steps: number of steps that are measured.
        config: config to train.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["--busy", "--rounds", "1", "--steps", str(steps), "--config-file", config, "--output", folder]
        environment = os.environ | {"GOMP_SPINCOUNT": spin_count}
        command = [sys.executable, str(ROOT / "benchmarks" / "quickstart_time.py"), *words]
        subprocess.run(command, check=True, capture_output=True, env=environment, cwd=ROOT)
        (record,) = Path(folder).glob("*.json")
        return {threads: times[0] for threads, times in json.loads(record.read_text(encoding="utf-8"))["ms"].items()}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps in a measurement.")
@click.option("--config-file", "config", default="quickstart/deformable_peg.yaml", show_default=True)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for a JSON.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(rounds: int, steps: int, config: str, output: Path | None, busy: bool) -> None:
    """Print the time of the quickstart's step by threads, waiting and busy processes beside it: medians over the rounds."""
    load_average = check_load(busy)
    from benchmarks.machine import machine, versions
    from benchmarks.report import file_stem
    from cpvt_det.study.origin import commit_of

    words = " ".join([f"--rounds {rounds}", f"--steps {steps}", *["--busy"] * busy])
    record: dict[str, Any] = {"command": f"python benchmarks/waiting.py {words}", "config": config, "busy": busy}
    record |= {
        "commit": commit_of(Path(__file__).parent, short=True),
        "machine": machine("cpu", load_average),
        "versions": versions(),
        "spin_counts": SETTINGS,
    }
    rows: dict[tuple[int, str], list[dict[str, float]]] = {(number, name): [] for number in BESIDE for name in SETTINGS}
    for _ in range(rounds):
        for (number, name), found in rows.items():
            with busy_processes(number):
                found.append(step_of(SETTINGS[name], steps, config))
    record["rows"] = []
    for (number, name), found in rows.items():
        times = {threads: [round(one[threads], 1) for one in found] for threads in found[0]}
        record["rows"].append({"busy processes": number, "waiting": name, "ms": times})
        medians = ", ".join(f"{threads} thread(s) {statistics.median(values):.0f} ms" for threads, values in times.items())
        click.echo(f"beside {number} busy process(es), waiting {name}: {medians}")
    if output:
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"{file_stem('waiting', 'cpu', 1, record['machine'])}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        click.echo(f"written: {path}")


if __name__ == "__main__":
    main()
