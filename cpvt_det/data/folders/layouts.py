# SPDX-License-Identifier: Apache-2.0
"""Which layout a folder has: by what its files contain, not by their names.

Known: COCO JSON (COCO's own folders, RF-DETR's and Roboflow's ``_annotations.coco.json``, CVAT's export, a JSON beside its images);
YOLO with a YAML file (Ultralytics, Roboflow, CVAT) or text files alone (CVAT's YOLO 1.1, LabelImg); Pascal VOC with ``ImageSets``
or XML files anywhere (Roboflow, LabelImg); CVAT's own XML; and formats registered by the user.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cpvt_det.data.coco import read_json
from cpvt_det.data.folders import loose
from cpvt_det.data.folders.cvat import read_cvat_files, skipped_shapes
from cpvt_det.data.folders.listing import Listing, split_named
from cpvt_det.data.formats.registry import FORMAT_REGISTRY, Sections
from cpvt_det.data.formats.voc import is_voc, parse_xml
from cpvt_det.data.formats.yolo import missing_splits, yolo_splits
from cpvt_det.errors import DataError, UnknownNameError

Places = Mapping[str, tuple[str, str]]
"""Split -> the second and third entry of its triple in ``DATASETS.REGISTER``."""
CHOSEN = {
    "train": ("train", "training", "trainval"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""Split -> names of a format's own splits, the preferred one first."""
NOT_BOXES = re.compile(r"caption|keypoint|panoptic|stuff|image_info")
"""Names of JSON files with other annotations than boxes, as COCO's own folder has them."""
HEAD = 1 << 20
"""Bytes of a file that are looked at to recognise it."""


@dataclass(frozen=True)
class Layout:
    """What a folder contains.

    Attributes:
        format: name of the format: coco, yolo, voc, cvat, or one that the user registered.
        what: the files that are read, for the log.
        places: files of the folder's own splits, ``train`` and another one, as a config can name them; empty where there are none.
        read: reader of all images together.
        notes: what was found and is not read, a line each.
    """

    format: str
    what: str
    places: Places
    read: Callable[[], Sections]
    notes: Sequence[str] = ()


def find_layout(listing: Listing, wanted: str = "") -> Layout:
    """The layout of a folder.

    Args:
        listing: its files.
        wanted: format to read, where there are several; empty: the only one.

    Raises:
        DataError: no annotations, or several formats at once.
        UnknownNameError: a format that does not exist.
    """
    own = [name for name in FORMAT_REGISTRY.names if name not in ("yolo", "voc", "image_folder")]  # the last has no boxes
    if wanted and wanted not in (*FINDERS, *own):
        raise UnknownNameError("data format (--format)", wanted, (*FINDERS, *own))
    found = [layout for name in own if wanted in ("", name) and (layout := _own_layout(listing, name))][-1:]
    if not found:  # a format of the user's is meant for the folder, whatever else there is
        found = [layout for name, find in FINDERS.items() if wanted in ("", name) and (layout := find(listing))]
    if not found and wanted:
        raise DataError(f"{listing.root} has nothing in the format {wanted}; leave --format out to take what it has")
    if len(found) > 1:
        listed = "; ".join(f"{layout.format} ({layout.what})" for layout in found)
        raise DataError(
            f"{listing.root} has annotations in several formats: {listed}; choose one, as in --format {found[0].format}, or remove "
            "the other"
        )
    if not found:
        loose.require_annotations(listing)
    return found[0]


def _own_layout(listing: Listing, name: str) -> Layout | None:
    """A format that the user registered: of the folder, of a file directly in it, or of the only folder below it that matches.

    Raises:
        DataError: several folders that match, none of them inside another one.
    """
    data_format = FORMAT_REGISTRY.get(name)
    paths = [listing.root, *(path for path in listing.files if path.parent == listing.root)]
    path = next((path for path in paths if data_format.matches(path)), None)
    if path is not None:
        return _registered(name, path)
    below = [folder for folder in listing.folders if data_format.matches(folder)]
    below = [folder for folder in below if not any(other in folder.parents for other in below)]
    if len(below) > 1:
        listed = ", ".join(map(str, below[:3]))
        raise DataError(
            f"several folders in the format {name}: {listed}; name one of them instead of {listing.root}, or another --format"
        )
    return _registered(name, below[0]) if below else None


def _registered(name: str, path: Path) -> Layout:
    """A path of a registered format, with its own splits where it has at least two."""
    data_format = FORMAT_REGISTRY.get(name)
    names = list(data_format.splits(path))
    chosen = {split: next((known for known in order if known in names), None) for split, order in CHOSEN.items()}
    places = {split: (str(path), known) for split, known in chosen.items() if known is not None}
    whole = [known for _, known in places.values()] or names[:1] or [""]
    what = f"{path}, splits {', '.join(names)}" if names else str(path)
    return Layout(
        name,
        what,
        places if "train" in places and len(places) > 1 else {},
        lambda: _read_together([data_format.read(path, one) for one in whole]),
    )


def _read_together(contents: Sequence[Sections]) -> Sections:
    """The splits of one data set as one; an image of several splits is taken once."""
    together: Sections = {"images": [], "annotations": [], "categories": contents[0]["categories"]}
    ids: dict[str, int] = {}
    for content in contents:
        new_ids = {}
        for image in content["images"]:
            if image["file_name"] not in ids:
                ids[image["file_name"]] = new_ids[image["id"]] = len(ids) + 1
                together["images"].append(image | {"id": new_ids[image["id"]]})
        for annotation in content["annotations"]:
            if annotation["image_id"] in new_ids:
                number = {"id": len(together["annotations"]) + 1, "image_id": new_ids[annotation["image_id"]]}
                together["annotations"].append(annotation | number)
    return together


