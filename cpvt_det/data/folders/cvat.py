# SPDX-License-Identifier: Apache-2.0
"""CVAT's own XML -> COCO's sections. Source: CVAT's manual, "CVAT for image"."""

import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpvt_det.data.folders.listing import Listing
from cpvt_det.data.folders.loose import image_named
from cpvt_det.data.formats.registry import Sections
from cpvt_det.errors import DataError


def read_cvat_files(listing: Listing, trees: Mapping[Path, ET.Element]) -> Sections:
    """CVAT's own XML ("CVAT for images"): of each shape in :data:`CVAT_SHAPES` the upright box around it, in pixels.

    Args:
        listing: the files of the folder.
        trees: file -> its content.

    Raises:
        DataError: CVAT's XML of a video, which has tracks in place of images.
    """
    content: Sections = {"images": [], "annotations": [], "categories": []}
    labels: list[str] = []
    for path, tree in trees.items():
        if tree.find("track") is not None:
            raise DataError(f'{path} is of a video ("CVAT for video"): export the task as "CVAT for images" or as COCO')
        labels += [label.text.strip() for label in tree.iterfind("meta//label/name") if label.text]
        for image in tree.iterfind("image"):
            _add_cvat_image(content, image, path, str(image_named(listing, path, image.get("name", ""))))
    names = list(dict.fromkeys([*labels, *(annotation["category_id"] for annotation in content["annotations"])]))
    for annotation in content["annotations"]:
        annotation["category_id"] = names.index(annotation["category_id"]) + 1
    content["categories"] = [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
    return content


def skipped_shapes(trees: Mapping[Path, ET.Element]) -> list[str]:
    """A line for each kind of shape in CVAT's XML that has no box: points, polylines, skeletons."""
    shapes = (shape for tree in trees.values() for image in tree.iterfind("image") for shape in image if shape.get("label"))
    counts = Counter(shape.tag for shape in shapes if shape.tag not in (*CVAT_SHAPES, "tag"))  # a tag is of the whole image
    return [f"not read: {number} annotations of the kind {tag!r}, which have no box" for tag, number in sorted(counts.items())]


def _add_cvat_image(content: Sections, element: ET.Element, path: Path, file_name: str) -> None:
    image_id = len(content["images"]) + 1
    content["images"].append({"id": image_id, "file_name": file_name})
    shapes = [shape for tag in CVAT_SHAPES for shape in element.iterfind(tag)]
    for number, shape in enumerate(shapes, start=1):
        name, source = shape.get("label", "").strip(), f"{path}, image {element.get('name')!r}, shape {number}"
        annotation = {"id": len(content["annotations"]) + 1, "image_id": image_id, "category_id": name, "source": source}
        content["annotations"].append(annotation | {"bbox": _cvat_box(shape)})


def _cvat_box(shape: ET.Element) -> Any:
    """COCO's box; the words of the file where one is not a number."""
    attributes, box_around = CVAT_SHAPES[shape.tag]
    words = [word for name in attributes for word in re.split("[,;]", shape.get(name, ""))]
    try:
        return box_around([float(word) for word in words], math.radians(float(shape.get("rotation", 0.0))))
    except ValueError:
        return words


def _around_rectangle(corners: Sequence[float], angle: float) -> list[float]:
    """Of opposite corners and an angle about the middle, the upright box."""
    (left, top, right, bottom), sine, cosine = corners, abs(math.sin(angle)), abs(math.cos(angle))
    if not angle:
        return [min(left, right), min(top, bottom), abs(right - left), abs(bottom - top)]
    width, height = abs(right - left), abs(bottom - top)
    return _around_middle((left + right) / 2, (top + bottom) / 2, width * cosine + height * sine, width * sine + height * cosine)


def _around_ellipse(values: Sequence[float], angle: float) -> list[float]:
    """Of a middle, half axes and an angle, the upright box."""
    (x, y, across, down), sine, cosine = values, math.sin(angle), math.cos(angle)
    return _around_middle(x, y, 2 * math.hypot(across * cosine, down * sine), 2 * math.hypot(across * sine, down * cosine))


def _around_middle(x: float, y: float, width: float, height: float) -> list[float]:
    return [x - width / 2, y - height / 2, width, height]


def _around_points(values: Sequence[float], angle: float) -> list[float]:
    xs, ys = values[::2], values[1::2]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


CVAT_SHAPES: dict[str, tuple[Sequence[str], Callable[[Sequence[float], float], list[float]]]] = {
    "box": (("xtl", "ytl", "xbr", "ybr"), _around_rectangle),
    "polygon": (("points",), _around_points),
    "ellipse": (("cx", "cy", "rx", "ry"), _around_ellipse),
    "mask": (("left", "top", "width", "height"), lambda values, angle: list(values)),
}
"""Shape of CVAT that is read -> the attributes with its numbers, and what makes COCO's box of these and of an angle in radians."""
