# SPDX-License-Identifier: Apache-2.0
"""Drawn JPEGs that take as long to decode as photographs of the same size: gradients, shapes, and texture at several scales."""

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from cpvt_det.data.records import ImageRecord

HEIGHT, WIDTH = 480, 640
QUALITY = 90
TEXTURE = {1: 6.2, 2: 8.0, 4: 9.0, 16: 12.0}
"""Standard deviation of noise by the size of its grain in pixels; so a file has about 110 KB."""
OBJECTS = 7
CLASSES = 80

_folders: list[tempfile.TemporaryDirectory] = []  # deleted when the process ends


@dataclass(frozen=True)
class Photos:
    """Files with their objects, and the mean size of a file."""

    records: list[ImageRecord]
    mean_bytes: float


@cache
def draw_photos(count: int) -> Photos:
    """Photographs drawn from a fixed seed, in a folder that is deleted when the process ends."""
    rng, folder = np.random.default_rng(0), tempfile.TemporaryDirectory(prefix="benchmarks_photos")
    _folders.append(folder)
    records, sizes = [], []
    for number in range(count):
        path = Path(folder.name) / f"{number}.jpg"
        boxes = draw_boxes(rng)
        draw(rng, boxes).save(path, quality=QUALITY)
        sizes.append(path.stat().st_size)
        records.append(ImageRecord(str(path), number, HEIGHT, WIDTH, boxes, rng.integers(CLASSES, size=len(boxes))))
    return Photos(records, float(np.mean(sizes)))


def draw_boxes(rng: np.random.Generator) -> np.ndarray:
    """(G, 4) float32 xyxy in pixels."""
    sides = rng.uniform(20, 220, (OBJECTS, 2))
    start = rng.random((OBJECTS, 2)) * ((WIDTH, HEIGHT) - sides)
    return np.concatenate((start, start + sides), axis=1).astype(np.float32)


def draw(rng: np.random.Generator, boxes: np.ndarray) -> Image.Image:
    """An image with a soft background, an ellipse or a rectangle in every box, and noise everywhere."""
    picture = Image.fromarray(rng.integers(40, 216, (4, 5, 3), dtype=np.uint8)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    for box in boxes.tolist():
        shape = pen.ellipse if rng.random() < 0.5 else pen.rectangle
        shape(box, fill=tuple(rng.integers(0, 256, 3).tolist()))
    noise = np.zeros((HEIGHT, WIDTH, 1), dtype=np.float32)
    for grain, deviation in TEXTURE.items():
        coarse = rng.normal(0, deviation, (HEIGHT // grain, WIDTH // grain)).astype(np.float32)
        noise[..., 0] += np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR))
    return Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))
