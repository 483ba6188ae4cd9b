# SPDX-License-Identifier: Apache-2.0
"""Read and check all data sets of a run before its first iteration: their JSON, the headers of their images, and their classes.

Entries of the JSON are checked in ``data/validation/rules.py``, and image files in ``data/images.py``. For image classification,
each image must also have exactly one class, and each class must have an image in every split.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cpvt_det.common.class_names import require_same_classes
from cpvt_det.common.errors import DataError, MissingFileError, UnreachableError
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import CocoDataset, read_coco
from cpvt_det.data.images import ImageHeader, file_threads, is_file, read_header, read_image
from cpvt_det.data.records import Records
from cpvt_det.data.storage import Patience
from cpvt_det.data.validation.issues import EXAMPLES, Issues, Looked
from cpvt_det.data.validation.rules import Fault

PATIENCE = 30.0
"""Total seconds to wait for a data set whose mount or server does not answer."""
NOT_TRIED = f"not tried, because no image could be read for {PATIENCE:.0f} seconds"
SEVERAL = "images that do not have exactly one class"
WITHOUT = "classes without an image"
AT_ONCE = 4096  # images that wait for a thread


class NotTriedError(UnreachableError):
    """An image that was not read, because no other image could be read for some time."""


@dataclass
class CheckedData:
    """The data sets of a run, without the images and boxes that have faults.

    Attributes:
        train, tests: data sets in the order of the config, except data sets that cannot be read.
        issues: the issues of each data set, and the issues that concern all data sets together.
    """

    train: list[CocoDataset]
    tests: list[CocoDataset]
    issues: list[Issues]


Seen = ImageHeader | DataError
"""The header of an image file, or the error from reading it."""
LookAtImages = Callable[[Records, bool, float], Looked]


def look_at_images(records: Records, decode: bool, examples: float, part: range | None = None) -> Looked:
    """Compare image files with their records.

    Args:
        records: records of a data set.
        decode: whether to decode every image, not only those that seem cut off.
        examples: largest number of examples stored for each kind of issue.
        part: indices of the records to check; ``None`` for all. Only the part that contains the first record has a progress bar.
    """
    part = range(len(records)) if part is None else part
    looked = Looked(Issues("", examples))
    image_ids, sizes = records.image_ids, records.sizes
    seen = look_at_files(map(records.path, part), len(part), decode, quiet=part.start > 0)
    for index, found in zip(part, seen, strict=True):
        image_id, path = int(image_ids[index]), records.path(index)
        looked.may_pass |= isinstance(found, UnreachableError) and not isinstance(found, MissingFileError)
        if isinstance(found, NotTriedError):  # not a fault, because faults may be dropped
            looked.issues.add_error(f"images {NOT_TRIED}", f"image {image_id}: {path}")
            continue
        if fault := _fault(path, sizes[index].tolist(), found):
            looked.faulty.append(image_id)
            looked.issues.add_fault(fault[0], f"image {image_id}: {fault[1]}")
            continue
        where = f"image {image_id}: {path}"
        if found.orientation != 1:
            looked.issues.add_info("images rotated according to EXIF; boxes are assumed to be in the rotated image", where)
        if found.mode != "RGB":
            looked.issues.add_info(f"images of mode {found.mode}, converted to RGB", where)
        if not path.isascii() and is_file(path) and not os.path.exists(path):
            looked.issues.add_info("file names found on the disk in another Unicode form", where)
    return looked


def look_at_files(paths: Iterable[str], number: int, decode: bool = False, quiet: bool = False) -> Iterator[Seen]:
    """The header or the error of each path. Once no image could be read for some time, all further paths get a
    :class:`NotTriedError`.

    Args:
        paths: paths of images.
        number: number of paths.
        decode: whether to decode every image, not only those that seem cut off.
        quiet: whether to hide the progress bar.
    """
    bar = partial(tqdm, desc="checking images", leave=False, unit="img", mininterval=0.5, delay=1.0, file=sys.stderr)
    paths, patience = iter(paths), Patience(PATIENCE)
    with file_threads() as pool, bar(total=number, disable=quiet) as progress:
        while some := list(itertools.islice(paths, AT_ONCE)):
            for seen in pool.map(partial(_look, decode=decode, patience=patience), some):
                progress.update()
                yield seen


def check_data(
    train: Sequence[DatasetFiles],
    tests: Sequence[DatasetFiles],
    decode: bool = False,
    examples: float = EXAMPLES,
    look: LookAtImages = look_at_images,
    cache: Path | None = None,
) -> CheckedData:
    """Read and check data sets: their entries, their images, that all have the same classes, and that every split has an object.

    Args:
        train, tests: files of each data set; a data set may be in both.
        decode: whether to decode every image, which also finds damage after the header.
        examples: largest number of examples stored for each kind of issue.
        look: function that checks the image files of a data set; with several processes, each checks a part of the files.
        cache: folder that caches large data sets; ``None`` for no cache.
    """
    together = Issues("", examples)
    read: dict[str, CocoDataset] = {}
    for name, files in {one.name: one for one in (*train, *tests)}.items():
        try:
            read[name] = read_coco(files, examples, cache)
        except DataError as error:
            together.add_error("data sets that cannot be read", str(error))
    for dataset in read.values():
        looked = look(dataset.records, decode, examples)
        dataset.issues.add(looked.issues)
        if looked.faulty:
            dataset.leave_out(set(looked.faulty))
    data = CheckedData(*([read[one.name] for one in split if one.name in read] for split in (train, tests)), issues=[])
    data.issues = [*(dataset.issues for dataset in read.values()), together]
    for split in [data.train, *([test] for test in data.tests)]:
        if split and not any(dataset.records.num_boxes.any() for dataset in split):
            names = ", ".join(dataset.name for dataset in split)
            together.add_error("splits without objects", f"{names}: no image has an object; are these the right annotations?")
    first, *others = read.values() or [None]
    for other in others:
        try:
            require_same_classes(first.classes, other.classes, f"data sets {first.name} and {other.name}")
        except DataError as error:
            together.add_error("classes", str(error))
    return data


def _look(path: str, decode: bool, patience: Patience) -> Seen:
    """Read the header of an image; decode the file too if it seems incomplete, or if ``decode`` is set."""
    if patience.is_over:
        return NotTriedError(f"cannot read image {path}: {NOT_TRIED}")
    try:
        header = patience.read(lambda: read_header(path))
        if decode or not header.is_whole:
            read_image(path)
        return header
    except DataError as error:
        return error


def _fault(path: str, size: Sequence[int], header: Seen) -> Fault | None:
    if isinstance(header, DataError):
        what = "are missing" if isinstance(header, MissingFileError) else "cannot be read"
        return f"image files that {what}", str(header)
    said = size[1], size[0]
    if (header.width, header.height) == said:
        return None
    detail = f"{path} has {header.width} x {header.height} pixels, but {said[0]} x {said[1]} in the annotations"
    if header.orientation >= 5 and said == (header.height, header.width):
        detail += f"; EXIF orientation {header.orientation} rotates it, and the annotations contain the size before rotation"
    return "images whose size differs from the annotations", detail


class ClassDataset(CocoDataset):
    """A data set whose images each have one class, the first label of the record."""

    def describe(self) -> str:
        """A summary in one line, for the log."""
        found = "".join(f"; {heading}: {count}" for heading, count in sorted(self.issues.counts().items()))
        return f"{self.name}: {len(self.records)} images of {len(self.classes)} classes{found}"


def check_image_classes(data: CheckedData) -> CheckedData:
    """Check data sets, and leave out images that do not have exactly one class.

    Args:
        data: data sets of any format; several boxes of one class count as one class.
    """
    made = {dataset.name: ClassDataset(**vars(dataset)) for dataset in (*data.train, *data.tests)}
    for dataset in made.values():
        _leave_out_several(dataset)
        counts = count_images(dataset.records, len(dataset.classes))
        for label in np.flatnonzero(counts == 0):
            dataset.issues.add_fault(WITHOUT, f"class {dataset.classes.names[label]!r}")
    train, tests = ([made[dataset.name] for dataset in split] for split in (data.train, data.tests))
    return CheckedData(train, tests, data.issues)


def count_images(records: Records, number: int) -> np.ndarray:
    """(number,) int64, number of images of each class; every image must have one class."""
    counts = np.zeros(number, dtype=np.int64)
    for block in records.blocks():
        image_of, _, labels = block.boxes_to_learn()
        counts += np.bincount(labels[np.unique(image_of, return_index=True)[1]], minlength=number)
    return counts


def _leave_out_several(dataset: ClassDataset) -> None:
    """Leave out the images that do not have exactly one class."""
    several = []
    for block in dataset.records.blocks():
        image_of, _, labels = block.boxes_to_learn()
        number = labels.max(initial=0) + 1
        classes = np.unique(image_of * number + labels) // number  # each image once for each of its classes
        for index in np.flatnonzero(np.bincount(classes, minlength=len(block)) != 1).tolist():
            record = block[index]
            names = [dataset.classes.names[label] for label in np.unique(record.labels)]
            dataset.issues.add_fault(SEVERAL, f"image {record.image_id} ({record.file_name}): {', '.join(names) or 'none'}")
            several.append(record.image_id)
    dataset.leave_out(several)
