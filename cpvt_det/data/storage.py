# SPDX-License-Identifier: Apache-2.0
"""Files on a disk, on a mount that may go and come back, and behind URLs."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cpvt_det.errors import DataError, MissingFileError, UnreachableError, first_line

logger = logging.getLogger("cpvt_det")
Value = TypeVar("Value")
PAUSE = 0.5  # seconds between two attempts
URL = "://"  # what marks one
MAY_PASS = (408, 425, 429)  # HTTP: request timeout, too early, too many requests


def is_url(path: str | Path) -> bool:
    """Whether fsspec reads the path."""
    return URL in str(path)


def root_of(text: str) -> Path | str:
    """What image names are relative to: a folder or tar files as a path, a URL as text."""
    return text.rstrip("/") if is_url(text) else Path(text).expanduser()


def fetch(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """Content of a URL, or a part of it.

    Args:
        url: URL of a file system that fsspec knows.
        start, end: first byte, and the one after the last.

    Raises:
        FileNotFoundError: nothing is there.
        UnreachableError: a server that does not answer, or with an error that may pass.
        DataError: a server that refuses; a file system that fsspec does not know, or whose package is not installed.
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
        kind = DataError if _is_refusal(error) else UnreachableError
        raise kind(f"{type(error).__name__}: {first_line(error)}") from error


def _is_refusal(error: Exception) -> bool:
    """Whether a server understood and refused, as it would again: HTTP's 4xx, but for those that are a matter of time."""
    status = getattr(error, "status", None)
    return isinstance(error, PermissionError) or (type(status) is int and 400 <= status < 500 and status not in MAY_PASS)


class Patience:
    """A time to wait for a place that does not answer: one for all that is read there, by any number of threads.

    Args:
        seconds: the time, from the first attempt that failed on.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = math.inf
        self._answered = True

    @property
    def is_over(self) -> bool:
        """Whether nothing at all could be read in this time."""
        return not self._answered and self._ends()

    def read(self, read: Callable[[], Value], even_if_missing: bool = False) -> Value:
        """Read something, again and again while its place does not answer.

        Args:
            read: function that reads.
            even_if_missing: whether a missing file too is tried again: one that was there before, on a mount that is gone.

        Raises:
            UnreachableError: it was not there in all this time.
        """
        start, told = time.monotonic(), False
        while True:
            try:
                value = read()
            except DataError as error:
                is_missing = isinstance(error, MissingFileError) and not even_if_missing
                if is_missing or not isinstance(error, UnreachableError):
                    self._answered = True
                    raise
                if self._end == math.inf:
                    self._end, self._answered = start + self.seconds, False
                if self._ends():
                    raise
                if not told:
                    logger.warning("%s; trying again for %.0f s", error, self.seconds)
                told = True
                time.sleep(PAUSE)
            else:
                self._answered = True
                return value

    def _ends(self) -> bool:
        return time.monotonic() + PAUSE > self._end
