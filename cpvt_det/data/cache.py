# SPDX-License-Identifier: Apache-2.0
"""What was read of a large annotation file, kept as columns that all processes of a machine share."""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from cpvt_det.data.columns import Columns, load_columns, save_columns
from cpvt_det.data.validation.issues import EXAMPLES, Group, Issues
from cpvt_det.files import atomic_file

try:
    import fcntl
except ImportError:  # on Windows, where two makers write one after the other
    fcntl = None

logger = logging.getLogger("cpvt_det")
SMALL = 2**22  # bytes; a smaller file is read in the time that it takes to say so


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


def read_once(path: Path, examples: float, folder: Path, read: Callable[[], Reading]) -> Reading:
    """Read a file, or map what an earlier run kept of it.

    The kept file is named by a hash of the source's path, size and time of change, and of the code that reads it. It appears
    complete or not at all; of several processes one reads, and the others wait. A folder that cannot be written to costs only time.

    Args:
        path: annotation file.
        examples: largest number of examples kept of each kind of issue; another number than the usual one is not kept.
        folder: place of the kept files; created if missing.
        read: reader of the file.

    Returns:
        What ``read`` returns; its columns mapped from the kept file, if there is one.
    """
    try:
        state = path.stat()
    except OSError:
        return read()  # which reports it
    if examples != EXAMPLES or state.st_size < SMALL:
        return read()
    source = f"{path.resolve()} {state.st_size} {state.st_mtime_ns} {_hash_of_code()}"
    kept = folder.expanduser() / f"{hashlib.sha256(source.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.columns"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with _only_maker(kept):
            with contextlib.suppress(FileNotFoundError, ValueError):  # not there, or damaged
                return _load(kept)
            for unfinished in kept.parent.glob(f".{kept.name}.*.tmp"):  # of a maker that was killed
                unfinished.unlink()
            _keep(read(), kept)
            return _load(kept)
    except OSError as error:
        logger.warning("Annotations are not kept in %s, and take longer to read: %s", kept.parent, error)
        return read()


def _keep(reading: Reading, path: Path) -> None:
    found = {name: getattr(reading.issues, name) for name in ("errors", "faults", "infos")}
    groups = {name: {heading: asdict(group) for heading, group in kind.items()} for name, kind in found.items()}
    about = {"class_ids": reading.class_ids, "class_names": reading.class_names, "issues": groups}
    with atomic_file(path) as file:
        save_columns(reading.columns, about, file)


def _load(path: Path) -> Reading:
    columns, about = load_columns(path)
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


@cache
def _hash_of_code() -> str:
    """A hash of the modules whose change may change what is kept."""
    here = Path(__file__).parent
    names = ("annotations.py", "cache.py", "coco.py", "columns.py", "json_stream.py", "validation/rules.py", "validation/issues.py")
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in names)).hexdigest()
