# SPDX-License-Identifier: Apache-2.0
"""XML files: Pascal VOC's, one per image, and CVAT's own, one per task.

VOC's box coordinates start at 1 and include the last pixel. If any box starts at 0, coordinates are taken to start at 0 in the
whole data set. Objects marked difficult are neither learned nor counted in evaluation, as in VOC's own evaluation: they become
COCO's crowds. Source: the VOC 2012 development kit, section 10. Rotated boxes (roLabelImg) and polygons (LabelMe) become the
upright boxes around them. Source for CVAT: its manual, "CVAT for image".
"""

import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpvt_det.common.errors import DataError
from cpvt_det.data.formats.format import (
    Sections,
    around_corners,
    around_ellipse,
    around_points,
    around_rotated,
    make_sections,
    register_format,
)
from cpvt_det.data.listing import Listing, files_below, split_named
from cpvt_det.data.names import Names
from cpvt_det.data.text import composed, ends_of, read_lines, read_xml
from cpvt_det.data.validation.rules import FAULT

SIDES = ("xmin", "ymin", "xmax", "ymax")
"""Tags of Pascal VOC for the sides of a box."""
SHAPES: dict[str, tuple[Sequence[str], Callable[[Sequence[float], float], list[float]]]] = {
    "box": (("xtl", "ytl", "xbr", "ybr"), lambda numbers, angle: around_corners(*numbers, angle)),
    "polygon": (("points",), lambda numbers, angle: around_points(numbers[::2], numbers[1::2])),
    "ellipse": (("cx", "cy", "rx", "ry"), lambda numbers, angle: around_ellipse(*numbers, angle)),
    "mask": (("left", "top", "width", "height"), lambda numbers, angle: list(numbers)),
}
"""CVAT shape -> the attributes that hold its numbers, and a function that turns these and an angle in radians into COCO's box."""


def voc_splits(folder: Path) -> list[str]:
    """Names of the splits in ``ImageSets/Main``, without VOC's lists for single classes (``aeroplane_train``)."""
    names = _lists(folder)
    return [name for name in names if name.rpartition("_")[2] == name or name.rpartition("_")[2] not in names]


def _lists(folder: Path) -> dict[str, Path]:
    """The file of each split, by name."""
    return {path.stem: path for path in sorted((folder / "ImageSets" / "Main").glob("*")) if path.suffix.lower() == ".txt"}


def is_voc(path: Path) -> bool:
    """Whether a path is a Pascal VOC folder, with XML files or with ``Annotations/``."""
    return path.is_dir() and (next(path.glob("*.xml"), None) is not None or (path / "Annotations").is_dir())


def is_voc_file(path: Path) -> bool:
    """Whether an XML file has Pascal VOC's ``<annotation>`` in its first or last 64 KiB."""
    return re.search(r"<annotation[\s>]", ends_of(path, 2**16)) is not None


