# SPDX-License-Identifier: Apache-2.0
"""Read and check all data sets of a run before its first iteration: their JSON, the headers of their images, and their classes.

The checks of an entry are in ``data/validation/rules.py``, those of an image file in ``data/images.py``.
"""

import logging
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import CocoDataset, read_coco, require_same_classes
from cpvt_det.data.images import ImageHeader, file_threads, read_header, read_image
from cpvt_det.data.validation.issues import EXAMPLES, Issues
from cpvt_det.data.validation.rules import Fault, Id
from cpvt_det.errors import DataError

logger = logging.getLogger("cpvt_det")
TOO_MANY = "images with more boxes than queries, so that some boxes cannot be learned"


@dataclass
class CheckedData:
    """The data sets of a run, without the images and boxes that have faults.

    Attributes:
        train, tests: data sets in the order of the config; a data set that cannot be read is missing.
        issues: issues of every data set, and of all data sets together.
    """

    train: list[CocoDataset]
    tests: list[CocoDataset]
    issues: list[Issues]


@dataclass(frozen=True)
class Seen:
    """The result of looking at an image file.

    Attributes:
        path: actual path, whose Unicode form may differ from that in the JSON.
        header: header of the file; ``None`` if it cannot be read.
        why: the reason why it cannot be read.
    """

    path: str
    header: ImageHeader | None
    why: str = ""


LookAtImages = Callable[[Mapping[str, str], bool], dict[str, Seen]]


def look_at_images(roots: Mapping[str, str], decode: bool = False) -> dict[str, Seen]:
    """What there is under each path.

    Args:
        roots: paths, each with the folder that its data set names it below.
        decode: decode every image, not only those that seem cut off.
    """
    with file_threads() as pool:
        found = pool.map(partial(_look, decode=decode), roots, roots.values())
        bar = tqdm(found, "checking images", len(roots), leave=False, unit="img", mininterval=0.5, delay=1.0, file=sys.stderr)
        return dict(zip(roots, bar, strict=True))


def check_data(
    train: Sequence[DatasetFiles],
    tests: Sequence[DatasetFiles],
    num_queries: int,
    decode: bool = False,
    examples: float = EXAMPLES,
    look: LookAtImages = look_at_images,
    cache: Path | None = None,
) -> CheckedData:
    """Read and check data sets.

    Args:
        train, tests: files of each data set; a data set may be in both.
        num_queries: number of queries of the detector.
        decode: decode every image, which also finds damage behind the header.
        examples: largest number of examples kept of each kind of issue.
        look: reader of the image files; in a run of several processes, one reads for all.
        cache: folder for what was read of large annotation files; ``None`` for none.
    """
    together = Issues("", examples)
    read: dict[str, CocoDataset] = {}
    files = {one.name: one for one in (*train, *tests)}
    for one in files.values():
        try:
            read[one.name] = read_coco(one, examples, cache)
        except DataError as error:
            together.add_error("data sets that cannot be read", str(error))
    roots = {path: str(files[name].image_root) for name in read for path in read[name].records.paths}
    seen = look(roots, decode)
    for dataset in read.values():
        _take_faulty_images_out(dataset, seen)
    data = CheckedData(*([read[one.name] for one in split if one.name in read] for split in (train, tests)), issues=[])
    data.issues = [*(dataset.issues for dataset in read.values()), together]
    _compare(data, together)
    for dataset in data.train:
        _note_many_boxes(dataset, num_queries)
    return data


def log_data(datasets: Iterable[CocoDataset]) -> None:
    """Log a line per data set, and a warning where training cannot learn all of its boxes."""
    for dataset in datasets:
        logger.info(dataset.describe())
        too_many = dataset.issues.infos.get(TOO_MANY)
        if too_many:
            logger.warning("%s: %s: %d; raise MODEL.DETR.NUM_OBJECT_QUERIES", dataset.name, TOO_MANY, too_many.count)


def _look(path: str, root: str, decode: bool) -> Seen:
    """Read the header of an image; decode the file too if it seems incomplete, or if ``decode``."""
    found = _find(path, root)
    try:
        header = read_header(found)
        if decode or not header.is_whole:
            read_image(found)
        return Seen(found, header)
    except DataError as error:
        return Seen(found, None, str(error))


def _find(path: str, root: str) -> str:
    """The path; if there is no such file, the path of the same name in another Unicode form: "é" is one character or two."""
    if not os.path.exists(path):
        for form in ("NFC", "NFD"):
            other = root + unicodedata.normalize(form, path.removeprefix(root))
            if os.path.exists(other):
                return other
    return path


def _take_faulty_images_out(dataset: CocoDataset, seen: dict[str, Seen]) -> None:
    faulty: set[Id] = set()
    records = dataset.records
    for index, (path, image_id, size) in enumerate(
        zip(records.paths, records.image_ids.tolist(), records.sizes.tolist(), strict=True)
    ):
        found = seen[path]
        fault = _fault(size, found)
        if fault is not None:
            faulty.add(image_id)
            dataset.issues.add_fault(fault[0], f"image {image_id}: {fault[1]}")
        else:
            _note_conversions(image_id, path, found, dataset.issues)
            if found.path != path:
                records.set_path(index, found.path)
    if faulty:
        dataset.leave_out(faulty)


def _fault(size: Sequence[int], found: Seen) -> Fault | None:
    if found.header is None:
        return "image files that " + ("cannot be read" if os.path.isfile(found.path) else "are missing"), found.why
    header, said = found.header, (size[1], size[0])
    if (header.width, header.height) == said:
        return None
    detail = f"{found.path} has {header.width} x {header.height} pixels, but {said[0]} x {said[1]} in the JSON"
    if header.swaps_sides and said == (header.height, header.width):
        detail += f"; EXIF orientation {header.orientation} turns it, and the JSON contains the size before turning"
    return "images whose size differs from the JSON", detail


def _note_conversions(image_id: Id, path: str, found: Seen, issues: Issues) -> None:
    where, header = f"image {image_id}: {path}", found.header
    if header.orientation != 1:
        issues.add_info("images turned according to EXIF; boxes are taken to be in the turned image", where)
    if header.mode != "RGB":
        issues.add_info(f"images of mode {header.mode}, converted to RGB", where)
    if found.path != path:
        issues.add_info("file names whose Unicode form differs from that on the disk, resolved", where)


def _compare(data: CheckedData, together: Issues) -> None:
    """Check data sets against each other: equal classes, and an object in every split."""
    for split in [data.train, *([test] for test in data.tests)]:
        if split and not any(dataset.records.num_boxes.any() for dataset in split):
            names = ", ".join(dataset.name for dataset in split)
            together.add_error("splits without objects", f"{names}: no image has an object; is it the right JSON?")
    first, *others = {dataset.name: dataset for dataset in (*data.train, *data.tests)}.values() or [None]
    for other in others:
        try:
            require_same_classes(first.classes, other.classes, f"data sets {first.name} and {other.name}")
        except DataError as error:
            together.add_error("classes", str(error))


def _note_many_boxes(dataset: CocoDataset, num_queries: int) -> None:
    counts = dataset.records.num_boxes
    for index in (counts > num_queries).nonzero()[0].tolist():
        image_id, path = int(dataset.records.image_ids[index]), dataset.records.path(index)
        where = f"image {image_id}: {path} has {counts[index]} boxes, there are {num_queries} queries"
        dataset.issues.add_info(TOO_MANY, where)
