# SPDX-License-Identifier: Apache-2.0
"""Files on a disk, on a mount that may disappear and come back, and at URLs."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cpvt_det.common.errors import DataError, MissingFileError, UnreachableError, first_line

logger = logging.getLogger("cpvt_det")
Value = TypeVar("Value")
PAUSE = 0.5  # seconds between two attempts
URL = "://"  # marks a path as a URL
MAY_PASS = (408, 425, 429)  # HTTP: request timeout, too early, too many requests


def is_url(path: str | Path) -> bool:
    """Whether a path is a URL, which fsspec reads."""
    return URL in str(path)


def fetch(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """The content of a URL, or part of it.

    Args:
        url: URL of a file system that fsspec knows.
        start, end: positions of the first byte, and of the one after the last.

    Raises:
        FileNotFoundError: no file at the URL.
        UnreachableError: the server does not answer, or answers with a temporary error.
        DataError: the server refuses the request, fsspec does not know the file system, or the package for the file system is not
            installed.
    """
    import fsspec

    try:
        # at each call, because a forked data worker needs its own connections; fsspec caches them per process
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{first_line(error)}; for http: pip install cpvt-det[remote]") from error
    try:
        return system.cat_file(path, start=start, end=end)
    except FileNotFoundError:
        raise
    except Exception as error:  # the errors of file systems have no common base class
        status = getattr(error, "status", None)  # of HTTP
        is_refused = isinstance(error, PermissionError) or (type(status) is int and 400 <= status < 500 and status not in MAY_PASS)
        raise (DataError if is_refused else UnreachableError)(f"{type(error).__name__}: {first_line(error)}") from error


class Patience:
    """A time limit on waiting for a server or mount that does not answer, shared by all reads from it, in any number of threads.

    Args:
        seconds: the time limit, counted from the first failed attempt.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = math.inf
        self._answered = True

    @property
    def is_over(self) -> bool:
        """Whether the time is over and nothing at all could be read within that time."""
        return not self._answered and self._ends()

    def read(self, read: Callable[[], Value], even_if_missing: bool = False) -> Value:
        """Read something, and retry while the server or mount does not answer.

        Args:
            read: function that reads.
            even_if_missing: whether to retry also if the file is missing. This makes sense for a file that was there before,
                because its mount may be gone.

        Raises:
            UnreachableError: the server or mount did not answer before the time limit.
        """
        start, told = time.monotonic(), False
        while True:
            try:
                value = read()
            except DataError as error:
                if not isinstance(error, UnreachableError) or (isinstance(error, MissingFileError) and not even_if_missing):
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
