# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det compare``: the curves of several runs in one picture; the drawing is in ``visualize/curves.py``."""

from pathlib import Path

import click

from cpvt_det.cli import common_options
from cpvt_det.visualize.curves import comparison_figure, comparison_table, read_runs
from cpvt_det.visualize.figures import save_figure


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--output", default="compare.png", show_default=True, help="Picture to write; its suffix chooses the format.")
@common_options
def compare(runs: tuple[str, ...], output: str) -> None:
    """Draw loss and AP of runs in one picture, and print their last and best values.

    RUN is a run's OUTPUT_DIR, or a file like its metrics.json, from either runner; the run may still be in progress. If a run has
    several test sets, AP is that of the first.

    \b
    Example:
      cpvt-det compare output/peg output/sine --output peg_or_sine.png
    """
    read = read_runs(runs)
    save_figure(comparison_figure(read), Path(output).expanduser())
    click.echo(comparison_table(read))
    click.echo(f"\n{output}")
