# SPDX-License-Identifier: Apache-2.0
"""The files of a folder, and which of them belong together."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from cpvt_det.data.formats.yolo import IMAGES
from cpvt_det.errors import DataError

SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
SPLIT_NAMES |= {"testing": "test"}
"""Words in the names of files and folders -> splits."""


class Listing:
    """All files below a folder, read once; hidden ones are left out.

    Args:
        root: the folder.

    Attributes:
        files: paths that begin with ``root``, in alphabetical order.

    Raises:
        DataError: no such folder.
    """

    def __init__(self, root: Path):
        if not root.is_dir():
            config = f"; for a config: --config-file {root}" if root.suffix in (".yaml", ".yml") else ""
            raise DataError(f"there is no folder {root}" if not root.exists() else f"{root} is not a folder{config}")
        self.root = root
        self.files: list[Path] = []
        seen: set[str] = set()
        for folder, names, files in os.walk(root, followlinks=True):
            if (real := os.path.realpath(folder)) in seen:  # a link to a folder that was read already, or to one around it
                names[:] = []
                continue
            seen.add(real)
            names[:] = sorted(name for name in names if not name.startswith(".") and name != "__MACOSX")
            self.files += [Path(folder, name) for name in files if not name.startswith(".")]
        self.files.sort()

    @cached_property
    def folders(self) -> list[Path]:
        """The folders below the root that hold files, at any depth."""
        direct = {path.parent for path in self.files}
        return sorted({folder for deepest in direct for folder in (deepest, *deepest.parents) if self.root in folder.parents})

    def with_suffix(self, *suffixes: str) -> list[Path]:
        """Files by suffix, in whatever case."""
        return [path for path in self.files if path.suffix.lower() in suffixes]

    @cached_property
    def images(self) -> list[Path]:
        """The image files, by suffix."""
        return self.with_suffix(*IMAGES, ".gif", ".pgm", ".ppm")

    @cached_property
    def images_by_stem(self) -> Mapping[str, list[Path]]:
        """Image files by their names without suffix."""
        return by_stem(self.images)

    @cached_property
    def _images_by_lower_stem(self) -> Mapping[str, list[Path]]:
        found: dict[str, list[Path]] = defaultdict(list)
        for path in self.images:
            found[path.stem.lower()].append(path)
        return found

    @cached_property
    def image_suffix(self) -> str:
        """The suffix that most image files have."""
        return Counter(path.suffix for path in self.images).most_common(1)[0][0] if self.images else ".jpg"

    def images_called(self, stem: str) -> list[Path]:
        """Image files of a name without suffix; where there is none, those whose names differ in case alone."""
        return self.images_by_stem.get(stem) or self._images_by_lower_stem.get(stem.lower(), [])

    def split_of(self, path: Path, with_name: bool = False) -> str:
        """``train``, ``val`` or ``test`` by the nearest folder below the root whose name contains such a word; else empty.

        Args:
            path: a file below the root.
            with_name: look at the file's own name first.
        """
        parts = path.relative_to(self.root).parts
        words = [split_named(part) for part in reversed(parts if with_name else parts[:-1])]
        return next((word for word in words if word), "")


def by_stem(paths: Iterable[Path]) -> Mapping[str, list[Path]]:
    """Paths by their names without suffix."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        found[path.stem].append(path)
    return found


def split_named(name: str) -> str:
    """The split that a name contains as a word: ``instances_train2017.json`` -> ``train``, ``obj_valid_data`` -> ``val``."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), "")


def closest(path: Path, candidates: Sequence[Path]) -> Path | None:
    """Of several files of one name, the one whose folders have the most names in common with those of ``path``.

    ``labels/train/1.txt`` belongs to ``images/train/1.jpg`` rather than to ``images/val/1.jpg``.

    Raises:
        DataError: two that are equally close.
    """
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    parts = set(path.parent.parts)
    ranked = sorted(candidates, key=lambda one: (-len(parts & set(one.parent.parts)), len(one.parts), one))
    ranks = [(len(parts & set(one.parent.parts)), len(one.parts)) for one in ranked[:2]]
    if ranks[0] == ranks[1]:
        raise DataError(f"{path} belongs to {ranked[0]} or to {ranked[1]}; give only one of them this name")
    return ranked[0]
