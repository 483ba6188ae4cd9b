# SPDX-License-Identifier: Apache-2.0
"""The images and boxes of a data set as arrays: in memory, or in a file that all processes of a machine share by mapping it.

A Python object per box would take 910 bytes in every process. A row of these arrays takes 53 bytes, and only once per machine. So
an image's record, with its boxes to learn, is made only when the image is accessed.
"""

import bisect
import contextlib
import itertools
import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cpvt_det.common.files import fcntl

WIDE, NARROW = ("id", "name", "first"), ("name_size", "count", "to_learn", "height", "width")
IMAGE = np.dtype([*((name, "i8") for name in WIDE), *((name, "i4") for name in NARROW)])
"""An image: its size in pixels; byte position of its file name in the names; index of its first box, the number of its boxes, and
the number of those to learn, which are not crowds."""
BOX = np.dtype([("xywh", "f8", 4), ("area", "f8"), ("number", "i8"), ("label", "i4"), ("crowd", "?")])
"""A box in pixels, inside the image; its area in square pixels (in COCO, the mask's); its position in the file; label in [0, K)."""


@dataclass(frozen=True)
class Table:
    """N images and A boxes, crowds included; the boxes of an image are adjacent, in the order of the file.

    Attributes:
        images: (N,) of ``IMAGE``.
        names: (bytes,) uint8, the file names in UTF-8, one after the other.
        boxes: (A,) of ``BOX``.
        about: other data from the file, as values that JSON can hold.
        path: file that the arrays are mapped from, or ``None``.
    """

    images: np.ndarray
    names: np.ndarray
    boxes: np.ndarray
    about: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def name(self, index: int) -> str:
        """The file name of an image."""
        _, start, _, size, *_ = self.images[index].item()
        return self.names[start : start + size].tobytes().decode("utf-8", "surrogatepass")

    def __reduce__(self) -> tuple:
        """Let data workers that do not share memory map the file themselves. If there is no file, they get copies of the arrays."""
        return (Table, (self.images, self.names, self.boxes, self.about)) if self.path is None else (load_table, (self.path,))


def save_table(table: Table, file: BinaryIO) -> None:
    """Write a table into a file that is open for writing: four arrays in numpy's format, the first of them ``about`` as JSON."""
    about = np.frombuffer(json.dumps(table.about).encode(), dtype=np.uint8)
    for array in (about, table.images, table.names, table.boxes):
        np.save(file, array, allow_pickle=False)


