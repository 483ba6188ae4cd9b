# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det eval``: ``cpvt-det train --eval-only`` with the weights as an argument."""

import tempfile
from pathlib import Path

import click

from cpvt_det.cli import train
from cpvt_det.common.errors import BadInputError, WeightsError


@click.command(context_settings=train.RUN_CONTEXT)
@click.argument("weights", metavar="WEIGHTS")
@click.option("--config-file", default="", metavar="FILE", help="Path or name of a config.  [default: the one in WEIGHTS]")
@train.num_gpus_option
@train.runner_options
@train.allow_partial_option
@train.tiles_options
@click.option("--report", is_flag=True, help="Also write OUTPUT_DIR/report/: curves, confusion, thresholds, worst images.")
@click.option("--sizes", default="", metavar="PIXELS,...", help="Evaluate at each of these test sizes, and write one table.")
def eval(
    weights: str,
    config_file: str,
    num_gpus: int | None,
    runner: str,
    overrides: tuple[str, ...],
    allow_partial: bool,
    report: bool,
    sizes: str,
    tiles: int | None,
    overlap: float | None,
) -> None:
    """Evaluate WEIGHTS, a file, a model folder or a file of cpvt-det export, on DATASETS.TEST; KEY VALUE pairs override the config.

    With --sizes, the evaluation is repeated for each size, which is the short side of the test images or, for a classifier, the
    side of the crop. The metrics are written to sizes.md and sizes.json in OUTPUT_DIR.

    \b
    Example:
      cpvt-det eval output/model_best.pth --config-file output/config.yaml OUTPUT_DIR output/eval
      cpvt-det eval output/model_best.pth --config-file output/config.yaml --report OUTPUT_DIR output/eval
      cpvt-det eval detector.onnx OUTPUT_DIR output/eval_onnx
      cpvt-det eval output/model_best.pth --config-file output/config.yaml --tiles 640 OUTPUT_DIR output/eval
      cpvt-det eval output/model_best.pth --sizes 160,224,288,384,448,512 OUTPUT_DIR output/sizes
    """
    from cpvt_det.training.launch import launch

    words = [word.strip() for word in sizes.split(",")] if sizes else []
    if not all(word.isdecimal() and int(word) for word in words):
        raise BadInputError(f"--sizes {sizes!r} must be sides in pixels, such as 160,224,288")
    if words and report:
        raise BadInputError("--report works with one size only: leave out --sizes, and set the size in INPUT")
    overrides = (*overrides, *train.tiles_overrides(tiles, overlap), "MODEL.WEIGHTS", weights)
    overrides += ("TEST.REPORT", "True") if report else ()
    with tempfile.TemporaryDirectory() as folder:
        config_file = config_file or _config_in(weights, Path(folder))
        options = (False, True, allow_partial, [int(word) for word in words])
        launch(train.run_config, num_gpus, config_file, overrides, train.device_of(num_gpus), train.choose_runner(runner), *options)


def _config_in(weights: str, folder: Path) -> str:
    """Write the config that weights contain to a file."""
    from cpvt_det.checkpoint.exported import is_exported, read_program
    from cpvt_det.checkpoint.weights import read_weights

    config = (read_program(weights)[1] if is_exported(weights) else read_weights(weights)).config
    if config is None:
        raise WeightsError(f"{weights} contains no config; give its config with --config-file")
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    return str(folder / "config.yaml")
