# SPDX-License-Identifier: Apache-2.0
"""YOLO's format: one text file of boxes per image, with or without a YAML file of class names and splits.

A line of text is ``class cx cy w h``, or the polygon ``class x1 y1 x2 y2 x3 y3 ...``; all numbers except the class are fractions
of the image's sides. If the YAML file has ``kpt_shape``, numbers for keypoints follow the box. Source: Ultralytics and Roboflow.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cpvt_det.common.errors import DataError, counted, first_line
from cpvt_det.data.formats.format import Sections, make_sections, register_format
from cpvt_det.data.listing import IMAGES, SPLIT_NAMES, SPLITS, Listing, cannot_read
from cpvt_det.data.names import Names
from cpvt_det.data.text import ends_of, numbered_lines, read_lines, read_text
from cpvt_det.data.validation.rules import FAULT

NAME_FILES = ("classes.txt", "obj.names", "labels.txt", "names.txt", "_darknet.labels")
"""Files with one class name per line, in the order of the class numbers; files that end in ``.names`` are read in the same way."""
MOST_CLASSES = 10_000
"""Largest number of classes in a folder of text files without class names."""
LINE = "class cx cy w h"
KEYPOINTS = "keypoints need kpt_shape in data.yaml"
CORNERS = (8, 10)
"""How many numbers a polygon of four points has, open or closed; tools write boxes, even rotated ones, as such polygons."""
LARGEST_CORNER = 1.5
"""Largest coordinate of a polygon, as a fraction of the image's side; a larger number may be the visibility of a keypoint."""
AT_LEAST = 5
"""Smallest number of lines for which equal lengths suggest that all lines contain keypoints."""


def find_yolo(path: Path) -> Path | None:
    """The YAML file of a data set: the path itself, or ``data.yaml`` in a folder; ``None`` if there is none."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return path
    inside = path / "data.yaml"
    return inside if inside.is_file() else None


class YoloFile:
    """The YAML file of a data set. Paths in it are relative to its ``path:`` or, if there is none, to the folder of the file.

    Args:
        path: a folder with ``data.yaml``, or the YAML file.

    Raises:
        DataError: a file that cannot be read, or that has other content.
    """

    def __init__(self, path: Path):
        self.path = find_yolo(path) or path
        try:  # values as they are written: YAML 1.1 would turn the class `no` into False, and `010` into 8
            content = yaml.load(read_text(self.path), yaml.BaseLoader)
        except (yaml.YAMLError, RecursionError) as error:
            where = f", line {error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
            why = f"{getattr(error, 'problem', '') or first_line(error)}{where}"
            raise DataError(f"{self.path} is not YAML: {why}") from error
        if not isinstance(content, dict):
            raise DataError(
                f"{self.path} is not a YOLO data set: expected keys train, val and names, got a {type(content).__name__}"
            )
        self.content = {key: None if value in ("", "~", "null") else value for key, value in content.items()}
        root = self.path.parent / str(self.content.get("path") or "").replace("\\", "/")
        # `path:` may refer to the machine on which the file was written
        self.root = root if os.path.isdir(root) else self.path.parent

    @property
    def missing(self) -> dict[str, str]:
        """Each split that the file names -> an error message if the split's images do not exist, otherwise an empty text."""
        found = {}
        for split in filter(self._written, SPLITS):
            try:
                self.places(split)
                found[split] = ""
            except DataError as error:
                found[split] = str(error)
        return found

    @property
    def class_names(self) -> dict[int, str]:
        """The name of each class by its number."""
        names = self.content.get("names")
        names = dict(enumerate(names)) if isinstance(names, list) else names
        if not isinstance(names, dict) or not names or not all(str(number).isdecimal() for number in names):
            why = f"names must be a list of class names, or a mapping of numbers to class names, got {names!r}"
            raise DataError(f"{self.path}: {why}")
        return {int(number): str(name) for number, name in sorted(names.items(), key=lambda item: int(item[0]))}

    @property
    def keypoints(self) -> int | None:
        """Count of keypoint numbers after each box; ``None`` if the file has no ``kpt_shape``."""
        if (shape := self.content.get("kpt_shape")) is None:
            return None
        if not isinstance(shape, list) or len(shape) != 2 or not all(re.fullmatch(r"\d{1,4}", str(number)) for number in shape):
            raise DataError(f"{self.path}: kpt_shape must be [number of keypoints, 2 or 3], got {shape!r}")
        return int(shape[0]) * int(shape[1])

    def places(self, split: str) -> list[Path]:
        """Folders, text files and images of a split."""
        if not (written := self._written(split)):
            known = [key for key in SPLIT_NAMES if self.content.get(key)]
            raise DataError(f"{self.path} has no split {split!r}; known: {', '.join(known) or 'none'}")
        places = []
        for place in map(str, written if isinstance(written, list) else [written]):
            bases = dict.fromkeys((self.root, self.path.parent))
            tried = [self.root / place, *(base / end for base in bases for end in _ends(place))]
            if (there := next(filter(os.path.exists, tried), None)) is None:  # exists is False for impossible names
                raise DataError(
                    f"{self.path}: split {split!r} is {place}, but {tried[0]} does not exist; write its path relative to the "
                    "folder of this YAML file"
                )
            places.append(there)
        return places

    def listing(self, places: Iterable[Path]) -> Listing:
        """The files of the data set: the files below its folder and, if there are images elsewhere, the files near these images."""
        others, real = [], self.root.resolve()
        folders = (place if place.is_dir() else place.parent for place in places)
        for place in (place for place in folders if real not in (place.resolve(), *place.resolve().parents)):
            around = [folder for folder in (place, *place.parents) if folder.name.lower() == "images"]
            others.append(around[0].parent if around else place)
        return Listing(self.root, *others)

    def files(self, split: str) -> list[Path]:
        """All files that :func:`read_yolo` reads: the YAML file, and the files of the data set."""
        return [self.path, *self.listing(self.places(split)).files]

    def _written(self, split: str) -> Any:
        """The value that the file gives for a split, under any of the split's names; ``None`` if there is none."""
        return next((self.content[key] for key, of in SPLIT_NAMES.items() if of == split and self.content.get(key)), None)


