# SPDX-License-Identifier: Apache-2.0
"""Turn the entries of COCO's ``images`` and ``annotations`` into a table, and check each by ``data/validation/rules.py``.

Nearly all boxes are plain: nothing needs to be reported about them, except perhaps a missing area or iscrowd. A single expression
recognises plain boxes, and only their numbers are stored. The full rules are applied only to the other boxes.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from cpvt_det.data.formats.format import around_rotated
from cpvt_det.data.records import BOX, IMAGE, Table
from cpvt_det.data.validation.issues import Issues
from cpvt_det.data.validation.rules import FAULT, LARGEST_AREA, LARGEST_ID, THIN, Id, annotation_fault, clip_box, image_fault

KEYS = ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "source", "attributes", FAULT)
NUMBERS = frozenset((int, float))
FACTOR = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: an odd number with well-mixed bits
ROW = np.dtype(
    [("number", "i8"), ("image", "i4"), ("category", "i8"), ("flags", "i1"), ("id", "i8"), ("xywh", "f8", 4), ("area", "f8")]
)
"""An accepted box: its position in the file, the index of its image, the id of its category, its flags and its id."""
PACKED = struct.Struct("=qiqbq5d")
CROWD, NO_AREA, NO_CROWD, NO_ID = 1, 2, 4, 8  # flags of a box
FILLED = "annotations without area or iscrowd, filled in"
TWICE = "boxes that repeat another one of the same image and class, left out"


class Entries:
    """The valid entries of a COCO JSON's sections. If annotations precede the images in the file, the annotations are read a
    second time.

    Images that share an id are left out, because a box with that id could belong to any of them.

    Args:
        read: function that takes section names and returns all their entries, each as a pair of section name and entry.
        issues: collection to which all issues found are added.

    Attributes:
        categories: all entries of ``categories``.
        num_images: number of entries of ``images``, with or without faults.
    """

    def __init__(self, read: Callable[[Collection[str]], Iterable[tuple[str, Any]]], issues: Issues):
        self.issues = issues
        self.categories: list[Any] = []
        self.num_images = 0
        self._good: list[tuple[Id, str, int, int]] = []
        self._faulty: set[Id] = set()
        self._number = 0  # of annotations
        self._taken = bytearray()  # of ``ROW``
        self._others: list[tuple[int, Any]] = []
        too_early = False
        for section, entry in read(("categories", "images", "annotations")):
            if section == "categories":
                self.categories.append(entry)
            elif section == "images":
                self._add_image(entry)
            elif self.num_images:
                self._add_annotation(entry)
            else:
                too_early = True
        for _, entry in read(("annotations",)) if too_early else ():
            self._add_annotation(entry)

    def _add_image(self, entry: Any) -> None:
        if (fault := image_fault(entry)) is None:
            self._good.append((entry["id"], entry["file_name"], int(entry["height"]), int(entry["width"])))
        else:
            has_own = type(entry) is dict and FAULT in entry
            self.issues.add_fault(fault[0], fault[1] if has_own else f"images[{self.num_images}]: {fault[1]}")
            if type(entry) is dict and type(entry.get("id")) is int:
                self._faulty.add(entry["id"])
        self.num_images += 1

    @cached_property
    def kept(self) -> list[tuple[Id, str, int, int]]:
        """Id, file name, height and width of each valid image. The list is complete once all images have been added."""
        good = self._good
        for at, heading in enumerate(("image ids that are not unique", "images that are listed more than once")):
            if len({image[at] for image in good}) < len(good):
                counts = Counter(image[at] for image in good)
                for image_id, name, *_ in (image for image in good if counts[image[at]] > 1):
                    self.issues.add_fault(heading, f"image {image_id} ({name})")
                good = [image for image in good if counts[image[at]] == 1]
        return good

    @cached_property
    def index_of(self) -> dict[Id, int]:
        """Index of each image, by its id."""
        return {image_id: index for index, (image_id, *_) in enumerate(self.kept)}

    @cached_property
    def left_out(self) -> set[Id]:
        """Ids of images with faults."""
        return (self._faulty | {image_id for image_id, *_ in self._good}) - self.index_of.keys()

    def _add_annotation(self, entry: Any) -> None:
        try:
            box, area, crowd, own = entry["bbox"], entry.get("area"), entry.get("iscrowd"), entry.get("id")
            image_id, category_id, (x, y, w, h) = entry["image_id"], entry["category_id"], box
            flags = (area is None and NO_AREA) | (crowd is None and NO_CROWD) | (own is None and NO_ID)
            if flags:
                area, crowd, own = (0 if value is None else value for value in (area, crowd, own))
            is_plain = (
                type(image_id) is type(category_id) is type(own) is type(crowd) is int
                and type(box) is list
                and "source" not in entry
                and not _rotation(entry)
                and {type(x), type(y), type(w), type(h), type(area)} <= NUMBERS
                and (x >= 0 and y >= 0 and w >= 1 and h >= 1 and 0 <= area <= LARGEST_AREA)
                and (0 <= crowd <= 1 and -LARGEST_ID <= own <= LARGEST_ID and -LARGEST_ID <= category_id <= LARGEST_ID)
            )
            if is_plain:
                image = self.index_of[image_id]
                _, _, height, width = self.kept[image]
                is_plain = x + w <= width and y + h <= height
        except (LookupError, TypeError, ValueError, OverflowError):
            is_plain = False
        if is_plain:
            area = w * h if flags & NO_AREA else area
            self._taken += PACKED.pack(self._number, image, category_id, flags | crowd, own, x, y, w, h, area)
        else:
            self._others.append((self._number, {key: entry[key] for key in KEYS if key in entry} if type(entry) is dict else entry))
        self._number += 1

    def table(self, label_of: dict[Id, int]) -> Table:
        """All valid images and boxes.

        Args:
            label_of: label of each category id.
        """
        is_good = self._ask_rules(label_of)
        taken = np.frombuffer(self._taken, ROW)
        rows = np.flatnonzero(is_good)
        rows = self._without_copies(rows[np.lexsort((taken["number"][rows], taken["image"][rows]))], taken)
        boxes, images = np.empty(len(rows), BOX), np.zeros(len(self.kept), IMAGE)
        for side in range(4):  # one side at a time takes less memory
            boxes["xywh"][:, side] = taken["xywh"][rows, side]
        boxes["area"], boxes["number"] = taken["area"][rows], taken["number"][rows]
        boxes["label"] = _labels(taken["category"][rows], label_of)[1]
        boxes["crowd"] = taken["flags"][rows] & CROWD
        ids, names, images["height"], images["width"] = zip(*self.kept, strict=True) if len(images) else ((),) * 4
        names = [name.encode("utf-8", "surrogatepass") for name in names]
        images["id"], images["name_size"] = ids, list(map(len, names))
        images["name"] = np.cumsum(images["name_size"], dtype=np.int64) - images["name_size"]
        images["count"] = np.bincount(taken["image"][rows], minlength=len(images))
        images["to_learn"] = np.bincount(taken["image"][rows][~boxes["crowd"]], minlength=len(images))
        images["first"] = np.cumsum(images["count"], dtype=np.int64) - images["count"]
        return Table(images, np.frombuffer(b"".join(names), dtype=np.uint8), boxes)

    def _without_copies(self, rows: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """Rows without duplicates. If an image has several equal boxes of one class, only one of them is kept, because a detector
        could find only one.
        """
        hashes = np.zeros(len(rows), dtype=np.uint64)
        for column in (taken["image"], taken["category"], *taken["xywh"].view(np.int64).T):
            hashes = hashes * np.uint64(FACTOR) + column[rows].astype(np.uint64)
        ordered = np.sort(hashes)
        alike = np.flatnonzero(np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]]))
        seen, copies = set(), []
        for at in alike.tolist():
            row = taken[rows[at : at + 1]]
            key = *row[["image", "category"]].item(), row["flags"].item() & CROWD, row["xywh"].tobytes()
            if key in seen:
                copies.append(at)
            seen.add(key)
        others = dict(self._others) if copies else {}
        for number, entry in self._entries(taken[rows[copies]]) if copies else ():
            self.issues.add_info(TWICE, _where(others.get(number, entry), number))
        return np.delete(rows, copies)

    def _shares_id(self, taken: np.ndarray) -> np.ndarray:
        """(n,) bool: whether each plain annotation shares its id with another annotation."""
        others = [entry.get("id") for _, entry in self._others if type(entry) is dict]
        others = [one for one in others if type(one) is int and -LARGEST_ID <= one <= LARGEST_ID]
        has_id = taken["flags"] & NO_ID == 0
        ids = np.sort(taken["id"][has_id])
        several = np.concatenate([ids[1:][ids[1:] == ids[:-1]], np.array(others, dtype=np.int64)])
        return has_id & np.isin(taken["id"], several)

    def _ask_rules(self, label_of: dict[Id, int]) -> np.ndarray:
        """Apply all rules to the annotations that are not plain, in the order of the file, and accept the valid ones.

        Returns:
            (n,) bool: whether each accepted row is valid.
        """
        taken = np.frombuffer(self._taken, ROW)
        is_plain = _labels(taken["category"], label_of)[0] & ~self._shares_id(taken)
        filled = np.flatnonzero(is_plain & (taken["flags"] & (NO_AREA | NO_CROWD) > 0))
        is_plain[filled[: self.issues.examples]] = False  # these become examples; the others are only counted
        found = [*self._others, *self._entries(taken[~is_plain])]
        del taken  # a bytearray with a view cannot grow
        seen: set[int | str] = set()
        for number, entry in sorted(found, key=lambda one: one[0]):
            own = entry.get("id") if type(entry) is dict else None
            fault = annotation_fault(entry, self.index_of, label_of)
            if type(own) in (int, str):
                if own in seen:
                    fault = "annotation ids that are not unique", "an earlier annotation has the same id"
                seen.add(own)
            if not fault:
                self._add_clean(entry, number)
            elif type(entry) is dict and type(entry.get("image_id")) is int and entry["image_id"] in self.left_out:
                self.issues.add_info("boxes of images that have faults themselves", _where(entry, number))
            else:
                self.issues.add_fault(fault[0], f"{_where(entry, number)}: {fault[1]}")
        if counted := np.count_nonzero(is_plain[filled]):
            self.issues.count_info(FILLED, counted)
        return np.pad(is_plain, (0, len(self._taken) // PACKED.size - len(is_plain)), constant_values=True)

    def _entries(self, taken: np.ndarray) -> Iterator[tuple[int, dict]]:
        """Number and entry of each row."""
        image_ids = [image_id for image_id, *_ in self.kept]
        for number, image, category_id, flags, own, box, area in taken.tolist():
            entry = {"image_id": image_ids[image], "category_id": category_id, "bbox": box.tolist()}
            entry |= {} if flags & NO_ID else {"id": own}
            entry |= {} if flags & NO_AREA else {"area": area}
            yield number, entry | ({} if flags & NO_CROWD else {"iscrowd": flags & CROWD})

    def _add_clean(self, entry: dict, number: int) -> None:
        """Accept an annotation without faults, unless its box has no area or is outside the image."""
        image = self.index_of[entry["image_id"]]
        size = tuple(map(float, self.kept[image][2:]))
        x, y, w, h = box = entry["bbox"]
        if angle := _rotation(entry):
            box = around_rotated(x + w / 2, y + h / 2, w, h, angle)
            self.issues.add_info("rectangles with attributes.rotation, replaced by the boxes around them", _where(entry, number))
        box, why = clip_box(box, size)
        if why is not None:
            self.issues.add_info(why, f"{_where(entry, number)}: bbox {entry['bbox']}")
        if box is None:
            return
        if min(box[2:]) < 1 and max(size) > 1:  # a file that cannot be read counts as 1 x 1
            self.issues.add_info(THIN, f"{_where(entry, number)}: bbox {entry['bbox']}")
        area, crowd = entry.get("area"), entry.get("iscrowd")
        if (area is None or crowd is None) and "source" not in entry:  # other formats have neither of them
            self.issues.add_info(FILLED, _where(entry, number))
        box_area = box[2] * box[3]
        area = box_area if area is None else float(area) if why is None else min(area, box_area)
        self._taken += PACKED.pack(number, image, entry["category_id"], int(crowd or 0), 0, *box, area)


def _rotation(entry: dict) -> float:
    """The angle, in radians, by which a rectangle is turned whose ``bbox`` is that before the turn, as CVAT writes it; else 0."""
    attributes = entry.get("attributes")
    angle = attributes.get("rotation") if type(attributes) is dict else 0.0
    return math.radians(angle) if type(angle) in NUMBERS and -360 < angle < 360 else 0.0


def _labels(category_ids: np.ndarray, label_of: dict[Id, int]) -> tuple[np.ndarray, np.ndarray]:
    """(n,) bool: whether each category is known; (n,) int32: its label, or 0 if it is unknown."""
    if not len(label_of):
        return np.zeros(len(category_ids), bool), np.zeros(len(category_ids), np.int32)
    ids = np.array(sorted(label_of), dtype=np.int64)
    place = np.searchsorted(ids, category_ids).clip(max=len(ids) - 1)
    known = ids[place] == category_ids
    return known, np.where(known, np.array([label_of[one] for one in ids.tolist()], dtype=np.int32)[place], 0).astype(np.int32)


def _where(entry: Any, number: int) -> str:
    if type(entry) is not dict:
        return f"annotations[{number}]"
    if "source" in entry:
        return entry["source"]
    return f"annotations[{number}] (id {entry.get('id')!r}, image {entry.get('image_id')!r})"
