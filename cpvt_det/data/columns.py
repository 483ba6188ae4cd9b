# SPDX-License-Identifier: Apache-2.0
"""The images and boxes of a data set as arrays: in memory, or in a file that all processes of a machine map and share.

An object per box takes 910 bytes in every process; a row of these arrays takes 53, once per machine.
"""

import contextlib
import dataclasses
import json
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

try:
    import fcntl
except ImportError:  # on Windows, where a mapped file cannot be removed
    fcntl = None

MAGIC = b"cpvt_det columns\n"
ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Columns:
    """N images and A boxes, crowds included; the boxes of an image are neighbours, in the order of the file.

    Attributes:
        image_ids: (N,) int64.
        sizes: (N, 2) int32, height and width in pixels.
        names: (bytes,) uint8, the file names in UTF-8, one after the other.
        name_ends: (N + 1,) int64, where in ``names`` the name before each image ends, and the last one.
        starts: (N + 1,) int64, row of each image's first box; the last is A.
        boxes_xywh: (A, 4) float64, in pixels, inside the image.
        areas: (A,) float64, in square pixels; COCO's is that of the mask.
        labels: (A,) int32 in [0, K).
        crowds: (A,) bool.
        numbers: (A,) int64, position of each box in the file.
        sha256: hash of all images as records, where somebody took it.
        path: file that the arrays are mapped from, or ``None``.
    """

    image_ids: np.ndarray
    sizes: np.ndarray
    names: np.ndarray
    name_ends: np.ndarray
    starts: np.ndarray
    boxes_xywh: np.ndarray
    areas: np.ndarray
    labels: np.ndarray
    crowds: np.ndarray
    numbers: np.ndarray
    sha256: str = ""
    path: Path | None = field(default=None, compare=False)

    def name(self, index: int) -> str:
        """The file name of an image."""
        return self.names[self.name_ends[index] : self.name_ends[index + 1]].tobytes().decode("utf-8", "surrogatepass")

    def __reduce__(self) -> tuple:
        """Data workers that do not share memory map the file too; without a file they get the arrays."""
        if self.path is not None:
            return _columns_of, (self.path,)
        return Columns, (*(getattr(self, name) for name in ARRAYS), self.sha256)


ARRAYS = tuple(one.name for one in dataclasses.fields(Columns) if one.type is np.ndarray)


def _columns_of(path: Path) -> Columns:
    return load_columns(path)[0]


def pack_names(names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """``names`` and ``name_ends`` of :class:`Columns`."""
    encoded = [name.encode("utf-8", "surrogatepass") for name in names]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), ends


def save_columns(columns: Columns, about: dict[str, Any], file: BinaryIO) -> None:
    """Write arrays, and what belongs to them.

    Args:
        columns: arrays to write.
        about: values that JSON takes.
        file: file open for writing in binary.
    """
    arrays, place = {}, 0
    for name in ARRAYS:
        array = getattr(columns, name)
        arrays[name] = {"dtype": array.dtype.str, "shape": array.shape, "place": place}
        place += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    header = json.dumps({"arrays": arrays, "sha256": columns.sha256, "about": about}).encode()
    file.write(MAGIC + f"{len(header)}\n".encode() + header)
    start = file.tell()
    file.write(b"\0" * (-start % ALIGNMENT))
    for name in ARRAYS:
        written = file.write(np.ascontiguousarray(getattr(columns, name)).data)
        file.write(b"\0" * (-written % ALIGNMENT))


def load_columns(path: Path) -> tuple[Columns, dict[str, Any]]:
    """Map a file of :func:`save_columns`. It is locked, shared, as long as it is mapped: a sign for who would remove it.

    Returns:
        The arrays, read-only, and ``about``.

    Raises:
        ValueError: a file that is none of these, or not whole.
        OSError: a file that cannot be read.
    """
    with path.open("rb") as file:
        if file.readline() != MAGIC:
            raise ValueError(f"{path} contains no columns")
        header = json.loads(file.read(int(file.readline())))
        start = file.tell() + -file.tell() % ALIGNMENT
        with contextlib.suppress(OSError):  # a file system without locks
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # which has the open file, and so the lock, until it ends
    arrays = {}
    for name in ARRAYS:
        dtype, shape, place = (header["arrays"][name][key] for key in ("dtype", "shape", "place"))
        count = int(np.prod(shape, dtype=np.int64))
        # frombuffer takes no empty part, and refuses one beyond the end
        array = np.frombuffer(mapped, dtype, count, start + place) if count else np.empty(0, dtype)
        arrays[name] = array.reshape(shape)
    return Columns(**arrays, sha256=header["sha256"], path=path), header["about"]
