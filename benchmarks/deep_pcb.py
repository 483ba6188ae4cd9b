#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""COCO JSON of DeepPCB, small defects on scans of 640 x 640 pixels: ``python benchmarks/deep_pcb.py CHECKOUT FOLDER``.

CHECKOUT is a clone of github.com/tangsanli5201/DeepPCB (MIT licence); ``FOLDER/train.json`` and ``FOLDER/test.json`` name images
in ``CHECKOUT/PCBData``.
"""

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from cpvt_det.common.files import write_json

CLASSES = ("open", "short", "mousebite", "spur", "copper", "pin-hole")
"""By number, from 1, in the annotation files."""
SIDE = 640


def read_split(root: Path, name: str) -> dict:
    """One list of images with their boxes, as COCO has them.

    Args:
        root: folder ``PCBData``.
        name: name of the list, ``trainval.txt`` or ``test.txt``: rows of an image without ``_test`` and an annotation file, whose
            rows are x0 y0 x1 y1 and the class.
    """
    images, annotations = [], []
    for number, line in enumerate((root / name).read_text(encoding="utf-8").splitlines(), start=1):
        image, boxes = line.split()
        images.append({"id": number, "file_name": image.replace(".jpg", "_test.jpg"), "height": SIDE, "width": SIDE})
        for row in (root / boxes).read_text(encoding="utf-8").splitlines():
            x0, y0, x1, y1, label = map(int, row.split())
            box = [x0, y0, x1 - x0, y1 - y0]
            owner = {"id": len(annotations) + 1, "image_id": number, "category_id": label}
            annotations.append({**owner, "bbox": box, "area": box[2] * box[3], "iscrowd": 0})
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, start=1)]
    return {"images": images, "annotations": annotations, "categories": categories}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkout", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def main(checkout: Path, folder: Path) -> None:
    """Write FOLDER/train.json and test.json of the clone CHECKOUT."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in (("train", "trainval.txt"), ("test", "test.txt")):
        write_json(read_split(checkout / "PCBData", name), folder / f"{split}.json")


if __name__ == "__main__":
    main()