@register_format("voc", matches=is_voc, splits=voc_splits, files=files_below)
def read_voc(folder: Path, split: str) -> Sections:
    """Read a data set into COCO's sections.

    Args:
        folder: folder with XML files and images. They may be in ``Annotations/`` and ``JPEGImages/``, side by side, or in other
            folders.
        split: name of a file in ``ImageSets/Main`` without ``.txt``; empty for every XML file.

    Returns:
        The sections. Category ids count from 1 in the order of ``classes.txt`` in the folder. Without this file, they follow the
        alphabetical order of the classes in all XML files of the folder, regardless of the split. Image ids count from 1 in the
        order of the split's file or, without a split, of the file names.

    Raises:
        DataError: a file that cannot be read, or a split that does not exist.
    """
    listing = Listing(folder)
    names = Names(listing.images, listing)
    trees = {path: read_xml(path) for path in listing.with_suffix(".xml") if is_voc_file(path) or not path.stat().st_size}
    files = Names(list(trees), listing)
    chosen = _split(folder, split, files) if split else list(trees)
    written = {path: tree.findtext("filename", "").strip() or path.stem for path, tree in trees.items()}
    image_of = names.pair(list(trees), written)
    if not chosen:
        raise DataError(f"{folder}: split {split!r} has no images")
    images = [{"file_name": str(image_of[path])} if path in image_of else names.entry(written[path], path) for path in chosen]
    objects = [element for tree in trees.values() for element in tree.iter("object")]
    listed = folder / "classes.txt"
    classes = map(composed, read_lines(listed)) if listed.is_file() else sorted({_name(element) for element in objects} - {""})
    ids = {name: number for number, name in enumerate(classes, start=1)}
    starts = (element.findtext(f"bndbox/{side}") for element in objects for side in SIDES[:2])
    first = 0 if any(_number(start) == 0 for start in starts) else 1  # the coordinate of the first pixel
    annotations: list[dict[str, Any]] = []
    difficult, swapped = [], []
    for image_id, (path, image) in enumerate(zip(chosen, images, strict=True), start=1):
        image |= {side: _number(trees[path].findtext(f"size/{side}")) for side in ("height", "width")}
        for number, element in enumerate(trees[path].iter("object"), start=1):
            if element.findtext("deleted") == "1":  # LabelMe's
                continue
            name = _name(element)
            source = f"{path}, object {number} ({name!r})"
            annotation = {"image_id": image_id, "category_id": ids.get(name, -1), "source": source, **_voc_box(element, first)}
            annotation["iscrowd"] = int(element.findtext("difficult", "0").strip() == "1")
            if name not in ids:
                annotation[FAULT] = ["objects of unknown classes", f"<name> is {name!r}" + "; classes.txt lacks it" * bool(name)]
            difficult += [source] * annotation["iscrowd"]
            swapped += [source] * annotation.pop("swapped", False)
            annotations.append(annotation)
    notes = {
        "objects marked difficult, neither learned nor counted in evaluation": difficult,
        "boxes whose minimum is above their maximum, sorted": swapped,
        "coordinates taken to start at 0, because one of them is 0": [] if first else [chosen[0].parent],
    }
    return make_sections(images, annotations, {number: name for name, number in ids.items()}, notes, files.notes, names.notes)


def _name(element: ET.Element) -> str:
    """The class of an object."""
    return composed(element.findtext("name", "").strip())


def _split(folder: Path, split: str, names: Names) -> list[Path]:
    """The XML files of a split, in the order of the split's file."""
    if (path := _lists(folder).get(split)) is None:
        known, place = ", ".join(voc_splits(folder)) or "none", folder / "ImageSets" / "Main" / f"{split}.txt"
        raise DataError(f"{folder} has no split {split!r}: there is no file {place}; known: {known}, and '' for every XML file")
    return list(dict.fromkeys(_listed(folder, path, line, names) for line in read_lines(path)))


def _listed(folder: Path, path: Path, line: str, names: Names) -> Path:
    """The XML file for a line that names an image. The name may be in quotes, and may be followed by VOC's 1, 0 or -1."""
    whole = line[1:-1].strip() if line[:1] == line[-1:] == '"' else line
    for loosely in (False, True):
        for name in (whole, re.sub(r"\s+-?[01]$", "", whole).strip('"')):
            if found := names.find(name, path, loosely):
                return found
    raise DataError(f"{path} contains {whole!r}, but no XML file below {folder} has this name")


def _voc_box(element: ET.Element, first: int) -> dict[str, Any]:
    """An object's box as in COCO, with coordinates from 0, or its fault."""
    box, rotated, polygon = (element.find(tag) for tag in ("bndbox", "robndbox", "polygon"))
    try:
        if box is not None:
            x0, y0, x1, y1 = (_required(box, side) for side in SIDES)
            is_swapped = x1 < x0 or y1 < y0
            (x0, x1), (y0, y1) = sorted((x0, x1)), sorted((y0, y1))
            return {"bbox": [x0 - first, y0 - first, x1 - x0 + first, y1 - y0 + first], "swapped": is_swapped}
        if rotated is not None:
            return {"bbox": around_rotated(*(_required(rotated, tag) for tag in ("cx", "cy", "w", "h", "angle")))}
        if polygon is not None:
            if not len(polygon):
                raise ValueError("<polygon> has no points")
            numbers = [(point.tag, _required(polygon, point)) for point in polygon.iter() if re.fullmatch(r"[xy]\d*", point.tag)]
            return {"bbox": around_points(*([number for tag, number in numbers if tag[0] == axis] for axis in "xy"))}
    except ValueError as error:
        return {FAULT: ["boxes that are not numbers", str(error)]}
    return {FAULT: ["objects without a box", "it has no <bndbox>, <robndbox> or <polygon>"]}


