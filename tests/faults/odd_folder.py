# SPDX-License-Identifier: Apache-2.0
"""A folder of pictures and annotations in one of the formats, to be changed before it is written, and what is meant by it."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 96, 72
KINDS = ("yolo", "yolo flat", "voc", "voc lists", "coco", "coco split", "cvat")
"""Formats; ``flat`` is without YAML file."""


@dataclass
class Picture:
    """One picture.

    Attributes:
        stem: name without suffix.
        split: train or val.
        boxes: class and x, y, width, height in whole pixels.
        image, label: paths of its files from the folder on; ``label`` of YOLO and VOC.
        written: its name in the annotations.
        save: options of Pillow.
    """

    stem: str
    split: str
    boxes: list[tuple[int, int, int, int, int]]
    image: str = ""
    label: str = ""
    written: str = ""
    seed: int = 0
    save: dict[str, Any] = field(default_factory=dict)


@dataclass
class OddFolder:
    """A data set before it is written.

    Attributes:
        kind: one of ``KINDS``.
        pictures: eight pictures, five to train on; some have two boxes, one has none.
        classes: names of the classes, as they are meant and written.
        line: text of a box in YOLO's files: class and cx, cy, w, h.
        tail: what is behind a line.
        encodings: kind of text file (labels, names, lists, yaml, xml, json) -> its encoding.
        ends: line end of text files.
        yaml: entries of the YAML file besides names and splits.
        entries: train and val of the YAML file.
        names: text of the names in the YAML file.
        listed: text of a picture in a list.
        lists: names of the lists of the splits.
        name_file: file with class names of YOLO without YAML file.
        objects: text of the box in VOC's XML, of corners that count from 1.
        head: what is before the root of XML.
        content: changes COCO's JSON or the text of any file before it is written.
        extra: further files.
        root: folder below the given one, in which all is written.
    """

    kind: str
    pictures: list[Picture]
    classes: list[str] = field(default_factory=lambda: ["cat", "dog"])
    written_classes: list[str] | None = None
    line: Callable[[int, float, float, float, float], str] = lambda label, *box: " ".join(
        [str(label), *(f"{part:.6f}" for part in box)]
    )
    tail: Callable[[int], str] = lambda number: ""
    encodings: dict[str, str] = field(default_factory=dict)
    ends: str = "\n"
    yaml: str = ""
    entries: dict[str, str] = field(default_factory=lambda: {"train": "images/train", "val": "images/val"})
    names: str = ""
    listed: Callable[[Picture], str] | None = None
    lists: dict[str, str] = field(default_factory=lambda: {"train": "train.txt", "val": "val.txt"})
    name_file: str = "classes.txt"
    objects: Callable[[int, int, int, int], str] = lambda x0, y0, x1, y1: (
        f"<bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox>"
    )
    head: str = ""
    size: str = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
    change: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    extra: dict[str, bytes] = field(default_factory=dict)
    root: str = ""
    texts: dict[str, tuple[str, str]] = field(default_factory=dict)

    def meant(self, folder: Path) -> dict[str, list[tuple]]:
        """Real path of each picture -> its boxes, class and xywh."""
        found = {}
        for picture in self.pictures:
            boxes = sorted((self.classes[label], *map(float, box)) for label, *box in picture.boxes)
            found[str((folder / self.root / picture.image).resolve())] = boxes
        return found

    def write(self, folder: Path) -> Path:
        """Write the files; returns the folder to name in a command."""
        top = folder / self.root
        for picture in self.pictures:
            _write(top / picture.image, draw(picture.seed, Path(picture.image).suffix, tuple(picture.save.items())))
        for name, (kind, text) in {**getattr(self, f"_{self.kind.split()[0]}")(), **self.texts}.items():
            content = text.replace("\n", self.ends) if kind in ("labels", "names", "lists", "yaml") else text
            _write(top / name, content.encode(self.encodings.get(kind, "utf-8")))
        for name, content in self.extra.items():
            _write(top / name, content)
        return top

    def _yolo(self) -> dict[str, tuple[str, str]]:
        files = {}
        for picture in self.pictures:
            lines = []
            for number, (label, x, y, w, h) in enumerate(picture.boxes):
                box = (x + w / 2) / WIDTH, (y + h / 2) / HEIGHT, w / WIDTH, h / HEIGHT
                lines.append(self.line(label, *box) + self.tail(number))
            if picture.label:
                files[picture.label] = "labels", "\n".join(lines) + "\n" * bool(lines)
        if self.kind == "yolo flat":
            return files | {self.name_file: ("names", "\n".join(self.classes) + "\n")}
        names = self.names or "names:\n" + "".join(f"  {number}: {name}\n" for number, name in enumerate(self.classes))
        entries = dict(self.entries)
        for split in entries if self.listed else ():
            files[self.lists[split]] = "lists", self._list(split)
            entries[split] = self.lists[split]
        splits = "".join(f"{split}: {place}\n" for split, place in entries.items())
        return files | {"data.yaml": ("yaml", f"{self.yaml}{splits}{names}")}

    def _list(self, split: str) -> str:
        return "".join(f"{self.listed(picture)}\n" for picture in self.pictures if picture.split == split)

    def _voc(self) -> dict[str, tuple[str, str]]:
        files, names = {}, self.written_classes or self.classes
        for picture in self.pictures:
            objects = "".join(
                f"<object><name>{names[label]}</name><difficult>0</difficult>{self.objects(x + 1, y + 1, x + w, y + h)}</object>"
                for label, x, y, w, h in picture.boxes
            )
            text = f"{self.head}<annotation><filename>{picture.written}</filename>{self.size}{objects}</annotation>"
            files[picture.label] = "xml", text
        if self.kind == "voc lists":
            self.listed = self.listed or (lambda picture: picture.stem)
            files |= {f"ImageSets/Main/{self.lists[split]}": ("lists", self._list(split)) for split in ("train", "val")}
        return files

    def _coco(self) -> dict[str, tuple[str, str]]:
        places = {"": "annotations/instances.json"}
        if self.kind == "coco split":
            places = {"train": "train/_annotations.coco.json", "val": "valid/_annotations.coco.json"}
        files = {}
        for split, place in places.items():
            content = self.coco([picture for picture in self.pictures if split in ("", picture.split)])
            for change in self.change:
                change(content)
            files[place] = "json", json.dumps(content, ensure_ascii=False)
        return files

    def coco(self, pictures: list[Picture]) -> dict[str, Any]:
        """COCO's sections of some pictures."""
        images, annotations = [], []
        for number, picture in enumerate(pictures, start=1):
            images.append({"id": number, "file_name": picture.written, "width": WIDTH, "height": HEIGHT})
            for label, x, y, w, h in picture.boxes:
                entry = {"id": len(annotations) + 1, "image_id": number, "category_id": label + 1, "bbox": [x, y, w, h]}
                annotations.append({**entry, "area": w * h, "iscrowd": 0})
        categories = [{"id": number + 1, "name": name} for number, name in enumerate(self.written_classes or self.classes)]
        return {"images": images, "annotations": annotations, "categories": categories}

    def _cvat(self) -> dict[str, tuple[str, str]]:
        labels = "".join(f"<label><name>{name}</name></label>" for name in self.classes)
        images = "".join(
            f'<image id="{number}" name="{picture.written}" width="{WIDTH}" height="{HEIGHT}">'
            + "".join(
                f'<box label="{self.classes[label]}" xtl="{x}" ytl="{y}" xbr="{x + w}" ybr="{y + h}"></box>'
                for label, x, y, w, h in picture.boxes
            )
            + "</image>"
            for number, picture in enumerate(self.pictures)
        )
        text = f"{self.head}<annotations><meta><task><labels>{labels}</labels></task></meta>{images}</annotations>"
        return {"annotations.xml": ("xml", text)}


