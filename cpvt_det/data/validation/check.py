# SPDX-License-Identifier: Apache-2.0
"""Read and check all data sets of a run before its first iteration: their JSON, the headers of their images, and their classes.

Entries of the JSON are checked in ``data/validation/rules.py``, and image files in ``data/images.py``.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
        fault = _fault(path, sizes[index].tolist(), found)
        if fault is not None:
            looked.faulty.append(image_id)
            looked.issues.add_fault(fault[0], f"image {image_id}: {fault[1]}")
        else:
            _note_conversions(f"image {image_id}: {path}", path, found, looked.issues)
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
    """Read and check data sets.

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
    _compare(data, together)
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


def _note_conversions(where: str, path: str, header: ImageHeader, issues: Issues) -> None:
    if header.orientation != 1:
        issues.add_info("images rotated according to EXIF; boxes are assumed to be in the rotated image", where)
    if header.mode != "RGB":
        issues.add_info(f"images of mode {header.mode}, converted to RGB", where)
    if not path.isascii() and is_file(path) and not os.path.exists(path):
        issues.add_info("file names found on the disk in another Unicode form", where)


def _compare(data: CheckedData, together: Issues) -> None:
    """Check that all data sets have the same classes, and that every split has at least one object."""
    for split in [data.train, *([test] for test in data.tests)]:
        if split and not any(dataset.records.num_boxes.any() for dataset in split):
            names = ", ".join(dataset.name for dataset in split)
            together.add_error("splits without objects", f"{names}: no image has an object; are these the right annotations?")
    first, *others = {dataset.name: dataset for dataset in (*data.train, *data.tests)}.values() or [None]
    for other in others:
        try:
            require_same_classes(first.classes, other.classes, f"data sets {first.name} and {other.name}")
        except DataError as error:
            together.add_error("classes", str(error))
