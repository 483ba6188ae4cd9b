# SPDX-License-Identifier: Apache-2.0
"""From JPEG files to training samples, and to a normalised, padded batch: 640x480, on one core.

DETR's augmentation without its crop: mirror half the images, resize to a short side from 480 to 800; for the same image every
contender draws the same. Compared before timing: pixels and boxes; between Pillow's resizing, which detectron2 uses, and ours of
bytes a pixel may differ by 1 of 255.

``samples`` ends with bytes and boxes, as loader processes send them; ``batches`` with normalised floats on a padded canvas, eight
images each, which is done in the training process and may be done on a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.harness import ROUNDS, Case, Contender, Plan, Work
from benchmarks.peers import detectron2_data, official_detr
from benchmarks.photos import HEIGHT, WIDTH, draw_photos
from benchmarks.suites import Options
from cpvt_det.common.boxes import xyxy_to_cxcywh
from cpvt_det.common.structures import PaddedBatch
from cpvt_det.data.mapper import Mapper, train_transform
from cpvt_det.data.records import ImageRecord

TITLE = "From JPEG to batch"
PLANS = {"quick": Plan(seconds=2.0), "full": Plan(rounds=max(9, ROUNDS), seconds=60.0)}

IMAGES = {"quick": 16, "default": 128, "all": 128}
COMPARED = 16
SIDES = tuple(range(480, 801, 32))
MAX_SIZE = 1333
BATCH, STRIDE = 8, 32
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of the channels, in the order RGB
CASES = ("samples", "batches")
TOLERANCE = {"samples": 1.001 / 255, "batches": 0.01}
"""Relative to the largest value: a step of 1 of 255, in bytes and normalised."""


@dataclass(frozen=True)
class Draw:
    """An image and its augmentation."""

    record: ImageRecord
    side: int
    mirrored: bool


@dataclass(frozen=True)
class Pipeline:
    """One implementation.

    Args:
        sample: function of a draw that returns the sample, in the implementation's own form.
        content: function of a sample that returns pixels (3, h, w), and boxes (G, 4) cxcywh in [0, 1].
        batch: function of samples that returns the canvas (B, 3, H, W) float.
    """

    sample: Callable[[Draw], Any]
    content: Callable[[Any], tuple[Tensor, Tensor]]
    batch: Callable[[Sequence[Any]], Tensor]


def cases(options: Options) -> list[Case]:
    images = IMAGES[options.size]
    return [
        Case(
            name=name,
            about={"to": name, "images": images},
            build=partial(make_work, name, images, options),
            left_out="files are decoded on the CPU: --device cpu" if options.device != "cpu" else "",
        )
        for name in CASES
    ]


def make_draws(images: int) -> list[Draw]:
    rng = np.random.default_rng(1)
    records = draw_photos(images).records
    return [Draw(record, int(rng.choice(SIDES)), bool(rng.random() < 0.5)) for record in records]


def make_work(name: str, images: int, options: Options) -> Work:
    """All contenders; the first one is detectron2's mapper if it is available."""
    draws, left_out = make_draws(images), {}
    found: list[tuple[str, Pipeline, bool]] = []
    if "detectron2" in options.peers:
        found.append(("detectron2 DatasetMapper", detectron2_pipeline(options.peers["detectron2"]), True))
    else:
        left_out["detectron2 DatasetMapper"] = "not installed, and no checkout given: --peer detectron2=PATH"
    if "detr" not in options.peers:
        left_out["detr transforms"] = "no checkout given: --peer detr=PATH"
    elif name == "samples":
        left_out["detr transforms"] = "they give normalised floats: see batches"
    else:
        found.append(("detr transforms", detr_pipeline(options.peers["detr"]), True))
    found.append(("cpvt_det", our_pipeline(), False))
    return Work([make_contender(name, *parts, draws) for parts in found], TOLERANCE[name], left_out)


def make_contender(name: str, shown: str, pipeline: Pipeline, peer: bool, draws: list[Draw]) -> Contender:
    # The long side is rounded down by detr, to the nearest by others: compared are sides for which both are the same.
    same = [draw for draw in draws if draw.side * WIDTH % HEIGHT == 0][:COMPARED]
    if name == "samples":
        return Contender(shown, partial(run_samples, pipeline, draws), peer, check=partial(contents, pipeline, same))
    return Contender(shown, partial(run_batches, pipeline, draws), peer, check=partial(canvases, pipeline, same))


def run_samples(pipeline: Pipeline, draws: list[Draw]) -> None:
    for draw in draws:
        pipeline.sample(draw)


