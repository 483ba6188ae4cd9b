# SPDX-License-Identifier: Apache-2.0
"""Read one or several COCO JSONs of a folder, with images anywhere in it, as one data set in COCO's sections."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpvt_det.common.errors import DataError
from cpvt_det.data.coco import read_json
from cpvt_det.data.formats.format import Sections, make_sections
from cpvt_det.data.listing import Listing
from cpvt_det.data.names import Names
from cpvt_det.data.validation.rules import FAULT, category_fault


def read_coco_files(listing: Listing, files: Sequence[Path]) -> Sections:
    """Join COCO JSONs into one data set. Classes are matched by name and keep the id from the first file; images may be anywhere.

    The ``split`` of an image is the one named in the path of its JSON.

    Raises:
        DataError: an entry is not a JSON object, a category cannot be used, or an image is in two files of one split.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    names, ids = Names(listing.images, listing), {}
    file_of: dict[tuple[str, str], Path] = {}
    for path in files:
        read, split, image_ids = read_json(path), listing.split_of(path, with_name=True), {}
        for number, image in enumerate(_objects(read, path, "images")):
            new_id = image_ids.setdefault(str(_whole(image.get("id"))), len(images) + 1)  # duplicate ids stay duplicates
            images.append({"id": new_id, **_image(image, number, path, names), "split": split})
            other = file_of.setdefault((split, images[-1]["file_name"]), path)
            if other != path:
                raise DataError(
                    f"{images[-1]['file_name']} is in {other} and in {path}; keep one, or name the data sets in a config"
                )
        known = {"image_id": image_ids, "category_id": _add_categories(ids, _objects(read, path, "categories"), path)}
        boxes = _objects(read, path, "annotations")
        count = Counter(repr(annotation["id"]) for annotation in boxes if annotation.get("id") is not None)
        for number, annotation in enumerate(boxes):
            annotations.append(_annotation(annotation, number, path, known))
            if count[repr(annotation.get("id"))] > 1:
                annotations[-1][FAULT] = ["annotation ids that are not unique", "another annotation has the same id"]
    return make_sections(images, annotations, {number: name for name, number in ids.items()}, names.notes)


def _image(image: dict[str, Any], number: int, path: Path, names: Names) -> dict[str, Any]:
    """The entry of an image, without id."""
    url = image.get("coco_url")  # LVIS has no file_name
    written = image.get("file_name") or (url.rpartition("/")[2] if isinstance(url, str) else image.get("file_name"))
    entry = {side: _whole(image[side]) for side in ("height", "width") if side in image}
    if isinstance(written, str):
        return entry | names.entry(written, path)
    why = f"{path}: images[{number}] (id {image.get('id')!r}) has file_name {written!r}"
    return entry | {"file_name": str(written), FAULT: ["file names that are not text", why]}


def _add_categories(ids: dict[str, int], categories: Sequence[dict[str, Any]], path: Path) -> dict[str, int]:
    """Add categories to ``ids``, name -> id; returns old id -> id of the category with the same name."""
    new_ids = {}
    for number, category in enumerate({"id": None} | category for category in categories):
        category["id"] = _whole(category["id"])
        if fault := category_fault(category):
            raise DataError(f"{path}: {fault[0]}: categories[{number}]: {fault[1]}")
        old, name = category["id"], str(category["name"])
        if str(old) in new_ids:
            raise DataError(f"{path}: category ids that are not unique: categories[{number}]: id {old}")
        if name not in ids:
            taken = set(ids.values())
            ids[name] = old if old not in taken else max(taken) + 1
        new_ids[str(old)] = ids[name]
    return new_ids


def _annotation(annotation: dict[str, Any], number: int, path: Path, ids: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The entry of an annotation, without id, with the new ids of images and categories."""
    entry = {key: annotation[key] for key in ("bbox", "area", "iscrowd", "attributes") if key in annotation}
    entry["source"] = f"{path}: annotations[{number}] (id {annotation.get('id')!r}, image {annotation.get('image_id')!r})"
    for key, section in (("image_id", "images"), ("category_id", "categories")):
        value = annotation.get(key)
        entry[key] = ids[key].get(str(_whole(value)), -1)
        if entry[key] == -1:
            entry[FAULT] = [f"annotations of unknown {section}", f"{key} {value!r}, which is not an id in {section}"]
    return entry


def _whole(value: Any) -> Any:
    """Convert an id or a size to an integer: "1", for example, or 1.0, which pandas writes and pycocotools treats as 1."""
    is_whole = value.isdecimal() if isinstance(value, str) else isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


def _objects(read: dict[str, Any], path: Path, section: str) -> list[dict[str, Any]]:
    values = read.get(section)
    if not isinstance(values, list) or (not values and section != "annotations"):
        raise DataError(f"{path} is not COCO: {section!r} has to be a list of objects, got {str(values)[:60]}")
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise DataError(f"{path}: {section}[{number}] is not an object but {value!r}; correct or remove it")
    return values
