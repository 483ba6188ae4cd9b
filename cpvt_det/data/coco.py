# SPDX-License-Identifier: Apache-2.0
"""COCO JSON -> records of images with the boxes to learn, and the ground truth for evaluation.

The start of the way of one image; ``data/mapper.py`` is next. Other formats are read by ``data/formats/``. Boxes that are left
out of the records are also left out of the ground truth; ``data/validation/rules.py`` defines which ones.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.formats.reading import read_foreign
from cpvt_det.data.validation.issues import EXAMPLES, Issues, require_no_errors
from cpvt_det.data.validation.rules import THIN, Fault, Id, Size, annotation_fault, category_fault, clip_box, image_fault
from cpvt_det.errors import DataError
from cpvt_det.garbage import no_garbage_collection


@dataclass(frozen=True)
class Classes:
    """The classes of the contiguous labels 0..K-1.

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
        image_id: id of the image in the data.
        height, width: size of the image in pixels, according to the JSON.
        boxes_xyxy: (G, 4) float32 array, in pixels, inside the image; without crowds.
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
        name: registered name of the data set.
        classes: ids and names of the classes.
        records: one record per image, also for images without objects.
        ground_truth: a COCO dict of the boxes that count, crowds included, with ``area`` and ``iscrowd`` filled in.
        issues: issues of the file; images and boxes with faults are in neither ``records`` nor ``ground_truth``.
    """

    name: str
    classes: Classes
    records: list[ImageRecord]
    ground_truth: dict[str, Any]
    issues: Issues = field(default_factory=Issues)

    def describe(self) -> str:
        """A summary in one line, for the log."""
        boxes = sum(len(record.labels) for record in self.records)
        empty = sum(not len(record.labels) for record in self.records)
        found = "".join(f"; {heading}: {count}" for heading, count in sorted(self.issues.counts().items()))
        images = f"{len(self.records)} images, {empty} of them without objects"
        return f"{self.name}: {images}, {boxes} boxes, {len(self.classes)} classes{found}"

    def leave_out(self, image_ids: Container[Id]) -> None:
        """Remove images and their boxes from the records and from the ground truth."""
        truth = self.ground_truth
        self.records = [record for record in self.records if record.image_id not in image_ids]
        truth["images"] = [image for image in truth["images"] if image["id"] not in image_ids]
        truth["annotations"] = [box for box in truth["annotations"] if box["image_id"] not in image_ids]


def describe_records(records: Sequence[ImageRecord]) -> dict[str, Any]:
    """The number of images that a run is trained on, and a hash of them in their order that does not depend on file paths."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(f"{record.image_id} {record.height} {record.width}".encode())
        digest.update(record.boxes_xyxy.tobytes() + record.labels.tobytes())
    return {"images": len(records), "sha256": digest.hexdigest()}


def load_coco(files: DatasetFiles) -> CocoDataset:
    """Read a data set that has no faults.

    Args:
        files: files of the data set; for COCO JSON, the images are not opened.

    Raises:
        DataError: a file that is missing or of unknown format; images, annotations or categories with faults, all in one message.
    """
    dataset = read_coco(files)
    require_no_errors([dataset.issues], "error")
    return dataset


def read_coco(files: DatasetFiles, examples: float = EXAMPLES) -> CocoDataset:
    """Read a data set without the entries that have faults; these are in ``issues``.

    Args:
        files: files of the data set; for COCO JSON, the images are not opened.
        examples: largest number of examples kept of each kind of issue.

    Raises:
        DataError: a file that is missing or of unknown format.
    """
    with no_garbage_collection():
        content = read_json(files.annotations) if files.is_coco else read_foreign(files)
        issues = Issues(f"{files.name} ({files.annotations})", examples)
        categories = _read_categories(_section(content, "categories", files), issues)
        classes = Classes(tuple(c["id"] for c in categories), tuple(str(c["name"]) for c in categories))
        label_of = {category_id: label for label, category_id in enumerate(classes.ids)}
        images = _read_images(_section(content, "images", files), issues)
        kept = _read_annotations(content, images, label_of, issues)
        _require_pixels([annotation["bbox"] for group in kept.values() for annotation in group], issues)
        records = [_record(image, kept[image["id"]], label_of, files.image_root) for image in images.values()]
        annotations = [annotation for group in kept.values() for annotation in group]
        truth = {"images": list(images.values()), "categories": categories, "annotations": annotations}
    return CocoDataset(files.name, classes, records, truth, issues)


def require_same_classes(first: Classes, second: Classes, what: str) -> None:
    """Refuse class lists that differ in names or in order; ids may differ.

    Raises:
        DataError: lists that differ; the message contains the first differences.
    """
    if first.names == second.names:
        return
    only_first = [name for name in first.names if name not in second.names]
    only_second = [name for name in second.names if name not in first.names]
    difference = (
        f"only in the first: {only_first[:5]}, only in the second: {only_second[:5]}" if only_first or only_second else "order"
    )
    raise DataError(f"{what} have different classes ({len(first)} and {len(second)}; {difference})")


