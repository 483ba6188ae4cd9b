# SPDX-License-Identifier: Apache-2.0
"""Read CVAT's own XML into COCO's sections. Source: CVAT's manual, "CVAT for image"."""

import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpvt_det.common.errors import DataError
from cpvt_det.data.formats.format import Sections, around_corners, around_ellipse, around_points, make_sections
from cpvt_det.data.listing import Listing
from cpvt_det.data.names import Names
from cpvt_det.data.text import composed
from cpvt_det.data.validation.rules import FAULT

SHAPES: dict[str, tuple[Sequence[str], Callable[[Sequence[float], float], list[float]]]] = {
    "box": (("xtl", "ytl", "xbr", "ybr"), lambda numbers, angle: around_corners(*numbers, angle)),
    "polygon": (("points",), lambda numbers, angle: around_points(numbers[::2], numbers[1::2])),
    "ellipse": (("cx", "cy", "rx", "ry"), lambda numbers, angle: around_ellipse(*numbers, angle)),
    "mask": (("left", "top", "width", "height"), lambda numbers, angle: list(numbers)),
}
"""CVAT shape -> the attributes that hold its numbers, and a function that turns these and an angle in radians into COCO's box."""


def read_cvat_files(listing: Listing, trees: Mapping[Path, ET.Element]) -> Sections:
    """Read CVAT's own XML ("CVAT for images"): each shape in :data:`SHAPES` becomes the upright box around it, in pixels.

    Args:
        listing: files of the folder.
        trees: XML file -> its content.

    Raises:
        DataError: CVAT's XML for a video, which has tracks instead of images.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    labels: dict[str, None] = {}
    names = Names(listing.images, listing)
    for path, tree in trees.items():
        if tree.find("track") is not None:
            raise DataError(f'{path} describes a video ("CVAT for video"): export the task as "CVAT for images" or as COCO')
        labels |= {composed(label.text.strip()): None for label in tree.iterfind("meta//label/name") if label.text}
        for image in tree.iterfind("image"):
            images.append(names.entry(image.get("name", ""), path))
            for number, shape in enumerate((shape for tag in SHAPES for shape in image.iterfind(tag)), start=1):
                name = composed(shape.get("label", "").strip())
                found = _box(shape) if name else {FAULT: ["shapes without a label", f"<{shape.tag}> has no label"]}
                source = f"{path}, image {image.get('name')!r}, shape {number}"
                annotations.append({"image_id": len(images), "category_id": name, "source": source, **found})
    labels |= {annotation["category_id"]: None for annotation in annotations if FAULT not in annotation}
    ids = {name: number for number, name in enumerate(labels, start=1)}
    for annotation in annotations:
        annotation["category_id"] = ids.get(annotation["category_id"], -1)
    return make_sections(images, annotations, dict(enumerate(labels, start=1)), names.notes)


def skipped_shapes(trees: Mapping[Path, ET.Element]) -> list[str]:
    """One line of text for each kind of shape in CVAT's XML that has no box: points, polylines, skeletons."""
    shapes = (shape for tree in trees.values() for image in tree.iterfind("image") for shape in image if shape.get("label"))
    counts = Counter(shape.tag for shape in shapes if shape.tag not in (*SHAPES, "tag"))  # a tag labels the whole image
    return [f"not read: {number} annotations of the kind {tag!r}, which have no box" for tag, number in sorted(counts.items())]


def _box(shape: ET.Element) -> dict[str, Any]:
    """The COCO annotation of a shape, with its box or its fault."""
    attributes, box_around = SHAPES[shape.tag]
    words = [word for name in attributes for word in re.split("[,;]", shape.get(name, ""))]
    try:
        box = box_around([float(word) for word in words], math.radians(float(shape.get("rotation", 0.0))))
        if all(map(math.isfinite, box)):
            return {"bbox": box}
    except (ValueError, TypeError):
        pass
    said = " ".join(f'{name}="{shape.get(name, "")}"' for name in attributes)[:100]
    return {FAULT: ["shapes whose numbers cannot be read", f"<{shape.tag} {said}>"]}
