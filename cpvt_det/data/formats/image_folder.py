# SPDX-License-Identifier: Apache-2.0
"""A folder of images per class, ``root/train/CLASS/*.jpg``: the layout of ImageNet and of torchvision's ``ImageFolder``.

Each image counts as one object of its class that fills the image. Files in deeper folders belong to the class, too. A folder is
read only once, even if links lead to it again. Files with other suffixes, and names that start with a dot, are ignored.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from cpvt_det.common.errors import DataError
from cpvt_det.data.formats.format import Sections, make_sections, register_format
from cpvt_det.data.listing import files_below, is_image, walk

WHOLE = [0.5, 0.5, 1.0, 1.0]
"""The box of an object that fills its image, cxcywh in [0, 1]."""


def is_image_folder(path: Path) -> bool:
    """Whether a folder has images in its subfolders, or one level deeper."""
    folders = _folders(path) if path.is_dir() else []
    return any(_has_image(inside) for folder in folders for inside in (folder, *_folders(folder)))


@register_format("image_folder", matches=is_image_folder, files=files_below)
def read_image_folder(root: Path, split: str) -> Sections:
    """Read a data set into COCO's sections, without sizes of images.

    Args:
        root: folder that contains the splits.
        split: name of a folder in ``root`` whose subfolders are the classes; if empty, the folders in ``root`` are the classes.

    Returns:
        The sections. Category ids count from 1 in alphabetical order over the classes of all splits, so that labels are the same
        even in a split that lacks a class. Image ids count from 1 in the order of the paths.

    Raises:
        DataError: the split does not exist, or it has no class folder.
    """
    place = root / split
    if not place.is_dir():
        known = ", ".join(folder.name for folder in _folders(root))
        raise DataError(f"{root} has no split {split!r}: there is no folder {place}; known: {known}")
    if not (own := {folder.name for folder in _folders(place)}):
        raise DataError(f"{place} has no class folder; expected {place / 'CLASS'}/*.jpg")
    siblings = [{folder.name for folder in _folders(other)} for other in _folders(root)] if split else []
    names = sorted(own.union(*(other for other in siblings if other & own)))
    files = [(number, path) for number, name in enumerate(names, start=1) for path in _images(place / name)]
    annotations = [
        {"image_id": image_id, "category_id": number, "relative_cxcywh": WHOLE, "source": path}
        for image_id, (number, path) in enumerate(files, start=1)
    ]
    notes = {"folders with images outside the class folders, left out": [place] if _has_image(place) else []}
    return make_sections(({"file_name": path} for _, path in files), annotations, dict(enumerate(names, start=1)), notes)


def _folders(path: Path) -> list[Path]:
    """The folders in a folder, by name."""
    return sorted(folder for folder in path.iterdir() if not folder.name.startswith(".") and folder.is_dir())


def _has_image(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(is_image(entry.name) and not entry.name.startswith(".") for entry in entries)


def _images(folder: Path) -> Iterator[str]:
    """Paths of the images in a folder and below it, by name."""
    parents = set(map(str, Path(os.path.realpath(folder)).parents))  # a link to one would bring in images of other classes
    for place, files in walk(folder, parents):
        yield from (os.path.join(place, name) for name in files if is_image(name))
