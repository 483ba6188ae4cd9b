#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Time a suite of contenders against each other: ``python benchmarks/run.py --suite op``."""

import os
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.threads import thread_environment
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.errors import BadInputError

# Libraries read the number of threads when they are imported, so the rest is imported after the options are known.
QUICKSTART = Path(__file__).resolve().parent.parent / "studies" / "quickstart" / "plan.yaml"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--suite", "suites", multiple=True, help="A file of benchmarks/suites, or quickstart.  [default: all but quickstart]")
@click.option("--peer", "peers", multiple=True, metavar="NAME=PATH", help="Checkout of a peer to compare with; repeat for more.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads per contender.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("output/benchmarks"), show_default=True)
@click.option("--case", "pattern", default="*", help="Run only cases whose name matches, such as '*b1 qall*'.")
@click.option("--quick", is_flag=True, help="Run a few small cases, in under a minute.")
@click.option("--all", "everything", is_flag=True, help="Run slow cases too.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@click.option("--memory/--no-memory", default=True, show_default=True, help="Measure peak memory, in separate processes.")
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
    busy: bool,
    memory: bool,
) -> None:
    """Time our implementations and public ones, alternately in one run, and write a table, JSON and a chart.

    The suite quickstart compares no code: it trains the runs of studies/quickstart/plan.yaml that have no record yet, for hours.

    Installed libraries take part automatically; give the path of a checkout with --peer. Outputs are compared first: a contender
    with different results is not timed, and the exit code is 1. A machine with other work is refused, unless with --busy.

    \b
    Example:
      python benchmarks/run.py --suite op --quick
      python benchmarks/run.py --suite op --peer deformable_detr=~/src/Deformable-DETR
    """
    if "quickstart" in suites:
        if len(suites) > 1 or peers or device != "cpu" or threads != 1 or quick or everything or busy or pattern != "*":
            raise BadInputError("--suite quickstart accepts no other option: all settings are in studies/quickstart/plan.yaml")
        _train_quickstart()
        return
    if quick and everything:
        raise BadInputError("--quick and --all cannot be used together; choose one")
    os.environ.update(thread_environment(threads))
    from benchmarks.load import check_load
    from benchmarks.peers import find_peers
    from benchmarks.runner import run_suite
    from benchmarks.suites import Options, find_suite, known_suites

    chosen = [(name, find_suite(name)) for name in suites or known_suites()]
    _check_device(device)
    size = "quick" if quick else "all" if everything else "default"
    options = Options(device, threads, size, find_peers(peers), busy, check_load(busy))
    unequal = []
    for name, suite in chosen:
        unequal += run_suite(name, suite, options, output, pattern, memory)
    if unequal:
        raise RuntimeError(f"the outputs of contenders differ in {len(unequal)} cases, the first: {unequal[0]}")


def _train_quickstart() -> None:
    from studies.engine.report import write_report
    from studies.engine.run import run_study

    run_study(QUICKSTART, processes=1, write_line=click.echo)
    click.echo(write_report(QUICKSTART)[0])


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise BadInputError("--device cuda: torch finds no GPU; use --device cpu")


if __name__ == "__main__":
    main(prog_name="benchmarks/run.py")