def plain(kind: str, seed: int = 0) -> OddFolder:
    """A folder without anything odd."""
    rng, pictures = np.random.default_rng(seed), []
    for number in range(8):
        boxes = []
        for label in range(2 if number % 2 else 1):
            w, h = (int(side) for side in rng.integers(8, 40, 2))
            boxes.append((label, int(rng.integers(0, WIDTH - w)), int(rng.integers(0, HEIGHT - h)), w, h))
        stem, split = f"p{number}", "train" if number < 5 else "val"
        image, label = {
            "yolo": (f"images/{split}/{stem}.png", f"labels/{split}/{stem}.txt"),
            "yolo flat": (f"images/{stem}.png", f"labels/{stem}.txt"),
            "voc": (f"JPEGImages/{stem}.png", f"Annotations/{stem}.xml"),
            "coco": (f"images/{stem}.png", ""),
            "coco split": (f"{'train' if split == 'train' else 'valid'}/{stem}.png", ""),
            "cvat": (f"images/{stem}.png", ""),
        }[kind.removesuffix(" lists")]
        pictures.append(Picture(stem, split, boxes, image, label, f"{stem}.png", seed=number))
    return OddFolder(kind, pictures)


@cache
def draw(seed: int, suffix: str, options: tuple[tuple[str, Any], ...] = ()) -> bytes:
    """A picture that resembles no other."""
    colours = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    picture, file = Image.fromarray(colours).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST), io.BytesIO()
    picture.save(file, Image.registered_extensions()[suffix.lower()], **dict(options))
    return file.getvalue()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
