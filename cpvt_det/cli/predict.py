# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det predict``: run a trained model on image files; the work is done in ``predict/``."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from cpvt_det.builders import is_classifier
from cpvt_det.builders.trained import load_model
from cpvt_det.cli import common_options
from cpvt_det.cli.train import RUN_CONTEXT, tiles_options, tiles_overrides
from cpvt_det.common.errors import BadInputError, counted
from cpvt_det.data.listing import cannot_read, find_files
from cpvt_det.data.validation.issues import POLICIES, Issues
from cpvt_det.predict import ClassPredictor, Predictor
from cpvt_det.predict.detect_files import check_files, predict_classes, predict_files, predict_film
from cpvt_det.predict.films import FilmReader, is_film


@click.command(context_settings=RUN_CONTEXT)
@click.argument("weights", metavar="WEIGHTS")
@click.option(
    "--input",
    "source",
    required=True,
    metavar="FILE|FOLDER|GLOB|VIDEO",
    help="Images (a glob in quotes); a video, a camera's number or an rtsp:// or http:// address.",
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@click.option(
    "--threshold",
    type=float,
    help="Lowest score to draw and write, from 0 to 1.  [default: the one with the best F1 in the last evaluation of WEIGHTS]",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Images or tiles per batch; larger batches are faster on a GPU.",
)
@click.option("--device", help="cpu, cuda, cuda:1.  [default: a GPU if there is one]")
@click.option("--config-file", default="", metavar="FILE", help="Config to use instead of the one in WEIGHTS, or if it has none.")
@click.option(
    "--on-bad",
    type=click.Choice(POLICIES),
    default="error",
    show_default=True,
    help="Whether to stop at unreadable images or skip them.",
)
@click.option(
    "--every", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="For videos: use only every N-th frame."
)
@click.option("--track", is_flag=True, help="For videos: give objects ids that stay the same from frame to frame.")
@tiles_options
@common_options
@click.argument("overrides", nargs=-1, metavar="[KEY VALUE]...")
def predict(
    weights: str,
    source: str,
    output: Path,
    threshold: float | None,
    batch: int,
    device: str | None,
    config_file: str,
    on_bad: str,
    every: int,
    track: bool,
    tiles: int | None,
    overlap: float | None,
    overrides: tuple[str, ...],
) -> None:
    """Detect objects in images with WEIGHTS: a checkpoint, a model folder, a name (cpvt-det weights lists them), or a file
    of cpvt-det export, ONNX or OpenVINO.

    Writes pictures/, detections.json (COCO's results format), images.json (the id of each image) and coco.json (a COCO data set). A
    classifier writes classes.json: the best five classes of each image, with their scores. For a video or a camera, the command
    writes film.mp4 and frames.jsonl, one line per frame. KEY VALUE pairs override the config.

    \b
    Example:
      cpvt-det predict output/model_best.pth --input photos --output found
      cpvt-det predict dino_r50 --input photo.jpg --output found
      cpvt-det predict output/model_best.pth --input 'photos/**/*.jpg' --output found --threshold 0.3 INPUT.MIN_SIZE_TEST 480
      cpvt-det predict detector.onnx --input photo.jpg --output found
      cpvt-det predict output/model_best.pth --input film.mp4 --output found --every 5 --batch 4
      cpvt-det predict output/model_best.pth --input photos --output found --tiles 640 --overlap 0.2
    """
    filmed = is_film(source)
    _require_usable(threshold, overrides)
    if (track or every > 1) and not filmed:
        raise BadInputError(f"--track and --every are for videos, and {source} is not one")
    output = output.expanduser()
    paths, unreadable, ignored = ([], [], []) if filmed else find_files(source, output / "pictures")
    if ignored:
        click.echo(f"left out: {counted(len(ignored), 'image')} in {output / 'pictures'}, where pictures are drawn", err=True)
    if unreadable:
        click.echo(f"left out: {counted(len(unreadable), 'image')}{cannot_read(unreadable)}", err=True)
    trained = load_model(weights, device, config_file, (*overrides, *tiles_overrides(tiles, overlap)))
    classifies = is_classifier(trained.cfg)
    for option, value in ("--threshold", threshold), ("--tiles", tiles), ("--overlap", overlap):
        if classifies and value is not None:
            raise BadInputError(f"{option} is for detections, and {weights} is a classifier; leave it out")
    if overlap is not None and not trained.cfg.TEST.TILES.SIZE:
        raise BadInputError("--overlap is for tiles; set their size with --tiles")
    if classifies and filmed:
        raise BadInputError(f"{source} is a video, but {weights} is a classifier, which takes only images")
    predictor = (ClassPredictor if classifies else Predictor).from_trained(trained)
    reader = FilmReader(source, every) if filmed else None
    files, issues = ([], Issues()) if filmed else check_files(paths, source, on_bad)
    for line in issues.lines(issues.faults):
        click.echo(line, err=True)
    if not classifies and threshold is None:
        threshold = predictor.threshold
        is_known = predictor.thresholds is not None and predictor.thresholds.overall is not None
        why = f"the best F1 in the last evaluation of {weights}" if is_known else f"{weights} contains none from an evaluation"
        click.echo(f"Threshold {threshold:.3g}: {why}; --threshold sets another", err=True)
    start = time.perf_counter()
    if classifies:
        count = predict_classes(predictor, files, output, batch, on_bad)
        click.echo(f"{output / 'classes.json'}: {counted(count, 'image')}, {count / (time.perf_counter() - start):.1f} images/s")
        return
    if reader is not None:
        found = predict_film(predictor, reader, output, threshold, batch, track)
    else:
        found = predict_files(predictor, files, output, threshold, batch, on_bad)
    speed, kind = found.images / (time.perf_counter() - start), "frame" if filmed else "image"
    best = "" if found.best is None else f"; the best score is {found.best:.3g}"
    click.echo(
        f"{output}: {counted(found.images, kind)}, {counted(found.detections, 'detection')} with score >= {threshold:.3g}, "
        f"{speed:.1f} {kind}s/s{best}"
    )
    if reader is not None and reader.expected and found.images < 0.9 * reader.expected:  # containers may give a rough number
        click.echo(f"{source} may be incomplete: by its header, about {counted(reader.expected, 'frame')} were expected", err=True)
    if found.best is not None and not found.detections:
        click.echo("No detection reaches the threshold, so the pictures have no boxes; --threshold sets a lower one", err=True)


def _require_usable(threshold: float | None, overrides: Sequence[str]) -> None:
    if threshold is not None and not 0 <= threshold <= 1:
        raise BadInputError(f"--threshold must be a score from 0 to 1, got {threshold}")
    for word in overrides[::2]:
        if os.path.isfile(word):
            raise BadInputError(f"{word} is a file, not a config key; put a glob in quotes: --input '*.jpg'")
