# SPDX-License-Identifier: Apache-2.0
"""Annotation files wherever they lie in a folder -> COCO's sections: YOLO's text, Pascal VOC's XML, several COCO JSONs.

Files belong together by their names. As in ``data/formats/``, faulty entries are passed on unchanged, and an annotation whose image
is missing gets the name that the image should have: the check of the data reports both.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpvt_det.data.coco import read_json
from cpvt_det.data.folders.listing import Listing, closest
from cpvt_det.data.formats.lines import read_lines
from cpvt_det.data.formats.registry import Sections
from cpvt_det.data.formats.voc import classes_of, parse_xml, voc_sections
from cpvt_det.data.formats.yolo import yolo_annotations, yolo_sections
from cpvt_det.errors import DataError

NAME_FILES = ("classes.txt", "obj.names", "labels.txt", "names.txt")
"""Files with a class name per line, in the order of the numbers in YOLO's text files."""
MOST_CLASSES = 10_000
"""Classes without names that a folder of text files may have."""
LABEL = re.compile(r"\d+(\s+-?\d*\.?\d+(e-?\d+)?){4,}\s*$", re.I)


def label_files(listing: Listing) -> list[Path]:
    """Text files that are YOLO's: of the name of an image, or beside such files with lines of a class and numbers in [0, 1]."""
    texts = [path for path in listing.with_suffix(".txt") if path.name not in NAME_FILES]
    named = {path for path in texts if listing.images_called(path.stem)}
    some = [path for path in texts if (not named or path in named) and path.stat().st_size][:50]
    if not any(map(_is_label_file, some)):
        return []
    folders = {path.parent for path in named}
    return [path for path in texts if path in named or ((not named or path.parent in folders) and _is_label_file(path))]


def _is_label_file(path: Path) -> bool:
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if not lines or not all(map(LABEL.match, lines)):
        return False
    numbers = [float(word) for line in lines for word in line.split()[1:]]
    return sum(0 <= number <= 1 for number in numbers) > len(numbers) / 2


def read_label_files(listing: Listing, labels: Sequence[Path]) -> Sections:
    """YOLO's text files without a YAML file. An image without a text file has no objects; ids and classes as in
    :func:`cpvt_det.data.formats.yolo.read_yolo`, where no file has the classes' names they are called by their numbers."""
    missing = listing.image_suffix
    of_image = {closest(label, listing.images_called(label.stem)) or label.with_suffix(missing): label for label in labels}
    images = [(image, of_image.pop(image, None)) for image in listing.images]
    images += of_image.items()  # whose images are missing
    annotations = yolo_annotations(label for _, label in images)
    names = _class_names(listing) or _numbers_as_names(annotations)
    return yolo_sections((image for image, _ in images), annotations, dict(enumerate(names)))


