# SPDX-License-Identifier: Apache-2.0
"""Text files as editors and tools write them: one decoder for labels, lists, names, YAML, XML and JSON.

The encoding is taken from the byte order mark or, if there is none, from XML's declaration. All other text is assumed to be
UTF-8, UTF-16 or UTF-32. Its zero bytes show which of the three it is, as in JSON's standard.
"""

import json
import re
import unicodedata
import xml.etree.ElementTree as ET
from pathlib import Path

from cpvt_det.common.errors import DataError, first_line

DECLARED = re.compile(rb"""^\s*<\?xml[^>]*?encoding\s*=\s*["']([\w.:-]+)["']""")
LARGER = {"gb2312": "gb18030", "gbk": "gb18030", "x-gbk": "gb18030"}
"""Encoding -> a larger one that contains it, in which files that declare the smaller one are often written. Source: the WHATWG's
encoding standard."""


def decode(content: bytes) -> str:
    """The text of a file's bytes.

    Raises:
        UnicodeDecodeError: bytes that are not valid in the encoding.
        LookupError: XML that declares an unknown encoding.
    """
    encoding, declared = json.detect_encoding(content), DECLARED.match(content)
    if encoding == "utf-8" and declared and not declared[1].lower().startswith(b"utf-16"):  # UTF-16 has zero bytes
        encoding = declared[1].decode().lower()
    return content.decode(LARGER.get(encoding, encoding))


def composed(text: str) -> str:
    """The text in a single Unicode form, because different forms of a character look the same."""
    return unicodedata.normalize("NFC", text)


def ends_of(path: Path, size: int) -> str:
    """The first and last ``size`` bytes of a file as text, to recognise the file by words in it.

    Raises:
        DataError: a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(size)
            file.seek(max(size, path.stat().st_size - size))
            content += file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return content.decode(json.detect_encoding(content), "replace")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        DataError: a file that cannot be read, or whose encoding is not known.
    """
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, LookupError) as error:
        raise DataError(f"cannot read {path}: {first_line(error)}; save it as UTF-8") from error


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The number and the text of each line that is not blank. Lines are counted from 1, and surrounding blanks are removed.

    Raises:
        DataError: a file that cannot be read, or whose encoding is not known.
    """
    lines = re.split(r"\r\n|\r|\n", read_text(path))
    return [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]


def read_lines(path: Path) -> list[str]:
    """The text of each line that is not blank, as in :func:`numbered_lines`."""
    return [line for _, line in numbered_lines(path)]


def read_xml(path: Path) -> ET.Element:
    """The root of an XML file.

    Raises:
        DataError: a file that cannot be read, whose encoding is not known, or that is not XML.
    """
    text = read_text(path)
    try:
        return ET.fromstring(text)
    except (ET.ParseError, ValueError) as error:
        raise DataError(f"{path} is not XML: {first_line(error)}") from error