@register_format(
    "yolo",
    matches=lambda path: find_yolo(path) is not None,
    splits=lambda path: [split for split, missing in YoloFile(path).missing.items() if not missing],
    files=lambda path, split: YoloFile(path).files(split),
)
def read_yolo(path: Path, split: str) -> Sections:
    """Read a data set into COCO's sections, with ``relative_cxcywh`` for boxes and without sizes of images.

    Args:
        path: folder with ``data.yaml``, or the YAML file.
        split: ``train``, ``val`` or ``test``.

    Returns:
        The sections. Category ids are YOLO's, from 0; image ids count from 1 in the order of the paths. An image without a text
        file has no objects.

    Raises:
        DataError: a file that cannot be read, or one without class names or without the split.
    """
    described = YoloFile(path)
    places = described.places(split)
    listing = described.listing(places)
    names = Names(listing.images, listing)
    images = {image["file_name"]: image for place in places for image in _images(place, names)}
    listed = {Path(name).parent for name, image in images.items() if FAULT not in image}
    if outside := listed - {image.parent for image in listing.images}:  # images of lists, with their label files
        listing = described.listing([*places, *outside])
        names = Names(listing.images, listing)
    if not images:
        raise DataError(f"{described.path}: split {split!r} has no images{cannot_read(listing.unreadable)}")
    return _sections(list(images.values()), names, split, described.keypoints, described.class_names)


def label_files(listing: Listing) -> list[Path]:
    """The text files that are named like images, if any of them has lines like YOLO's. If no text file is named like an image,
    all text files with such lines.
    """
    pairs = Names(listing.images, listing).pair(_texts(listing))
    alike = [path for path in pairs or _texts(listing) if _is_like_labels(path, strictly=not pairs)]
    return list(pairs) if alike and pairs else alike


def read_label_files(listing: Listing) -> Sections:
    """Read YOLO's text files without a YAML file.

    An image without a text file has no objects. Ids and classes are as in :func:`read_yolo`. If no file has class names, the
    class numbers serve as names.

    Raises:
        DataError: a file that cannot be read; files with different class names.
    """
    files = [path for path in listing.files if path.name.lower() in NAME_FILES or path.suffix.lower() == ".names"]
    for path in listing.with_suffix(".data"):  # darknet's
        written = re.search(r"^\s*names\s*=\s*(.+?)\s*$", ends_of(path, 2**12), re.M)
        named = Names(listing.files, listing).find(written[1], path) if written else None
        files += [named] if named and named not in files else []
    contents = [read_lines(path) for path in files]
    if other := next((number for number, names in enumerate(contents) if names != contents[0]), None):
        raise DataError(
            f"{files[0]} and {files[other]} list different class names, or the same in a different order; keep the correct one"
        )
    classes = dict(enumerate(contents[0])) if contents and contents[0] else None
    return _sections([{"file_name": str(path)} for path in listing.images], Names(listing.images, listing), "", None, classes)


