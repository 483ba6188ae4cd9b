# SPDX-License-Identifier: Apache-2.0
"""Write files that are either complete or absent."""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # on Windows: no locks, so two writers of one file replace it one after the other
    fcntl = None


def remove_unfinished(folder: str | Path) -> None:
    """Remove the temporary files of killed processes; no process may be writing to the folder at the same time."""
    for path in Path(folder).glob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing. The file appears at ``path`` only after the block, when it is complete and on the disk.

    If the block raises an error, everything that it wrote is removed, and ``path`` is left unchanged.
    """
    path = Path(path)
    # In the same folder: a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the new name is on the disk only after the folder is synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(value: Any, path: str | os.PathLike[str], indent: int | None = None) -> None:
    """Write strict JSON with :func:`atomic_file`, and create missing folders.

    Raises:
        ValueError: NaN or an infinite number.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(value, indent=indent, allow_nan=False) + "\n"
    with atomic_file(path) as file:
        file.write(content.encode())
