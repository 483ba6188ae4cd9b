# SPDX-License-Identifier: Apache-2.0
"""The contract and the registry of data formats other than COCO JSON."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpvt_det.common.registry import PartRegistry

Notes = Mapping[str, Iterable[object]]
"""Heading of a kind of correction -> the places where it was made."""
Sections = dict[str, Any]
"""COCO's ``images``, ``annotations`` and ``categories``, and :data:`Notes` as ``notes``."""


@dataclass(frozen=True)
class DataFormat:
    """A format: how its data sets are recognised, and how they are read.

    Attributes:
        matches: function that tells whether a path, the second entry of a triple of ``DATASETS.REGISTER``, is in this format.
        read: function that reads a path and a split, the third entry. Images need ``id`` and ``file_name``; their sizes are
            optional. Annotations need ``id``, ``image_id``, ``category_id`` and either ``bbox`` (xywh in pixels) or
            ``relative_cxcywh`` (in [0, 1]). Categories need ``id`` and ``name``. Faulty entries are passed on, and the data check
            reports them. They are either unchanged, or have the key ``rules.FAULT``, whose value is a heading and a text in the
            format's own terms. The ``source`` of an annotation is its file and line.
        splits: function that lists the splits of a path, for ``cpvt-det train FOLDER``. A path without splits is a single data
            set, which is read with "" as its split.
        files: function that lists all files that ``read`` reads or looks for, including images, in a fixed order. With it, a
            data set of 10,000 files or more is cached in ``DATASETS.CACHE`` until one of them changes. With ``None``, the data set
            is read at every start.
    """

    matches: Callable[[Path], bool]
    read: Callable[[Path, str], Sections]
    splits: Callable[[Path], Sequence[str]] = lambda path: ()
    files: Callable[[Path, str], Iterable[str | Path]] | None = None


def make_sections(
    images: Iterable[dict[str, Any]], annotations: Iterable[dict[str, Any]], names: Mapping[int, str], *notes: Notes
) -> Sections:
    """Sections whose images and annotations are numbered from 1 in the given order. They contain all notes, and each place is
    listed only once.

    Args:
        images, annotations: entries; an entry that has an id keeps it.
        names: name of each class by its id.
        notes: notes of several kinds.
    """
    places: dict[str, dict[str, None]] = defaultdict(dict)
    for heading, where in (item for some in notes for item in some.items()):
        places[heading] |= dict.fromkeys(map(str, where))
    sections: Sections = {"images": list(images), "annotations": list(annotations)}
    for number, entry in (item for entries in sections.values() for item in enumerate(entries, start=1)):
        entry.setdefault("id", number)
    sections["categories"] = [{"id": number, "name": name} for number, name in names.items()]
    sections["notes"] = {heading: list(where) for heading, where in places.items() if where}
    return sections


FORMAT_REGISTRY = PartRegistry("FORMAT", "data format")
"""Name -> :class:`DataFormat`. If several match a path, the one registered last is used."""


def register_format(
    name: str,
    matches: Callable[[Path], bool],
    splits: Callable[[Path], Sequence[str]] = lambda path: (),
    files: Callable[[Path, str], Iterable[str | Path]] | None = None,
) -> Callable:
    """Register the decorated function as the reader of a format.

    Args:
        name: name of the format.
        matches, splits, files: as in :class:`DataFormat`.
    """

    def register(read: Callable[[Path, str], Sections]) -> Callable[[Path, str], Sections]:
        FORMAT_REGISTRY.register_as(name)(DataFormat(matches, read, splits, files))
        return read

    return register


def find_format(path: Path) -> DataFormat | None:
    """The format of a path; ``None`` if no registered format matches."""
    formats = [data_format for _, data_format in FORMAT_REGISTRY]
    return next((data_format for data_format in reversed(formats) if data_format.matches(path)), None)
