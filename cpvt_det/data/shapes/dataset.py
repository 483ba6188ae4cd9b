# SPDX-License-Identifier: Apache-2.0
"""The shapes data set: drawn, seeded, in COCO format, so that a detector can be trained without a download.

Before the way of one image: it writes the files that ``data/coco.py`` reads. Every image depends only on
``default_rng([seed, split, image])``, so neither the number of processes nor the number of images changes it.
"""

import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from cpvt_det.data.shapes.scene import CLASS_NAMES, ShapesSpec, draw_image
from cpvt_det.errors import ConfigError, DataError
from cpvt_det.files import atomic_file
from cpvt_det.memory import usable_cores

# A parameter in the JSON: increase it with any change of the drawing or of the JSON, so that older data can be distinguished.
GENERATOR_VERSION = 2
SPLITS = ("train", "val")
CHUNK = 16  # number of images that a process takes at a time


def draw_dataset(
    root: str | os.PathLike[str],
    num_train: int = 4000,
    num_val: int = 500,
    seed: int = 0,
    spec: ShapesSpec = ShapesSpec(),
    num_processes: int | None = None,
    overwrite: bool = False,
) -> None:
    """Draw the data set, or do nothing if the folder already contains it, complete and with the same parameters.

    Writes ``annotations/train.json``, ``annotations/val.json``, ``train/000000.jpg``, ... A split's JSON is written last, so
    a split with a JSON is complete. Processes are spawned: a script that uses more than one needs the usual
    ``if __name__ == "__main__":``.

    Args:
        root: folder to write to; created if missing.
        num_train: number of training images; more images do not change the earlier ones.
        num_val: number of validation images.
        seed: random seed, 0 or more.
        spec: properties of the images.
        num_processes: number of processes; ``None``: one per core that this process may use, at most 16.
        overwrite: whether a shapes data set with other parameters is replaced.

    Raises:
        ConfigError: a count or seed out of range.
        DataError: a folder that contains a shapes data set with other parameters, while ``overwrite`` is False, or other files.
    """
    num_processes = min(16, usable_cores()) if num_processes is None else num_processes
    given = {"num_train": num_train, "num_val": num_val, "seed": seed, "num_processes": num_processes}
    for name, value in given.items():
        least = 0 if name == "seed" else 1
        if value < least:
            raise ConfigError(f"{name} must be {least} or more, got {value}")
    root = Path(root)
    if root.exists() and not root.is_dir():
        raise DataError(f"{root} is a file; the shapes data set needs a folder")
    counts = dict(zip(SPLITS, (num_train, num_val), strict=True))
    wanted = {split: describe(split, count, seed, spec) for split, count in counts.items()}
    missing = [split for split in SPLITS if not _is_drawn(root, wanted[split], overwrite)]
    for split in missing:
        _mark_unfinished(root, split)
    for split in missing:
        _draw_split(root, wanted[split], spec, num_processes)


def describe(split: str, count: int, seed: int, spec: ShapesSpec) -> dict[str, Any]:
    """The ``info`` of the JSON: all parameters of the drawing."""
    return {
        "description": "the shapes data set of cpvt-det",
        "generator_version": GENERATOR_VERSION,
        "split": split,
        "num_images": count,
        "seed": seed,
        "spec": {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(spec).items() if value is not None
        },
    }


def _is_drawn(root: Path, wanted: dict[str, Any], overwrite: bool) -> bool:
    """Whether the folder contains a split, complete and with the wanted parameters.

    Raises:
        DataError: other files, or a split with other parameters while ``overwrite`` is False.
    """
    path = _json_path(root, wanted["split"])
    if not path.exists():
        if not _unfinished_path(path).exists() and any(root.glob(f"{wanted['split']}/*")):
            raise DataError(f"{root / wanted['split']} contains files, but {path} is missing; choose another folder")
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["info"]
        ours = found["description"] == wanted["description"]
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise DataError(f"{path} is not from the shapes data set and is not overwritten; choose another folder")
    if found == wanted:
        return all((root / wanted["split"] / _file_name(i)).is_file() for i in range(wanted["num_images"]))
    if overwrite:
        return False
    differ = [f"{key} {found.get(key)!r}, not {value!r}" for key, value in wanted.items() if found.get(key) != value]
    way_out = "choose another folder, or replace the data set (overwrite=True, --overwrite)"
    raise DataError(f"{path} was drawn with {'; '.join(differ)}; {way_out}")


def _json_path(root: Path, split: str) -> Path:
    return root / "annotations" / f"{split}.json"


def _unfinished_path(path: Path) -> Path:
    return path.with_suffix(".json.part")


def _mark_unfinished(root: Path, split: str) -> None:
    """Mark the images of a split as ours but incomplete, before the first one changes."""
    path = _json_path(root, split)
    path.parent.mkdir(parents=True, exist_ok=True)
    _unfinished_path(path).touch()
    path.unlink(missing_ok=True)


def _draw_split(root: Path, info: dict[str, Any], spec: ShapesSpec, num_processes: int) -> None:
    """Draw the images of a split, remove those left from an earlier, larger drawing, and write its JSON."""
    split, count = info["split"], info["num_images"]
    (root / split).mkdir(exist_ok=True)
    draw = partial(_draw_file, root / split, spec, info["seed"], SPLITS.index(split))
    bar = partial(tqdm, total=count, desc=f"drawing {split}", unit="image", disable=None)
    num_processes = min(num_processes, -(-count // CHUNK))
    if num_processes == 1:
        drawn = list(bar(map(draw, range(count))))
    else:
        # A fork would copy locks that the caller's threads hold, such as those of torch.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
            drawn = list(bar(pool.map(draw, range(count), chunksize=CHUNK)))
    path = _json_path(root, split)
    kept = {_file_name(i) for i in range(count)}
    for stale in (root / split).glob("[0-9]" * 6 + ".jpg"):
        if stale.name not in kept:
            stale.unlink()
    with atomic_file(path) as file:
        file.write(json.dumps(_to_coco(info, drawn)).encode())
    _unfinished_path(path).unlink()


def _draw_file(folder: Path, spec: ShapesSpec, seed: int, split_index: int, index: int) -> tuple[Any, ...]:
    """Draw one image into its file; return its (h, w), boxes, labels and polygons."""
    image, boxes, labels, polygons = draw_image(spec, np.random.default_rng([seed, split_index, index]))
    Image.fromarray(image).save(folder / _file_name(index), quality=90)
    return image.shape[:2], boxes.tolist(), labels.tolist(), [polygon.reshape(-1).tolist() for polygon in polygons]


def _to_coco(info: dict[str, Any], drawn: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The content of a JSON file in COCO's format; ids start at 1, and the area of an object is that of its box."""
    images, annotations = [], []
    for index, ((height, width), *objects) in enumerate(drawn):
        images.append({"id": index + 1, "file_name": _file_name(index), "width": width, "height": height})
        for (x1, y1, x2, y2), label, polygon in zip(*objects, strict=True):
            place = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "iscrowd": 0, "segmentation": [polygon]}
            annotations.append({"id": len(annotations) + 1, "image_id": index + 1, "category_id": label + 1, **place})
    categories = [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASS_NAMES)]
    return {"info": info, "licenses": [], "images": images, "annotations": annotations, "categories": categories}


def _file_name(index: int) -> str:
    return f"{index:06d}.jpg"
