# SPDX-License-Identifier: Apache-2.0
"""Where image files are: on a disk or a mount, in tar shards, behind a URL.

A path names all three: ``images/1.jpg``, ``shards/{000000..000011}.tar/1.jpg`` for a member of one of twelve tar files, and
``https://host/images/1.jpg`` or any other URL that fsspec knows, for tar files too.
"""

import errno
import io
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from cpvt_det.errors import DataError, MissingFileError, UnreachableError, first_line

logger = logging.getLogger("cpvt_det")
Value = TypeVar("Value")
TAR = ".tar"
PAUSE = 0.5  # seconds between two attempts
NOT_A_MATTER_OF_TIME = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)


def is_url(path: str | Path) -> bool:
    """Whether fsspec reads the path."""
    return "://" in str(path)


def root_of(text: str) -> Path | str:
    """What image names are relative to: a folder or tar files as a path, a URL as text."""
    return text.rstrip("/") if is_url(text) else Path(text).expanduser()


def join_path(root: Path | str, name: str) -> str:
    """The path of an image."""
    return f"{root}/{name}" if isinstance(root, str) else str(root / name)


def split_at_shards(path: str) -> tuple[str, str]:
    """The tar files of a path and the member in them; ("", path) for a path of a file."""
    root, found, name = path.partition(f"{TAR}/")
    is_member = found and (is_url(path) or not os.path.isdir(root + TAR))
    return (root + TAR, name) if is_member else ("", path)


def is_file(path: str) -> bool:
    """Whether the path is that of a file on a disk or a mount, which may be missing."""
    return not is_url(path) and not split_at_shards(path)[0]


def open_image(path: str) -> BinaryIO:
    """Open an image file for reading.

    Raises:
        MissingFileError: no such file.
        UnreachableError: a file that is not there now, and may be later.
        DataError: a file that cannot be read.
    """
    shards, name = split_at_shards(path)
    try:
        if shards:
            from cpvt_det.data.shards import open_shards

            return open_shards(shards).open(name)
        return io.BytesIO(fetch(path)) if is_url(path) else open(path, "rb")
    except DataError as error:
        raise type(error)(f"cannot read image {path}: {error}") from error
    except IsADirectoryError as error:
        raise MissingFileError(f"cannot read image {path}: it is a folder") from error
    except FileNotFoundError as error:
        raise MissingFileError(f"cannot read image {path}: no such file") from error
    except ValueError as error:  # a name that no file can have
        raise MissingFileError(f"cannot read image {path}: {first_line(error)}") from error
    except OSError as error:
        kind = DataError if error.errno in NOT_A_MATTER_OF_TIME else UnreachableError
        raise kind(f"cannot read image {path}: {first_line(error)}") from error


def fetch(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """Content of a URL, or a part of it.

    Args:
        url: URL of a file system that fsspec knows.
        start, end: first byte, and the one after the last.

    Raises:
        FileNotFoundError: nothing is there.
        UnreachableError: a server that does not answer, or with an error.
        DataError: a file system that fsspec does not know, or whose package is not installed.
    """
    import fsspec

    try:
        # at each call, as a forked data worker needs connections of its own; fsspec keeps them by process
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{first_line(error)}; for http: pip install cpvt-det[remote]") from error
    try:
        return system.cat_file(path, start=start, end=end)
    except FileNotFoundError:
        raise
    except Exception as error:  # what file systems raise has no common base
        raise UnreachableError(f"{type(error).__name__}: {first_line(error)}") from error


def patiently(read: Callable[[], Value], seconds: float, even_if_missing: bool = False) -> Value:
    """Read something, again and again while its place does not answer.

    Args:
        read: function that reads.
        seconds: the longest time to try.
        even_if_missing: whether a missing file too is tried again: one that was there before, on a mount that is gone.

    Raises:
        UnreachableError: it was not there in all this time.
    """
    end, told = time.monotonic() + seconds, False
    while True:
        try:
            return read()
        except UnreachableError as error:
            final = isinstance(error, MissingFileError) and not even_if_missing
            if final or time.monotonic() + PAUSE > end:
                raise
            if not told:
                logger.warning("%s; trying again for %.0f s", error, seconds)
            told = True
            time.sleep(PAUSE)
