# SPDX-License-Identifier: Apache-2.0
"""``python -m studies patches``, ``features`` and ``pixels``: pictures of vision transformers, of classifiers and detectors."""

from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import Tensor

from cpvt_det import builders
from cpvt_det.builders import backbone_position
from cpvt_det.builders.trained import load_trained
from cpvt_det.cli import common_options, report_errors
from cpvt_det.cli.show import output_option, read_size, weights_config_option
from cpvt_det.common.errors import BadInputError
from cpvt_det.config import load_cfg
from cpvt_det.visualize.attention import draw_found
from cpvt_det.visualize.position import NamedDetector, images_of_size
from studies.patches import (
    draw_attention_grids,
    draw_features,
    draw_pixels,
    patch_attention,
    require_size,
    transformer_of,
)

layers_option = click.option("--layers", default="", metavar="N,N,...", help="Layers from 0.  [default: first, middle, last]")


def _options(size: str) -> Callable[[Callable], Callable]:
    """Arguments and options of these commands, with the default size of the images."""
    size_help = "Size of the images in pixels."
    options = (
        click.argument("sources", nargs=-1, required=True, metavar="CONFIG_OR_WEIGHTS..."),
        output_option,
        click.option("--size", default=size, show_default=True, metavar="HEIGHTxWIDTH", help=size_help),
        click.option("--input", "source", default="", metavar="FILE|FOLDER|GLOB", help="Images.  [default: drawn shapes]"),
        weights_config_option,
        common_options,
    )

    def add(command: Callable) -> Callable:
        command = report_errors(command)
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command()
@_options("224x224")
@click.option("--layer", default=1, show_default=True, type=click.IntRange(min=0), help="Layer whose attention is drawn.")
def patches(sources: tuple[str, ...], output: Path, size: str, source: str, config_file: str, layer: int) -> None:
    """Draw the attention between the patches of DeiTs, CPVTs and TNTs, several models side by side.

    A config (.yaml) is built with random weights; a checkpoint or a model folder has its own. Both pictures are of one layer, the
    mean over heads and images (at most 16): attention.png from every patch to every other, and by their offset; grids.png as a grid
    of grids, in which the tile at a patch's place is where this patch looks.

    \b
    Example:
      python -m studies patches output/none/model_best.pth output/table/model_best.pth output/peg/model_best.pth --output pictures
    """
    models, images = _models_and_images(sources, config_file, size, source, output)
    found = [(model.name, patch_attention(model, images, layer)) for model in models]
    what = f"mean over heads and {len(images)} images, in multiples of even attention"
    draw_found(found, f"Attention between patches, {what}", output / "attention.png")
    click.echo(output / "attention.png")
    click.echo(draw_attention_grids(found, f"Where each patch looks, {what}", output / "grids.png"))


@click.command()
@_options("1024x1024")
@layers_option
@click.option("--channels", default=12, show_default=True, type=click.IntRange(min=1), help="Number of channels, drawn at random.")
def features(sources: tuple[str, ...], output: Path, size: str, source: str, config_file: str, layers: str, channels: int) -> None:
    """Draw the patches of DeiTs, CPVTs and TNTs after chosen layers as feature maps, of the first image.

    \b
    Example:
      python -m studies features imagenet/deit_small.yaml imagenet/tnt_small.yaml --output pictures --layers 0,5,11
    """
    chosen = _layers(layers)
    models, images = _models_and_images(sources, config_file, size, source, output)
    click.echo(draw_features(models, images[0], chosen, channels, output / "features.png"))


@click.command()
@_options("224x224")
@layers_option
def pixels(sources: tuple[str, ...], output: Path, size: str, source: str, config_file: str, layers: str) -> None:
    """Draw the pixel tokens of TNTs after chosen layers, of the first image: a tile per patch.

    \b
    Example:
      python -m studies pixels imagenet/tnt_small.yaml --output pictures --layers 0,5,11
    """
    chosen = _layers(layers)
    models, images = _models_and_images(sources, config_file, size, source, output)
    click.echo(draw_pixels(models, images[0], chosen, output / "pixels.png"))


def _models_and_images(
    sources: tuple[str, ...], config_file: str, size: str, source: str, output: Path
) -> tuple[list[NamedDetector], list[Tensor]]:
    sides = read_size(size)
    models = [_model(name, config_file) for name in sources]
    require_size(models, sides)
    return models, images_of_size(source, output, sides)


def _model(name: str, config_file: str) -> NamedDetector:
    """A classifier or detector on a vision transformer: of a checkpoint, or of a config with random weights."""
    if Path(name).suffix.lower() in (".yaml", ".yml"):
        cfg, where = load_cfg(name), "random weights"
        cfg.MODEL.NUM_CLASSES = cfg.MODEL.NUM_CLASSES or 1
        torch.manual_seed(0)
        detector = builders.build_detector(cfg).to(builders.build_device(cfg)).eval()
    else:
        trained = load_trained(name, config_file=config_file)
        cfg, where, detector = trained.cfg, "/".join(Path(name).parts[-2:]), trained.detector
    parts = (cfg.MODEL.BACKBONE.NAME, backbone_position(cfg), where)
    model = NamedDetector(", ".join(part for part in parts if part), detector)
    transformer_of(model)
    return model


def _layers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() for word in words):
        raise BadInputError(f"--layers {text!r} is not a list of numbers, such as 0,5,11")
    return [int(word) for word in words]
