# SPDX-License-Identifier: Apache-2.0
"""Recognise the layout of a folder by the content of its files, not by their names.

Known layouts: COCO JSON (COCO's own folders, RF-DETR's and Roboflow's ``_annotations.coco.json``, CVAT's, a JSON next to its
images); YOLO with a YAML file (Ultralytics, Roboflow, CVAT) or text files alone (CVAT's YOLO 1.1, LabelImg); Pascal VOC with
``ImageSets`` or XML files anywhere (Roboflow, LabelImg); CVAT's own XML; and formats registered by the user.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpvt_det.common.errors import DataError, UnknownNameError
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import read_coco
from cpvt_det.data.folders.coco_files import read_coco_files
from cpvt_det.data.formats.format import FORMAT_REGISTRY, Sections, find_format, make_sections
from cpvt_det.data.formats.xml_files import is_voc_file, read_cvat_files, skipped_shapes
from cpvt_det.data.formats.yolo import YoloFile, label_files, read_label_files
from cpvt_det.data.listing import SPLIT_NAMES, Listing, few, split_named
from cpvt_det.data.names import Names
from cpvt_det.data.text import ends_of, read_xml

Places = Mapping[str, tuple[str, str]]
"""Split -> the second and third entry of its triple in ``DATASETS.REGISTER``."""
PREFERRED = ("train", "training", "trainval", "val", "valid", "validation", "dev", "test", "testing")
"""Names that formats give their splits; of several names for one split, the first in this list is preferred."""
NOT_BOXES = re.compile(r"caption|keypoint|panoptic|stuff|image_info")
"""Names of JSON files with annotations other than boxes, such as those in COCO's own folder."""
HEAD = 1 << 20
"""Number of bytes at the beginning and at the end of a file that are searched to recognise it."""


@dataclass(frozen=True)
class Layout:
    """The layout of a folder.

    Attributes:
        format: name of the format: coco, yolo, voc, cvat, or one that the user registered.
        what: the files that are read, for the log.
        places: files of the splits that the folder itself defines, which are ``train`` and at least one other. Empty if there are
            no such splits, or if a config cannot refer to them.
        read: function that reads all images at once.
        notes: remarks on what was found but is not read, one line each.
        others: files or names of the format that name no split; ``places`` leaves their images out, ``read`` does not.
    """

    format: str
    what: str
    places: Places
    read: Callable[[], Sections]
    notes: Sequence[str] = ()
    others: Sequence[str] = ()


def find_layout(listing: Listing, wanted: str = "") -> Layout:
    """The layout of a folder.

    Args:
        listing: files of the folder.
        wanted: format to read if the folder has annotations in several formats; empty if it has only one.

    Raises:
        DataError: no annotations, or annotations in several formats.
        UnknownNameError: a format that does not exist.
    """
    own = [name for name in FORMAT_REGISTRY.names if name not in ("yolo", "voc", "image_folder")]  # image_folder has no boxes
    if wanted and wanted not in (*FINDERS, *own):
        raise UnknownNameError("data format (--format)", wanted, (*FINDERS, *own))
    found = [layout for name in own if wanted in ("", name) and (layout := _own_layout(listing, name))][-1:]
    if not found:  # a format that the user registered comes before all others
        found = [layout for name, find in FINDERS.items() if wanted in ("", name) and (layout := find(listing))]
    if len(found) > 1:
        listed = "; ".join(f"{layout.format} ({layout.what})" for layout in found)
        raise DataError(
            f"{listing.root} has annotations in several formats: {listed}; choose one, as in --format {found[0].format}, or remove "
            "the others"
        )
    if not found:
        nothing = f"{listing.root} has no annotations in the format {wanted}; leave out --format to use those that it has"
        raise DataError(nothing if wanted else _nothing(listing))
    return found[0]


def _own_layout(listing: Listing, name: str) -> Layout | None:
    """The layout in a registered format, if that format matches the folder, a file directly in it, or exactly one folder below
    it.

    Raises:
        DataError: several folders match, and they are not inside each other.
    """
    data_format = FORMAT_REGISTRY.get(name)
    direct = (listing.root, *(path for path in listing.files if path.parent == listing.root))
    found = [path for path in direct if data_format.matches(path)][:1]
    if not found:
        deepest = {path.parent for path in listing.files}
        folders = {folder for one in deepest for folder in (one, *one.parents) if listing.root in folder.parents}
        below = [folder for folder in sorted(folders) if data_format.matches(folder)]
        found = [folder for folder in below if not any(other in folder.parents for other in below)]
    if len(found) > 1:
        raise DataError(
            f"several folders in the format {name}: {few(found)}; give one of them instead of {listing.root}, or choose another "
            "--format"
        )
    return _registered(name, found[0]) if found else None


