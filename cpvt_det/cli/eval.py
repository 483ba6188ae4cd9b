# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det eval``: ``cpvt-det train --eval-only`` with the weights as an argument."""

import click

from cpvt_det.cli.train import (
    RUN_CONTEXT,
    allow_partial_option,
    choose_runner,
    device_of,
    run_config,
    run_options,
    tiles_options,
    tiles_overrides,
)


@click.command(context_settings=RUN_CONTEXT)
@click.argument("weights", metavar="WEIGHTS")
@run_options
@allow_partial_option
@tiles_options
@click.option("--report", is_flag=True, help="Also write OUTPUT_DIR/report/: curves, confusion, thresholds, worst images.")
def eval(
    weights: str,
    config_file: str,
    num_gpus: int | None,
    runner: str,
    overrides: tuple[str, ...],
    allow_partial: bool,
    report: bool,
    tiles: int | None,
    overlap: float | None,
) -> None:
    """Evaluate WEIGHTS, a file or a model folder, on DATASETS.TEST; KEY VALUE pairs override the config.

    \b
    Example:
      cpvt-det eval output/model_best.pth --config-file output/config.yaml OUTPUT_DIR output/eval
      cpvt-det eval output/model_best.pth --config-file output/config.yaml --report OUTPUT_DIR output/eval
      cpvt-det eval output/model_best.pth --config-file output/config.yaml --tiles 640 OUTPUT_DIR output/eval
    """
    from cpvt_det.runner.launch import launch

    overrides = (*overrides, *tiles_overrides(tiles, overlap), "MODEL.WEIGHTS", weights)
    overrides += ("TEST.REPORT", "True") if report else ()
    launch(run_config, num_gpus, config_file, overrides, device_of(num_gpus), choose_runner(runner), False, True, allow_partial)
