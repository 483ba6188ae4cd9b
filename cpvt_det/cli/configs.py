# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det configs``: the configs that come with the package, one per line."""

import re
from pathlib import Path

import click
import yaml
from tabulate import tabulate

from cpvt_det.cli import common_options
from cpvt_det.config import config_root, find_config


@click.command()
@click.argument("part", default="")
@common_options
def configs(part: str) -> None:
    """List the configs of the package, all or those with PART in their names.

    Each name can follow --config-file, and _BASE_ in a config of your own.

    \b
    Example:
      cpvt-det configs
      cpvt-det configs deformable
    """
    names = sorted(path.relative_to(config_root()).as_posix() for path in config_root().rglob("*.yaml"))
    shown = [name for name in names if part in name and not Path(name).name.startswith("_")]
    click.echo(tabulate([(name, describe(find_config(name))) for name in shown], tablefmt="plain"))


def describe(path: Path) -> str:
    """The first sentence of the comment at the start of a config. A config without a comment gets the sentence of its base config,
    followed by the position encoding that it sets."""
    text = path.read_text(encoding="utf-8")
    comment = " ".join(line.lstrip("# ") for line in re.match(r"(?:#.*\n)*", text)[0].splitlines())
    if comment:
        return re.match(r"(?:\([^)]*\)|(?![.:;](?:\s|$)).)*", comment)[0]
    own = yaml.safe_load(text)
    base = describe(path.parent / own["_BASE_"]) if "_BASE_" in own else ""
    encoding = own.get("MODEL", {}).get("POSITION", {}).get("NAME")
    return base + (f"; encoding: {encoding}" if encoding else "")
