# SPDX-License-Identifier: Apache-2.0
"""Images in tar files, in the layout of webdataset. They are found by name, so they can be read in the same order as plain files.

``index.npz``, next to the tar files, lists the position of each member. If this file is missing, local tar files are searched
instead.
"""

import hashlib
import io
import os
import posixpath
import re
import tarfile
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cpvt_det.common.errors import DataError, MissingFileError, first_line
from cpvt_det.data.storage import fetch, is_url

TAR = ".tar"
INDEX = "index.npz"
ARRAYS = ("shards", "lengths", "keys", "shard_of", "starts", "sizes")
_ONE_AT_A_TIME = threading.Lock()
_OPENED: dict[str, "Shards"] = {}


@dataclass(frozen=True)
class Shards:
    """The n members of tar files, by ascending key.

    Attributes:
        folder: folder or URL of the tar files.
        shards: (s,) names of the tar files.
        lengths: (s,) int64, sizes of the tar files in bytes.
        keys: (n,) uint64, hashes of the members' names.
        shard_of: (n,) int32, tar file of each member.
        starts, sizes: (n,) int64, position of each member's content in its tar file and its length, in bytes.
    """

    folder: str
    shards: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    shard_of: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    def open(self, name: str) -> BinaryIO:
        """Open a member for reading.

        Raises:
            DataError: the tar file ends before the member does, or there is no such member. Other errors are the same as for
                plain files.
        """
        key = np.uint64(_key(name))
        row = int(self.keys.searchsorted(key))
        if row == len(self.keys) or self.keys[row] != key:
            raise MissingFileError(f"it is in none of the {len(self.shards)} tar files, which have {len(self.keys)} members")
        shard, start, size = int(self.shard_of[row]), int(self.starts[row]), int(self.sizes[row])
        path = f"{self.folder}/{self.shards[shard]}"
        if is_url(path):
            content = fetch(path, start, start + size) if size else b""  # a server cannot be asked for 0 bytes
            if len(content) != size:
                came = f"{len(content)} bytes arrived instead of {size}"
                raise DataError(f"{path}: {came}; it is cut off, or newer than its {INDEX}, or its server cannot send parts")
            return io.BytesIO(content)
        file = _Part(path, start, size)  # the check of an image reads only its ends
        length = os.fstat(file.fileno()).st_size
        if length != self.lengths[shard]:
            file.close()
            raise DataError(f"{path} has {length} bytes instead of {self.lengths[shard]}: it is cut off, or newer than its {INDEX}")
        return io.BufferedReader(file)


class _Part(io.FileIO):
    """A part of a file on a disk that can be used like a file of its own."""

    def __init__(self, path: str, start: int, size: int):
        super().__init__(path)
        self._start, self._size = start, size
        super().seek(start)

    def tell(self) -> int:
        return super().tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = 0 if whence == os.SEEK_SET else self.tell() if whence == os.SEEK_CUR else self._size
        return super().seek(self._start + max(0, base + offset)) - self._start

    def readinto(self, buffer) -> int:
        return super().readinto(memoryview(buffer)[: max(0, self._size - self.tell())])

    def readall(self) -> bytes:
        return super().read(max(0, self._size - self.tell()))  # at once, not in small pieces


def open_shards(pattern: str) -> Shards:
    """The members of tar files, as their index lists them.

    Args:
        pattern: path or URL of a tar file, or of several that are numbered: ``shards/{000000..000011}.tar``.

    Raises:
        DataError: the index is damaged or belongs to other tar files, or the tar files are at URLs and there is no index.
    """
    with _ONE_AT_A_TIME:  # many threads may all ask for the first time
        if pattern not in _OPENED:
            _OPENED[pattern] = _read_index(pattern)
        return _OPENED[pattern]


def _read_index(pattern: str) -> Shards:
    folder, _, last = pattern.rpartition("/")
    names, place = expand(last), f"{folder or '.'}/{INDEX}"
    try:
        content = fetch(place) if is_url(place) else Path(place).read_bytes()
    except FileNotFoundError:
        if is_url(place):
            raise DataError(f"there is no {place}, the index of the tar files; cpvt-det pack writes it") from None
        return index_shards(folder or ".", names)
    try:
        with np.load(io.BytesIO(content)) as arrays:
            found = Shards(folder or ".", *(arrays[name] for name in ARRAYS))
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{place} is damaged: {first_line(error)}; pack the images again") from error
    if found.shards.tolist() != names:
        raise DataError(f"{place} lists {len(found.shards)} tar files from {found.shards[0]} on, not {last}")
    return found


def split_at_shards(path: str) -> tuple[str, str]:
    """Split a path into its tar files and the member in them; ("", path) for the path of a plain file."""
    root, found, name = path.partition(f"{TAR}/")
    # a folder may have such a name; a path already opened as tar files is no folder, and is not looked up again for each image
    is_member = found and (root + TAR in _OPENED or is_url(path) or not os.path.isdir(root + TAR))
    return (root + TAR, name) if is_member else ("", path)


def expand(name: str) -> list[str]:
    """The names that a name with a range stands for: {08..11}.tar stands for 08.tar, 09.tar, 10.tar and 11.tar."""
    if (match := re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", name)) is None:
        return [name]
    before, first, last, after = match.groups()
    return [f"{before}{number:0{len(first)}}{after}" for number in range(int(first), int(last) + 1)]


def index_shards(folder: str, names: Sequence[str]) -> Shards:
    """The members of local tar files, found by reading the header of each.

    Raises:
        DataError: a tar file is damaged, or a member occurs twice.
    """
    rows = []
    for number, name in enumerate(names):
        try:
            with tarfile.open(f"{folder}/{name}", "r:") as tar:
                rows += [(_key(member.name), number, member.offset_data, member.size) for member in tar if member.isfile()]
        except tarfile.TarError as error:
            raise DataError(f"{folder}/{name} is not a complete tar file: {error}") from error
        except FileNotFoundError as error:
            raise MissingFileError(f"there is no {folder}/{name}") from error
    table = np.sort(np.array(rows, "u8, i4, i8, i8"), order="f0")
    keys, *others = (np.ascontiguousarray(table[name]) for name in table.dtype.names)
    if (keys[1:] == keys[:-1]).any():
        raise DataError(f"two members have the same name in {folder}/{names[0]} and the tar files after it")
    lengths = np.array([os.path.getsize(f"{folder}/{name}") for name in names])
    return Shards(folder, np.array(names), lengths, keys, *others)


def _key(name: str) -> int:
    """The hash of a name. ``./a.jpg`` has the same hash as ``a.jpg``, because tar may put ``./`` before the name of a file in the
    folder that it packs.
    """
    name = posixpath.normpath(name)
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
