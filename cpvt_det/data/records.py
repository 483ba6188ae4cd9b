# SPDX-License-Identifier: Apache-2.0
"""Images with their boxes to learn, one after the other, read from columns when they are asked for."""

import bisect
import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cpvt_det.data.columns import Columns


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


@dataclass(frozen=True)
class Objects:
    """The boxes of images, crowds included, image by image.

    Attributes:
        image_of: (A,) int64, index of the image of each box.
        boxes_xywh: (A, 4) float64, in pixels.
        areas: (A,) float64, in square pixels.
        labels: (A,) integers in [0, K).
        crowds: (A,) bool.
        numbers: (A,) int64, position of each box in the file.
    """

    image_of: np.ndarray
    boxes_xywh: np.ndarray
    areas: np.ndarray
    labels: np.ndarray
    crowds: np.ndarray
    numbers: np.ndarray


@dataclass(frozen=True)
class Block:
    """Neighbouring images, and their boxes to learn.

    Attributes:
        image_ids: (n,) int64, ids of the images.
        sizes: (n, 2) integers, height and width of the images in pixels.
        image_of: (G,) int64 in [0, n), index of the image of each box; rising.
        boxes_xyxy: (G, 4) float32, in pixels.
        labels: (G,) int64 in [0, K).
    """

    image_ids: np.ndarray
    sizes: np.ndarray
    image_of: np.ndarray
    boxes_xyxy: np.ndarray
    labels: np.ndarray


class Records(Sequence[ImageRecord]):
    """Some or all images of columns.

    Args:
        columns: the arrays.
        root: folder, tar files or URL that file names are relative to.
        kept: (n,) indices of the images, in rising order; ``None`` for all.
        corrected: paths by index of the image, where they are not ``root / name``.
    """

    def __init__(self, columns: Columns, root: Path | str, kept: np.ndarray | None = None, corrected: dict[int, str] | None = None):
        self.columns = columns
        self.root = root
        self.kept = kept
        self.corrected = corrected if corrected is not None else {}
        self._at: Sequence[int] = range(len(columns.image_ids)) if kept is None else kept  # index in the columns of each image

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, index: int | slice) -> ImageRecord | list[ImageRecord]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        columns, at = self.columns, int(self._at[index])
        rows = slice(columns.starts[at], columns.starts[at + 1])
        boxes, labels, crowds = columns.boxes_xywh[rows], columns.labels[rows], columns.crowds[rows]
        if crowds.any():
            boxes, labels = boxes[~crowds], labels[~crowds]
        boxes_xyxy = boxes.astype(np.float64)  # a copy
        boxes_xyxy[:, 2:] += boxes_xyxy[:, :2]
        height, width = columns.sizes[at].tolist()
        image_id, boxes, labels = int(columns.image_ids[at]), boxes_xyxy.astype(np.float32), labels.astype(np.int64)
        return ImageRecord(self.path(index), image_id, height, width, boxes, labels)

    def path(self, index: int) -> str:
        """Path of an image."""
        at = int(self._at[index])
        if at in self.corrected:
            return self.corrected[at]
        name = self.columns.name(at)
        return f"{self.root}/{name}" if isinstance(self.root, str) else str(self.root / name)

    def set_path(self, index: int, path: str) -> None:
        """Correct the path of an image."""
        self.corrected[int(self._at[index])] = path

    @property
    def paths(self) -> Iterator[str]:
        """The paths of the images."""
        return map(self.path, range(len(self)))

    @property
    def indices(self) -> np.ndarray:
        """(n,) indices of the images in the columns."""
        return np.arange(len(self)) if self.kept is None else self.kept

    @property
    def image_ids(self) -> np.ndarray:
        """(n,) int64, ids of the images."""
        return self._of(self.columns.image_ids)

    @property
    def sizes(self) -> np.ndarray:
        """(n, 2) int32, height and width of the images in pixels."""
        return self._of(self.columns.sizes)

    @property
    def num_boxes(self) -> np.ndarray:
        """(n,) int64, number of boxes to learn in each image."""
        columns = self.columns
        crowds = columns.starts.searchsorted(np.flatnonzero(columns.crowds), "right") - 1  # image of each; no array of all boxes
        return self._of(np.diff(columns.starts) - np.bincount(crowds, minlength=len(columns.image_ids)))

    @property
    def objects(self) -> Objects:
        """The boxes of the images, crowds included."""
        columns, counts = self.columns, np.diff(self.columns.starts)
        tables = (columns.boxes_xywh, columns.areas, columns.labels, columns.crowds, columns.numbers)
        if self.kept is None:
            return Objects(np.repeat(np.arange(len(counts)), counts), *tables)
        counts = counts[self.kept]
        rows = np.arange(counts.sum()) + np.repeat(columns.starts[self.kept] - np.cumsum(counts) + counts, counts)
        return Objects(np.repeat(np.arange(len(self)), counts), *(table[rows] for table in tables))

    def block(self, start: int, end: int) -> Block:
        """The images from one index up to another."""
        part = Records(self.columns, self.root, self.indices[start:end])
        objects = part.objects
        boxes, rows = objects.boxes_xywh, ~objects.crowds
        boxes_xyxy = np.concatenate([boxes[rows, :2], boxes[rows, :2] + boxes[rows, 2:]], axis=1).astype(np.float32)
        return Block(part.image_ids, part.sizes, objects.image_of[rows], boxes_xyxy, objects.labels[rows].astype(np.int64))

    def select(self, chosen: np.ndarray) -> "Records":
        """The images where ``chosen``, (n,) bool, is True."""
        if chosen.all():
            return self
        kept = np.flatnonzero(chosen) if self.kept is None else self.kept[chosen]
        return Records(self.columns, self.root, kept, self.corrected)

    def without(self, image_ids: Container[int]) -> "Records":
        """The images with other ids."""
        return self.select(np.array([image_id not in image_ids for image_id in self.image_ids.tolist()], dtype=bool))

    def _of(self, values: np.ndarray) -> np.ndarray:
        return values if self.kept is None else values[self.kept]


