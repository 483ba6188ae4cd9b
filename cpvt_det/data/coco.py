# SPDX-License-Identifier: Apache-2.0
"""Turn COCO JSON into records, which hold the boxes to learn for each image, and into the ground truth for evaluation.

This is the start of the data pipeline: ``data/validation/check.py`` calls :func:`read_coco`, and ``data/loader.py`` passes records
to ``data/mapper.py``. Other formats are read by ``data/formats/``. Boxes that are left out of the records are also left out of the
ground truth; ``data/validation/rules.py`` defines which ones.
"""

import hashlib
import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import DataError
from cpvt_det.common.memory import no_garbage_collection
from cpvt_det.data.annotations import Entries
from cpvt_det.data.cache import read_once
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.formats.format import read_foreign
from cpvt_det.data.json_stream import NotAStreamError, entries
from cpvt_det.data.records import Records, Table
from cpvt_det.data.text import decode
from cpvt_det.data.validation.issues import EXAMPLES, Issues, require_no_errors
from cpvt_det.data.validation.rules import Id, category_fault


@dataclass
class CocoDataset:
    """A data set.

    Attributes:
        name: registered name of the data set.
        classes: ids and names of the classes.
        records: one record per image, also for images without objects, with the boxes that count in evaluation, crowds included.
        issues: issues found in the file; images and boxes with faults are not in ``records``.
    """

    name: str
    classes: Classes
    records: Records
    issues: Issues = field(default_factory=Issues)

    def describe(self) -> str:
        """A summary in one line, for the log."""
        counts = self.records.num_boxes
        found = "".join(f"; {heading}: {count}" for heading, count in sorted(self.issues.counts().items()))
        images = f"{len(counts)} images, {int((counts == 0).sum())} of them without objects"
        return f"{self.name}: {images}, {int(counts.sum())} boxes, {len(self.classes)} classes{found}"

    def leave_out(self, image_ids: Iterable[Id]) -> None:
        """Remove images and their boxes."""
        self.records = self.records.select(~np.isin(self.records.image_ids, list(image_ids)))


def describe_records(records: Records) -> dict[str, Any]:
    """The number of training images of a run, and a hash of their records in this order, which does not depend on file paths."""
    table, *others = (table for table, _ in records.parts)
    is_whole = len(records) == len(table.images) and not others
    return {"images": len(records), "sha256": (is_whole and table.about.get("sha256")) or _digest(records)}


def _digest(records: Records) -> str:
    digest = hashlib.sha256()
    for block in records.blocks():
        ends = np.cumsum(block.num_boxes).tolist()
        boxes, labels = (values.tobytes() for values in block.boxes_to_learn()[1:])  # 16 and 8 bytes per box
        rows = zip(block.image_ids.tolist(), block.sizes.tolist(), [0, *ends], ends, strict=False)
        for image_id, (height, width), start, end in rows:
            digest.update(f"{image_id} {height} {width}".encode() + boxes[16 * start : 16 * end] + labels[8 * start : 8 * end])
    return digest.hexdigest()


def load_coco(files: DatasetFiles) -> CocoDataset:
    """Read a data set with :func:`read_coco`, and refuse it if it has faults.

    Args:
        files: files of the data set; for COCO JSON, the images are not opened.

    Raises:
        DataError: a file that is missing or of unknown format; images, annotations or categories with faults, all in one message.
    """
    dataset = read_coco(files)
    require_no_errors([dataset.issues], "error")
    return dataset


