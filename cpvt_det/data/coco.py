# SPDX-License-Identifier: Apache-2.0
"""COCO JSON -> records of images with boxes that can be learned from, and the ground truth that evaluation compares with.

The start of the road of one image; ``data/mapper.py`` comes next. Training and evaluation leave out the same boxes: those without
area or outside their image. Boxes partly outside are clipped in both.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.errors import DataError


@dataclass(frozen=True)
class Classes:
    """What the contiguous labels 0..K-1 mean.

    Attributes:
        ids: the category id of each label in the data, in rising order.
        names: the category name of each label.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class ImageRecord:
    """One image of a data set and its objects to learn.

    Attributes:
        file_name: path of the image.
        image_id: as in the data.
        height, width: as the JSON says.
        boxes_xyxy: (G, 4) float32 array, in pixels, inside the image; no crowds.
        labels: (G,) int64 array in [0, K).
    """

    file_name: str
    image_id: int
    height: int
    width: int
    boxes_xyxy: np.ndarray
    labels: np.ndarray


@dataclass
class CocoDataset:
    """A data set in memory.

    Attributes:
        name: as registered.
        classes: ids and names.
        records: one for each image, images without objects too.
        ground_truth: a COCO dict of the boxes that count, crowds included, with ``area`` and ``iscrowd`` filled in.
        left_out: reason -> number of annotations not used, or used after clipping.
    """

    name: str
    classes: Classes
    records: list[ImageRecord]
    ground_truth: dict[str, Any]
    left_out: Counter = field(default_factory=Counter)

    def describe(self) -> str:
        """A line for the log."""
        boxes = sum(len(record.labels) for record in self.records)
        empty = sum(not len(record.labels) for record in self.records)
        faults = "".join(f"; {count} {reason}" for reason, count in sorted(self.left_out.items()))
        images = f"{len(self.records)} images, {empty} of them without objects"
        return f"{self.name}: {images}, {boxes} boxes, {len(self.classes)} classes{faults}"


def load_coco(files: DatasetFiles) -> CocoDataset:
    """Read a data set.

    Args:
        files: its COCO JSON and its image folder; images are not opened.

    Raises:
        DataError: a missing file, JSON that is not COCO, an annotation that fits no image or category; naming the file and the
            image or annotation.
    """
    content = _read_json(files.annotations)
    if not isinstance(content.setdefault("annotations", []), list):
        raise DataError(f"{files.annotations} is not COCO: its 'annotations' are no list")
    categories = sorted(_section(content, "categories", files), key=lambda category: category["id"])
    classes = Classes(tuple(c["id"] for c in categories), tuple(str(c["name"]) for c in categories))
    for values, what in ((classes.ids, "ids"), (classes.names, "names")):
        _require_unique(values, f"category {what}", files)
    label_of = {category_id: label for label, category_id in enumerate(classes.ids)}
    images = _section(content, "images", files)
    _require_unique([image["id"] for image in images], "image ids", files)
    left_out: Counter = Counter()
    kept: dict[Any, list[dict]] = {image["id"]: [] for image in images}
    sizes = {image["id"]: (int(image["height"]), int(image["width"])) for image in images}
    for number, annotation in enumerate(content["annotations"]):
        _check_annotation(annotation, number, kept, label_of, files)
        clean = _clean(annotation, sizes[annotation["image_id"]], left_out)
        if clean is not None:
            kept[clean["image_id"]].append({**clean, "id": number + 1})  # 0 would count as unmatched in COCO's evaluation
    records = [_record(image, kept[image["id"]], label_of, files.image_root) for image in images]
    truth = {"images": images, "categories": categories, "annotations": [a for group in kept.values() for a in group]}
    return CocoDataset(files.name, classes, records, truth, left_out)


def require_same_classes(first: Classes, second: Classes, what: str) -> None:
    """Refuse class lists that differ in names or in order; ids may differ.

    Raises:
        DataError: with the first differences.
    """
    if first.names == second.names:
        return
    only_first = [name for name in first.names if name not in second.names]
    only_second = [name for name in second.names if name not in first.names]
    difference = (
        f"only in the first: {only_first[:5]}, only in the second: {only_second[:5]}" if only_first or only_second else "order"
    )
    raise DataError(f"{what} have different classes ({len(first)} and {len(second)}; {difference})")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        hint = "DATASETS.REGISTER, or DETECTRON2_DATASETS for COCO itself, says where they are"
        raise DataError(f"cannot read annotations {path}: {error.strerror}; {hint}") from error
    except ValueError as error:  # bad JSON and bad UTF-8
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} is not COCO: expected an object with images, annotations, categories, got a {type(content).__name__}"
        )
    return content


