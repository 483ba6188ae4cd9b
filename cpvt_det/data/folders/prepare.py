# SPDX-License-Identifier: Apache-2.0
"""Turn a folder into entries of ``DATASETS.REGISTER``. Nothing is written into the folder.

If the folder's own files define a split, the entries refer to these files. A split that is drawn, or that folder names define, is
written as COCO JSONs.
"""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cpvt_det.common.errors import DataError, counted
from cpvt_det.common.files import write_json
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.folders.layouts import Layout, find_layout
from cpvt_det.data.formats.format import Sections, complete
from cpvt_det.data.listing import SPLITS, Listing, cannot_read, few
from cpvt_det.data.validation.duplicates import group_near_duplicates
from cpvt_det.data.validation.rules import FAULT, annotation_fault, image_fault

VALIDATION_SHARE = 0.2
MOST_TO_VALIDATE = 500
"""Largest number of validation images; more images would make evaluation slower, but its figures hardly more certain."""
SEED = 0
"""Seed of the split: the same for every run, so that runs on one folder can be compared."""


@dataclass
class FolderData:
    """The data sets of a folder.

    Attributes:
        register: entries of ``DATASETS.REGISTER``; their names end in ``_train``, ``_val`` and, if there is one, ``_test``.
        notes: remarks on what was found and done, one line each.
        written: COCO JSONs that were written.
    """

    register: list[list[str]]
    notes: list[str]
    written: list[str] = field(default_factory=list)

    def source_of(self, source: str) -> str:
        """A data set's name and file, as messages show them. If a JSON was written for a split, messages show the folder instead
        of this JSON.
        """
        for _, annotations, folder in self.register:
            source = source.replace(annotations, folder) if annotations in self.written else source
        return source

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
        output: folder for JSONs, which are written if a config cannot refer to the splits otherwise. The folder is created when
            needed.
        wanted: format to read if the folder has annotations in several formats.
        new_split: whether to draw a split even if the folder has one.

    Raises:
        DataError: no annotations, annotations in several formats, or images that cannot be divided.
        UnknownNameError: a format that does not exist.
    """
    listing = Listing(folder)
    layout = find_layout(listing, wanted)
    data = FolderData([], [f"{folder}: {layout.format}, {layout.what}", *layout.notes])
    if listing.unreadable and layout.format != "yolo":  # YOLO's reader reports them itself
        data.notes.append(f"{counted(len(listing.unreadable), 'image')} left out{cannot_read(listing.unreadable)}")
    name, places = folder.resolve().name or "data", dict(layout.places)
    if places and not new_split:
        _use_test_set(places, data.notes)
        if layout.others:
            data.notes.append(f"not read: {few(layout.others)}; name them in a config, or split all images anew with --new-split")
    else:
        places = _write_splits(listing, layout, output, new_split, data)
    data.register += [[f"{name}_{split}", *places[split]] for split in SPLITS if split in places]
    for name, *_ in data.register[2:]:
        data.notes.append(f"{name} is set aside for the final evaluation: cpvt-det eval ... DATASETS.TEST {name}")
    return data


def _write_splits(listing: Listing, layout: Layout, output: Path, new_split: bool, data: FolderData) -> dict[str, tuple[str, str]]:
    """Read all images of a folder, and write a JSON for each split; returns the JSON and image folder of each split.

    Splits are defined by annotation files or folder names, or drawn at random.
    """
    folder, content, notes = listing.root, complete(layout.read()), data.notes
    if not listing.images and all(FAULT in image for image in content["images"]):
        why = f"put the images below {folder}, too{cannot_read(listing.unreadable)}"
        raise DataError(f"{folder} has annotations ({layout.what}) but no images; {why}")
    corrections = [f"{heading}: {len(where)}, such as {where[0]}" for heading, where in content["notes"].items()]
    if not content["annotations"]:
        why = "; ".join(["no image has an object; are these the right annotations?", *corrections])
        raise DataError(f"{folder}: {layout.format}, {layout.what}, and {why}")
    notes += corrections
    used = {os.path.realpath(image["file_name"]) for image in content["images"]}
    if unused := [path for path in listing.images if os.path.realpath(path) not in used]:
        number = f"{len(unused)} of {len(listing.images)}"
        notes.append(f"{number} images have no annotations and are not used, such as {unused[0]}")

    found: dict[str, list[int]] = defaultdict(list)
    for image in content["images"]:
        found[image.get("split") or listing.split_of(Path(image["file_name"]))].append(image["id"])
    if not new_split and "train" in found and ("val" in found or "test" in found):
        left_out = len(found.pop("", ()))
        notes += [f"left out, because neither file nor folder names a split: {counted(left_out, 'image')}"] if left_out else []
        _use_test_set(found, notes)
        parts: dict[str, Collection[int]] = {split: found[split] for split in SPLITS if split in found}
        how = "by the names of files and folders"
    else:
        parts, how = divide(content, folder, SEED, notes), f"drawn with seed {SEED}, near-duplicates kept together"
    sizes = [f"{counted(len(image_ids), 'image')} for {split}" for split, image_ids in parts.items()]
    notes.append(f"split {how}: {', '.join(sizes)}")

    data.written = [str(output / f"{split}.json") for split in parts]
    for path, image_ids in zip(data.written, parts.values(), strict=True):
        write_json(_part(content, set(image_ids), folder), Path(path))
    return {split: (path, str(folder)) for split, path in zip(parts, data.written, strict=True)}


def _use_test_set(parts: dict[str, Any], notes: list[str]) -> None:
    """Validate on the test set if there is no validation set."""
    if "val" not in parts and "test" in parts:
        parts["val"] = parts.pop("test")
        notes.append("there is no validation set: the test set is used for it")


def divide(content: Sections, root: Path, seed: int, notes: list[str]) -> dict[str, set[int]]:
    """Draw a split: the same images and seed give the same split on every machine.

    Near-duplicates, such as neighbouring frames of a video, stay together, because validation would otherwise use images that are
    almost the same as training images. A long video is divided only if there are few other images.

    Args:
        content: COCO's sections, whose images have paths as ``file_name``.
        root: folder of the data; the draw uses paths relative to it.
        seed: seed of the draw.
        notes: list to which remarks on the split are added, one line each.

    Returns:
        ``train`` and ``val``, each with the ids of its images. Both have objects of every class if possible, other than crowds and
        boxes without area. ``val`` lacks a class if no group of near-duplicates with this class may go to ``val``, either because
        ``train`` would then lose a class, or because the group is larger than ``val`` as a whole should be.

    Raises:
        DataError: there are fewer than two images.
    """
    images = {image["id"]: image["file_name"] for image in content["images"]}
    if len(images) < 2:
        raise DataError(
            f"too few images with annotations to train and validate on: {len(images)}; add some, or name the data sets in a config"
        )
    target = max(1, min(MOST_TO_VALIDATE, round(VALIDATION_SHARE * len(images))))
    order = {}
    for image_id, path in images.items():
        name = os.path.relpath(path, root).replace(os.sep, "/")
        order[image_id] = hashlib.sha256(f"{seed} {name}".encode(errors="replace")).hexdigest()
    group_of = dict(zip(images, group_near_duplicates(list(images.values())), strict=True))
    alike = defaultdict(list)
    for image_id in sorted(images, key=order.__getitem__):
        alike[group_of[image_id]].append(image_id)
    groups = list(alike.values())
    if sum(len(group) for group in groups if len(group) <= target) < target:
        long = [group for group in groups if len(group) > target]
        ordered = (sorted(group, key=images.__getitem__) for group in groups)
        groups = [group[start : start + target] for group in ordered for start in range(0, len(group), target)]
        notes.append(
            f"{sum(map(len, long))} images are nearly the same, like the frames of a video, and there are few others: they were "
            "split in the order of their names, so the validation images resemble those of the training set"
        )
    classes, known = defaultdict(set), {category["id"] for category in content["categories"]}
    for annotation in content["annotations"]:
        can_be_used = not annotation_fault(annotation, images, known) and min(annotation["bbox"][2:]) > 0
        if can_be_used and not annotation.get("iscrowd"):
            classes[annotation["image_id"]].add(str(annotation["category_id"]))
    of_group = [set().union(*(classes[image_id] for image_id in group)) for group in groups]
    val = {image_id for number in _choose(of_group, list(map(len, groups)), target) for image_id in groups[number]}
    return {"train": images.keys() - val, "val": val}


def _choose(classes: Sequence[set[str]], sizes: Sequence[int], target: int) -> set[int]:
    """Choose groups for validation: first one for each class, beginning with the rarest class, then others in order, up to
    ``target`` images.

    The last group with objects of a class stays in training, and so does a group that alone exceeds the target.
    """
    count = Counter(name for group in classes for name in group)
    chosen: set[int] = set()

    def take(number: int) -> None:
        chosen.add(number)
        count.subtract(classes[number])

    def is_free(number: int) -> bool:
        is_last = any(count[name] < 2 for name in classes[number])
        return number not in chosen and not is_last and sizes[number] <= target and len(chosen) < len(classes) - 1

    for name in sorted(count, key=lambda name: (count[name], name)):
        if not any(name in classes[number] for number in chosen):
            for number in [number for number, group in enumerate(classes) if name in group and is_free(number)][:1]:
                take(number)
    total = sum(sizes[number] for number in chosen)
    for number, size in enumerate(sizes):
        if is_free(number) and total + size <= target:
            take(number)
            total += size
    return chosen or {min(range(len(sizes)), key=sizes.__getitem__)}  # no group is free if each is the last with some class


def _part(content: Sections, image_ids: set[int], folder: Path) -> Sections:
    """The given images with their annotations, plus annotations of images that do not exist, which the data check will report.

    Faulty values are replaced by a text that describes the fault, because JSON has neither NaN nor infinity.
    """
    known = {image["id"] for image in content["images"]}
    categories = {category["id"] for category in content["categories"]}
    images = [dict(image) for image in content["images"] if image["id"] in image_ids]
    for image in images:
        if fault := image_fault(image):
            detail = fault[1] if FAULT in image else f"{image['file_name']}: {fault[1]}"
            image |= {"height": None, "width": None, FAULT: [fault[0], detail]}
        else:
            image["file_name"] = os.path.relpath(image["file_name"], folder)
    others = known - image_ids
    annotations = [annotation for annotation in content["annotations"] if annotation["image_id"] not in others]
    for annotation in annotations:
        if fault := annotation_fault(annotation, known, categories):
            annotation |= {"bbox": None, "area": None, "iscrowd": None, FAULT: list(fault)}
    return {"images": images, "annotations": annotations, "categories": content["categories"]}


def refuse_overlap(train: CocoDataset, val: CocoDataset) -> None:
    """Refuse a split in which an image, or a copy of it, is in both parts. Copies without objects, such as black images, may be.

    Raises:
        DataError: images are both in training and in validation.
    """
    paths = [{os.path.realpath(record.file_name): record.file_name for record in dataset.records} for dataset in (train, val)]
    both = [(path, path) for path in paths[0].keys() & paths[1].keys()]
    labelled = {record.file_name for split in (train, val) for record in split.records if len(record.labels)}
    both = both or [pair for pair in _copies(*(list(named.values()) for named in paths)) if labelled.intersection(pair)]
    if both:
        first, second = min(both)
        copy = f"{first}, which is {second}" if first != second else first
        raise DataError(
            f"in both training and validation: {counted(len(both), 'image')}, such as {copy}; the figures would include images "
            "seen in training, so remove them from one of the two, or draw a new split with --new-split"
        )


def _copies(train: Iterable[str], val: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of files with the same bytes; only files of the same size are read."""
    size_of = {path: os.path.getsize(path) for path in (*train, *val)}
    common = {size_of[path] for path in train} & {size_of[path] for path in val}
    digests = {path: hashlib.sha256(Path(path).read_bytes()).digest() for path, size in size_of.items() if size in common}
    of_digest = {digests[path]: path for path in train if path in digests}
    return [(of_digest[digests[path]], path) for path in val if digests.get(path) in of_digest]


def count_classes(datasets: Mapping[str, CocoDataset]) -> tuple[list[tuple], list[str]]:
    """Count the boxes of each class in each data set.

    Returns:
        Rows (class, boxes in each data set), and a message for each data set that lacks classes.
    """
    names = next(iter(datasets.values())).classes.names
    labels = {split: data.records.boxes_to_learn()[2] for split, data in datasets.items()}
    counts = {split: np.bincount(found, minlength=len(names))[: len(names)].tolist() for split, found in labels.items()}
    notes = []
    for split, count in counts.items():
        absent = [name for name, number in zip(names, count, strict=True) if not number]
        why = "which cannot be learned" if split == "train" else "whose AP is not measured"
        if absent:
            notes.append(f"{split} has no object of {len(absent)} of {len(names)} classes, {why}: {few(absent)}")
    return list(zip(names, *counts.values(), strict=True)), notes
