# SPDX-License-Identifier: Apache-2.0
"""Detect objects in image files, given by path, folder or glob, or in a video; write pictures and JSON."""

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import BadInputError, DataError, DataFaultsError
from cpvt_det.common.files import write_json
from cpvt_det.data.images import ImageHeader, read_image
from cpvt_det.data.listing import few
from cpvt_det.data.validation.check import look_at_files
from cpvt_det.data.validation.issues import Issues
from cpvt_det.predict.detections import ImageDetections
from cpvt_det.predict.films import FilmReader, FilmWriter, Tracks
from cpvt_det.predict.predictor import ClassPredictor, Predictor
from cpvt_det.visualize.pictures import draw_objects

LONGEST_JPEG = 65_500  # largest side in pixels, libjpeg's limit


@dataclass
class Found:
    """A summary of the detections in all images.

    Attributes:
        images: number of images.
        detections: number of detections that passed the threshold.
        best: highest score of all detections; ``None`` if there are none.
    """

    images: int = 0
    detections: int = 0
    best: float | None = None

    def add(self, found: ImageDetections, passed: int) -> None:
        """Count an image in which ``passed`` detections passed the threshold."""
        self.images += 1
        self.detections += passed
        if len(found):
            self.best = max(self.best or 0.0, found.scores[0].item())


@dataclass
class InputFile:
    """An image file to detect objects in.

    Attributes:
        image_id: id of the image in the JSON files: 1, 2, ... by name.
        path: path of the file.
        name: path relative to the input folder, or to the folder that all files of the glob have in common.
        header: header of the file.
    """

    image_id: int
    path: str
    name: str
    header: ImageHeader


def check_files(paths: Sequence[Path], source: str, on_bad: str) -> tuple[list[InputFile], Issues]:
    """Read the headers of all files before the first detection.

    Args:
        paths: result of :func:`find_files`.
        source: file, folder or glob by which they were found.
        on_bad: policy for files that cannot be read, as ``DATASETS.ON_BAD``: ``error``, or ``drop`` to leave them out.

    Raises:
        DataFaultsError: files that cannot be read, all in one message; with ``drop``, only if no file can be read.
    """
    folder = Path(source).expanduser()
    root = str(folder) if folder.is_dir() else os.path.commonpath([path.parent.absolute() for path in paths])
    seen = look_at_files(map(str, paths), len(paths))
    issues = Issues()
    good = []
    for path, found in zip(paths, seen, strict=True):
        if isinstance(found, DataError):
            issues.add_fault("image files that cannot be read", str(found))
        else:
            name = Path(os.path.relpath(path, root)).as_posix()
            good.append(InputFile(len(good) + 1, str(path), name, found))
    if issues.faults and (on_bad == "error" or not good):
        advice = "; --on-bad drop leaves them out" if good else ""
        head = f"{len(paths) - len(good)} of {len(paths)} image files cannot be read{advice}"
        raise DataFaultsError("\n".join([head, *issues.lines(issues.faults)]))
    return good, issues


def predict_files(
    predictor: Predictor, files: Sequence[InputFile], output: Path, threshold: float, batch_size: int, on_bad: str
) -> Found:
    """Detect objects in files. Write ``pictures/``, ``detections.json`` (COCO's results), ``images.json`` (a COCO data set without
    annotations) and ``coco.json`` (the same with the detections as annotations, for viewing and correcting them in other
    programs).

    Args:
        predictor: predictor of a trained model.
        files: files from :func:`check_files`.
        output: folder to write to; created if missing.
        threshold: lowest score to draw and write.
        batch_size: number of images per batch.
        on_bad: policy for images whose damage only decoding reveals, as in :func:`check_files`.

    Returns:
        The numbers of images and detections, and the best score.

    Raises:
        BadInputError: a folder that cannot be written to, or in which an image would be overwritten.
        DataError: an image that cannot be decoded, unless it is dropped.
    """
    names = picture_names([file.name for file in files])
    pictures = {file.path: output / "pictures" / names[file.name] for file in files}
    results: list[dict[str, Any]] = []
    done: list[InputFile] = []
    total = Found()
    _make_folder(output, pictures.values(), pictures)
    for file, everything in _predict_each(predictor, files, batch_size, on_bad):
        found = everything.above(threshold)
        total.add(everything, len(found))
        drawn = found.draw()
        drawn.thumbnail((LONGEST_JPEG, LONGEST_JPEG))  # only if it is larger
        _make_folder(pictures[file.path].parent)
        drawn.save(pictures[file.path], quality=92)
        results += found.to_coco(file.image_id)
        done.append(file)
    _write_coco(predictor.classes, done, results, output)
    return total


