#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""One data set of many small public ones, for the detector that comes with the package::

    python studies/starter/data.py CLONES output/starter_data

``CLONES`` has a clone of every repository in ``studies/starter/data.yaml``, as ``OWNER+NAME``. Of each set at most ``most`` images
are taken, drawn with seed 0: of several versions of one photograph (Roboflow's ``NAME.rf.HASH.jpg``) one, and no copies. Short
sides become 320 pixels. Classes of one name are one class. Three of a hundred images are for validation.
"""

import hashlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml
from PIL import Image, ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # this folder is not part of the installed package

from cpvt_det.builders.datasets import check_datasets
from cpvt_det.cli import report_errors
from cpvt_det.cli.folder import folder_config
from cpvt_det.common.errors import BadInputError, DataError
from cpvt_det.common.files import write_json
from cpvt_det.data.images import open_image

TABLE = Path(__file__).with_suffix(".yaml")
SHORT_SIDE, MOST, VALIDATED, QUALITY = 320, 700, 0.03, 90
LEAST = 3
"""Smallest side of a box in pixels, after resizing."""


def read(folder: Path, leave_out: list[str]) -> list[tuple[str, list[tuple[str, np.ndarray]]]]:
    """Paths of a folder's images, each with its (class name, box as x0, y0, x1, y1) pairs; one version per photograph."""
    with tempfile.TemporaryDirectory() as drawn:
        cfg, _ = folder_config(folder, Path(drawn), ["DATASETS.ON_BAD", "drop"])
        data = check_datasets(cfg)
    found: dict[str, tuple[str, list[tuple[str, np.ndarray]]]] = {}
    for dataset in (*data.tests, *data.train):
        for one in dataset.records:
            names = [dataset.classes.names[label] for label in one.labels]
            objects = [pair for pair in zip(names, one.boxes_xyxy, strict=True) if pair[0] not in leave_out]
            found.setdefault(Path(one.file_name).name.partition(".rf.")[0], (one.file_name, objects))
    return [found[name] for name in sorted(found)]


def take(
    images: list[tuple[str, list[tuple[str, np.ndarray]]]], most: int, seen: set[str]
) -> Iterator[tuple[Image.Image, list[Any]]]:
    """Up to ``most`` images with objects, resized, with (class name, box) pairs."""
    count = 0
    for index in np.random.default_rng(0).permutation(len(images)):
        path, objects = images[index]
        if count == most:
            return
        try:
            with open_image(path) as file:
                digest = hashlib.sha1(file.read()).hexdigest()
                image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        except (DataError, OSError):  # an annotation without its image, or a file that was cut off
            continue
        scale = min(1.0, SHORT_SIDE / min(image.size))
        boxes = [(name, (scale * box).tolist()) for name, box in objects]
        boxes = [(name, box) for name, box in boxes if min(box[2] - box[0], box[3] - box[1]) >= LEAST]
        if boxes and digest not in seen:
            seen.add(digest)
            count += 1
            yield image.resize([max(1, round(scale * side)) for side in image.size], Image.Resampling.LANCZOS), boxes


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("clones", type=click.Path(path_type=Path, exists=True))
@click.argument("output", type=click.Path(path_type=Path, exists=False))
@report_errors
def main(clones: Path, output: Path) -> None:
    """Write OUTPUT/train and OUTPUT/valid from the repositories in CLONES."""
    splits: dict[str, dict[str, list[Any]]] = {name: {"images": [], "annotations": []} for name in ("train", "valid")}
    ids: dict[str, int] = {}
    seen: set[str] = set()
    for name in splits:
        (output / name).mkdir(parents=True)
    for source in yaml.safe_load(TABLE.read_text(encoding="utf-8")):
        folder = clones / source["repository"].replace("/", "+") / source.get("folder", "")
        try:
            images = read(folder, source.get("leave_out", []))
        except BadInputError as error:
            click.echo(f"{source['name']}: {error}")
            continue
        number = boxes = 0
        for number, (image, objects) in enumerate(take(images, source.get("most", MOST), seen), start=1):
            split = "valid" if number % round(1 / VALIDATED) == 0 else "train"
            found = splits[split]
            file_name = f"{source['name']}_{number:04d}.jpg"
            image.save(output / split / file_name, quality=QUALITY)
            image_id = len(found["images"]) + 1
            found["images"].append({"id": image_id, "file_name": file_name, "width": image.width, "height": image.height})
            for class_name, (left, top, right, bottom) in objects:
                category = ids.setdefault(_plain(class_name, source["name"]), len(ids) + 1)
                box = [round(value, 2) for value in (left, top, right - left, bottom - top)]
                row = {"id": len(found["annotations"]) + 1, "image_id": image_id, "category_id": category, "bbox": box}
                found["annotations"].append(row | {"area": box[2] * box[3], "iscrowd": 0})
            boxes += len(objects)
        click.echo(f"{source['name']}: {number} of {len(images)} images, {boxes} boxes")
    for name, found in splits.items():
        categories = [{"id": number, "name": word} for word, number in ids.items()]
        write_json(found | {"categories": categories}, output / name / "_annotations.coco.json")
        click.echo(f"{output / name}: {len(found['images'])} images, {len(found['annotations'])} boxes, {len(ids)} classes")


def _plain(name: str, source: str) -> str:
    """A class name that sets can share; with the set's name before it where it is no word."""
    words = " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
    return words if sum(map(str.isalpha, words)) > 2 and words not in ("object", "objects") else f"{source} {words}"


if __name__ == "__main__":
    main(prog_name="studies/starter/data.py")