def read_coco(files: DatasetFiles, examples: float = EXAMPLES, cache: Path | None = None) -> CocoDataset:
    """Read a data set without its faulty entries, which are listed in ``issues``.

    Args:
        files: files of the data set; for COCO JSON, the images are not opened.
        examples: largest number of examples stored for each kind of issue.
        cache: folder that caches large data sets, as in :func:`cpvt_det.data.cache.read_once`; ``None`` for no cache. Nothing is
            cached if ``examples`` is not the default.

    Raises:
        DataError: a file that is missing or of unknown format.
    """

    def read_all(files: DatasetFiles) -> Table:
        table = _read(files, examples)
        table.about["sha256"] = _digest(Records([(table, Path())]))  # stored, as hashing takes far longer than mapping the records
        return table

    with no_garbage_collection():
        table = _read(files, examples) if cache is None or examples != EXAMPLES else read_once(files, cache, read_all)
    about = table.about
    issues = Issues.from_json(about["issues"], f"{files.name} ({files.annotations})", examples)
    classes = Classes(tuple(about["class_ids"]), tuple(about["class_names"]))
    return CocoDataset(files.name, classes, Records([(table, files.image_root)]), issues)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a COCO JSON, in which ``annotations`` may be missing.

    Raises:
        DataError: a file that cannot be read, or that contains something else.
    """
    try:
        content = json.loads(decode(path.read_bytes()))
    except OSError as error:
        hint = "set the path in DATASETS.REGISTER or, for COCO itself, in DETECTRON2_DATASETS"
        raise DataError(f"cannot read annotations {path}: {error.strerror}; {hint}") from error
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a thousand nested lists
        hint = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"{path} is not JSON: {error}{hint}") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} is not COCO: expected an object with images, annotations, categories, got a {type(content).__name__}"
        )
    if not isinstance(content.setdefault("annotations", []), list):
        raise DataError(f"{path} is not COCO: its 'annotations' are not a list")
    return content


def _read_categories(section: list, issues: Issues) -> list[dict]:
    """Categories without faults, by ascending id. A faulty category is an error, because the boxes of that category would be
    meaningless.
    """
    faults = ((number, category_fault(category)) for number, category in enumerate(section))
    faulty = {number: fault for number, fault in faults if fault}
    for number, (heading, detail) in faulty.items():
        issues.add_error(heading, f"categories[{number}]: {detail}")
    good = [category for number, category in enumerate(section) if number not in faulty]
    for heading, key in (("category ids that are not unique", "id"), ("category names that are not unique", "name")):
        counts = Counter(str(category[key]) for category in good)
        for value in (value for value, count in counts.items() if count > 1):
            issues.add_error(heading, f"{key} {value}")
    alike = defaultdict(list)  # names that differ only in blanks, case or Unicode form
    for name in (str(category["name"]) for category in good):
        alike["".join(unicodedata.normalize("NFKC", name).casefold().split())].append(name)
    for names in (names for names in alike.values() if len(set(names)) > 1):
        issues.add_info("classes whose names look the same", ", ".join(map(repr, names)))
    return sorted(good, key=lambda category: category["id"])


def _read(files: DatasetFiles, examples: float) -> Table:
    issues = Issues("", examples)
    try:
        if not files.is_coco:
            raise NotAStreamError("sections in memory")
        found = Entries(partial(entries, files.annotations), issues)
        if not (found.categories and found.num_images):
            raise NotAStreamError("not COCO")
    except (NotAStreamError, OSError):  # the whole file is needed, if only to report what is wrong
        issues = Issues("", examples)
        content = read_json(files.annotations) if files.is_coco else read_foreign(files.annotations, files.split)
        for name in ("categories", "images"):
            section = content.get(name)
            if not isinstance(section, list) or not section:
                raise DataError(f"{files.annotations} is not COCO: it has no {name!r}") from None
        found = Entries(lambda names: ((name, one) for name in names for one in content[name]), issues)
        for heading, places in ({} if files.is_coco else content["notes"]).items():
            for place in places:
                issues.add_info(heading, str(place))
    good = _read_categories(found.categories, issues)
    table = found.table({category["id"]: label for label, category in enumerate(good)})
    if crowds := int(table.boxes["crowd"].sum()) if files.is_coco else 0:
        issues.count_info("annotations with iscrowd 1, neither learned nor counted in evaluation", crowds)
    # All boxes as fractions of the image's sides are a frequent mistake; a single such box may just be tiny.
    is_known = np.maximum(table.images["height"], table.images["width"]) > 1  # an image that cannot be read counts as 1 x 1
    boxes = table.boxes["xywh"][np.repeat(is_known, table.images["count"])]
    if len(boxes) and (boxes[:, :2] + boxes[:, 2:]).max() <= 1:
        why = f"all {len(boxes)} are within [0, 1]; bbox must be [x, y, width, height] in pixels, not relative to the image"
        issues.add_error("boxes that are not in pixels", why)
    names = [str(category["name"]) for category in good]
    table.about.update(class_ids=[category["id"] for category in good], class_names=names, issues=issues.to_json())
    return table