def _coco(listing: Listing) -> Layout | None:
    files = [path for path in listing.with_suffix(".json") if _contains(path, b'"images"', b'"annotations"', b'"categories"')]
    files = [path for path in files if not NOT_BOXES.search(path.name.lower())] or files
    if not files:
        return None
    by_split = defaultdict(list)
    for path in files:
        by_split[listing.split_of(path, with_name=True)].append(path)
    for split, paths in by_split.items():
        if len(paths) > 1:
            listed = " and ".join(map(str, paths[:3]))
            raise DataError(f"two COCO files for {split or 'all images'}: {listed}; keep one, or name the sets in a config")
    of_split = {split: paths[0] for split, paths in by_split.items()}
    what = ", ".join(map(str, files))
    places = _coco_places(listing, of_split) if "train" in of_split and len(of_split) > 1 else {}
    return Layout("coco", what, places, lambda: loose.read_coco_files(listing, files))


def _coco_places(listing: Listing, of_split: Mapping[str, Path]) -> Places:
    """A JSON and an image folder for each split; none where the images have no folder in common, or where classes differ in
    name or id."""
    places, classes = {}, []
    for split, path in of_split.items():
        content = read_json(path)
        names = [image["file_name"] for image in content.get("images") or () if isinstance(image, dict) and "file_name" in image]
        roots = {_without_end(loose.image_named(listing, path, str(name)), str(name)) for name in names}
        if len(roots) != 1 or None in roots:
            return {}
        places[split] = (str(path), str(roots.pop()))
        categories = [category for category in content.get("categories") or () if isinstance(category, dict)]
        classes.append(sorted((str(category.get("id")), str(category.get("name"))) for category in categories))
    if any(one != classes[0] for one in classes):
        return {}
    return places


def _without_end(path: Path, end: str) -> Path | None:
    """The folder that ``end`` is relative to; ``None`` where the path does not end so."""
    parts = Path(end).parts
    return Path(*path.parts[: -len(parts)]) if path.parts[-len(parts) :] == parts else None


def _yolo(listing: Listing) -> Layout | None:
    yamls = [path for path in listing.with_suffix(".yaml", ".yml") if _contains(path, b"names:", b"train:")]
    yamls = [path for path in yamls if path.stem in ("data", "dataset")] or yamls
    if len(yamls) > 1:
        raise DataError(
            f"several YAML files look like YOLO's: {', '.join(map(str, yamls[:3]))}; keep one, or name the sets in a config"
        )
    if yamls:
        missing, splits = missing_splits(yamls[0]), yolo_splits(yamls[0])
        if "train" in missing or not splits:
            raise DataError(next(iter(missing.values()), f"{yamls[0]} names no images: expected train: and val:"))
        return replace(_registered("yolo", yamls[0]), notes=[f"not read: {line}" for line in missing.values()])
    labels = loose.label_files(listing)
    lists = [path for path in listing.with_suffix(".txt") if split_named(path.stem) and path not in labels]
    notes = [f"not read: {path}; a data.yaml with train: and val: makes a split of such lists" for path in lists]
    return Layout("yolo", _several(labels), {}, lambda: loose.read_label_files(listing, labels), notes) if labels else None


def _voc(listing: Listing) -> Layout | None:
    files = _xml_files(listing, b"<annotation>")
    if not files:
        return None
    roots = {path.parent.parent for path in listing.with_suffix(".txt") if path.parent.name == "Main"}
    roots = sorted(path.parent for path in roots if path.name == "ImageSets" and is_voc(path.parent))
    if len(roots) > 1:
        raise DataError(f"several Pascal VOC folders: {', '.join(map(str, roots[:3]))}; name one of them instead of {listing.root}")
    layout = _registered("voc", roots[0]) if roots else None
    if layout is not None and layout.places:
        return layout
    return Layout("voc", _several(files), {}, lambda: loose.read_voc_files(listing, files))


def _cvat(listing: Listing) -> Layout | None:
    files = _xml_files(listing, b"<annotations>")
    if not files:
        return None
    trees = {path: parse_xml(path) for path in files}
    return Layout("cvat", _several(files), {}, lambda: read_cvat_files(listing, trees), skipped_shapes(trees))


FINDERS: dict[str, Callable[[Listing], Layout | None]] = {"coco": _coco, "yolo": _yolo, "voc": _voc, "cvat": _cvat}
"""Name of a format -> finder of its layout in a folder, ``None`` where it has none of it."""


def _xml_files(listing: Listing, root: bytes) -> list[Path]:
    return [path for path in listing.with_suffix(".xml") if re.search(root.replace(b">", rb"[\s>]"), _head(path))]


def _contains(path: Path, *words: bytes) -> bool:
    """Whether a file has all of these words; of a large one, whether its beginning has at least one and its end another."""
    head = _head(path)
    if len(head) < HEAD:
        return all(word in head for word in words)
    with path.open("rb") as file:
        file.seek(-HEAD, 2)
        ends = head + file.read()
    return sum(word in ends for word in words) > 1


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


def _several(paths: Sequence[Path] | Iterable[Path]) -> str:
    paths = list(paths)
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} files such as {paths[0]}"
