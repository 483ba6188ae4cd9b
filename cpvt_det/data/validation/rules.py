# SPDX-License-Identifier: Apache-2.0
"""The rules for entries of COCO JSON: which entries are faulty, and which part of a box counts.

A fault is a pair of a heading and a detail. Training and evaluation leave out the same boxes: boxes without area, and boxes
outside their image. Both clip boxes that are partly outside.
"""

from collections.abc import Container
from typing import Any

import numpy as np

Fault = tuple[str, str]
"""(heading of this kind of fault, in the plural; detail of this entry)."""
Id = int
Size = tuple[float, float]
"""(height, width) in pixels."""

FAULT = "fault of cpvt_det"
"""Key by which a reader marks an entry as faulty; the value is a heading and a detail in the format's own terms."""
WITHOUT_AREA = "boxes without area, left out"
OUTSIDE = "boxes outside the image, left out"
CLIPPED = "boxes partly outside the image, clipped"
THIN = "boxes less than a pixel wide or high, kept"
LARGEST_ID = 2**63 - 1
LARGEST_NUMBER = 1e15
LARGEST_AREA = 1e10  # square pixels; COCO's evaluation ignores larger objects, and those of negative area
LARGEST_SIDE = 10**6  # pixels
LARGEST_SHARE = 2.0
"""Largest number in a relative box, as a multiple of the image's width or height; a box may reach beyond the image."""
SMALL = 0.1  # pixels; a smaller side may become 0 in the float32 of the records


def category_fault(category: Any) -> Fault | None:
    """The fault of an entry of ``categories``, if any."""
    fault = _entry_fault(category, ("id", "name"))
    if fault:
        return fault
    if not isinstance(category["name"], (str, int, float)):
        return "category names that are not text", f"category {category['id']} has name {category['name']!r}"
    return None


def image_fault(image: Any) -> Fault | None:
    """The fault of an entry of ``images``, if any."""
    if type(image) is dict and FAULT in image:
        return tuple(image[FAULT])
    if fault := _entry_fault(image, ("id", "file_name", "height", "width")):
        return fault
    where = f"image {image['id']}"
    if not isinstance(image["file_name"], str):
        return "file names that are not text", f"{where} has file_name {image['file_name']!r}"
    if not all(is_number(side) and side % 1 == 0 and 1 <= side <= LARGEST_SIDE for side in (image["height"], image["width"])):
        return "images of an impossible size", f"{where} ({image['file_name']}) has size {image['height']!r} x {image['width']!r}"
    return None


def annotation_fault(annotation: Any, images: Container[Id], categories: Container[Id]) -> Fault | None:
    """The fault of an entry of ``annotations``, if any.

    Args:
        annotation: the entry.
        images: ids of the images.
        categories: ids of the categories.
    """
    if type(annotation) is not dict:
        return "annotations that are not objects", repr(annotation)[:80]
    if FAULT in annotation:
        return tuple(annotation[FAULT])
    for key, known, section in (("image_id", images, "images"), ("category_id", categories, "categories")):
        value = annotation.get(key)
        if type(value) is not int or value not in known:
            why = f"which is not an id in {section}"
            text = "; it is text, not a number" if isinstance(value, str) else ""
            return f"annotations of unknown {section}", f"{key} {value!r}, {why}{text}"
    box = annotation.get("bbox")
    if type(box) is not list or len(box) != 4 or not all(type(side) in (int, float) for side in box):
        return "boxes that are not four numbers", f"bbox {box!r}; expected [x, y, width, height] in pixels"
    if not all(map(is_number, box)):
        return "boxes that are not finite", f"bbox {box!r}"
    for key in ("area", "iscrowd"):
        value = annotation.get(key)
        if value is not None and not is_number(value):
            return f"annotations whose {key} is not a number", f"{key} {value!r}"
    area = annotation.get("area")
    if area is not None and not 0 <= area <= LARGEST_AREA:
        return "annotations whose area is out of range", f"area {area!r}; expected 0 to 1e10 square pixels"
    if annotation.get("iscrowd") not in (None, 0, 1):
        return "annotations whose iscrowd is neither 0 nor 1", f"iscrowd {annotation['iscrowd']!r}"
    return None


def clip_box(box: list[float], size: Size) -> tuple[list[float] | None, str | None]:
    """The part of a box that counts.

    Args:
        box: xywh in pixels, finite.
        size: (height, width) of the image in pixels.

    Returns:
        Two values. The first is the box, its part inside the image, or ``None``. The second is the reason, ``WITHOUT_AREA``,
        ``OUTSIDE`` or ``CLIPPED``; it is ``None`` if the box is unchanged.
    """
    x, y, w, h = box
    if w <= 0 or h <= 0:
        return None, WITHOUT_AREA
    height, width = size
    if x >= 0 and y >= 0 and x + w <= width and y + h <= height:
        return (None, WITHOUT_AREA) if _vanishes(x, y, x + w, y + h) else (box, None)
    x0, y0, x1, y1 = max(x, 0.0), max(y, 0.0), min(x + w, width), min(y + h, height)
    is_outside = x1 <= x0 or y1 <= y0 or _vanishes(x0, y0, x1, y1)
    return (None, OUTSIDE) if is_outside else ([x0, y0, x1 - x0, y1 - y0], CLIPPED)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number of plausible size."""
    return isinstance(value, (int, float)) and -LARGEST_NUMBER < value < LARGEST_NUMBER


def _vanishes(x0: float, y0: float, x1: float, y1: float) -> bool:
    """Whether rounding to float32 leaves no area."""
    if x1 - x0 > SMALL and y1 - y0 > SMALL:
        return False
    corners = np.array((x0, y0, x1, y1), dtype=np.float32)
    return bool((corners[2:] <= corners[:2]).any())


def _entry_fault(entry: Any, keys: tuple[str, ...]) -> Fault | None:
    if type(entry) is not dict:
        return "entries that are not objects", repr(entry)[:80]
    missing = [key for key in keys if key not in entry]
    if missing:
        return "entries without a field", f"no {missing[0]!r}"
    if type(entry["id"]) is not int or abs(entry["id"]) > LARGEST_ID:  # evaluators accept no other ids
        return "ids that are not whole numbers", f"id {entry['id']!r}"
    return None
