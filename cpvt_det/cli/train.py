# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det train``, the command line of both runners, and the options that other commands share with it.

``tools/train_net.py`` calls the same function. Commands that preview a run load the same files in the same way as either runner.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from cpvt_det.cli import common_options, report_errors
from cpvt_det.cli.folder import budget_option, choose_run, folder_options, take_folder
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.memory import quick_imports
from cpvt_det.common.registry import import_inherited

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode
    from torch import nn

RUNNERS = ("auto", "builtin", "detectron2")
RUN_CONTEXT = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}  # KEY VALUE may contain negative numbers


def config_file_option(required: bool = True) -> Callable:
    """The option ``--config-file``; it is not required if the command also takes a folder."""
    text = "Path of a config, or its name in the package's configs/ (cpvt-det configs lists them)."
    return click.option("--config-file", required=required, default=None if required else "", metavar="FILE", help=text)


num_gpus_option = click.option(
    "--num-gpus", type=click.IntRange(min=0), help="Number of GPUs, one process each; 0: CPU.  [default: one GPU if there is one]"
)


def runner_options(command: Callable, takes_folder: bool = False) -> Callable:
    """``--runner``, the common options, and the words after all options."""
    words = "[FOLDER] [KEY VALUE]..." if takes_folder else "[KEY VALUE]..."
    command = common_options(click.argument("overrides", nargs=-1, metavar=words)(command))
    text = "auto: detectron2 if it is installed."
    return click.option("--runner", type=click.Choice(RUNNERS), default="auto", help=text)(command)


allow_partial_option = click.option(
    "--allow-partial", is_flag=True, help="Evaluate weights that fit only part of the model; the rest stays random."
)


def tiles_options(command: Callable) -> Callable:
    """``--tiles`` and ``--overlap``, which :func:`tiles_overrides` turns into KEY VALUE words."""
    command = click.option(
        "--overlap", type=float, help="Overlap of neighbouring tiles, as a fraction of the side.  [default: 0.2]"
    )(command)
    return click.option(
        "--tiles", type=int, metavar="PIXELS", help="Cut larger images into tiles of this side length in pixels, at least 32."
    )(command)


def tiles_overrides(tiles: int | None, overlap: float | None) -> tuple[str, ...]:
    """The KEY VALUE words of ``--tiles`` and ``--overlap``."""
    pairs = (("TEST.TILES.SIZE", tiles), ("TEST.TILES.OVERLAP", overlap))
    return tuple(str(word) for key, value in pairs if value is not None for word in (key, value))


@click.command(context_settings=RUN_CONTEXT)
@config_file_option(required=False)
@num_gpus_option
@partial(runner_options, takes_folder=True)
@budget_option
@folder_options
@click.option(
    "--start",
    metavar="NAME|FILE|auto|none",
    help="Trained detector that a run on a FOLDER fine-tunes (cpvt-det weights lists names).",
)
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint in OUTPUT_DIR.")
@click.option("--eval-only", is_flag=True, help="Only evaluate MODEL.WEIGHTS, or with --resume the last checkpoint.")
@allow_partial_option
@report_errors
def train(
    config_file: str,
    num_gpus: int | None,
    runner: str,
    overrides: tuple[str, ...],
    budget: float | None,
    data_format: str,
    new_split: bool,
    start: str | None,
    resume: bool,
    eval_only: bool,
    allow_partial: bool,
) -> None:
    """Train a detector and evaluate it: on a folder of images and annotations, or by a config.

    The format of a FOLDER is detected. Model, image size and length are chosen to suit the data, the speed of a few steps that are
    timed on this machine, and --budget. Nothing is written into the folder. The chosen settings and the reasons for them are
    written to chosen.yaml in OUTPUT_DIR (output/NAME_OF_FOLDER); --config-file chosen.yaml repeats the run. KEY VALUE pairs
    override the chosen settings or the config.

    \b
    Example:
      cpvt-det train photos --budget 30m
      cpvt-det train photos --budget 30m --start dino_r50
      cpvt-det train --config-file coco/detr_r50_peg_50ep.yaml --num-gpus 8 OUTPUT_DIR output/peg
      torchrun --nproc-per-node 2 -m cpvt_det train --config-file quickstart/deformable_peg.yaml --num-gpus 0
    """
    folder, overrides = take_folder(config_file, overrides)
    with quick_imports():
        from cpvt_det.training.launch import launch  # this imports torch, which --help does not need
    if folder is not None:
        if eval_only:
            raise BadInputError("--eval-only needs a config; give the run's chosen.yaml with --config-file")
        config_file, overrides = choose_run(folder, overrides, budget, data_format, new_split, num_gpus, resume, start)
    elif budget is not None or data_format or new_split or start:
        raise BadInputError("--budget, --format, --new-split and --start need a FOLDER, as in cpvt-det train photos --budget 30m")

    launch(
        run_config, num_gpus, config_file, overrides, device_of(num_gpus), choose_runner(runner), resume, eval_only, allow_partial
    )


@report_errors
def run_config(
    config_file: str,
    overrides: tuple[str, ...],
    device: str | None,
    runner: str,
    resume: bool,
    eval_only: bool,
    allow_partial: bool,
    sizes: Sequence[int] = (),
) -> dict:
    """Load a config and run it, in one process of the run, and return the results of the last evaluation."""
    import_inherited()
    if device is not None:
        overrides = (*overrides, "MODEL.DEVICE", device)
    with quick_imports():
        if runner == "detectron2":
            from cpvt_det.d2.run import load_cfg, run
        else:
            from cpvt_det.config import load_cfg
            from cpvt_det.training.train import run
        from cpvt_det.training.launch import process_group
    cfg = load_cfg(config_file, overrides)
    with process_group(cfg.SOLVER.COLLECTIVE_TIMEOUT):
        return run(cfg, resume, eval_only, allow_partial, sizes)


def load_any(config_file: str, overrides: tuple[str, ...], runner: str) -> "CfgNode":
    """The config as the runner would load it; data sets registered in detectron2 are found.

    Raises:
        ConfigError: as in :func:`cpvt_det.config.load_cfg`.
    """
    if choose_runner(runner) == "builtin":
        from cpvt_det.config import load_cfg

        return load_cfg(config_file, overrides)
    from cpvt_det.d2.config import load_cfg
    from cpvt_det.d2.data import find_registered

    cfg = load_cfg(config_file, overrides)
    find_registered(cfg)
    return cfg


def build_any(cfg: "CfgNode", runner: str) -> "nn.Module":
    """The detector of a config as the runner would build it, with random weights, in evaluation mode on its device."""
    if choose_runner(runner) == "detectron2":
        from cpvt_det.d2.run import build_detector

        return build_detector(cfg).eval()
    from cpvt_det import builders

    return builders.build_detector(cfg).to(builders.build_device(cfg)).eval()


def device_of(num_gpus: int | None) -> str | None:
    """The ``MODEL.DEVICE`` for ``--num-gpus``; ``None`` leaves the device to the config."""
    return None if num_gpus is None else "cuda" if num_gpus else "cpu"


def choose_runner(name: str) -> str:
    """The runner to use, ``detectron2`` or ``builtin``.

    Raises:
        BadInputError: detectron2 was requested but is not installed.
    """
    spec = importlib.util.find_spec("detectron2")
    installed = spec is not None and spec.origin is not None  # without an origin, it is a folder of that name, such as a clone
    if name == "detectron2" and not installed:
        raise BadInputError(
            "--runner detectron2: detectron2 cannot be imported; README, 'With detectron2', describes how to install it"
        )
    if name == "auto":
        return "detectron2" if installed else "builtin"
    return name
