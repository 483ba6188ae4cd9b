# SPDX-License-Identifier: Apache-2.0
"""The files below a folder, listed once. Images and splits are recognised by name, and hidden files are left out."""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path

from PIL import Image

from cpvt_det.common.errors import DataError

IMAGES = {".apng", ".avif", ".bmp", ".dib", ".gif", ".j2c", ".j2k", ".jfif", ".jp2", ".jpc", ".jpe", ".jpeg", ".jpf", ".jpg"}
IMAGES |= {".jpx", ".mpo", ".pbm", ".pcx", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif", ".tiff", ".webp"}
IMAGES |= {".arw", ".cr2", ".cr3", ".dng", ".heic", ".heif", ".hif", ".jxl", ".nef", ".orf", ".raf", ".rw2"}
"""Suffixes of photographs. Which of them can be read depends on Pillow and its plugins."""
NOT_THE_USERS = frozenset(("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"))
"""Folders that operating systems add, with copies and thumbnails of the user's files."""
SPLITS = ("train", "val", "test")
SPLIT_NAMES = {name: name for name in SPLITS} | {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
"""Words in the names of files and folders -> splits."""


@cache
def readable() -> frozenset[str]:
    """The suffixes of ``IMAGES`` that Pillow can read here. Whether it reads AVIF and JPEG 2000 depends on how it was built."""
    return frozenset(IMAGES & Image.registered_extensions().keys())


def is_image(name: str) -> bool:
    """Whether a file can be read as an image, judging by its suffix."""
    return os.path.splitext(name)[1].lower() in readable()


def walk(top: str | Path, seen: set[str]) -> Iterator[tuple[str, list[str]]]:
    """A folder and all folders below it, sorted by name, each with its sorted file names. Hidden files and folders, and folders
    in ``NOT_THE_USERS``, are left out.

    Args:
        top: the folder.
        seen: real paths of folders to leave out, so that a link cannot lead back to them. The folders of this walk are added to
            it.

    Raises:
        DataError: after the last folder, if one that exists cannot be read.
    """
    errors: list[OSError] = []
    for folder, names, files in os.walk(top, onerror=errors.append, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in NOT_THE_USERS)
        yield folder, sorted(name for name in files if not name.startswith("."))
    for error in (error for error in errors if not isinstance(error, FileNotFoundError)):  # such as a class without a folder
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}")


def files_below(folder: Path, split: str = "") -> Iterator[str]:
    """The folders and files of :func:`walk`, regardless of the split. A format whose data sets are folders reads these."""
    for place, names in walk(folder, set()):
        yield place
        yield from (os.path.join(place, name) for name in names)


class Listing:
    """All files below one or several folders, without hidden files and files in the folders ``NOT_THE_USERS``.

    Args:
        root: the folder.
        others: further folders.

    Attributes:
        files: paths that begin with one of the folders, in alphabetical order.

    Raises:
        DataError: no such folder.
    """

    def __init__(self, root: Path, *others: Path):
        if not root.is_dir():
            config = f"; for a config: --config-file {root}" if root.suffix in (".yaml", ".yml") else ""
            raise DataError(f"there is no folder {root}" if not root.exists() else f"{root} is not a folder{config}")
        self.root = root
        self._tops = (root, *others)
        seen: set[str] = set()
        paths = (os.path.join(folder, name) for top in self._tops for folder, names in walk(top, seen) for name in names)
        self.files = sorted(Path(path) for path in paths if not os.path.islink(path) or os.path.exists(path))

    def with_suffix(self, *suffixes: str) -> list[Path]:
        """The files with one of these suffixes, in upper or lower case."""
        return [path for path in self.files if path.suffix.lower() in suffixes]

    @cached_property
    def images(self) -> list[Path]:
        """The image files that can be read, judging by their suffixes."""
        return self.with_suffix(*readable())

    @cached_property
    def unreadable(self) -> list[Path]:
        """The image files that cannot be read, judging by their suffixes."""
        return self.with_suffix(*(IMAGES - readable()))

    def below(self, folder: Path) -> list[Path]:
        """The images in a folder and below it; its path may be relative or contain links."""
        inside = set()
        for find in (os.path.abspath, os.path.realpath):
            top = find(folder)
            inside |= {parent for parent in {path.parent for path in self.images} if Path(find(parent)).is_relative_to(top)}
        return [path for path in self.images if path.parent in inside]

    def parts_of(self, path: Path) -> tuple[str, ...]:
        """The parts of a path below the root, or below another folder of the listing; empty for a path outside all of these
        folders.
        """
        for top in self._tops:
            if path.is_relative_to(top) and os.pardir not in (parts := path.parts[len(top.parts) :]):
                return parts
        parts = Path(os.path.relpath(os.path.realpath(path), os.path.realpath(self.root))).parts
        return () if parts[:1] == (os.pardir,) else parts

    def split_of(self, path: Path, with_name: bool = False) -> str:
        """``train``, ``val`` or ``test``, taken from the nearest folder below the root whose name contains such a word; empty if
        there is none.

        Args:
            path: a file.
            with_name: whether to look at the file's own name first.
        """
        parts = self.parts_of(path)
        return next((word for word in map(split_named, reversed(parts if with_name else parts[:-1])) if word), "")


@cache
def split_named(name: str) -> str:
    """The split that a name contains as a word: ``instances_train2017.json`` -> ``train``, ``obj_valid_data`` -> ``val``."""
    return next((SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_NAMES), "")


def few(paths: Iterable[object]) -> str:
    """The first three items, for a message."""
    paths = list(map(str, paths))
    return ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")


def cannot_read(paths: Sequence[Path]) -> str:
    """The end of a message about image files that cannot be read; empty if there are none."""
    return f"; {few(paths)} cannot be read here: convert them to JPEG or PNG" if paths else ""


def find_files(source: str, drawn: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Find image files by path, folder or glob.

    Args:
        source: a file, a folder or a glob. A folder stands for all images in it and below it; in a glob, ``**`` matches any
            depth.
        drawn: folder below which all files are ignored, because an earlier call may have drawn them.

    Returns:
        At least one path, sorted. For a folder, also the photographs in formats that cannot be read here. Images that are ignored.

    Raises:
        DataError: no image was found, or only ignored ones.
    """
    path, unreadable = Path(source).expanduser(), []
    if os.path.isfile(path):  # unlike Path.is_file, no error for a name that no file can have
        return [path], [], []
    if os.path.isdir(path):
        listing = Listing(path)
        found, unreadable = listing.images, listing.unreadable
        suffixes = ", ".join(sorted(readable()))
        why = f"there is no image in the folder {path} or below it (suffixes: {suffixes}){cannot_read(unreadable)}"
    else:
        # brackets in the names of existing folders are taken literally: ``trip [2024]/*.jpg``
        fixed = next((folder for folder in path.parents if os.path.isdir(folder)), path.parents[-1])
        pattern = str(Path(glob.escape(str(fixed)), path.relative_to(fixed)))
        found = [file for name in glob.glob(pattern, recursive=True) if (file := Path(name)).is_file()]
        why = f"nothing matches {source}" if glob.has_magic(source) else f"there is no file or folder {source}"
    ignored = [file for file in found if drawn.resolve() in file.resolve().parents]
    if len(ignored) == len(found):
        drawn_over = f"all images of {source} are in {drawn}, to which pictures are written; choose another output folder"
        raise DataError(drawn_over if ignored else why)
    left = (sorted(file for file in some if drawn.resolve() not in file.resolve().parents) for some in (found, unreadable))
    return *left, ignored
