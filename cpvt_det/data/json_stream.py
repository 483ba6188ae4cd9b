# SPDX-License-Identifier: Apache-2.0
"""Read the long lists of a JSON object entry by entry, so that a file need not fit into memory."""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

CHUNK = 2**24  # characters
AHEAD = len("e-1")  # characters needed behind a number; with fewer, it may go on in the next chunk
SPACE = re.compile(r"[ \t\n\r]*")


class NotAStreamError(ValueError):
    """The file must be read as a whole: it is broken, is not an object, repeats a name, or has a section that is not a list."""


def entries(path: Path, sections: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Pairs of section name and entry, in the order of the file, for sections that are lists.

    Args:
        path: file of a JSON object.
        sections: names of the lists to read; everything else is skipped.

    Raises:
        NotAStreamError: the file must be parsed as a whole. Some entries may already have been returned.
        OSError: a file that cannot be read.
    """
    with path.open(encoding="utf-8-sig") as file:
        text, names = _Text(file), set()
        for _ in text.parts("{", "}"):
            name = text.value()
            if not isinstance(name, str) or name in names:
                raise NotAStreamError(f"{name!r} twice, or no name")
            names.add(name)
            text.require(":")
            if name in sections:
                for _ in text.parts("[", "]"):
                    yield name, text.value()
            else:
                text.value()
        if text.peek():
            raise NotAStreamError("more than one value")


class _Text:
    """A moving window on the text of a file; text before it is no longer in memory."""

    def __init__(self, file):
        self.file = file
        self.decode = json.JSONDecoder().raw_decode
        self.window = ""
        self.at = 0
        self.is_whole = False

    def peek(self) -> str:
        """The next character that is not a space; empty at the end."""
        while True:
            self.at = SPACE.match(self.window, self.at).end()
            if self.at < len(self.window) or not self._read():
                return self.window[self.at : self.at + 1]

    def require(self, character: str) -> None:
        """Go past one character."""
        if self.peek() != character:
            raise NotAStreamError(f"no {character}")
        self.at += 1

    def value(self) -> Any:
        """Read one value and go past it."""
        self.peek()
        while True:
            try:
                value, end = self.decode(self.window, self.at)
            except (json.JSONDecodeError, RecursionError) as error:
                if isinstance(error, RecursionError) or not self._read():
                    raise NotAStreamError(str(error)) from error
                continue
            if end + AHEAD <= len(self.window) or not self._read():
                self.at = end
                return value

    def parts(self, first: str, last: str) -> Iterator[None]:
        """Go past one list or object, given its two brackets; at each ``yield``, the caller must go past one part of it."""
        self.require(first)
        if self.peek() != last:
            yield
        while self.peek() != last:
            self.require(",")
            yield  # an end after the comma is not a value
        self.require(last)

    def _read(self) -> bool:
        """Drop the text already passed and read on; returns whether there was more."""
        try:
            more = "" if self.is_whole else self.file.read(CHUNK)
        except UnicodeDecodeError as error:
            raise NotAStreamError(str(error)) from error
        self.is_whole = not more
        if more:
            self.window, self.at = self.window[self.at :] + more, 0
        return bool(more)
