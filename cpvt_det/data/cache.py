# SPDX-License-Identifier: Apache-2.0
"""What was read of a large data set, kept as columns that all processes of a machine share."""

import contextlib
import hashlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import PIL

from cpvt_det.data.columns import Columns, load_columns, save_columns
from cpvt_det.data.validation.issues import EXAMPLES, Group, Issues
from cpvt_det.errors import DataError
from cpvt_det.files import atomic_file

try:
    import fcntl
except ImportError:  # on Windows, where two makers write one after the other
    fcntl = None

logger = logging.getLogger("cpvt_det")
SMALL = 2**22  # bytes; a smaller file is read in the time that it takes to say so
FEW = 10_000  # files; fewer are read in a second
TICK = 2.0  # seconds, the coarsest time of a file system: a file may change twice within it and keep its times


@dataclass
class Reading:
    """What an annotation file contains.

    Attributes:
        columns: images and boxes that count.
        class_ids, class_names: categories by rising id.
        issues: what the checks found.
    """

    columns: Columns
    class_ids: tuple[int, ...]
    class_names: tuple[str, ...]
    issues: Issues


@dataclass(frozen=True)
class Source:
    """What a data set is read from.

    Attributes:
        path: annotation file, or path of another format.
        split: split of another format.
        reader: function that reads another format, and ``files``, a function that names the files that it reads, both of path and
            split; ``None`` of a COCO JSON, and ``files`` of a format that does not name them, which is not kept.
    """

    path: Path
    split: str = ""
    reader: Callable[[Path, str], Any] | None = None
    files: Callable[[Path, str], Iterable[str | Path]] | None = None

    @property
    def name(self) -> str:
        """A text that other sources do not have."""
        return f"{self.path.resolve()}" if self.reader is None else f"{self.path.resolve()}\0{self.path}\0{self.split}"

    def state(self) -> str:
        """A hash of names, sizes and times of the files, and of the code that reads them; empty where keeping gains nothing.

        Raises:
            DataError, OSError: files that are not there, as the reader will report.
        """
        if self.reader is None:
            return _hash_of([self.path])[0] + hash_of_code() if self.path.stat().st_size >= SMALL else ""
        code = inspect.getsourcefile(self.reader) if self.files else None
        if code is None:
            return ""
        state, number = _hash_of(self.files(self.path, self.split))
        return state + hash_of_code(code) + self.reader.__qualname__ if number >= FEW else ""

    def copy(self) -> list:
        """The difference of this copy of a JSON from others of the same size and time: its place and a hash of its content.

        Empty for other formats: names, sizes and times of their many files have to do.
        """
        return [] if self.reader else [_place_of(self.path), _hash_of_content(self.path)]

    def is_copy(self, copy: list) -> bool:
        """Whether the source is what :meth:`copy` was of; its content is looked at only where its place is not the same."""
        return not copy or _place_of(self.path) == copy[0] != [] or _hash_of_content(self.path) == copy[1]


def read_once(source: Source, examples: float, folder: Path, read: Callable[[], Reading]) -> Reading:
    """Read a data set, or map what an earlier run kept of it.

    The kept file is named by hashes of the source: of its path, and of size and time of its files and of the code that reads them.
    It appears complete or not at all; of several processes one reads, and the others wait. Kept files of earlier states of the
    source are removed, but for those that a process has mapped. A folder that cannot be written to costs only time.

    Args:
        source: what is read.
        examples: largest number of examples kept of each kind of issue; another number than the usual one is not kept.
        folder: place of the kept files; created if missing.
        read: reader of the source.

    Returns:
        What ``read`` returns; its columns mapped from the kept file, if there is one.
    """
    try:
        state = source.state() if examples == EXAMPLES else ""
    except (DataError, OSError):
        state = ""  # the reader reports it
    if not state:
        return read()
    kept, reading = folder.expanduser() / f"{_short(source.name)}-{_short(state)}.columns", None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with _only_maker(kept):
            with contextlib.suppress(FileNotFoundError, ValueError):  # not there, damaged, or of another copy
                return _load(kept, source)
            for unfinished in kept.parent.glob(f".{kept.name}.*.tmp"):  # of a maker that was killed
                unfinished.unlink()
            copy = source.copy()  # before it is read, so that no change in between is missed
            reading = read()
            _keep(reading, copy, kept)
            _remove_earlier(kept)
            return _load(kept, source)
    except OSError as error:
        logger.warning("Annotations are not kept in %s, and take longer to read: %s", kept.parent, error)
        return reading or read()


def _keep(reading: Reading, copy: list, path: Path) -> None:
    found = {name: getattr(reading.issues, name) for name in ("errors", "faults", "infos")}
    groups = {name: {heading: asdict(group) for heading, group in kind.items()} for name, kind in found.items()}
    about = {"class_ids": reading.class_ids, "class_names": reading.class_names, "issues": groups, "copy": copy}
    with atomic_file(path) as file:
        save_columns(reading.columns, about, file)


def _load(path: Path, source: Source) -> Reading:
    columns, about = load_columns(path)
    if not source.is_copy(about["copy"]):
        raise ValueError(f"{path} is of another copy of {source.path}")
    issues = Issues()
    for name, groups in about["issues"].items():
        setattr(issues, name, {heading: Group(**group) for heading, group in groups.items()})
    return Reading(columns, tuple(about["class_ids"]), tuple(about["class_names"]), issues)


@contextlib.contextmanager
def _only_maker(path: Path) -> Iterator[None]:
    """Wait until no other process makes the file; the lock of one that is killed ends with it."""
    if fcntl is None:
        yield
        return
    with path.with_suffix(".lock").open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: two makers write the same
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _remove_earlier(kept: Path) -> None:
    """Remove what is kept of earlier states of a source, unless a process has it mapped, which its lock shows."""
    for earlier in kept.parent.glob(f"{kept.name.partition('-')[0]}-*.columns") if fcntl else ():
        with contextlib.suppress(OSError), earlier.open("r+b") as file:
            if earlier != kept:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                earlier.unlink()
                earlier.with_suffix(".lock").unlink()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:20]


def _hash_of(paths: Iterable[str | Path]) -> tuple[str, int]:
    """A hash of names, sizes and times of files, and their number."""
    digest, number = hashlib.sha256(), 0
    for path in paths:
        number += 1
        try:
            found = os.stat(path)
            state = f"{found.st_size} {found.st_mtime_ns}"
        except OSError:
            state = "none"
        digest.update(f"{path}\0{state}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest(), number


def _place_of(path: Path) -> list[int]:
    """What changes with every writing into a file, and is different for each copy; empty for a file that was just written."""
    found = path.stat()
    return [] if time.time() < max(found.st_mtime, found.st_ctime) + TICK else [found.st_ino, found.st_ctime_ns]


def _hash_of_content(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


@cache
def hash_of_code(reader: str = "") -> str:
    """A hash of all code that reads and checks data, and of the versions of what decodes images: a change may change what is kept.

    Args:
        reader: module of a format of the user's.
    """
    paths = [*sorted(Path(__file__).parent.rglob("*.py")), *([Path(reader)] if reader else [])]
    versions = f"{PIL.__version__} {metadata.version('torchvision')}".encode()
    return hashlib.sha256(versions + b"".join(path.read_bytes() for path in paths)).hexdigest()