def _registered(name: str, path: Path) -> Layout:
    """The layout of a path in a registered format, with the path's own splits if it has at least two."""
    data_format = FORMAT_REGISTRY.get(name)
    names = list(data_format.splits(path))
    of_split = defaultdict(list)
    for one in sorted(names, key=lambda one: PREFERRED.index(one.lower()) if one.lower() in PREFERRED else len(PREFERRED)):
        of_split[{"trainval": "train", "dev": "val"}.get(one.lower(), split_named(one))].append(one)
    others = of_split.pop("", []) if of_split.keys() - {""} else []
    for own in of_split.values():
        if own[0].lower() in PREFERRED:  # train alone, as trainval has the same images
            others += [one for one in own[1:] if one.lower() not in PREFERRED]
            del own[1:]
    what = f"{path}, splits {', '.join(names)}" if names else str(path)
    places = {split: (str(path), own[0]) for split, own in of_split.items() if split}
    splits = {one: split for split, own in of_split.items() for one in own} | dict.fromkeys(others, "") or {"": ""}
    return Layout(
        name,
        what,
        places if _can_be_named(of_split) and find_format(path) is data_format else {},
        lambda: _read_together([(split, data_format.read(path, one)) for one, split in splits.items()]),
        others=others,
    )


def _can_be_named(splits: Mapping[str, Sequence[object]]) -> bool:
    """Whether a config can refer to the splits: there are images for training and others for validation, in one place each."""
    return "train" in splits and ("val" in splits or "test" in splits) and all(len(places) == 1 for places in splits.values())


def _read_together(contents: Sequence[tuple[str, Sections]]) -> Sections:
    """All splits of a data set joined into one, with the split of each image. An image that is in several splits is included only
    once.
    """
    images: dict[str, dict[str, Any]] = {}
    annotations = []
    for split, content in contents:
        new_ids = {}
        for image in content["images"]:
            if image["file_name"] not in images:
                new_ids[image["id"]] = len(images) + 1
                images[image["file_name"]] = image | {"id": len(images) + 1, "split": split or image.get("split", "")}
        for annotation in content["annotations"]:
            if annotation["image_id"] in new_ids:
                annotations.append(annotation | {"id": len(annotations) + 1, "image_id": new_ids[annotation["image_id"]]})
    together = make_sections(images.values(), annotations, {}, *(content.get("notes", {}) for _, content in contents))
    return together | {"categories": contents[0][1]["categories"]}


def _coco(listing: Listing) -> Layout | None:
    files = [path for path in listing.with_suffix(".json") if _contains(path, '"images"', '"annotations"', '"categories"')]
    files = [path for path in files if not NOT_BOXES.search(path.name.lower())] or files
    if not files:
        return None
    by_split = defaultdict(list)
    for path in files:
        by_split[listing.split_of(path, with_name=True)].append(path)
    if "train" not in by_split and ["trainval" in path.name.lower() for path in by_split.get("", ())] == [True]:
        by_split["train"] = by_split.pop("")
    others = [str(path) for path in by_split.pop("", ())]
    places = _coco_places(listing, by_split) if _can_be_named(by_split) else {}
    return Layout("coco", _several(files), places, lambda: read_coco_files(listing, files), others=others)


def _coco_places(listing: Listing, of_split: Mapping[str, Sequence[Path]]) -> Places:
    """A JSON and an image folder for each split; empty if a JSON has faults, if the classes of the JSONs differ, or if the images
    have no common folder.
    """
    places, classes, found = {}, [], Names(listing.images, listing)
    for split, (path,) in of_split.items():
        dataset = read_coco(DatasetFiles(split, path))
        names = map(dataset.records.name, range(len(dataset.records)))
        roots = {_without_end(image, name) for name in names if (image := found.find(name, path))}
        if dataset.issues.has_errors("error") or len(roots) != 1 or None in roots:
            return {}
        places[split] = (str(path), str(roots.pop()))
        classes.append(dataset.classes)
    return places if all(one == classes[0] for one in classes) else {}


def _without_end(path: Path, end: str) -> Path | None:
    """The folder that ``end`` is relative to; ``None`` if the path does not end with it."""
    parts = Path(end).parts
    return Path(*path.parts[: -len(parts)]) if path.parts[-len(parts) :] == parts else None