def run_batches(pipeline: Pipeline, draws: list[Draw]) -> None:
    for batch in _batches(draws):
        pipeline.batch([pipeline.sample(draw) for draw in batch])


def contents(pipeline: Pipeline, draws: list[Draw]) -> list[tuple[Tensor, Tensor]]:
    return [pipeline.content(pipeline.sample(draw)) for draw in draws]


def canvases(pipeline: Pipeline, draws: list[Draw]) -> list[Tensor]:
    """The images without padding, because contenders pad to different sizes."""
    found = []
    for batch in _batches(draws):
        canvas = pipeline.batch([pipeline.sample(draw) for draw in batch])
        for image, draw in zip(canvas, batch, strict=True):
            found.append(image[:, : draw.side, : draw.side * WIDTH // HEIGHT])
    return found


def _batches(draws: list[Draw]) -> Iterator[list[Draw]]:
    for start, end in pairwise([*range(0, len(draws), BATCH), len(draws)]):
        yield draws[start:end]


def our_pipeline() -> Pipeline:
    """The mapper and a detector's own preprocessing, without a detector behind it."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))

    @cache
    def mapper(side: int, mirrored: bool) -> Mapper:
        transform = train_transform([side], MAX_SIZE)
        transform.transforms[0].p = float(mirrored)
        return Mapper(transform, with_targets=True)

    return Pipeline(
        sample=lambda draw: mapper(draw.side, draw.mirrored)(draw.record),
        content=lambda sample: (sample["image"], sample["targets"].boxes_cxcywh),
        batch=lambda samples: PaddedBatch.from_images([sample["image"] for sample in samples], STRIDE, mean, std).images,
    )


def detectron2_pipeline(folder: Path | None) -> Pipeline:
    """``DatasetMapper`` with Pillow, and what its detectors do with samples."""
    d2 = detectron2_data(folder)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))

    @cache
    def mapper(side: int, mirrored: bool) -> Any:
        augmentations = [d2.T.ResizeShortestEdge([side], MAX_SIZE, "choice"), d2.T.RandomFlip(prob=float(mirrored))]
        return d2.DatasetMapper(True, augmentations=augmentations, image_format="RGB")

    def entry(record: ImageRecord) -> dict[str, Any]:
        boxes, labels = record.boxes_xyxy.tolist(), record.labels.tolist()
        kind = {"bbox_mode": d2.BoxMode.XYXY_ABS, "iscrowd": 0}
        objects = [{"bbox": box, "category_id": label, **kind} for box, label in zip(boxes, labels, strict=True)]
        place = {"file_name": record.file_name, "image_id": record.image_id, "height": record.height, "width": record.width}
        return {**place, "annotations": objects}

    def content(sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
        height, width = sample["image"].shape[1:]
        boxes = sample["instances"].gt_boxes.tensor / torch.tensor([width, height, width, height])
        return sample["image"], xyxy_to_cxcywh(boxes).float()

    return Pipeline(
        sample=lambda draw: mapper(draw.side, draw.mirrored)(entry(draw.record)),
        content=content,
        batch=lambda samples: d2.ImageList.from_tensors([(s["image"] - mean) / std for s in samples], STRIDE).tensor,
    )


def detr_pipeline(folder: Path) -> Pipeline:
    """The transforms of a checkout, which normalise each image, and its batches."""
    official = official_detr(folder)
    T = official.transforms

    @cache
    def transform(side: int, mirrored: bool) -> Any:
        normalise = T.Normalize([value / 255 for value in MEAN], [value / 255 for value in STD])
        resize = T.RandomResize([side], max_size=MAX_SIZE)
        return T.Compose([T.RandomHorizontalFlip(float(mirrored)), resize, T.ToTensor(), normalise])

    def sample(draw: Draw) -> Any:
        record = draw.record
        boxes = record.boxes_xyxy.copy()
        boxes[:, 2:] -= boxes[:, :2]
        objects = [
            {"bbox": box, "category_id": label, "area": box[2] * box[3], "iscrowd": 0}
            for box, label in zip(boxes.tolist(), record.labels.tolist(), strict=True)
        ]
        image = Image.open(record.file_name).convert("RGB")
        prepared = official.prepare_annotations(image, {"image_id": record.image_id, "annotations": objects})
        return transform(draw.side, draw.mirrored)(*prepared)

    return Pipeline(
        sample=sample,
        content=lambda sample: (sample[0], sample[1]["boxes"]),
        batch=lambda samples: official.batch_of([image for image, _ in samples]).tensors,
    )
