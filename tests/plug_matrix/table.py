# SPDX-License-Identifier: Apache-2.0
"""The checks of ``checks.py`` on every family that is installed, as a table."""

import contextlib
import io
import logging
import multiprocessing
import warnings
from pathlib import Path

import click
import torch
from tabulate import tabulate

from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.errors import BadInputError
from plug_matrix.checks import CHECKS, check
from plug_matrix.examples import EXAMPLES, PEERS, use_checkout


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--peer", "peers", multiple=True, metavar="NAME=PATH", help=f"A checkout to try too: {', '.join(PEERS)}.")
@click.option("--only", default="", metavar="TEXT", help="Families whose name has TEXT in it.")
@common_options
@report_errors
def main(peers: tuple[str, ...], only: str) -> None:
    """Try add_peg on a tiny random model of every family that is installed.

    Prints a table of families and checks: yes, no, - where the model has nothing of the kind (it does not compile without PEG
    either, it has no mask), or the error. Exit code 1 where a check fails.

    \b
    Example:
      PYTHONPATH=tests python -m plug_matrix
      PYTHONPATH=tests python -m plug_matrix --peer detr=~/src/detr --peer detrex=~/src/detrex
    """
    checkouts = dict(_checkout(peer) for peer in peers)
    there = {
        example.name for example in EXAMPLES if example.needs in checkouts or (example.needs not in PEERS and example.installed())
    }
    chosen = [i for i, example in enumerate(EXAMPLES) if only in example.name and example.name in there]
    if not chosen:
        raise BadInputError("nothing to try: no family of that name is installed or given by --peer")
    rows = []
    # A process each: checkouts have modules of the same names, and bring stand-ins of others.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(_row, [(i, EXAMPLES[i].needs, checkouts.get(EXAMPLES[i].needs)) for i in chosen]):
            click.echo(f"{row[0]}: {', '.join(row[1:])}", err=True)
            rows.append(row)
    click.echo(tabulate(rows, headers=["", *CHECKS], tablefmt="github"))
    if any(cell not in ("yes", "-") for row in rows for cell in row[1:]):
        raise click.exceptions.Exit(1)


def _checkout(peer: str) -> tuple[str, Path]:
    name, _, path = peer.partition("=")
    if name not in PEERS or not path:
        raise BadInputError(f"--peer {peer!r} is not NAME=PATH with a name of {', '.join(PEERS)}")
    return name, Path(path).expanduser()


def _row(task: tuple[int, str, Path | None]) -> list[str]:
    index, needs, path = task
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if path is not None:
        use_checkout(needs, path)
    with contextlib.redirect_stderr(io.StringIO()):  # graphs that could not be exported
        return [EXAMPLES[index].name, *(check(EXAMPLES[index], name) for name in CHECKS)]
