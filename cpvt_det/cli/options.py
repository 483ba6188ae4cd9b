# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that preview ``cpvt-det train``: they load the same files in the same way as either runner."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import click
from fvcore.common.config import CfgNode

from cpvt_det import builders, config
from cpvt_det.cli import common_options
from cpvt_det.cli.train import RUNNERS, choose_runner, config_file_option

if TYPE_CHECKING:
    from torch import nn


def config_options(command: Callable, takes_folder: bool = False) -> Callable:
    """Add the options that these commands share."""
    options = (
        config_file_option(required=not takes_folder),
        click.option("--runner", type=click.Choice(RUNNERS), default="auto", help="detectron2: also use parts registered there."),
        common_options,
        click.argument("overrides", nargs=-1, metavar="[FOLDER] [KEY VALUE]..." if takes_folder else "[KEY VALUE]..."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def load_any(config_file: str, overrides: tuple[str, ...], runner: str) -> CfgNode:
    """The config as the runner would load it; data sets registered in detectron2 are found.

    Raises:
        ConfigError: as in :func:`cpvt_det.config.load_cfg`.
    """
    if choose_runner(runner) == "builtin":
        return config.load_cfg(config_file, overrides)
    from cpvt_det.d2.config import load_cfg
    from cpvt_det.d2.data import find_registered

    cfg = load_cfg(config_file, overrides)
    find_registered(cfg)
    return cfg


def build_any(cfg: CfgNode, runner: str) -> "nn.Module":
    """The detector of a config as the runner would build it, with random weights, in evaluation mode on its device."""
    if choose_runner(runner) == "builtin":
        return builders.build_detector(cfg).to(builders.build_device(cfg)).eval()
    from cpvt_det.d2.run import build_detector

    return build_detector(cfg).eval()
