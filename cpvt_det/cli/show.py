# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det show``: pictures of what happens inside a detector. The drawing is in ``cpvt_det/visualize/``."""

import re
from pathlib import Path

import click
import torch

from cpvt_det import builders
from cpvt_det.builders.trained import Trained, load_trained
from cpvt_det.cli import common_options
from cpvt_det.cli.train import RUN_CONTEXT, build_any, config_file_option, load_any, runner_options
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Size, split_samples
from cpvt_det.config import load_cfg
from cpvt_det.data.images import read_image
from cpvt_det.training.setup import choose_seed
from cpvt_det.training.tasks import build_task
from cpvt_det.visualize.attention import dense_models, draw_attention, draw_attention_by_position
from cpvt_det.visualize.pictures import draw_batches
from cpvt_det.visualize.position import NamedDetector, draw_added, draw_kernels, images_of_size
from cpvt_det.visualize.recording import Point, record_forward, tokens_at

output_option = click.option(
    "--output", required=True, type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Folder for the pictures."
)

weights_config_option = click.option(
    "--config-file", default="", metavar="FILE", help="Config to use instead of the one in WEIGHTS, or if it has none."
)


@click.group()
@common_options
def show() -> None:
    """Draw what happens inside: attention, position encodings, the input of the model.

    \b
    Example:
      cpvt-det show attention output/model_best.pth --input photo.jpg --output pictures
    """


@show.command()
@click.argument("weights", metavar="WEIGHTS")
@click.option("--input", "image_file", required=True, metavar="IMAGE", help="Image to run the detector on.")
@output_option
@click.option(
    "--points",
    multiple=True,
    metavar="X,Y",
    help="Points whose encoder tokens are shown, in pixels.  [default: centres of detections]",
)
@click.option("--detections", default=4, show_default=True, type=click.IntRange(min=1), help="Number of detections, best first.")
@click.option("--level", default=0, show_default=True, help="Level of the tokens, for Deformable-DETR; 0 is the finest.")
@weights_config_option
@common_options
def attention(
    weights: str, image_file: str, output: Path, points: tuple[str, ...], detections: int, level: int, config_file: str
) -> None:
    """Draw where a trained detector looks in an image.

    WEIGHTS is a checkpoint or a model folder. encoder.png has a row per point and decoder.png has a row per detection; both have a
    column per layer. encoder_heads.png and decoder_heads.png show the heads of the last layer. For DETR, the pictures are heat maps
    of the attention weights. For Deformable-DETR, they show the sampling points around the reference point; a point's colour is its
    level and its size is its weight. RT-DETR and D-FINE have heat maps of the coarsest level in the encoder, and sampling points in
    the decoder.

    \b
    Example:
      cpvt-det show attention output/model_best.pth --input photo.jpg --output pictures
      cpvt-det show attention output/model_best.pth --input photo.jpg --output pictures --points 60,25 --points 20,10
    """
    given = [_point(word) for words in points for word in words.split()]
    image = read_image(image_file)
    trained = _load_detector(weights, config_file)
    resized = builders.build_test_mapper(trained.cfg).prepare(image)
    classification = builders.build_classification(trained.cfg)
    size = tuple(image.shape[1:])
    record = record_forward(trained.detector, resized, size, classification, trained.classes, detections)
    # A centre may lie exactly on the right or bottom border, which counts as outside.
    boxes = [query.box for query in record.found]
    found = [(min((x1 + x2) / 2, size[1] - 1), min((y1 + y2) / 2, size[0] - 1)) for x1, y1, x2, y2 in boxes]
    tokens = tokens_at(record, given or found, level)
    for path in draw_attention(record, tokens, output):
        click.echo(path)


@show.command()
@click.argument("sources", nargs=-1, required=True, metavar="CONFIG_OR_WEIGHTS...")
@output_option
@click.option("--size", default="384x512", show_default=True, metavar="HEIGHTxWIDTH", help="Size of the images in pixels.")
@click.option("--input", "source", default="", metavar="FILE|FOLDER|GLOB", help="Images, at most 16.  [default: drawn shapes]")
@weights_config_option
@common_options
def position(sources: tuple[str, ...], output: Path, size: str, source: str, config_file: str) -> None:
    """Draw what position encodings do, for several models side by side.

    A config (.yaml) gets random weights; a checkpoint or a model folder has its own weights. added.png shows, by groups of
    channels, what each encoding adds to images alone and to images with padding. kernels.png shows PEG's kernels. For DETR models,
    attention.png shows the attention of the first encoder layer after the encoding, averaged over images and heads. It is drawn
    once by the positions of query and key, and once by the offset between them.

    \b
    Example:
      cpvt-det show position output/none/model_best.pth output/sine/model_best.pth output/peg/model_best.pth --output pictures
      cpvt-det show position quickstart/detr_peg.yaml output/peg/model_best.pth --output pictures --size 128x192 --input photos
    """
    sides = read_size(size)
    models = [_model(name, config_file) for name in sources]
    stride = max(model.detector.size_divisibility for model in models)
    if min(sides) < stride:
        raise BadInputError(f"--size {size} is too small: the smallest size for these models is {stride}x{stride}, their stride")
    images = images_of_size(source, output, sides)
    click.echo(draw_added(models, images, output / "added.png"))
    click.echo(draw_kernels(models, output / "kernels.png") or "no kernels.png was written: no model has a PEG")
    dense = dense_models(models)
    for model in models:
        if model not in dense:
            click.echo(f"not in attention.png: {model.name}, which has no attention between all tokens")
    if dense:
        draw_attention_by_position(dense, images, output / "attention.png")
        click.echo(output / "attention.png")


