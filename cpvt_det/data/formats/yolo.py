# SPDX-License-Identifier: Apache-2.0
"""YOLO's format: a YAML file with class names and splits, and one text file of boxes per image.

A line of text is ``class cx cy w h``, or the polygon ``class x1 y1 x2 y2 x3 y3 ...``; all but the class relative to the image.
Source: the format of Ultralytics and Roboflow.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cpvt_det.data.formats.lines import numbered_lines, read_lines
from cpvt_det.data.formats.registry import Sections, register_format
from cpvt_det.errors import DataError, first_line

IMAGES = {".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp"}
LABELS = {"Images": "Labels", "IMAGES": "LABELS"}
SPLITS = {"val": ("val", "valid", "validation")}


def find_yolo(path: Path) -> Path | None:
    """The YAML file of a data set: the path itself, or ``data.yaml`` in a folder; ``None`` where there is none."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return path
    inside = path / "data.yaml"
    return inside if inside.is_file() else None


def yolo_splits(path: Path) -> list[str]:
    """Those of ``train``, ``val`` and ``test`` whose images are there.

    Raises:
        DataError: a file that cannot be read.
    """
    path = find_yolo(path) or path
    content, found = _read_yaml(path), []
    for split in ("train", "val", "test"):
        with contextlib.suppress(DataError):
            found += [split] if _places(content, split, path) else []
    return found


def missing_splits(path: Path) -> dict[str, str]:
    """Those of ``train``, ``val`` and ``test`` that a YAML file names and whose images are not there -> what is missing.

    Raises:
        DataError: a file that cannot be read.
    """
    content, found = _read_yaml(path), {}
    for split in ("train", "val", "test"):
        if any(content.get(name) for name in SPLITS.get(split, (split,))):
            try:
                _places(content, split, path)
            except DataError as error:
                found[split] = str(error)
    return found


def yolo_files(path: Path, split: str) -> Iterator[Path]:
    """What :func:`read_yolo` reads: the YAML file, lists of images, images, and the text file of each."""
    path = find_yolo(path) or path
    yield path
    for place in _places(_read_yaml(path), split, path):
        yield place
        for image in _images(place):
            yield image
            yield _label_file(image)


@register_format("yolo", matches=lambda path: find_yolo(path) is not None, splits=yolo_splits, files=yolo_files)
def read_yolo(path: Path, split: str) -> Sections:
    """Read a data set into COCO's sections, with ``relative_cxcywh`` for boxes and without sizes of images.

    Args:
        path: a folder with ``data.yaml``, or the YAML file.
        split: ``train``, ``val`` or ``test``.

    Returns:
        The sections. Category ids are YOLO's, from 0; image ids count from 1 in the order of the paths. An image without a text
        file has no objects.

    Raises:
        DataError: a file that cannot be read, or one without class names or without the split.
    """
    path = find_yolo(path) or path
    content = _read_yaml(path)
    images = [image for place in _places(content, split, path) for image in _images(place)]
    if not images:
        raise DataError(f"{path}: split {split!r} has no images")
    annotations = yolo_annotations([_label_file(image) for image in images])
    return yolo_sections(images, annotations, _names(content, path))


def yolo_annotations(labels: Iterable[Path | None]) -> list[dict[str, Any]]:
    """COCO's annotations of images 1, 2, ... from their text files; one that is ``None`` or does not exist has none.

    Raises:
        DataError: a text file that cannot be read.
    """
    annotations: list[dict[str, Any]] = []
    for image_id, label in enumerate(labels, start=1):
        for number, annotation in read_labels(label) if label else ():
            annotation |= {"id": len(annotations) + 1, "image_id": image_id, "source": f"{label}, line {number}"}
            annotations.append(annotation)
    return annotations


