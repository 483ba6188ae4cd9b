# SPDX-License-Identifier: Apache-2.0
"""Caches for large data sets: one for the table, which all processes of a machine share, and one for issues found in the images."""

import contextlib
import hashlib
import inspect
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import PIL

from cpvt_det.common.errors import DataError
from cpvt_det.common.files import atomic_file, fcntl, write_json
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.formats.format import find_format
from cpvt_det.data.records import Records, Table, load_table, save_table
from cpvt_det.data.shards import INDEX, open_shards, split_at_shards
from cpvt_det.data.storage import is_url
from cpvt_det.data.validation.issues import Issues, Looked

logger = logging.getLogger("cpvt_det")
SMALL = 2**22  # bytes; a smaller file is read too quickly for a cache to help
FEW = 10_000  # files and folders; fewer are read in a second, and so are the headers of fewer images
TICK = 2.0  # seconds, the coarsest time step of a file system: a file may change twice within it and keep its times


def read_once(files: DatasetFiles, folder: Path, read: Callable[[DatasetFiles], Table]) -> Table:
    """Read a data set, or map the file in which an earlier run has cached it.

    The cached file's name contains hashes of the source's path, of the sizes and times of its files, and of the code that reads
    them. The file is either complete or absent. If several processes start together, one reads the data set and the others wait.
    Cached files of earlier states of the source are removed, except those that a process has mapped. If the folder cannot be
    written to, the data set is simply read again in every run.

    Args:
        files: files of the data set.
        folder: folder of the cached files; created if missing.
        read: function that reads the files.

    Returns:
        The table that ``read`` returns, mapped from the cached file if there is one.
    """
    try:
        state = _state(files)
    except (DataError, OSError):
        state = ""  # the reader reports it
    if not state:
        return read(files)
    path = files.annotations
    name = f"{path.resolve()}" if files.is_coco else f"{path.resolve()}\0{path}\0{files.split}"
    kept, table = folder.expanduser() / f"{_short(name)}-{_short(state)}.columns", None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with _only_maker(kept):
            with contextlib.suppress(FileNotFoundError, ValueError):  # not there, or damaged
                return load_table(kept)
            for unfinished in kept.parent.glob(f".{kept.name}.*.tmp"):  # of a process that was killed
                unfinished.unlink()
            table = read(files)
            with atomic_file(kept) as file:
                save_table(table, file)
            _remove_earlier(kept)
            return load_table(kept)
    except OSError as error:
        logger.warning("Annotations cannot be cached in %s, so reading them takes longer: %s", kept.parent, error)
        return table or read(files)


def _state(files: DatasetFiles) -> str:
    """A hash of the files' names, sizes and times, and of the code that reads them; empty if caching would not save time.

    Raises:
        DataError, OSError: files are missing; the reader will report them.
    """
    data_format, code = find_format(files.annotations), hash_of_code()
    if data_format is None:
        paths = [files.annotations] if files.annotations.stat().st_size >= SMALL else []
    else:
        source = inspect.getsourcefile(data_format.read) if data_format.files else None
        paths = list(data_format.files(files.annotations, files.split)) if source else []
        paths = paths if len(paths) >= FEW else []
        code = hash_of_code(source or "") + data_format.read.__qualname__
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\0{_state_of(path)}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest() + code if paths else ""


@contextlib.contextmanager
def _only_maker(path: Path) -> Iterator[None]:
    """Wait until no other process is creating the file. If a process is killed, its lock is released."""
    if fcntl is None:
        yield
        return
    with path.with_suffix(".lock").open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: two processes write the same
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _remove_earlier(kept: Path) -> None:
    """Remove cached files of earlier states of a source, unless a lock shows that a process has them mapped."""
    for earlier in kept.parent.glob(f"{kept.name.partition('-')[0]}-*.columns") if fcntl else ():
        with contextlib.suppress(OSError), earlier.open("r+b") as file:
            if earlier != kept:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                earlier.unlink()
                earlier.with_suffix(".lock").unlink()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:20]


def _state_of(path: str | Path) -> list[int]:
    """Size, modification time and change time of a file or folder; empty if it is missing. The change time is included because
    copying a file never preserves it.
    """
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(path)
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return []


@cache
def hash_of_code(reader: str = "") -> str:
    """A hash of all code that reads and checks data, and of the image decoders' versions, because a change to any of them may
    affect results.

    Args:
        reader: module of a user-defined format.
    """
    paths = [*sorted(Path(__file__).parent.rglob("*.py")), *([Path(reader)] if reader else [])]
    versions = f"{PIL.__version__} {metadata.version('torchvision')}".encode()
    return hashlib.sha256(versions + b"".join(path.read_bytes() for path in paths)).hexdigest()


class KeptLook:
    """The cached result of checking all image files of a data set.

    The result is valid as long as no file in the image folders is added, removed or renamed, and no faulty image changes. If any
    other image is overwritten, this is noticed when the image is read, because its size is compared then.

    Args:
        records: records of the data set.
        folder: ``DATASETS.CACHE``; empty for no cache.
    """

    def __init__(self, records: Records, folder: str):
        self._records = records
        self._shards = split_at_shards(f"{records.root}/")[0]
        self._path: Path | None = None
        self._states: dict[str, list[int]] = {}
        self._start = time.time_ns()
        # nothing shows a change of files at URLs, except the index of tar files
        if folder and len(records) >= FEW and (self._shards or not is_url(records.root)):
            self._path = Path(folder).expanduser() / f"{self._hash()}.images.json"

    def load(self) -> Looked | None:
        """The result of an earlier run; ``None`` if there is none, or if a folder has changed."""
        if self._path is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if all(_state_of(path) == state for name in ("states", "faulty") for path, state in kept[name].items()):
                return Looked(Issues.from_json(kept["issues"]), kept["left_out"])
        if self._shards:  # the states of the tar files and their index
            found = open_shards(self._shards)
            places = {f"{found.folder}/{name}" for name in (INDEX, *found.shards.tolist()) if not is_url(found.folder)}
        else:  # the states of the folders of the images
            places = {os.path.dirname(self._records.path(index)) for index in range(len(self._records))}
        self._states = {place: _state_of(place) for place in places}  # before the check, so that no change in between is missed
        return None

    def save(self, looked: Looked) -> None:
        """Cache a result. If the folder cannot be written to, a warning is logged, and the next run checks the images again."""
        if self._path is None or looked.may_pass:
            return
        places = np.flatnonzero(np.isin(self._records.image_ids, looked.faulty)).tolist()
        faulty = {path: _state_of(path) for path in map(self._records.path, places)}
        if any(state and max(state[1:]) >= self._start - TICK * 1e9 for state in faulty.values()):
            return  # an image may have changed since the check
        kept = {"states": self._states, "faulty": faulty, "left_out": looked.faulty}
        try:
            write_json({**kept, "issues": looked.issues.to_json()}, self._path)
        except OSError as error:
            logger.warning("The result of checking the images cannot be cached in %s: %s", self._path.parent, error)

    def _hash(self) -> str:
        """A hash of the images' names, ids, sizes and locations, and of the code that checks them."""
        records, table = self._records, self._records.table
        arrays = [table.names, *(table.images[name] for name in ("id", "height", "width", "name_size")), records.indices]
        if self._shards:
            found = open_shards(self._shards)
            arrays += [found.keys, found.shard_of, found.starts, found.sizes, found.lengths]
        digest = hashlib.sha256(f"{records.root}\0{hash_of_code()}".encode("utf-8", "surrogatepass"))
        for array in arrays:
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()[:32]
