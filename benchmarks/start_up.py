#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What imports cost, beside another checkout of this package: ``python benchmarks/start_up.py CHECKOUT``.

Every round starts a process for each checkout, one after the other: ``python -X importtime -c "import cpvt_det.cli.train"``. Wall
time is the import's own, as ``importtime`` reports it; CPU time is that of the whole process. A first round, which may write
bytecode, does not count.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.harness import Spread
from benchmarks.load import check_load
from benchmarks.machine import machine, versions
from benchmarks.origin import commit_of
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.errors import BadInputError

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("cpvt_det.cli.train", "cpvt_det.training.train")
"""The command, which is all that ``--help`` needs, and the run behind it."""
LINE = re.compile(r"^import time: +\d+ \| +(\d+) \| +(\S+)$", re.MULTILINE)
FIGURES = {"wall_s": "wall s", "cpu_s": "CPU s of the process", "modules": "modules"}
Figures = dict[str, float]
Runs = dict[str, dict[str, list[Figures]]]
"""Commit -> module -> figures by round."""


def measure(root: Path, module: str) -> Figures:
    """Wall and CPU seconds of an import in a process of its own, and the number of modules that it imports."""
    words = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    before = os.times()
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(root)}, cwd=root, capture_output=True, text=True, check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {**read_times(done.stderr, module), "cpu_s": round(cpu, 3)}


def read_times(text: str, module: str) -> Figures:
    """Seconds of a module's import with all that it imports, and the number of modules.

    Args:
        text: lines of ``python -X importtime``.
        module: name of the module; the packages that it is in are part of its time.
    """
    found = {name: int(micros) for micros, name in LINE.findall(text)}
    return {"wall_s": round(found[module] / 1e6, 3), "modules": len(found)}


def compare(runs: Runs) -> list[Sequence[str]]:
    """Rows of a table, the head first: medians of both checkouts, and the quotient within a round with its quartiles."""
    (before, old), (after, new) = runs.items()
    rows: list[Sequence[str]] = [["", before, after, "quotient"]]
    for module in old:
        for key, label in FIGURES.items():
            sides = [[found[key] for found in runs[module]] for runs in (old, new)]
            medians = [f"{statistics.median(side):.{0 if key == 'modules' else 2}f}" for side in sides]
            ratio = Spread.of([b / a for a, b in zip(*sides, strict=True)])
            rows.append([f"`{module}`, {label}", *medians, f"{ratio.median:.2f} ({ratio.q1:.2f}-{ratio.q3:.2f})"])
    return rows


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkout", type=click.Path(path_type=Path))
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Pairs of processes.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for start_up.json.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(checkout: Path, rounds: int, output: Path | None, busy: bool) -> None:
    """Compare what imports cost in this tree with what they cost in another CHECKOUT of the package."""
    load_average = check_load(busy)
    if not (checkout / "cpvt_det").is_dir():
        raise BadInputError(f"{checkout} is no checkout of this package: it has no folder cpvt_det")
    words = f"python benchmarks/start_up.py CHECKOUT --rounds {rounds}{' --busy' * busy}"
    trees = {commit_of(root, short=True): root for root in (checkout.resolve(), ROOT)}
    runs: Runs = {name: {module: [] for module in MODULES} for name in trees}
    for number in range(rounds + 1):
        for module in MODULES:
            for name, root in trees.items():
                found = measure(root, module)
                if number:
                    runs[name][module].append(found)
    record = {"command": words, "busy": busy, "machine": machine("cpu", load_average), "versions": versions()}
    head, *rows = compare(runs)
    record |= {"head": head, "rows": rows, "runs": runs}
    click.echo(tabulate(rows, head, tablefmt="pipe", disable_numparse=True))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "start_up.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