def _texts(listing: Listing) -> list[Path]:
    return [path for path in listing.with_suffix(".txt") if path.name.lower() not in NAME_FILES]


def _is_like_labels(path: Path, strictly: bool) -> bool:
    """Whether a file begins with five numbers, whatever separates them. If ``strictly`` is set, the last four of them must be in
    [0, 1].
    """
    words = re.split(r"[\s,;]+", ends_of(path, 400).lstrip())[:5]
    if len(words) < 5 or not all(re.fullmatch(r"[+-]?(\d+\.?\d*(e[+-]?\d+)?|\.\d+|nan|inf)", word, re.I) for word in words):
        return False
    return not strictly or all(0 <= float(word) <= 1 for word in words[1:])


def _sections(
    images: list[dict[str, Any]], names: Names, split: str, keypoints: int | None, classes: Mapping[int, str] | None
) -> Sections:
    """COCO's sections for the images of a split, or for all images if ``split`` is empty; ``names`` finds their text files.

    ``keypoints`` is how many numbers follow a box, ``None`` if unknown. If ``classes`` is ``None``, the class numbers serve as
    names.
    """
    texts = _texts(names.listing)
    label_of = {str(image): label for label, image in names.pair(texts).items()}
    ours = (split, "") if split == "train" else (split,)  # files outside all splits are reported once
    orphans, unreadable = (
        [path for path in paths if not split or names.listing.split_of(path) in ours]
        for paths in (sorted(set(texts) - set(label_of.values())), names.listing.unreadable)
    )
    alone = (image["file_name"] for image in images if image["file_name"] not in label_of and FAULT not in image)
    notes = {
        "label files that belong to no image": [path for path in orphans if _is_like_labels(path, strictly=True)],
        "images that cannot be read here, left out; convert them to JPEG or PNG": unreadable,
        "images without a label file, which are taken to show no object": alone,
    }
    annotations: list[dict[str, Any]] = []
    for image_id, image in enumerate(images, start=1):
        label = label_of.get(image["file_name"])
        for number, line in numbered_lines(label) if label else ():
            annotation = {"image_id": image_id, "source": f"{label}, line {number}"}
            annotations.append(annotation | _parse(line, keypoints or 0))
    notes |= _settle(annotations, is_known=keypoints is not None)
    if classes is None:
        classes = _numbers_as_names(annotations)
        notes["classes without names, named by their numbers; list the names in classes.txt"] = [", ".join(classes.values())]
    for annotation in annotations:
        number = annotation["category_id"]
        if number not in classes and FAULT not in annotation:
            why = f"class {number}; there are names for {min(classes)} to {max(classes)}"
            annotation[FAULT] = ["classes that have no name", why]
        for key in ("count", "numbers"):
            annotation.pop(key, None)
    return make_sections(images, annotations, classes, names.notes, notes)