def read_json(path: Path) -> dict[str, Any]:
    """The object of a COCO JSON, which may lack annotations.

    Raises:
        DataError: a file that cannot be read, or that contains something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        hint = "set their path in DATASETS.REGISTER, or for COCO itself in DETECTRON2_DATASETS"
        raise DataError(f"cannot read annotations {path}: {error.strerror}; {hint}") from error
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a thousand nested lists
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} is not COCO: expected an object with images, annotations, categories, got a {type(content).__name__}"
        )
    if not isinstance(content.setdefault("annotations", []), list):
        raise DataError(f"{path} is not COCO: its 'annotations' are not a list")
    return content


def _section(content: dict[str, Any], name: str, files: DatasetFiles) -> list:
    section = content.get(name)
    if not isinstance(section, list) or not section:
        raise DataError(f"{files.annotations} is not COCO: it has no {name!r}")
    return section


def _read_categories(section: list, issues: Issues) -> list[dict]:
    """Categories without faults, by rising id. A fault here is an error: it would make the boxes of the category meaningless."""
    faults = ((number, category_fault(category)) for number, category in enumerate(section))
    faulty = {number: fault for number, fault in faults if fault}
    for number, (heading, detail) in faulty.items():
        issues.add_error(heading, f"categories[{number}]: {detail}")
    good = [category for number, category in enumerate(section) if number not in faulty]
    for heading, key in (("category ids that are not unique", "id"), ("category names that are not unique", "name")):
        for value in _double(str(category[key]) for category in good):
            issues.add_error(heading, f"{key} {value}")
    return sorted(good, key=lambda category: category["id"])


def _read_images(section: list, issues: Issues) -> dict[Id, dict]:
    """Images without faults, by id. Images that share an id are left out: its boxes could belong to any of them."""
    good: list[dict] = []
    for number, image in enumerate(section):
        fault = image_fault(image)
        if fault:
            issues.add_fault(fault[0], f"images[{number}]: {fault[1]}")
        else:
            good.append(image)
    double = _double(image["id"] for image in good)
    for image in good if double else ():
        if image["id"] in double:
            issues.add_fault("image ids that are not unique", f"image {image['id']} ({image['file_name']})")
    return {image["id"]: image for image in good if image["id"] not in double}


def _read_annotations(content: dict, images: dict[Id, dict], label_of: dict[Id, int], issues: Issues) -> dict[Id, list[dict]]:
    """Annotations that count, in the form for training and evaluation, by image id."""
    kept: dict[Id, list[dict]] = {image_id: [] for image_id in images}
    sizes = {image_id: (float(image["height"]), float(image["width"])) for image_id, image in images.items()}
    left_out = {i["id"] for i in content["images"] if isinstance(i, dict) and type(i.get("id")) is int} - images.keys()
    seen: set[int | str] = set()
    for number, annotation in enumerate(content["annotations"]):
        fault = _repeated_id(annotation, seen) or annotation_fault(annotation, sizes, label_of)
        if not fault:
            clean = _clean(annotation, number, sizes[annotation["image_id"]], issues)
            if clean is not None:
                kept[clean["image_id"]].append(clean)
        elif type(annotation) is dict and type(annotation.get("image_id")) is int and annotation["image_id"] in left_out:
            issues.add_info("boxes of images that have faults themselves", _where(annotation, number))
        else:
            issues.add_fault(fault[0], f"{_where(annotation, number)}: {fault[1]}")
    return kept


def _require_pixels(boxes: Sequence[list[float]], issues: Issues) -> None:
    """Refuse boxes given as parts of the image's sides, a frequent mistake: a single one could be a box smaller than a pixel."""
    if boxes and all(max(x + w, y + h) <= 1 for x, y, w, h in boxes):
        why = f"all {len(boxes)} are within [0, 1]; bbox must be [x, y, width, height] in pixels, not in parts of the image's sides"
        issues.add_error("boxes that are not in pixels", why)


def _repeated_id(annotation: Any, seen: set[int | str]) -> Fault | None:
    """The fault of an annotation whose id is in ``seen``; otherwise its id, if any, is added to ``seen``."""
    annotation_id = annotation.get("id") if type(annotation) is dict else None
    if type(annotation_id) not in (int, str):
        return None
    if annotation_id in seen:
        return "annotation ids that are not unique", "an earlier annotation has the same id"
    seen.add(annotation_id)
    return None


def _where(annotation: Any, number: int) -> str:
    if type(annotation) is not dict:
        return f"annotations[{number}]"
    if "source" in annotation:
        return annotation["source"]
    return f"annotations[{number}] (id {annotation.get('id')!r}, image {annotation.get('image_id')!r})"


def _clean(annotation: dict, number: int, size: Size, issues: Issues) -> dict | None:
    """The annotation in the form for training and evaluation; ``None`` for a box without area or outside the image."""
    box, why = clip_box(annotation["bbox"], size)
    if why is not None:
        issues.add_info(why, f"{_where(annotation, number)}: bbox {annotation['bbox']}")
    if box is None:
        return None
    if min(box[2:]) < 1 and max(size) > 1:  # a file that cannot be read counts as 1 x 1
        issues.add_info(THIN, f"{_where(annotation, number)}: bbox {annotation['bbox']}")
    area, crowd = annotation.get("area"), annotation.get("iscrowd")
    if (area is None or crowd is None) and "source" not in annotation:  # other formats have neither of them
        issues.add_info("annotations without area or iscrowd, filled in", _where(annotation, number))
    box_area = box[2] * box[3]
    area = box_area if area is None else float(area) if why is None else min(area, box_area)
    return {
        "image_id": annotation["image_id"],
        "category_id": annotation["category_id"],
        "bbox": box,
        "area": area,
        "iscrowd": int(crowd or 0),
        "id": number + 1,  # COCO's evaluation takes id 0 for "unmatched"
    }


def _record(image: dict, annotations: list[dict], label_of: dict[Id, int], root: Path) -> ImageRecord:
    objects = [annotation for annotation in annotations if not annotation["iscrowd"]]
    boxes = np.array([annotation["bbox"] for annotation in objects], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]  # xywh -> xyxy
    labels = np.array([label_of[annotation["category_id"]] for annotation in objects], dtype=np.int64)
    path = str(root / image["file_name"])
    return ImageRecord(path, image["id"], int(image["height"]), int(image["width"]), boxes.astype(np.float32), labels)


def _double(values: Iterable) -> set:
    return {value for value, count in Counter(values).items() if count > 1}