def _required(parent: ET.Element, part: str | ET.Element) -> float:
    tag, text = (part, parent.findtext(part)) if isinstance(part, str) else (part.tag, part.text)
    if (number := _number(text)) is None:
        raise ValueError(f"<{tag}> in <{parent.tag}> " + ("is missing" if text is None else f"is {text.strip()!r}, not a number"))
    return number


def _number(word: str | None) -> float | None:
    try:
        value = float(word or "")
    except ValueError:
        return None
    return None if not math.isfinite(value) else int(value) if value.is_integer() else value


def read_cvat_files(listing: Listing, trees: Mapping[Path, ET.Element]) -> Sections:
    """Read CVAT's own XML ("CVAT for images"): each shape in :data:`SHAPES` becomes the upright box around it, in pixels.

    Args:
        listing: files of the folder.
        trees: XML file -> its content.

    Raises:
        DataError: CVAT's XML for a video, which has tracks instead of images.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    labels: dict[str, None] = {}
    names = Names(listing.images, listing)
    for path, tree in trees.items():
        if tree.find("track") is not None:
            raise DataError(f'{path} describes a video ("CVAT for video"): export the task as "CVAT for images" or as COCO')
        labels |= {composed(label.text.strip()): None for label in tree.iterfind("meta//label/name") if label.text}
        for image in tree.iterfind("image"):
            written = "/".join(filter(None, (image.get("subset"), image.get("name", ""))))  # a project's images are in such folders
            sides = {side: _number(image.get(side)) for side in ("height", "width")}
            images.append({**names.entry(written, path), **sides, "split": split_named(image.get("subset", ""))})
            for number, shape in enumerate((shape for tag in SHAPES for shape in image.iterfind(tag)), start=1):
                name = composed(shape.get("label", "").strip())
                found = _cvat_box(shape) if name else {FAULT: ["shapes without a label", f"<{shape.tag}> has no label"]}
                source = f"{path}, image {image.get('name')!r}, shape {number}"
                annotations.append({"image_id": len(images), "category_id": name, "source": source, **found})
    labels |= {annotation["category_id"]: None for annotation in annotations if FAULT not in annotation}
    ids = {name: number for number, name in enumerate(labels, start=1)}
    for annotation in annotations:
        annotation["category_id"] = ids.get(annotation["category_id"], -1)
    return make_sections(images, annotations, dict(enumerate(labels, start=1)), names.notes)


def skipped_shapes(trees: Mapping[Path, ET.Element]) -> list[str]:
    """One line of text for each kind of shape in CVAT's XML that has no box: points, polylines, skeletons."""
    shapes = (shape for tree in trees.values() for image in tree.iterfind("image") for shape in image if shape.get("label"))
    counts = Counter(shape.tag for shape in shapes if shape.tag not in (*SHAPES, "tag"))  # a tag labels the whole image
    return [f"not read: {number} annotations of the kind {tag!r}, which have no box" for tag, number in sorted(counts.items())]


def _cvat_box(shape: ET.Element) -> dict[str, Any]:
    """The COCO annotation of a shape, with its box or its fault."""
    attributes, box_around = SHAPES[shape.tag]
    words = [word for name in attributes for word in re.split("[,;]", shape.get(name, ""))]
    try:
        box = box_around([float(word) for word in words], math.radians(float(shape.get("rotation", 0.0))))
        if all(map(math.isfinite, box)):
            return {"bbox": box}
    except (ValueError, TypeError):
        pass
    said = " ".join(f'{name}="{shape.get(name, "")}"' for name in attributes)[:100]
    return {FAULT: ["shapes whose numbers cannot be read", f"<{shape.tag} {said}>"]}
