#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Time a suite of contenders against each other: ``python benchmarks/run.py --suite op``."""

import os
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folder is no part of the installed package

from benchmarks.threads import thread_environment
from cpvt_det.cli import common_options, report_errors
from cpvt_det.errors import BadInputError

# Libraries read the number of threads when they are imported, so the rest is imported when it is known.
QUICKSTART = Path(__file__).resolve().parent.parent / "studies" / "quickstart" / "plan.yaml"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--suite", "suites", multiple=True, help="A file of benchmarks/suites, or quickstart.  [default: all but quickstart]")
@click.option("--peer", "peers", multiple=True, metavar="NAME=PATH", help="A checkout to compare with; may be repeated.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of every contender.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("output/benchmarks"), show_default=True)
@click.option("--case", "pattern", default="*", help="Only cases whose name fits, as in '*b1 qall*'.")
@click.option("--quick", is_flag=True, help="A few small cases, under a minute.")
@click.option("--all", "everything", is_flag=True, help="Also what takes long.")
@click.option("--memory/--no-memory", default=True, show_default=True, help="Measure peak memory, in processes of its own.")
@common_options
@report_errors
def main(
    suites: tuple[str, ...],
    peers: tuple[str, ...],
    device: str,
    threads: int,
    output: Path,
    pattern: str,
    quick: bool,
    everything: bool,
    memory: bool,
) -> None:
    """Time our implementations against public ones, A B A B in one run, and write a table, JSON and a chart.

    The suite quickstart is no duel: it trains the runs of studies/quickstart/plan.yaml that have no record yet, for hours.

    Libraries that are installed take part by themselves; checkouts are given by their path. Outputs are compared first:
    a contender that computes something else is not timed, and the exit code is 1.

    \b
    Example:
      python benchmarks/run.py --suite op --quick
      python benchmarks/run.py --suite op --peer deformable_detr=~/src/Deformable-DETR
    """
    if "quickstart" in suites:
        if len(suites) > 1 or peers or device != "cpu" or threads != 1 or quick or everything or pattern != "*":
            raise BadInputError("--suite quickstart takes no other option: its plan says what is trained, and how")
        _train_quickstart()
        return
    if quick and everything:
        raise BadInputError("--quick and --all exclude each other")
    os.environ.update(thread_environment(threads))
    from benchmarks.peers import find_peers
    from benchmarks.runner import run_suite
    from benchmarks.suites import Options, find_suite, known_suites

    chosen = [(name, find_suite(name)) for name in suites or known_suites()]
    _check_device(device)
    size = "quick" if quick else "all" if everything else "default"
    options = Options(device, threads, size, find_peers(peers))
    unequal = []
    for name, suite in chosen:
        unequal += run_suite(name, suite, options, output, pattern, memory)
    if unequal:
        raise RuntimeError(f"not the same work in {len(unequal)} cases, the first: {unequal[0]}")


def _train_quickstart() -> None:
    from cpvt_det.study.report import write_report
    from cpvt_det.study.run import run_study

    run_study(QUICKSTART, processes=1, write_line=click.echo)
    click.echo(write_report(QUICKSTART)[0])


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise BadInputError("--device cuda: torch sees no GPU here; run with --device cpu")


if __name__ == "__main__":
    main(prog_name="benchmarks/run.py")
