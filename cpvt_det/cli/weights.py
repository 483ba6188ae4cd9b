# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det weights``: list the public weights that have names, and show which of them are on this machine."""

from collections.abc import Sequence

import click
from tabulate import tabulate

from cpvt_det.checkpoint import fetch
from cpvt_det.checkpoint.fetch import STARTER, starts
from cpvt_det.cli import common_options
from cpvt_det.common.errors import UnknownNameError


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@common_options
def weights(names: Sequence[str]) -> None:
    """List public weights, trained on COCO; with NAMEs, fetch their files and print the paths.

    Each NAME can be given to predict, eval, serve and export in place of a file, and to train FOLDER with --start. AP is box AP on
    COCO val2017 at 800 pixels, as stated by the publisher.

    \b
    Example:
      cpvt-det weights
      cpvt-det weights dino_r50
    """
    for name in names:
        if name not in (*starts(), STARTER):
            raise UnknownNameError("name of public weights", name, (*starts(), STARTER))
        click.echo(fetch.locate(name))
    if not names:
        rows = [
            (start.name, f"{start.ap:.1f}", start.epochs, start.rows, start.licence, start.publisher, "yes" if path else "no")
            for start, path in ((start, fetch.find(start)) for start in starts().values())
        ]
        headers = ("name", "AP", "epochs", "rows", "licence", "publisher", "on this machine")
        click.echo(tabulate(rows, headers, tablefmt="plain", disable_numparse=True))
        click.echo(f"{STARTER} comes with the package; others are in {fetch.weights_folder()} ({fetch.HOME}) or the hub's cache")
