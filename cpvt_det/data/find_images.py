# SPDX-License-Identifier: Apache-2.0
"""Image files by path, folder or glob."""

import glob
import os
from pathlib import Path

from cpvt_det.errors import DataError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes of the image files that are taken from a folder."""


def find_files(source: str, output: Path) -> list[Path]:
    """Find image files.

    Args:
        source: a file; a folder, for all images in it and below it; or a glob, in which ``**`` matches any depth.
        output: folder below which no file is taken: it may contain pictures of an earlier call.

    Returns:
        At least one path, sorted.

    Raises:
        DataError: no image was found.
    """
    path = Path(source).expanduser()
    if os.path.isfile(path):  # unlike Path.is_file, no error for a name that no file can have
        return [path]
    if os.path.isdir(path):
        found = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
        why = f"there is no image in the folder {path} or below it (suffixes: {', '.join(SUFFIXES)})"
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        why = f"nothing matches {source}" if glob.has_magic(source) else f"there is no file or folder {source}"
    found = sorted(file for file in found if file.is_file() and output.resolve() not in file.resolve().parents)
    if not found:
        raise DataError(why)
    return found
