# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det eval``: ``cpvt-det train --eval-only`` with the weights as an argument."""

import click

from cpvt_det.cli.train import RUNNERS, choose_runner, device_of, run_config
from cpvt_det.runner.launch import launch


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("weights", metavar="WEIGHTS")
@click.option("--config-file", required=True, metavar="FILE", help="A path, or a name below the package's configs/.")
@click.option("--num-gpus", type=click.IntRange(min=0), help="Processes, one a GPU; 0: CPU.  [default: a GPU where there is one]")
@click.option("--runner", type=click.Choice(RUNNERS), default="auto", help="auto: detectron2 where it is installed.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.argument("overrides", nargs=-1, metavar="[KEY VALUE]...")
def eval(weights: str, config_file: str, num_gpus: int | None, runner: str, debug: bool, overrides: tuple[str, ...]) -> None:
    """Evaluate a file of weights on DATASETS.TEST; KEY VALUE pairs override the config.

    \b
    Example:
      cpvt-det eval output/model_best.pth --config-file output/config.yaml OUTPUT_DIR output/eval
    """
    overrides = (*overrides, "MODEL.WEIGHTS", weights)
    launch(run_config, num_gpus, config_file, overrides, device_of(num_gpus), choose_runner(runner), False, True)
