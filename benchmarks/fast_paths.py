#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What each way of our own buys in a whole step: ``python benchmarks/fast_paths.py``; an hour on one core.

Models and images are those of ``before_after.py``. A call with all ways that this processor takes and one without a way take turns,
in one process; a way is left out where it could do something. The figure is CPU seconds without it over those with all, formed
within a round: 1.05 says that it alone saves 5 % of what is left. ``control`` leaves out none: what it differs from 1 by is noise.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.before_after import DETECTORS, SIZES, prepare
from benchmarks.clocks import clock_of, fixed_threads
from benchmarks.harness import Contender, Plan, Row, Work, compare
from benchmarks.load import check_load
from benchmarks.records import about_run, write_record
from cpvt_det.cli import common_options, report_errors
from cpvt_det.ops import routes

PACKAGE = Path(__file__).resolve().parent.parent / "cpvt_det"
ALL = "all"
CONTROL = "control"
WORTH = 1.05
"""A way that saves less in every case is not worth its code."""
WHERE = {"canvases": "29 %", "packing": "29 %", "deformable": "Deformable", "dropout": "training", "rows": "training"}
"""Way -> text of the cases where it can do anything; others can everywhere, but for ``openmp``, which is for several threads."""


@contextlib.contextmanager
def without(way: str) -> Iterator[None]:
    """Within the block, a way is left out."""
    before = os.environ.get(routes.SWITCH)
    os.environ[routes.SWITCH] = ",".join(filter(None, (before, way)))
    routes.is_on.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(routes.SWITCH) if before is None else os.environ.update({routes.SWITCH: before})
        routes.is_on.cache_clear()


def contenders_of(call: Callable[[], Any], check: Callable[[], Any], way: str) -> list[Contender]:
    """With all ways, and without one; compared by what the model answers, as a step draws its dropout."""

    def left_out(function: Callable[[], Any]) -> Any:
        with without("" if way == CONTROL else way):
            return function()

    return [Contender(ALL, call, check=check), Contender(way, partial(left_out, call), check=partial(left_out, check))]


def measure(cases: list[str], ways: list[str], plan: Plan) -> dict[str, dict[str, list[float]]]:
    """Case -> way -> median and quartiles of the ratio."""
    found: dict[str, dict[str, list[float]]] = {}
    for detector, keys in DETECTORS.items():
        step, answer = prepare(PACKAGE, {**keys, "POSITION.NAME": "peg"})
        for padding, sizes in SIZES.items():
            for what, function in (("training", step), ("inference", answer)):
                case = f"{detector}, padding {padding}, {what}"
                if cases and not any(part in case for part in cases):
                    continue
                found[case] = {}
                for way in (CONTROL, *(way for way in ways if WHERE.get(way, "") in case)):
                    pair = contenders_of(partial(function, sizes), partial(answer, sizes), way)
                    found[case][way] = _gain(compare(Work(pair, tolerance=1e-4), plan, clock_of("cpu"))[1])
                click.echo(f"{case}: " + ", ".join(f"{way} {gain[0]:.3f}" for way, gain in found[case].items()))
    return found


def _gain(row: Row) -> list[float]:
    """The ratio of the harness has the time with all ways above."""
    ratio = row.ratio_cpu or row.ratio_wall
    return [1 / value for value in (ratio.median, ratio.q3, ratio.q1)]


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """A row for each way, a column for each case, and whether it is worth its code here."""
    ways = dict.fromkeys(way for gains in found.values() for way in gains)
    rows = [
        [
            way,
            *("{:.2f} ({:.2f}-{:.2f})".format(*gains[way]) if way in gains else "" for gains in found.values()),
            "yes" if any(gains[way][0] >= WORTH for gains in found.values() if way in gains) else "no",
        ]
        for way in ways
    ]
    return tabulate(rows, ["without", *found, f"{WORTH:g} in a case"], tablefmt="pipe", disable_numparse=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True, help="Rounds of a case.")
@click.option("--case", "cases", multiple=True, metavar="TEXT", help="Only cases with this text; may be given several times.")
@click.option("--way", "ways", multiple=True, metavar="NAME", help="Only this way; may be given several times.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for a JSON and a table.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(rounds: int, cases: tuple[str, ...], ways: tuple[str, ...], output: Path | None, busy: bool) -> None:
    """Measure what each way of our own buys in a whole step, and in inference, of DETR-R50 and Deformable-DETR-R50 with PEG."""
    load_average = check_load(busy)
    taken = [way for way in ways or routes.ROUTES if routes.is_on(way) and way != "openmp"]
    with fixed_threads(1):
        found = measure(list(cases), taken, Plan(warm_up=1, rounds=rounds, most_rounds=rounds))
    text = table(found)
    click.echo(text)
    if output:
        words = " ".join([*(f"--way {way}" for way in ways), *(f"--case '{case}'" for case in cases), f"--rounds {rounds}"])
        about = about_run(f"fast_paths.py {words}", 1, busy, load_average)
        write_record(output, "fast_paths", about, {"rounds": rounds, "ratios": found}, ["Ways of our own, one by one", text])


if __name__ == "__main__":
    main(prog_name="benchmarks/fast_paths.py")