def yolo_sections(images: Iterable[Path], annotations: list[dict[str, Any]], names: Mapping[int, str]) -> Sections:
    """COCO's sections of images 1, 2, ..., their annotations, and the name of each class."""
    return {
        "images": [{"id": number, "file_name": str(image)} for number, image in enumerate(images, start=1)],
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in names.items()],
    }


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not YAML: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a YOLO data set: expected keys train, val and names, got a {type(content).__name__}")
    return content


def _names(content: dict[str, Any], path: Path) -> dict[int, str]:
    names = content.get("names")
    names = dict(enumerate(names)) if isinstance(names, list) else names
    if not isinstance(names, dict) or not names or not all(type(number) is int for number in names):
        raise DataError(f"{path}: names must be a list of class names, or a mapping of numbers to class names, got {names!r}")
    return {number: str(name) for number, name in sorted(names.items())}


def _places(content: dict[str, Any], split: str, path: Path) -> list[Path]:
    """Folders and text files with the images of a split; paths are relative to ``path:`` in the file, or else to the file."""
    found = next((content[name] for name in SPLITS.get(split, (split,)) if content.get(name)), None)
    if found is None:
        known = [key for key in ("train", "val", "valid", "test") if content.get(key)]
        raise DataError(f"{path} has no split {split!r}; known: {', '.join(known) or 'none'}")
    root = path.parent / str(content.get("path") or "")
    root = root if root.is_dir() else path.parent  # `path:` may be of the machine that the file was written on
    places = []
    for place in map(str, found if isinstance(found, list) else [found]):
        tried = [root / place, *(path.parent / end for end in _ends(place))]
        there = next((candidate for candidate in tried if candidate.exists()), None)
        if there is None:
            raise DataError(
                f"{path}: split {split!r} is {place}, but {tried[0]} does not exist; write its path from the folder of the file on"
            )
        places.append(there)
    return places


def _ends(place: str) -> list[Path]:
    """What a path may mean in the folder of its file: Roboflow writes ``../train/images`` and means ``train/images``; and
    ``/home/me/cats/train/images`` of another machine is ``cats/train/images`` or ``train/images``, but not just any ``images``."""
    words = place.replace("\\", "/").split("/")
    parts = [word for word in words if word not in ("", ".", "..")]
    is_absolute = not words[0] or words[0].endswith(":")
    count = len(parts) - (parts[-1:] == ["images"]) if is_absolute else min(1, len(parts))
    return [Path(*parts[start:]) for start in range(count)]


def _images(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(file for file in place.rglob("*") if file.suffix.lower() in IMAGES)
    return [place.parent / line for line in read_lines(place)]


def _label_file(image: Path) -> Path:
    """The text file of an image: the last folder ``images`` in its path becomes ``labels``, both in whatever case."""
    folders = list(image.parent.parts)
    for number in reversed(range(len(folders))):
        if folders[number].lower() == "images":
            name = LABELS.get(folders[number], "labels")
            folders[number] = name if name == "labels" or Path(*folders[:number], name).is_dir() else "labels"
            break
    return Path(*folders, f"{image.stem}.txt")


def read_labels(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Number and content of each line; a line that is not a box has its words as ``bbox``, for the rules to report.

    Raises:
        DataError: a file that cannot be read; one that does not exist has no lines.
    """
    lines = numbered_lines(path) if path.exists() else []
    return [(number, _annotation(line.split())) for number, line in lines]


def _annotation(words: list[str]) -> dict[str, Any]:
    category_id = int(words[0]) if words[0].isdecimal() else words[0]
    try:
        numbers = [float(word) for word in words[1:]]
    except ValueError:
        return {"category_id": category_id, "bbox": words[1:]}
    if len(numbers) == 4:
        return {"category_id": category_id, "relative_cxcywh": numbers}
    if len(numbers) < 6 or len(numbers) % 2:
        return {"category_id": category_id, "bbox": numbers}
    xs, ys = numbers[0::2], numbers[1::2]
    centre = [(min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2]
    return {"category_id": category_id, "relative_cxcywh": [*centre, max(xs) - min(xs), max(ys) - min(ys)]}
