# SPDX-License-Identifier: Apache-2.0
"""The images and boxes of a data set as arrays: in memory, or in a file that all processes of a machine share by mapping it.

A Python object per box would take 910 bytes in every process. A row of these arrays takes 53 bytes, and only once per machine.
"""

import contextlib
import json
import mmap
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
