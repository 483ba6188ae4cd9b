#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Test images of other shapes, out of Aquarium's upright validation photographs: several of them as one image.

What they show keeps its size and shape, unlike in a stretched photograph, and no object is cut, unlike in a crop::

    python studies/photo_encodings/prepare.py datasets/aquarium_pretrain datasets/aquarium_strips
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # this folder is not part of the installed package

from cpvt_det.builders import load_tests
from cpvt_det.cli import report_errors
from cpvt_det.common.files import write_json
from cpvt_det.config import get_cfg
from cpvt_det.data.records import ImageRecord

WIDTH, HEIGHT = 768, 1024
"""Size of the photographs that are used: 87 of 127."""
STRIPS = {"upright": (1, 1), "tall": (2, 1), "wide": (1, 4)}
"""Name -> photographs below and beside each other: 3:4, 3:8 and 3:1."""


def joined(photographs: Sequence[ImageRecord], rows: int, columns: int) -> tuple[Image.Image, np.ndarray]:
    """One image of several photographs, row by row, and their boxes in it, (G, 4) xyxy."""
    strip, boxes = Image.new("RGB", (columns * WIDTH, rows * HEIGHT)), []
    for number, photograph in enumerate(photographs):
        row, column = divmod(number, columns)
        corner = column * WIDTH, row * HEIGHT
        strip.paste(Image.open(photograph.file_name).convert("RGB"), corner)
        boxes.append(photograph.boxes_xyxy + np.tile(corner, 2))
    return strip, np.concatenate(boxes)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("output", type=click.Path(path_type=Path, exists=False))
@report_errors
def main(source: Path, output: Path) -> None:
    """Write a folder of images and a COCO JSON in OUTPUT for each shape, from the data set in SOURCE."""
    cfg = get_cfg()
    cfg.DATASETS.REGISTER, cfg.DATASETS.TEST = [["aquarium_val", str(source), "val"]], ["aquarium_val"]
    tests = load_tests(cfg)[0]
    upright = [record for record in tests.records if (record.width, record.height) == (WIDTH, HEIGHT)]
    categories = [{"id": number, "name": name} for number, name in enumerate(tests.classes.names)]
    for name, (rows, columns) in STRIPS.items():
        count = rows * columns
        images, annotations = [], []
        (output / name).mkdir(parents=True)
        for number in range(len(upright) // count):
            photographs = upright[number * count : (number + 1) * count]
            strip, boxes = joined(photographs, rows, columns)
            image = {"id": number + 1, "file_name": f"{number:03d}.png", "width": strip.width, "height": strip.height}
            strip.save(output / name / image["file_name"])
            images.append(image)
            labels = np.concatenate([photograph.labels for photograph in photographs]).tolist()
            for (left, top, right, bottom), label in zip(boxes.tolist(), labels, strict=True):
                box = [left, top, right - left, bottom - top]
                row = {"id": len(annotations) + 1, "image_id": image["id"], "category_id": label, "bbox": box}
                annotations.append(row | {"area": box[2] * box[3], "iscrowd": 0})
        write_json({"images": images, "annotations": annotations, "categories": categories}, output / f"{name}.json")
        click.echo(f"{output / name}: {len(images)} images of {columns * WIDTH} x {rows * HEIGHT}, {len(annotations)} boxes")


if __name__ == "__main__":
    main(prog_name="studies/photo_encodings/prepare.py")