def _parse(line: str, keypoints: int) -> dict[str, Any]:
    """Class and box of a line, or its fault. An ambiguous line also gets ``count``, which says how many numbers it has, and
    ``numbers``, the first six of them.
    """
    said = repr(line[:100])
    # A comma is a separator or a decimal comma.
    words = re.split(r"[\s,;]+", line) if "." in line else line.replace(",", ".").split()
    try:
        number, *numbers = [float(word) for word in words if word]
    except ValueError:
        number, numbers = math.nan, []
    if not all(map(math.isfinite, (number, *numbers))):
        return _fault("lines that are not numbers", f"{said}; expected {LINE}")
    if number % 1 or number < 0:
        return _fault("classes that are not whole numbers", f"{said}; expected {LINE}, with a class of 0, 1, 2, ...")
    found, count = {"category_id": int(number)}, len(numbers)
    if count == 4 or (keypoints and count == 4 + keypoints):
        return found | {"relative_cxcywh": numbers[:4]}
    found |= {"count": count, "numbers": numbers[:6]}
    if count == 5 and not keypoints:
        return found
    if keypoints or count < 6 or count % 2:
        known = f"{LINE}{f' and {keypoints} numbers of keypoints' if keypoints else ''}"
        more = "" if keypoints or count < 5 else f"; {KEYPOINTS}"
        return _fault("lines of another length", f"{counted(count, 'number')} after the class; expected {known}{more}")
    if count > 6 and max(map(abs, numbers)) > LARGEST_CORNER:
        return _fault(
            "lines that are not polygons",
            f"{said}; expected {LINE}, or polygon points as fractions of the image's sides; {KEYPOINTS}",
        )
    xs, ys = numbers[0::2], numbers[1::2]
    centre = [(min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2]
    return found | {"relative_cxcywh": [*centre, max(xs) - min(xs), max(ys) - min(ys)]}


def _fault(heading: str, detail: str) -> dict[str, Any]:
    return {"category_id": -1, FAULT: [heading, detail]}


def _settle(annotations: Sequence[dict[str, Any]], is_known: bool) -> dict[str, list[str]]:
    """Decide what ambiguous lines mean; returns notes.

    A box may be followed by a confidence, and then by a track, which is a whole number. Lines are read in this way if two
    conditions hold: in every line the first four numbers are a box inside the image, and in at least one line the four numbers
    from the second one on are not such a box. Polygons in a data set have different numbers of points, whereas lists of keypoints
    all have the same length; this is checked unless the number of keypoints ``is_known``. Lines that remain unclear are marked as
    faulty.
    """
    notes = {}
    of_count = {count: [box for box in annotations if box.get("count") == count] for count in (5, 6)}
    polygons = [box for box in annotations if box.get("count", 0) > max(of_count)]
    if polygons or not all(box["numbers"][-1] % 1 == 0 for box in of_count[6]):
        del of_count[6]  # triangles
    for count, lines in of_count.items():
        by_start = [all(_is_box(box["numbers"][start : start + 4]) for box in lines) for start in (0, 1)]
        if by_start == [True, False] and all(0 <= box["numbers"][4] <= 1 for box in lines):
            what = "a confidence" if count == 5 else "a confidence and a track"
            notes[f"boxes followed by {what}, which is not read"] = [box["source"] for box in lines]
            for box in lines:
                box["relative_cxcywh"] = box["numbers"][:4]
        else:
            for box in lines:
                box[FAULT] = ["lines of another length", f"{count} numbers after the class; expected {LINE}"]
    polygons = [box for box in polygons if box["count"] > max(CORNERS)]
    if not is_known and len(polygons) == len(annotations) >= AT_LEAST and len({box["count"] for box in polygons}) == 1:
        for box in polygons:
            why = (
                f"all lines have {box['count']} numbers after the class, so they may be boxes with keypoints or polygons: for "
                "keypoints, write kpt_shape: [KEYPOINTS, 2 or 3] into data.yaml; for polygons, kpt_shape: [0, 2]"
            )
            box[FAULT] = ["lines that may be keypoints", why]
    return notes


def _is_box(numbers: Sequence[float]) -> bool:
    """Whether numbers are cx, cy, w and h of a box inside its image, with a tolerance of a hundredth on each side."""
    (cx, cy, w, h), low, high = numbers, -0.01, 1.01
    return w > 0 and h > 0 and low <= min(cx - w / 2, cy - h / 2) and max(cx + w / 2, cy + h / 2) <= high


def _numbers_as_names(annotations: Sequence[dict[str, Any]]) -> dict[int, str]:
    """A name for each class up to the largest number.

    Raises:
        DataError: a number is too large for a class.
    """
    last = max(annotations, key=lambda annotation: annotation["category_id"], default={"category_id": 0})
    if last["category_id"] >= MOST_CLASSES:
        raise DataError(
            f"{last['source']}: found class {last['category_id']}, but no file lists the class names (classes are counted from 0); "
            f"correct the number, or list the names in {NAME_FILES[0]}, one per line"
        )
    return {number: str(number) for number in range(max(last["category_id"], 0) + 1)}


def _ends(place: str) -> list[Path]:
    """What a path in a YAML file may mean relative to the folder of that file. Roboflow writes ``../train/images`` for
    ``train/images``. A path from another machine, such as ``/home/me/cats/train/images``, may mean ``cats/train/images`` or
    ``train/images``, but not just any ``images``.
    """
    words = place.replace("\\", "/").split("/")
    parts = [word for word in words if word not in ("", ".", "..")]
    is_absolute = not words[0] or words[0].endswith(":")
    count = len(parts) - (parts[-1:] == ["images"]) if is_absolute else min(1, len(parts))
    return [Path(*parts[start:]) for start in range(count)]


def _images(place: Path, names: Names) -> Iterator[dict[str, Any]]:
    """Entries of the images in a folder or in a list, or of a single image."""
    if place.is_dir() or place.suffix.lower() in IMAGES:
        yield from ({"file_name": str(path)} for path in (names.listing.below(place) if place.is_dir() else [place]))
    else:
        yield from (names.entry(line, place) for line in read_lines(place))