def _numbers_as_names(annotations: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each class up to the largest number.

    Raises:
        DataError: a number so large that it is no class.
    """
    numbered = [annotation for annotation in annotations if isinstance(annotation["category_id"], int)]
    last = max(numbered, key=lambda annotation: annotation["category_id"], default={"category_id": 0})
    if last["category_id"] >= MOST_CLASSES:
        raise DataError(
            f"{last['source']}: class {last['category_id']}, but no file has the names of the classes, which are counted from 0; "
            f"correct it, or write the names into a {NAME_FILES[0]}, a line each"
        )
    return [str(number) for number in range(last["category_id"] + 1)]


def _class_names(listing: Listing) -> list[str]:
    """The names of the classes, empty without a file that has them.

    Raises:
        DataError: files that contradict each other.
    """
    files = sorted((path for path in listing.files if path.name in NAME_FILES), key=lambda path: NAME_FILES.index(path.name))
    contents = [read_lines(path) for path in files]
    other = next((number for number, names in enumerate(contents) if names != contents[0]), None)
    if other is not None:
        raise DataError(f"{files[0]} and {files[other]} have other names of classes, or another order; keep the one that is right")
    return contents[0] if contents else []


def read_voc_files(listing: Listing, files: Sequence[Path]) -> Sections:
    """Pascal VOC's XML files anywhere, each for the image of its own name or else of the name that it contains."""
    chosen = [(path, parse_xml(path)) for path in files]
    names = classes_of(listing.root, [tree for _, tree in chosen])
    return voc_sections(((path, tree, _image_of(listing, path, tree)) for path, tree in chosen), names)


def _image_of(listing: Listing, path: Path, tree: ET.Element) -> Path:
    named = Path(tree.findtext("filename", "").strip().replace("\\", "/"))
    for stem in (path.stem, named.stem):
        found = closest(path, listing.images_called(stem))
        if found is not None:
            return found
    return path.with_suffix(listing.image_suffix)


def image_named(listing: Listing, annotations: Path, name: str) -> Path:
    """The image that an annotation file names, perhaps below folders that are no longer there; of several, one of its own split."""
    parts = Path(name.replace("\\", "/")).parts or ("",)
    candidates = [path for path in listing.images_by_stem.get(Path(parts[-1]).stem, ()) if path.name == parts[-1]]
    for length in range(len(parts), 0, -1):
        ends = [path for path in candidates if path.parts[-length:] == parts[-length:]]
        split = listing.split_of(annotations, with_name=True)
        ends = [path for path in ends if listing.split_of(path) == split] or ends
        if ends:
            return closest(annotations, ends)
    return annotations.parent / name


def read_coco_files(listing: Listing, files: Sequence[Path]) -> Sections:
    """COCO JSONs as one data set: classes by their names, with the ids of the first file that has them; images wherever they are.

    Raises:
        DataError: an entry that is no object of JSON.
    """
    content: Sections = {"images": [], "annotations": [], "categories": []}
    ids: dict[str, int] = {}
    for path in files:
        _add_coco_file(content, ids, path, listing)
    content["categories"] = [{"id": number, "name": name} for name, number in ids.items()]
    return content


def _add_coco_file(content: Sections, ids: dict[str, int], path: Path, listing: Listing) -> None:
    read = read_json(path)
    categories, images, annotations = (_objects(read, path, section) for section in ("categories", "images", "annotations"))
    names = {}
    for category in categories:
        old, name = category.get("id"), str(category.get("name"))
        if isinstance(old, int):
            names[old], taken = name, set(ids.values())
            ids.setdefault(name, old if old not in taken else max(taken) + 1)
    new_ids: dict[str, int] = {}
    for image in images:  # an id that is not unique stays so
        number = new_ids.setdefault(str(image.get("id")), len(content["images"]) + 1)
        content["images"].append(image | {"id": number, "file_name": str(image_named(listing, path, str(image.get("file_name"))))})
    for number, annotation in enumerate(annotations):
        old, image_id, category_id = (annotation.get(key) for key in ("id", "image_id", "category_id"))
        kept = {key: annotation[key] for key in ("bbox", "area", "iscrowd") if key in annotation}
        kept |= {"id": len(content["annotations"]) + 1, "image_id": new_ids.get(str(image_id), -1)}
        kept["category_id"] = ids[names[category_id]] if isinstance(category_id, int) and category_id in names else category_id
        kept["source"] = f"{path}: annotations[{number}] (id {old!r}, image {image_id!r})"
        content["annotations"].append(kept)


def _objects(read: dict[str, Any], path: Path, section: str) -> list[dict[str, Any]]:
    values = read.get(section)
    for number, value in enumerate(values if isinstance(values, list) else ()):
        if not isinstance(value, dict):
            raise DataError(f"{path}: {section}[{number}] is not an object but {value!r}; correct or remove it")
    return values if isinstance(values, list) else []


def require_annotations(listing: Listing) -> None:
    """Refuse a folder in which nothing is recognised.

    Raises:
        DataError: always; the message contains what was found and what is known.
    """
    known = (
        "a COCO JSON, YOLO's data.yaml or text files, Pascal VOC's XML files, CVAT's XML, or a format of your own (--import MODULE)"
    )
    images = f"{len(listing.images)} images" if listing.images else "no images"
    classes = "; for images in a folder of their class, train a classifier: --config-file quickstart/classifier.yaml"
    hint = classes if len({path.parent for path in listing.images}) > 1 else ""
    raise DataError(f"{listing.root} has {images} and no annotations that are known; put {known} beside them{hint}")
