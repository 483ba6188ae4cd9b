# SPDX-License-Identifier: Apache-2.0
"""``python -m studies``: train the runs of one plan and compare them, by ``engine/``; and draw vision transformers."""

from pathlib import Path

import click

from cpvt_det.cli import common_options, report_errors
from studies.show_patches import features, patches, pixels

plan_argument = click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path, dir_okay=False))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@common_options
def main() -> None:
    """Train the runs of a plan, and compare them; draw the articles' pictures of vision transformers.

    \b
    Example:
      python -m studies run studies/position_encodings/plan.yaml
      python -m studies report studies/position_encodings/plan.yaml
    """


@main.command()
@plan_argument
@click.option("--processes", type=click.IntRange(min=1), help="Number of runs at a time.  [default: one per core; four on a GPU]")
@click.option("--group", "groups", multiple=True, metavar="NAME", help="Only this group of the plan; may be given several times.")
@common_options
@report_errors
def run(plan: Path, processes: int | None, groups: tuple[str, ...]) -> None:
    """Train and measure every run of PLAN that has no record yet; an interrupted run resumes from its last checkpoint.

    Data sets that the plan describes are drawn first. Every run has one thread. Several runs share a GPU; CUDA_VISIBLE_DEVICES
    selects it.
    """
    import torch

    from cpvt_det.common.memory import usable_cores
    from studies.engine.run import run_study

    run_study(plan, processes or (4 if torch.cuda.is_available() else usable_cores()), groups, click.echo)


@main.command()
@plan_argument
@common_options
@report_errors
def report(plan: Path) -> None:
    """Write tables with 95 % intervals over seeds, and figures, from the existing records."""
    from studies.engine.report import write_report

    for path in write_report(plan):
        click.echo(path)


for _command in (patches, features, pixels):
    main.add_command(_command)


if __name__ == "__main__":
    main(prog_name="python -m studies")
