# SPDX-License-Identifier: Apache-2.0
"""The shapes data set, drawn from a seed in COCO format, so that a detector can be trained without a download.

This step comes before the data pipeline: it writes the files that ``data/coco.py`` reads. Every image depends only on
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

from cpvt_det.common.errors import DataError
from cpvt_det.common.files import atomic_file
from cpvt_det.common.memory import usable_cores
from cpvt_det.data.shapes.scene import CLASS_NAMES, ShapesSpec, draw_image

# Stored in the JSON: increase it with any change to the drawing or the JSON, so that older data can be told apart.
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
) -> None:
    """Draw the data set, or do nothing if the folder already contains the complete data set with the same parameters.

    Writes ``annotations/train.json``, ``annotations/val.json``, ``train/000000.jpg``, ... Processes are spawned, so a script that
    uses more than one needs the usual ``if __name__ == "__main__":``.

    Args:
        root: folder to write to; created if missing.
        num_train: number of training images; more images do not change the earlier ones.
        num_val: number of validation images.
        seed: random seed, 0 or more.
        spec: properties of the images.
        num_processes: number of processes. ``None`` means one for each core that this process may use, but at most 16.

    Raises:
        ValueError: a number out of range.
        DataError: the folder contains other data, this data set with other parameters, or only a part of this data set.
    """
    if min(num_train, num_val, num_processes or 1) < 1 or seed < 0:
        raise ValueError(
            f"the numbers of images and of processes must be at least 1, and the seed at least 0, got {num_train}, {num_val}, "
            f"{num_processes}, {seed}"
        )
    root = Path(root)
    infos = [describe(split, count, seed, spec) for split, count in zip(SPLITS, (num_train, num_val), strict=True)]
    if all(_is_drawn(root, info) for info in infos):
        return
    if root.is_file() or any((root / name).exists() for name in ("annotations", *SPLITS)):
        raise DataError(
            f"{root} exists, but is not a complete copy of this data set with the same parameters; remove it or choose another "
            "folder"
        )
    for info in infos:
        _draw_split(root, info, spec, min(16, usable_cores()) if num_processes is None else num_processes)


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


def _is_drawn(root: Path, info: dict[str, Any]) -> bool:
    """Whether the folder contains a split, complete and with these parameters."""
    try:
        found = json.loads((root / f"annotations/{info['split']}.json").read_text(encoding="utf-8"))["info"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return found == info and all((root / info["split"] / _file_name(i)).is_file() for i in range(info["num_images"]))


def _draw_split(root: Path, info: dict[str, Any], spec: ShapesSpec, num_processes: int) -> None:
    """Draw the images of a split and write its JSON."""
    split, count = info["split"], info["num_images"]
    (root / split).mkdir(parents=True)
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
    (root / "annotations").mkdir(exist_ok=True)
    with atomic_file(root / f"annotations/{split}.json") as file:
        file.write(json.dumps(_to_coco(info, drawn)).encode())


def _draw_file(folder: Path, spec: ShapesSpec, seed: int, split_index: int, index: int) -> tuple[Any, ...]:
    """Draw one image into its file; return its (h, w), boxes, labels and polygons."""
    image, boxes, labels, polygons = draw_image(spec, np.random.default_rng([seed, split_index, index]))
    Image.fromarray(image).save(folder / _file_name(index), quality=90)
    return image.shape[:2], boxes.tolist(), labels.tolist(), [polygon.reshape(-1).tolist() for polygon in polygons]


def _to_coco(info: dict[str, Any], drawn: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The content of a JSON file in COCO's format. Ids start at 1, and the area of an object is the area of its box."""
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
