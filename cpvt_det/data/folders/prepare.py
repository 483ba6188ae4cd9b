# SPDX-License-Identifier: Apache-2.0
"""A folder -> entries of ``DATASETS.REGISTER``. Nothing is written into the folder.

A split that the folder has is named as it is. One that is drawn, or that only names of folders tell, is written as two COCO JSONs.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.folders.layouts import Layout, find_layout
from cpvt_det.data.folders.listing import Listing
from cpvt_det.data.folders.split import divide
from cpvt_det.data.formats.reading import complete
from cpvt_det.data.formats.registry import Sections
from cpvt_det.errors import DataError
from cpvt_det.files import write_json

SEED = 0
"""Of the split: the same for every run, so that runs on one folder can be compared."""


@dataclass
class FolderData:
    """The data sets of a folder.

    Attributes:
        register: entries of ``DATASETS.REGISTER``; their names end in ``_train``, ``_val`` and, where there is one, ``_test``.
        notes: what was found and done, a line each.
    """

    register: list[list[str]]
    notes: list[str] = field(default_factory=list)

    @property
    def train(self) -> str:
        """The name of the training set."""
        return self.register[0][0]

    @property
    def val(self) -> str:
        """The name of the validation set."""
        return self.register[1][0]


def name_datasets(folder: Path, output: Path, wanted: str = "", new_split: bool = False) -> FolderData:
    """Find the data sets of a folder.

    Args:
        folder: folder of images and annotations, in a layout of :mod:`cpvt_det.data.folders.layouts`.
        output: folder for the JSONs of a split that no config could name otherwise; made when it is needed.
        wanted: format to read where there are several.
        new_split: draw a split, whatever the folder has.

    Raises:
        DataError: no annotations, several formats, images that cannot be divided.
        UnknownNameError: a format that does not exist.
    """
    listing = Listing(folder)
    layout = find_layout(listing, wanted)
    data = FolderData([], [f"{folder}: {layout.format}, {layout.what}"])
    name = folder.resolve().name or "data"
    if layout.places and not new_split:
        for split in ("train", "val", "test"):
            if split in layout.places:
                data.register.append([f"{name}_{split}", *layout.places[split]])
    else:
        content = complete(layout.read())
        parts, how = _parts(listing, content, new_split)
        data.notes.append(how)
        for split, image_ids in parts.items():
            path = output / f"{split}.json"
            write_json(_part(content, image_ids, folder), path)
            data.register.append([f"{name}_{split}", str(path), str(folder)])
        data.notes.append(f"which images are where: {', '.join(str(output / f'{split}.json') for split in parts)}")
    if layout.places.get("val", ("", ""))[1] in ("test", "testing"):
        data.notes.append("there is no validation set, so the test set is used for it")
    return data


def _parts(listing: Listing, content: Sections, new_split: bool) -> tuple[dict[str, Collection[int]], str]:
    """The ids of the images of each split, and how it came about."""
    images = {image["id"]: image for image in content["images"] if isinstance(image, dict)}
    parts: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    left_out = 0
    for image_id, image in images.items():
        split = listing.split_of(Path(image["file_name"]))
        left_out += not split
        parts.get(split, []).append(image_id)
    if not parts["val"]:
        parts["val"], parts["test"] = parts["test"], []
    if new_split or not parts["train"] or not parts["val"]:
        drawn = divide(content, listing.root, SEED)
        counts = f"{len(drawn['train'])} images to train on, {len(drawn['val'])} to validate on"
        return drawn, f"split drawn by seed {SEED}, near-duplicates together: {counts}"
    counts = ", ".join(f"{len(image_ids)} images for {split}" for split, image_ids in parts.items() if image_ids)
    without = f"; {left_out} images in no folder of a split are left out" if left_out else ""
    return {split: image_ids for split, image_ids in parts.items() if image_ids}, f"split by names of folders: {counts}{without}"


def _part(content: Sections, image_ids: Collection[int], folder: Path) -> Sections:
    """Some images with their annotations; file names from the folder on."""
    chosen = set(image_ids)
    images = [image for image in content["images"] if isinstance(image, dict) and image["id"] in chosen]
    return {
        "images": [image | {"file_name": os.path.relpath(image["file_name"], folder)} for image in images],
        "annotations": [box for box in content["annotations"] if isinstance(box, dict) and box.get("image_id") in chosen],
        "categories": content["categories"],
    }


def refuse_overlap(train: CocoDataset, val: CocoDataset) -> None:
    """Refuse a split that has images twice: the same file, or a copy of it.

    Raises:
        DataError: images to train on that are validated on, too.
    """
    paths = [{os.path.realpath(record.file_name): record.file_name for record in dataset.records} for dataset in (train, val)]
    both = [(path, path) for path in paths[0].keys() & paths[1].keys()] or _copies(*(list(named.values()) for named in paths))
    if both:
        first, second = min(both)
        copy = f"{first}, which is {second}" if first != second else first
        raise DataError(
            f"{len(both)} images are in training and in validation, such as {copy}; the figures would be of images seen in training: "
            "remove them from one of the two, or draw a split with --new-split"
        )


def _copies(train: Iterable[str], val: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of files with the same bytes; only files of the same size are read."""
    size_of = {path: os.path.getsize(path) for path in (*train, *val)}
    common = {size_of[path] for path in train} & {size_of[path] for path in val}
    digests = {path: sha256(Path(path).read_bytes()).digest() for path, size in size_of.items() if size in common}
    of_digest = {digests[path]: path for path in train if path in digests}
    return [(of_digest[digests[path]], path) for path in val if digests.get(path) in of_digest]


def count_classes(datasets: Mapping[str, CocoDataset]) -> tuple[list[tuple], list[str]]:
    """Boxes of each class in each data set.

    Returns:
        Rows (class, boxes in each data set); and a line for each data set that lacks classes.
    """
    counts = {split: Counter(int(label) for record in data.records for label in record.labels) for split, data in datasets.items()}
    names = next(iter(datasets.values())).classes.names
    rows = [(name, *(count[label] for count in counts.values())) for label, name in enumerate(names)]
    notes = []
    for split, count in counts.items():
        absent = [name for label, name in enumerate(names) if not count[label]]
        why = "they cannot be learned" if split == "train" else "their AP is not measured"
        if absent:
            listed = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
            notes.append(f"{len(absent)} of {len(names)} classes have no object in {split}, so {why}: {listed}")
    return rows, notes