def predict_film(
    predictor: Predictor, reader: FilmReader, output: Path, threshold: float, batch_size: int, track: bool = False
) -> Found:
    """Detect objects in a video. Write ``film.mp4``, with boxes and the times of its frames, and ``frames.jsonl``, with a line per
    frame: ``{"frame": 12, "time": 0.48, "detections": [{"category_id": 3, "name": "cat", "bbox": [x, y, w, h], "score": 0.9}]}``.

    Both are written while the video is read, so that all results up to an interruption remain.

    Args:
        predictor: predictor of a trained detector.
        reader: the video.
        output: folder to write to; created if missing.
        threshold: lowest score to draw and write.
        batch_size: number of frames per batch.
        track: whether to give objects ids across frames (:class:`cpvt_det.predict.films.Tracks`); they are written as ``track`` of
            a detection and drawn in the video.

    Returns:
        The numbers of frames and detections, and the best score.

    Raises:
        BadInputError: a folder that cannot be written to, or in which the video would be overwritten.
        DataError, RunStoppedError: a video that cannot be decoded, or breaks off.
    """
    tracks = Tracks(reader.rate, threshold) if track else None
    _make_folder(output, [output / "film.mp4"], [reader.source])
    total, writer = Found(), FilmWriter(output / "film.mp4")
    bar = tqdm(total=reader.expected, desc="predicting", unit="frame", leave=False, file=sys.stderr)
    with bar, contextlib.closing(writer), (output / "frames.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for number, time, everything in predictor.stream(reader, batch_size=batch_size):
            found = everything.above(threshold)
            total.add(everything, len(found))
            ids = tracks(everything)[: len(found)] if track else [None] * len(found)  # both are sorted best first
            rows = []
            for name, row, one in zip(found.names, found.to_coco(number), ids, strict=True):
                del row["image_id"]
                rows.append({"name": name, **row, **({"track": one} if track else {})})
            notes = ["" if one is None else f" #{one}" for one in ids]
            lines.write(json.dumps({"frame": number, "time": round(time, 6), "detections": rows}) + "\n")
            writer.add(draw_objects(found.image, found, predictor.classes.names, notes=notes), time)
            bar.update()
    return total


def _make_folder(folder: Path, written: Iterable[Path] = (), read: Iterable[str] = ()) -> None:
    """Create a folder, unless a file that is read would be overwritten in it."""
    there = {(file.st_dev, file.st_ino) for file in map(os.stat, filter(os.path.exists, written))}  # whatever they are called
    if lost := [path for path in read if os.path.exists(path) and ((file := os.stat(path)).st_dev, file.st_ino) in there]:
        raise BadInputError(f"{few(lost)} would be overwritten; choose another output folder than {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error


def _write_coco(classes: Classes, done: Sequence[InputFile], results: list[dict[str, Any]], output: Path) -> None:
    """Write ``images.json``, ``detections.json`` and ``coco.json``."""
    images = [
        {"id": file.image_id, "file_name": file.name, "height": file.header.height, "width": file.header.width} for file in done
    ]
    categories = [{"id": class_id, "name": name} for class_id, name in zip(classes.ids, classes.names, strict=True)]
    write_json({"images": images, "annotations": [], "categories": categories}, output / "images.json")
    write_json(results, output / "detections.json")
    annotations = [
        {"id": number, **found, "area": found["bbox"][2] * found["bbox"][3], "iscrowd": 0, "segmentation": []}
        for number, found in enumerate(results, start=1)
    ]
    write_json({"images": images, "annotations": annotations, "categories": categories}, output / "coco.json")


def predict_classes(predictor: ClassPredictor, files: Sequence[InputFile], output: Path, batch_size: int, on_bad: str) -> int:
    """Classify images. Write ``classes.json``, which contains the file of each image, and the names and scores of its best classes.

    Args:
        predictor: predictor of a trained classifier.
        files, output, batch_size, on_bad: as in :func:`predict_files`.

    Returns:
        The number of images.

    Raises:
        BadInputError: a folder that cannot be written to.
        DataError: an image that cannot be decoded, unless it is dropped.
    """
    _make_folder(output)
    each = _predict_each(predictor, files, batch_size, on_bad)
    rows = [{"file_name": file.name, "found": found.best()} for file, found in each]
    write_json(rows, output / "classes.json", indent=1)
    return len(rows)


def picture_names(names: Sequence[str]) -> dict[str, str]:
    """The name of each image's picture: ``a.jpg`` for ``a.png``, or ``a.png.jpg`` if two images would share a name."""
    short = {name: str(PurePosixPath(name).with_suffix(".jpg")) for name in names}
    long = {name: f"{name}.jpg" for name in names}
    counts = Counter([*short.values(), *long.values()])
    return {name: short[name] if counts[short[name]] == 1 else long[name] for name in names}


def _predict_each(
    predictor: Predictor, files: Sequence[InputFile], batch_size: int, on_bad: str
) -> Iterator[tuple[InputFile, Any]]:
    with tqdm(total=len(files), desc="predicting", unit="img", leave=False, file=sys.stderr) as bar:
        for start in range(0, len(files), batch_size):
            read = []
            for file in files[start : start + batch_size]:
                try:
                    read.append((file, read_image(file.path)))
                except DataError as error:
                    if on_bad == "error":
                        raise DataError(f"{error}; --on-bad drop leaves it out") from error
                    bar.write(f"left out: {error}", file=sys.stderr)
            found = predictor([image for _, image in read], batch_size=batch_size)
            for (file, _), one in zip(read, found, strict=True):
                yield file, one
            bar.update(len(files[start : start + batch_size]))