_FIELDS = {"categories": ("id", "name"), "images": ("id", "file_name", "height", "width")}


def _section(content: dict[str, Any], name: str, files: DatasetFiles) -> list[dict]:
    """A list of objects that have the fields we read."""
    section = content.get(name)
    if not isinstance(section, list) or not section:
        raise DataError(f"{files.annotations} is not COCO: it has no {name!r}")
    for number, entry in enumerate(section):
        missing = [key for key in _FIELDS[name] if not isinstance(entry, dict) or key not in entry]
        if missing:
            raise DataError(f"{files.annotations}: {name}[{number}] has no {missing[0]!r}")
        if type(entry["id"]) is not int:  # evaluation takes no other
            raise DataError(f"{files.annotations}: {name}[{number}] has id {entry['id']!r}; expected a whole number")
    if name == "images":
        for entry in section:
            if not isinstance(entry["file_name"], str):
                raise DataError(f"{files.annotations}: image {entry['id']} has file_name {entry['file_name']!r}; expected text")
            if not all(_is_number(entry[side]) and entry[side] >= 1 for side in ("height", "width")):
                raise DataError(f"{files.annotations}: image {entry['id']} has size {entry['height']} x {entry['width']}")
    return section


def _require_unique(values: Sequence, what: str, files: DatasetFiles) -> None:
    double = [value for value, count in Counter(values).items() if count > 1]
    if double:
        raise DataError(f"{files.annotations}: {what} are not unique: {double[:5]}")


def _check_annotation(annotation: Any, number: int, images: dict, labels: dict, files: DatasetFiles) -> None:
    where = f"{files.annotations}: annotations[{number}]"
    if not isinstance(annotation, dict):
        raise DataError(f"{where} is not an object")
    where += f" (id {annotation.get('id')})"
    for key, known, section in (("image_id", images, "images"), ("category_id", labels, "categories")):
        value = annotation.get(key)
        if not isinstance(value, (int, str)) or value not in known:
            raise DataError(f"{where} has {key} {value!r}, which is not the id of one of the {section}")
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(side, (int, float)) for side in box):
        raise DataError(f"{where} has bbox {box!r}; expected [x, y, width, height] in pixels")
    if not all(math.isfinite(side) for side in box):
        raise DataError(f"{where} has a bbox that is not finite: {box}")
    for key in ("area", "iscrowd"):
        value = annotation.get(key)
        if value is not None and not _is_number(value):
            raise DataError(f"{where} has {key} {value!r}; expected a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _clean(annotation: dict, size: tuple[int, int], left_out: Counter) -> dict | None:
    """The annotation as both training and evaluation take it, or ``None``."""
    height, width = size
    x, y, w, h = annotation["bbox"]
    if w <= 0 or h <= 0:
        left_out["boxes without area left out"] += 1
        return None
    x0, y0, x1, y1 = max(x, 0.0), max(y, 0.0), min(x + w, float(width)), min(y + h, float(height))
    if x1 <= x0 or y1 <= y0:
        left_out["boxes outside the image left out"] += 1
        return None
    area = annotation.get("area")
    area = w * h if area is None else float(area)
    box = [x, y, w, h]
    if x < 0 or y < 0 or x + w > width or y + h > height:
        left_out["boxes partly outside the image clipped"] += 1
        box = [x0, y0, x1 - x0, y1 - y0]
        area = min(area, box[2] * box[3])
    keys = {"image_id": annotation["image_id"], "category_id": annotation["category_id"]}
    return {**keys, "bbox": box, "area": area, "iscrowd": int(annotation.get("iscrowd") or 0)}


def _record(image: dict, annotations: list[dict], label_of: dict, root: Path) -> ImageRecord:
    objects = [annotation for annotation in annotations if not annotation["iscrowd"]]
    boxes = np.array([annotation["bbox"] for annotation in objects], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]  # xywh -> xyxy
    labels = np.array([label_of[annotation["category_id"]] for annotation in objects], dtype=np.int64)
    path = str(root / image["file_name"])
    return ImageRecord(path, image["id"], int(image["height"]), int(image["width"]), boxes.astype(np.float32), labels)