def load_table(path: Path) -> Table:
    """Map a file that :func:`save_table` wrote, read-only. While it is mapped, a shared lock warns others not to remove it.

    Raises:
        ValueError: a file of another kind, or an incomplete one.
        OSError: a file that cannot be read.
    """
    arrays = []
    with path.open("rb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # keeps the file open, and so the lock, until it is freed
        for _ in range(4):
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if file.tell() + shape[0] * dtype.itemsize > len(mapped):
                raise ValueError(f"{path} is incomplete")
            arrays.append(np.ndarray(shape, dtype, mapped, file.tell()))
            file.seek(arrays[-1].nbytes, 1)
    about, *others = arrays
    return Table(*others, json.loads(about.tobytes()), path)


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


class Records(Sequence[ImageRecord]):
    """Some or all images of one or several tables, in their order.

    Args:
        parts: tables, each with the folder, tar files or URL that its file names are relative to.
        rows: (n,) ascending indices of the images, counted across all tables; ``None`` for all.
    """

    def __init__(self, parts: Sequence[tuple[Table, Path | str]], rows: Sequence[int] | np.ndarray | None = None):
        self.parts = list(parts)
        self.ends = list(itertools.accumulate(len(table.images) for table, _ in parts))
        self.rows = range(self.ends[-1]) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice) -> "ImageRecord | Records":
        if isinstance(index, slice):
            return Records(self.parts, self.rows[index])
        table, _, at = self._place(index)
        image_id, _, first, _, count, _, height, width = table.images[at].item()
        _, boxes, labels = _to_learn(table.boxes[first : first + count])
        return ImageRecord(self.path(index), image_id, height, width, boxes, labels)

    def _place(self, index: int) -> tuple[Table, Path | str, int]:
        """The table that holds an image, the root of the table's file names, and the image's index in the table."""
        row = int(self.rows[index])
        part = bisect.bisect_right(self.ends, row)
        return *self.parts[part], row - (self.ends[part - 1] if part else 0)

    def name(self, index: int) -> str:
        """File name of an image, as in the data."""
        table, _, at = self._place(index)
        return table.name(at)

    def path(self, index: int) -> str:
        """Path of an image."""
        table, root, at = self._place(index)
        return f"{root}/{table.name(at)}" if isinstance(root, str) else str(root / table.name(at))

    @property
    def indices(self) -> np.ndarray:
        """(n,) int64, ``rows`` as an array."""
        return np.arange(self.rows.start, self.rows.stop, self.rows.step) if isinstance(self.rows, range) else self.rows

    @property
    def table(self) -> Table:
        """The table of these images, which must all belong to one data set."""
        ((table, _),) = self.parts
        return table

    @property
    def root(self) -> Path | str:
        """The folder, tar files or URL that these images are in. All images must belong to one data set."""
        ((_, root),) = self.parts
        return root

    @property
    def image_ids(self) -> np.ndarray:
        """(n,) int64, ids of the images."""
        return self._column("id")

    @property
    def sizes(self) -> np.ndarray:
        """(n, 2) int32, height and width of the images in pixels."""
        return np.stack((self._column("height"), self._column("width")), axis=1)

    @property
    def num_boxes(self) -> np.ndarray:
        """(n,) int64, number of boxes to learn in each image."""
        return self._column("to_learn").astype(np.int64)

    def _column(self, name: str) -> np.ndarray:
        columns = [table.images[name] for table, _ in self.parts]
        return (columns[0] if len(columns) == 1 else np.concatenate(columns))[self.indices]

    def boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """All boxes of these images, crowds included, image by image; the images must belong to one data set.

        Returns:
            (A,) int64, ascending, index of the image of each box; and (A,) of ``BOX``, the boxes.
        """
        counts = self._column("count")
        image_of = np.repeat(np.arange(len(self)), counts)
        at = np.arange(len(image_of)) + np.repeat(self._column("first") - np.cumsum(counts) + counts, counts)
        return image_of, self.table.boxes[at]

    def boxes_to_learn(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All boxes of these images, without crowds, image by image; the images must belong to one data set.

        Returns:
            (G,) int64, ascending, index of the image of each box; (G, 4) float32, xyxy in pixels; (G,) int64, labels in [0, K).
        """
        image_of, boxes = self.boxes()
        is_taken, *others = _to_learn(boxes)
        return image_of[is_taken], *others

    def blocks(self, images: int = 2**14) -> Iterator["Records"]:
        """All images in blocks, each from one data set and small enough that its boxes take little memory."""
        rows = self.indices
        bounds = np.searchsorted(rows, [0, *self.ends])
        for part, before, start, end in zip(self.parts, [0, *self.ends], bounds, bounds[1:], strict=False):
            for at in range(start, end, images):
                yield Records([part], rows[at : min(at + images, end)] - before)

    def select(self, chosen: np.ndarray) -> "Records":
        """The images where ``chosen``, (n,) bool, is True."""
        return self if chosen.all() else Records(self.parts, self.indices[chosen])


def join(several: Sequence[Records]) -> Records:
    """The images of one or several data sets as one sequence."""
    if len(several) == 1:
        return several[0]
    parts, rows, before = [], [], 0
    for records in several:
        parts += records.parts
        rows.append(records.indices + before)
        before += records.ends[-1]
    return Records(parts, np.concatenate(rows))


def _to_learn(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(A,) of ``BOX`` -> (A,) bool, whether each box is to be learned; and the boxes (G, 4) float32 xyxy and labels (G,) int64 to
    learn.
    """
    is_taken = ~boxes["crowd"]
    boxes = boxes[is_taken]
    corners = np.concatenate((boxes["xywh"][:, :2], boxes["xywh"][:, :2] + boxes["xywh"][:, 2:]), axis=1)
    return is_taken, corners.astype(np.float32), boxes["label"].astype(np.int64)