@show.command(context_settings=RUN_CONTEXT)
@config_file_option()
@runner_options
@output_option
@click.option("--count", default=8, show_default=True, type=click.IntRange(min=1), help="Number of images of each split.")
def data(config_file: str, runner: str, overrides: tuple[str, ...], output: Path, count: int) -> None:
    """Draw the actual input of the model; KEY VALUE pairs override the config.

    train.png shows the first images of the training sets after augmentation, with the boxes that the model learns. For each test
    set, a file shows the first images as they are evaluated. Each image is on the canvas of the batch that goes through the model
    at once, which is one process's batch divided by SOLVER.ACCUMULATE. The padding is striped.

    \b
    Example:
      cpvt-det show data --config-file output/config.yaml --output pictures --count 16
    """
    cfg = load_any(config_file, overrides, runner)
    cfg.DATALOADER.NUM_WORKERS = 0  # enough for a few images; the number of workers does not change the images
    task = build_task(cfg)
    datasets, tests = task.load_splits()
    detector = build_any(cfg, runner)
    classes, records = datasets[0].classes, task.training_records(datasets)
    cfg.SEED = choose_seed(cfg)
    loader = task.build_train_loader(records, cfg.SEED)
    # Images that go through the model together are those of one of the parts into which SOLVER.ACCUMULATE divides a batch.
    parts = (part for samples in loader for part in split_samples(samples, max(1, cfg.SOLVER.ACCUMULATE)))
    for name, batches, known in [("train", parts, records)] + [
        (dataset.name, task.build_test_loader(dataset), dataset.records) for dataset in tests
    ]:
        path = output / f"{name}.png"
        drawn = draw_batches(batches, {record.image_id: record for record in known}, detector, classes, count, path)
        click.echo(f"{path}: {drawn} of {len(known)} images")


def _model(name: str, config_file: str) -> NamedDetector:
    """The detector of a checkpoint, or of a config with random weights. Configs with the same parts get the same random weights."""
    if Path(name).suffix.lower() not in (".yaml", ".yml"):
        trained = _load_detector(name, config_file)
        where = "/".join(Path(name).parts[-2:])
        return NamedDetector(f"{trained.cfg.MODEL.POSITION.NAME}, {where}", trained.detector)
    cfg = load_cfg(name)
    if builders.is_classifier(cfg):
        raise BadInputError(f"{name} describes a classifier; this picture is for detectors")
    cfg.MODEL.NUM_CLASSES = cfg.MODEL.NUM_CLASSES or 1
    torch.manual_seed(0)
    detector = builders.build_detector(cfg).to(builders.build_device(cfg)).eval()
    return NamedDetector(f"{cfg.MODEL.POSITION.NAME}, random weights", detector)


def _load_detector(weights: str, config_file: str) -> Trained:
    trained = load_trained(weights, config_file=config_file)
    if builders.is_classifier(trained.cfg):
        raise BadInputError(f"{weights} is a {type(trained.detector).__name__}; this picture is for detectors")
    return trained


def _point(word: str) -> Point:
    if (match := re.fullmatch(r"(-?\d+(?:\.\d+)?),(-?\d+(?:\.\d+)?)", word)) is None:
        raise BadInputError(f"--points {word!r} is not X,Y in pixels, such as 120,80")
    return float(match[1]), float(match[2])


def read_size(text: str) -> Size:
    """(h, w) of ``--size``.

    Raises:
        BadInputError: a text that is not HEIGHTxWIDTH.
    """
    if (match := re.fullmatch(r"(\d+)x(\d+)", text)) is None:
        raise BadInputError(f"--size {text!r} is not HEIGHTxWIDTH, such as 480x640")
    return int(match[1]), int(match[2])
