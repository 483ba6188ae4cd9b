# SPDX-License-Identifier: Apache-2.0
"""Data formats other than COCO JSON: their contract, their registry, and what their readers share.

Readers pass invalid entries on unchanged; ``data/validation/rules.py`` checks them by the same rules as entries of COCO JSON.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpvt_det.common.errors import DataError
from cpvt_det.common.registry import PartRegistry
from cpvt_det.data.images import file_threads, read_header
from cpvt_det.data.validation.rules import FAULT, LARGEST_SHARE

Notes = Mapping[str, Iterable[object]]
"""Heading of a kind of correction -> the places where it was made."""
Sections = dict[str, Any]
"""COCO's ``images``, ``annotations`` and ``categories``, and :data:`Notes` as ``notes``."""


@dataclass(frozen=True)
class DataFormat:
    """A format: how its data sets are recognised, and how they are read.

    Attributes:
        matches: function that tells whether a path, the second entry of a triple of ``DATASETS.REGISTER``, is in this format.
        read: function that reads a path and a split, the third entry. Images need ``id`` and ``file_name``; their sizes are
            optional. Annotations need ``id``, ``image_id``, ``category_id`` and either ``bbox`` (xywh in pixels) or
            ``relative_cxcywh`` (in [0, 1]). Categories need ``id`` and ``name``. Faulty entries are passed on, and the data check
            reports them. They are either unchanged, or have the key ``rules.FAULT``, whose value is a heading and a text in the
            format's own terms. The ``source`` of an annotation is its file and line.
        splits: function that lists the splits of a path, for ``cpvt-det train FOLDER``. A path without splits is a single data
            set, which is read with "" as its split.
        files: function that lists all files that ``read`` reads or looks for, including images, in a fixed order. With it, a
            data set of 10,000 files or more is cached in ``DATASETS.CACHE`` until one of them changes. With ``None``, the data set
            is read at every start.
    """

    matches: Callable[[Path], bool]
    read: Callable[[Path, str], Sections]
    splits: Callable[[Path], Sequence[str]] = lambda path: ()
    files: Callable[[Path, str], Iterable[str | Path]] | None = None


def make_sections(
    images: Iterable[dict[str, Any]], annotations: Iterable[dict[str, Any]], names: Mapping[int, str], *notes: Notes
) -> Sections:
    """Sections whose images and annotations are numbered from 1 in the given order. They contain all notes, and each place is
    listed only once.

    Args:
        images, annotations: entries; an entry that has an id keeps it.
        names: name of each class by its id.
        notes: notes of several kinds.
    """
    places: dict[str, dict[str, None]] = defaultdict(dict)
    for heading, where in (item for some in notes for item in some.items()):
        places[heading] |= dict.fromkeys(map(str, where))
    sections: Sections = {"images": list(images), "annotations": list(annotations)}
    for number, entry in (item for entries in sections.values() for item in enumerate(entries, start=1)):
        entry.setdefault("id", number)
    sections["categories"] = [{"id": number, "name": name} for number, name in names.items()]
    sections["notes"] = {heading: list(where) for heading, where in places.items() if where}
    return sections


FORMAT_REGISTRY = PartRegistry("FORMAT", "data format")
"""Name -> :class:`DataFormat`. If several match a path, the one registered last is used."""


def register_format(
    name: str,
    matches: Callable[[Path], bool],
    splits: Callable[[Path], Sequence[str]] = lambda path: (),
    files: Callable[[Path, str], Iterable[str | Path]] | None = None,
) -> Callable:
    """Register the decorated function as the reader of a format.

    Args:
        name: name of the format.
        matches, splits, files: as in :class:`DataFormat`.
    """

    def register(read: Callable[[Path, str], Sections]) -> Callable[[Path, str], Sections]:
        FORMAT_REGISTRY.register_as(name)(DataFormat(matches, read, splits, files))
        return read

    return register


def find_format(path: Path) -> DataFormat | None:
    """The format of a path; ``None`` if no registered format matches."""
    formats = [data_format for _, data_format in FORMAT_REGISTRY]
    return next((data_format for data_format in reversed(formats) if data_format.matches(path)), None)


def read_foreign(path: Path, split: str) -> Sections:
    """The sections ``images``, ``annotations`` and ``categories`` of a data set in a registered format.

    Args:
        path: path of the data set in its format.
        split: name of a split.

    Returns:
        The sections. If the annotations lack image sizes, these are read from the image files. A file that cannot be read gets
        the size 1 x 1, and is reported later, when images are checked. An annotation's ``source`` is its file and position.

    Raises:
        DataError: an unknown format, or a split that does not exist.
    """
    if (data_format := find_format(path)) is None:
        raise DataError(
            f"{path} is not a data set: expected a COCO JSON file, a YOLO folder with data.yaml (or its YAML file by "
            "path), a Pascal VOC folder with Annotations/*.xml, a folder of images per class (SPLIT/CLASS/*.jpg), or a format "
            "registered by a module given with --import MODULE"
        )
    return complete(data_format.read(path, split))


def complete(content: Sections) -> Sections:
    """The same sections with missing image sizes, boxes in pixels, and notes added.

    Boxes that are relative to their image are converted, or marked as faulty if their numbers are far outside [0, 1].
    """
    content.setdefault("notes", {})
    images = content["images"]
    missing = [image for image in images if FAULT not in image and not (image.get("height") and image.get("width"))]
    with file_threads() as pool:
        for image, (height, width) in zip(missing, pool.map(_size, (image["file_name"] for image in missing)), strict=True):
            image.update(height=height, width=width)
    size_of = {image["id"]: (image.get("width", 1), image.get("height", 1)) for image in images}
    for annotation in content["annotations"]:
        relative = annotation.pop("relative_cxcywh", None)
        if relative is None or FAULT in annotation:
            continue
        if any(LARGEST_SHARE < abs(number) < math.inf for number in relative):
            why = f"{relative!r}; expected centre, width and height in [0, 1], not pixels"
            annotation[FAULT] = ["boxes that are not fractions of the image", why]
        else:
            (cx, cy, w, h), (width, height) = relative, size_of[annotation["image_id"]]
            annotation["bbox"] = [(cx - w / 2) * width, (cy - h / 2) * height, w * width, h * height]
    return content


def _size(path: str) -> tuple[int, int]:
    try:
        header = read_header(path)
    except DataError:
        return 1, 1
    return header.height, header.width


def around_corners(x0: float, y0: float, x1: float, y1: float, angle: float) -> list[float]:
    """The box around a rectangle, given by opposite corners and turned by an angle, in radians, about its middle."""
    if not angle:
        return [min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0)]
    return around_rotated((x0 + x1) / 2, (y0 + y1) / 2, abs(x1 - x0), abs(y1 - y0), angle)


def around_rotated(cx: float, cy: float, w: float, h: float, angle: float) -> list[float]:
    """The box around a rectangle that is turned by an angle, in radians, about its middle."""
    sine, cosine = abs(math.sin(angle)), abs(math.cos(angle))
    width, height = w * cosine + h * sine, w * sine + h * cosine
    return [cx - width / 2, cy - height / 2, width, height]


def around_ellipse(cx: float, cy: float, rx: float, ry: float, angle: float) -> list[float]:
    """The box around an ellipse, given by its semi-axes and turned by an angle, in radians, about its middle."""
    sine, cosine = math.sin(angle), math.cos(angle)
    half_width, half_height = math.hypot(rx * cosine, ry * sine), math.hypot(rx * sine, ry * cosine)
    return [cx - half_width, cy - half_height, 2 * half_width, 2 * half_height]


def around_points(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """The box around points."""
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
