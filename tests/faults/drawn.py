# SPDX-License-Identifier: Apache-2.0
"""A small drawn data set, one thing wrong with it, and the commands that meet it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tiny import overrides

from cpvt_det import builders
from cpvt_det.config import load_cfg
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import CocoDataset
from faults.case import Case, Cut, Ending, call

SIZES = {1: (40, 60), 2: (48, 48), 3: (56, 40), 4: (44, 64)}  # image id -> (height, width)


@dataclass
class Drawn:
    """A data set in a folder: four PNGs, with a box of either class each, to be changed before it is written.

    Attributes:
        folder: of the JSON ``set.json`` and of ``images/``.
        content: of the JSON.
        words: KEY VALUE pairs of the run.
    """

    folder: Path
    content: dict[str, Any] = field(default_factory=dict)
    words: dict[str, object] = field(default_factory=dict)

    def __post_init__(self):
        (self.folder / "images").mkdir(parents=True)
        images, annotations = [], []
        for image_id, (height, width) in SIZES.items():
            pixels = np.random.default_rng(image_id).integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(self.path(image_id))
            images.append({"id": image_id, "file_name": f"{image_id}.png", "height": height, "width": width})
            for category_id, box in ((3, [4, 5, 20, 12]), (7, [15, 8, 16.5, 24.25])):
                entry = {"id": len(annotations) + 1, "image_id": image_id, "category_id": category_id, "bbox": box}
                annotations.append({**entry, "area": box[2] * box[3], "iscrowd": 0})
        categories = [{"id": 3, "name": "cell"}, {"id": 7, "name": "mite"}]
        self.content = {"images": images, "annotations": annotations, "categories": categories}

    def path(self, image_id: int) -> Path:
        """Where an image was drawn."""
        return self.folder / "images" / f"{image_id}.png"

    def replace_image(self, image_id: int, picture: Image.Image, name: str, **options: Any) -> Path:
        """Another picture for an image, under another name, of the size that the JSON then says."""
        path = self.folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, **options)
        self.content["images"][image_id - 1] |= {"file_name": name, "width": picture.width, "height": picture.height}
        return path

    @property
    def files(self) -> DatasetFiles:
        """As a run finds them."""
        return DatasetFiles("drawn", self.folder / "set.json", self.folder / "images")

    def write(self) -> None:
        """Write the JSON, unless there is one."""
        if not self.files.annotations.exists():
            self.files.annotations.write_text(json.dumps(self.content), encoding="utf-8")


class DataCase(Case):
    """A fault of a data set, met by ``cpvt-det check-data``.

    Args:
        what, says, code, guard: as in :class:`Case`.
        make: changes a drawn data set.
        options: of the command.
        then: looks at what a run then reads of the data set, and asserts it.
    """

    def __init__(
        self,
        what: str,
        make: Callable[[Drawn], Any],
        says: str,
        code: int = 2,
        options: Sequence[str] = (),
        *,
        guard: Cut | tuple[Cut, ...] | str = "",
        then: Callable[[Drawn], None] | None = None,
    ):
        def run(folder: Path) -> Ending:
            drawn = draw(folder / "data", make)
            ending = call_on(drawn, "check-data", *options)
            if then is not None and ending.code == code:
                then(drawn)
            return ending

        super().__init__(what, run, says, code, guard)
        object.__setattr__(self, "make", make)
        object.__setattr__(self, "options", options)


def read_set(drawn: Drawn) -> CocoDataset:
    """The data set as a training reads it."""
    return builders.load_splits(load_cfg("", overrides(drawn.files, drawn.folder)))[0][0]


def read_pixels(drawn: Drawn) -> np.ndarray:
    """The first image as an evaluation reads it, (H, W, 3) uint8, RGB."""
    mapper = builders.build_test_mapper(load_cfg("", overrides(drawn.files, drawn.folder, INPUT__MIN_SIZE_TEST=0)))
    return mapper(read_set(drawn).records[0])["image"].permute(1, 2, 0).numpy()


def draw(folder: Path, make: Callable[[Drawn], Any]) -> Drawn:
    """A drawn data set after a change."""
    drawn = Drawn(folder)
    make(drawn)
    drawn.write()
    return drawn


def call_on(drawn: Drawn, command: str, *words: object, runner: str = "builtin", **more: object) -> Ending:
    """``cpvt-det COMMAND`` with the smallest config on a data set; ``more`` as in :func:`tiny.overrides`."""
    return call(*words_on(drawn, command, *words, runner=runner, **more))


def words_on(drawn: Drawn, command: str, *words: object, runner: str = "builtin", **more: object) -> list[object]:
    """The words of :func:`call_on`."""
    config = drawn.folder / "run.yaml"
    config.write_text("VERSION: 2\n")
    options = ["--config-file", config, "--runner", runner]
    return [command, *words, *options, *overrides(drawn.files, drawn.folder.parent / "out", **{**drawn.words, **more})]
