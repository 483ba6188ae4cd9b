# SPDX-License-Identifier: Apache-2.0
"""Pascal VOC's format: one XML file per image.

Box coordinates start at 1 and include the last pixel. Objects marked difficult are neither learned nor counted in evaluation, as in
VOC's own evaluation: they become COCO's crowds. Source: the VOC 2012 development kit, section 10.
"""

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cpvt_det.data.formats.lines import read_lines
from cpvt_det.data.formats.registry import Sections, register_format
from cpvt_det.data.formats.yolo import IMAGES
from cpvt_det.errors import DataError, first_line


def voc_splits(folder: Path) -> list[str]:
    """Names of the splits in ``ImageSets/Main``; of VOC's own, not those of single classes (``aeroplane_train``)."""
    names = sorted(path.stem for path in (folder / "ImageSets" / "Main").glob("*.txt"))
    return [name for name in names if name.rpartition("_")[2] == name or name.rpartition("_")[2] not in names]


def is_voc(path: Path) -> bool:
    """Whether a path is a Pascal VOC folder: with XML files, or with ``Annotations/``."""
    return path.is_dir() and (next(path.glob("*.xml"), None) is not None or (path / "Annotations").is_dir())


def voc_files(folder: Path, split: str) -> Iterator[Path]:
    """What :func:`read_voc` reads: all XML files, images, and the lists of classes and of the split."""
    yield from (folder / "classes.txt", folder / "ImageSets" / "Main" / f"{split}.txt")
    for inside in _folders(folder):
        yield from sorted(inside.iterdir())


@register_format("voc", matches=is_voc, splits=voc_splits, files=voc_files)
def read_voc(folder: Path, split: str) -> Sections:
    """Read a data set into COCO's sections.

    Args:
        folder: a folder with ``Annotations/``, ``JPEGImages/`` and ``ImageSets/Main/``, or with XML files and images side by side.
        split: name of a file in ``ImageSets/Main`` without ``.txt``; empty for every XML file.

    Returns:
        The sections. Category ids count from 1 in the order of ``classes.txt`` in the folder, or else in alphabetical order over
        all XML files of the folder, whatever the split; image ids count from 1 in the order of the split, or of their names.

    Raises:
        DataError: a file that cannot be read, or a split that does not exist.
    """
    annotation_folder, image_folder = _folders(folder)
    trees = {path.stem: parse_xml(path) for path in sorted(annotation_folder.glob("*.xml"))}
    chosen: list[tuple[Path, ET.Element, Path]] = []
    for stem in _stems(folder, split, trees):
        tree = trees.get(stem)
        if tree is None:
            raise DataError(f"{folder}: split {split!r} contains {stem}, but there is no file {annotation_folder / stem}.xml")
        chosen.append((annotation_folder / f"{stem}.xml", tree, _image(image_folder, stem, tree)))
    return voc_sections(chosen, classes_of(folder, trees.values()))


def voc_sections(chosen: Iterable[tuple[Path, ET.Element, Path]], names: Mapping[str, int]) -> Sections:
    """COCO's sections of XML files, each with its content and its image; ``names`` has the category id of each class."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, (path, tree, image) in enumerate(chosen, start=1):
        height, width = (_number(tree.findtext(f"size/{side}")) for side in ("height", "width"))
        images.append({"id": image_id, "file_name": str(image), "height": height, "width": width})
        for number, element in enumerate(tree.iter("object"), start=1):
            name = element.findtext("name", "").strip()
            annotation = {"id": len(annotations) + 1, "image_id": image_id, "bbox": _box(element)}
            annotation |= {"category_id": names.get(name, name), "iscrowd": int(element.findtext("difficult", "0").strip() == "1")}
            annotations.append(annotation | {"source": f"{path}, object {number} ({name!r})"})
    categories = [{"id": number, "name": name} for name, number in names.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def parse_xml(path: Path) -> ET.Element:
    """The root of an XML file.

    Raises:
        DataError: a file that is not XML.
    """
    try:
        return ET.parse(path).getroot()
    except (ET.ParseError, OSError, ValueError) as error:
        raise DataError(f"{path} is not XML: {first_line(error)}") from error


def classes_of(folder: Path, trees: Iterable[ET.Element]) -> dict[str, int]:
    """Category ids, from 1, by class name: of ``classes.txt`` in the folder, or else of the XML files, in alphabetical order."""
    listed = folder / "classes.txt"
    if listed.is_file():
        names = read_lines(listed)
    else:
        names = sorted({element.findtext("name", "").strip() for tree in trees for element in tree.iter("object")})
    return {name: number for number, name in enumerate(names, start=1)}


def _folders(folder: Path) -> list[Path]:
    """The folder of the XML files, and that of the images."""
    return [folder / name if (folder / name).is_dir() else folder for name in ("Annotations", "JPEGImages")]


def _stems(folder: Path, split: str, trees: dict[str, ET.Element]) -> list[str]:
    if not split:
        return list(trees)
    path = folder / "ImageSets" / "Main" / f"{split}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.txt"))) or "none"
        raise DataError(f"{folder} has no split {split!r}: there is no file {path}; known: {known}, and '' for every XML file")
    return [line.split()[0] for line in read_lines(path)]


def _image(folder: Path, stem: str, tree: ET.Element) -> Path:
    """The file that the XML names, or else an image with the name of the XML."""
    named = folder / Path(tree.findtext("filename", "").strip().replace("\\", "/")).name
    if named.is_file():
        return named
    return next((path for path in sorted(folder.glob(f"{stem}.*")) if path.suffix.lower() in IMAGES), folder / f"{stem}.jpg")


def _box(element: ET.Element) -> Any:
    """COCO's box, counted from 0; the words of the file where one is not a number, for the rules to report."""
    words = [element.findtext(f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
    corners = [_number(word) for word in words]
    if any(corner is None for corner in corners):
        return words
    x1, y1, x2, y2 = corners
    return [x1 - 1, y1 - 1, x2 - x1 + 1, y2 - y1 + 1]


def _number(word: str | None) -> float | None:
    try:
        value = float(word or "")
    except ValueError:
        return None
    return int(value) if value.is_integer() else value
