# SPDX-License-Identifier: Apache-2.0
"""Options that several of the ``cpvt-det show`` commands have."""

import re
from pathlib import Path

import click

from cpvt_det.errors import BadInputError
from cpvt_det.structures import Size

output_option = click.option(
    "--output", required=True, type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Folder for the pictures."
)

weights_config_option = click.option(
    "--config-file", default="", metavar="FILE", help="Config for weights without one, such as other projects'."
)


def read_size(text: str) -> Size:
    """(h, w) of ``--size``.

    Raises:
        BadInputError: a text that is not HEIGHTxWIDTH.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise BadInputError(f"--size {text!r} is not HEIGHTxWIDTH, such as 480x640")
    return int(match[1]), int(match[2])
