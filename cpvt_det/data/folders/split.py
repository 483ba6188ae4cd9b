# SPDX-License-Identifier: Apache-2.0
"""Divide a data set into images for training and images for validation.

The same images and seed give the same split on every machine. Near-duplicates, such as neighbouring frames of a film, stay
together, because validation would otherwise use images that are almost the same as training images. A long film is divided only
if there are few other images.
"""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from cpvt_det.common.errors import DataError
from cpvt_det.data.formats.format import Sections
from cpvt_det.data.validation.duplicates import group_near_duplicates

VALIDATION_SHARE = 0.2
MOST_TO_VALIDATE = 500
"""Largest number of validation images; more images would make evaluation slower, but its figures hardly more certain."""


def divide(content: Sections, root: Path, seed: int, notes: list[str]) -> dict[str, set[int]]:
    """Draw a split.

    Args:
        content: COCO's sections, whose images have paths as ``file_name``.
        root: folder of the data; the draw uses paths relative to it.
        seed: seed of the draw.
        notes: list to which remarks on the split are added, one line each.

    Returns:
        ``train`` and ``val``, each with the ids of its images. Both have every class if possible. ``val`` lacks a class if no
        group of near-duplicates with this class may go to ``val``, either because ``train`` would then lose a class, or because
        the group is larger than ``val`` as a whole should be.

    Raises:
        DataError: there are fewer than two images.
    """
    images = {image["id"]: image["file_name"] for image in content["images"]}
    if len(images) < 2:
        raise DataError(
            f"too few images with annotations to train and validate on: {len(images)}; add some, or name the data sets in a config"
        )
    target = max(1, min(MOST_TO_VALIDATE, round(VALIDATION_SHARE * len(images))))
    groups = _groups(images, root, seed)
    if sum(len(group) for group in groups if len(group) <= target) < target:
        long = [group for group in groups if len(group) > target]
        ordered = (sorted(group, key=images.__getitem__) for group in groups)
        groups = [group[start : start + target] for group in ordered for start in range(0, len(group), target)]
        notes.append(
            f"{sum(map(len, long))} images are nearly the same, like the frames of a film, and there are few others: they were "
            "split in the order of their names, so the validation images resemble those of the training set"
        )
    classes = defaultdict(set)
    for annotation in content["annotations"]:
        classes[annotation["image_id"]].add(str(annotation["category_id"]))
    of_group = [set().union(*(classes[image_id] for image_id in group)) for group in groups]
    chosen = _choose(of_group, [len(group) for group in groups], target)
    val = {image_id for number in chosen for image_id in groups[number]}
    return {"train": images.keys() - val, "val": val}


def _groups(images: Mapping[int, str], root: Path, seed: int) -> list[list[int]]:
    """Groups of near-duplicates, in an order derived from the seed and their file names."""
    order = {}
    for image_id, path in images.items():
        name = os.path.relpath(path, root).replace(os.sep, "/")
        order[image_id] = hashlib.sha256(f"{seed} {name}".encode(errors="replace")).hexdigest()
    number = dict(zip(images, group_near_duplicates(list(images.values())), strict=True))
    groups = defaultdict(list)
    for image_id in sorted(images, key=order.__getitem__):
        groups[number[image_id]].append(image_id)
    return list(groups.values())


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