def _yolo(listing: Listing) -> Layout | None:
    keys = re.compile(r"""(?:^|[\r\n]|[{,]\s*)["']?(names|train)["']?\s*:""")
    yamls = [path for path in listing.with_suffix(".yaml", ".yml") if len(set(keys.findall(ends_of(path, HEAD)))) > 1]
    yamls = [path for path in yamls if path.stem in ("data", "dataset")] or yamls
    if len(yamls) > 1:
        raise DataError(f"several YAML files look like YOLO's: {few(yamls)}; keep one, or name the data sets in a config")
    if yamls:
        splits = (described := YoloFile(yamls[0])).missing
        missing = [why for why in splits.values() if why]
        if splits.get("train") or len(missing) == len(splits):
            raise DataError(missing[0] if missing else f"{yamls[0]} names no images: expected train: and val:")
        layout = _registered("yolo", yamls[0])
        places = [place for split, why in splits.items() if not why for place in described.places(split)]
        notes = [f"read from outside of {listing.root}: {place}" for place in places if not listing.parts_of(place / "image")]
        return replace(layout, notes=[*notes, *(f"not read: {line}" for line in missing)])
    labels = label_files(listing)
    lists = [path for path in sorted(set(listing.with_suffix(".txt")) - set(labels)) if split_named(path.stem)]
    notes = [f"not read: {path}; to use such lists as splits, name them in a data.yaml with train: and val:" for path in lists]
    return Layout("yolo", _several(labels), {}, lambda: read_label_files(listing), notes) if labels else None


def _voc(listing: Listing) -> Layout | None:
    files = [path for path in listing.with_suffix(".xml") if is_voc_file(path)]
    if not files:
        return None
    lists = {path.parent for path in listing.with_suffix(".txt") if path.parts[-3:-1] == ("ImageSets", "Main")}
    roots = sorted(folder.parent.parent for folder in lists)
    if len(roots) > 1:
        raise DataError(f"several Pascal VOC folders: {few(roots)}; give one of them instead of {listing.root}")
    layout = _registered("voc", roots[0] if roots and files[0].is_relative_to(roots[0]) else listing.root)
    others = [path for path in listing.with_suffix(".txt") if not lists and path.stem.lower() in SPLIT_NAMES]
    notes = [f"not read: {few(others)}; to use such lists as splits, put them into ImageSets/Main"] if others else []
    return replace(layout, what=layout.what if roots else _several(files), notes=notes)


def _cvat(listing: Listing) -> Layout | None:
    files = [path for path in listing.with_suffix(".xml") if "<annotations" in ends_of(path, HEAD)]
    if not files:
        return None
    trees = {path: read_xml(path) for path in files}
    return Layout("cvat", _several(files), {}, lambda: read_cvat_files(listing, trees), skipped_shapes(trees))


FINDERS: dict[str, Callable[[Listing], Layout | None]] = {"coco": _coco, "yolo": _yolo, "voc": _voc, "cvat": _cvat}
"""Name of a format -> function that finds its layout in a folder, or returns ``None`` if the folder is not in this format."""


def _contains(path: Path, *words: str) -> bool:
    """Whether a file contains all of these words. Only the beginning and the end of a large file are read; there, one of the
    words together with ``image_id`` is enough.
    """
    ends, is_whole = ends_of(path, HEAD), path.stat().st_size <= 2 * HEAD
    return all(word in ends for word in words) if is_whole else any(word in ends for word in words) and '"image_id"' in ends


def _nothing(listing: Listing) -> str:
    """The message for a folder in which nothing is recognised: what was found, and which formats are known."""
    known = (
        "a COCO JSON, YOLO's data.yaml or text files, Pascal VOC's XML files, CVAT's XML, or a format of your own (--import MODULE)"
    )
    images = f"{len(listing.images)} images" if listing.images else "no images"
    texts = Names(listing.images, listing).pair(listing.with_suffix(".txt"))
    if texts:
        images += f" and {len(texts)} text files with the same names, whose lines are not class cx cy w h: {few(texts)},"
    classes = "; if each class has its own folder of images, train a classifier: --config-file quickstart/classifier.yaml"
    hint = classes if len({path.parent for path in listing.images}) > 1 else ""
    return f"{listing.root} has {images} and no annotations in a known format; put {known} beside them{hint}"


def _several(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} files such as {paths[0]}"
