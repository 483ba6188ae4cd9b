# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det study``: train the runs of one plan, and compare them. The work is in ``cpvt_det/study/``."""

from pathlib import Path

import click

from cpvt_det.cli import common_options

plan_argument = click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path, dir_okay=False))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@common_options
def study() -> None:
    """Train the runs of a plan, and compare them.

    \b
    Example:
      cpvt-det study run studies/position_encodings/plan.yaml
      cpvt-det study report studies/position_encodings/plan.yaml
    """


@study.command()
@plan_argument
@click.option("--processes", type=click.IntRange(min=1), help="Number of runs at a time.  [default: one per core; four on a GPU]")
@click.option("--group", "groups", multiple=True, metavar="NAME", help="Only this group of the plan; may be given several times.")
@common_options
def run(plan: Path, processes: int | None, groups: tuple[str, ...]) -> None:
    """Train and measure every run of PLAN that has no record yet; an interrupted run resumes from its last checkpoint.

    Data sets that the plan describes are drawn first. Every run has one thread. Several runs share a GPU; CUDA_VISIBLE_DEVICES
    selects it.
    """
    import torch

    from cpvt_det.memory import usable_cores
    from cpvt_det.study.run import run_study

    run_study(plan, processes or (4 if torch.cuda.is_available() else usable_cores()), groups, click.echo)


@study.command()
@plan_argument
@common_options
def report(plan: Path) -> None:
    """Write tables with 95 % intervals over seeds, and figures, from the existing records."""
    from cpvt_det.study.report import write_report

    for path in write_report(plan):
        click.echo(path)