class JoinedRecords(Sequence[ImageRecord]):
    """The images of several data sets, one after the other."""

    def __init__(self, parts: Sequence[Sequence[ImageRecord]]):
        self.parts = list(parts)
        self.ends = list(itertools.accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int | slice) -> ImageRecord | list[ImageRecord]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index = index + len(self) if index < 0 else index
        part = bisect.bisect_right(self.ends, index)
        return self.parts[part][index - (self.ends[part - 1] if part else 0)]

    @property
    def sizes(self) -> np.ndarray:
        """(n, 2) integers, height and width of the images in pixels."""
        return np.concatenate([sizes_of(part) for part in self.parts])

    @property
    def num_boxes(self) -> np.ndarray:
        """(n,) int64, number of boxes to learn in each image."""
        return np.concatenate([num_boxes_of(part) for part in self.parts])


def join(parts: Sequence[Sequence[ImageRecord]]) -> Sequence[ImageRecord]:
    """The images of one or several data sets as one sequence."""
    return parts[0] if len(parts) == 1 else JoinedRecords(parts)


def blocks_of(records: Sequence[ImageRecord], images: int = 2**14) -> Iterator[Block]:
    """The images one after the other, so many at once that a block takes little memory, without an object for each."""
    if isinstance(records, JoinedRecords):
        for part in records.parts:
            yield from blocks_of(part, images)
        return
    for start in range(0, len(records), images):
        if isinstance(records, Records):
            yield records.block(start, min(start + images, len(records)))
        else:
            yield _block(records[start : start + images])


def _block(records: Sequence[ImageRecord]) -> Block:
    counts = [len(record.labels) for record in records]
    boxes = np.concatenate([np.zeros((0, 4), np.float32), *(record.boxes_xyxy for record in records)])
    labels = np.concatenate([np.zeros(0, np.int64), *(record.labels for record in records)])
    ids = np.array([record.image_id for record in records], dtype=np.int64)
    return Block(ids, sizes_of(records), np.repeat(np.arange(len(records)), counts), boxes, labels)


def sizes_of(records: Sequence[ImageRecord]) -> np.ndarray:
    """(n, 2) integers, height and width of images in pixels."""
    if isinstance(records, (Records, JoinedRecords)):
        return records.sizes
    return np.array([(record.height, record.width) for record in records], dtype=np.int64).reshape(-1, 2)


def num_boxes_of(records: Sequence[ImageRecord]) -> np.ndarray:
    """(n,) int64, number of boxes to learn in each image."""
    if isinstance(records, (Records, JoinedRecords)):
        return records.num_boxes
    return np.array([len(record.labels) for record in records], dtype=np.int64)
