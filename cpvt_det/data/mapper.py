# SPDX-License-Identifier: Apache-2.0
"""Turn a record into a sample: the decoded and augmented image, in training with boxes for a detector or a label for a classifier.

Place in the pipeline: after ``data/coco.py``, before ``structures.PaddedBatch``.

The augmentations of a classifier are torchvision's. Their random numbers come from torch's generator, which the loader seeds from
the run's seed, the epoch and the image, so a resumed run repeats them. Mixup and CutMix, which mix images of a batch, are in
``losses/class_training.py``.
"""

import contextlib
import copy
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as TF

from cpvt_det.common.boxes import xyxy_to_cxcywh
from cpvt_det.common.errors import DataError
from cpvt_det.common.structures import Sample, Targets
from cpvt_det.data.augmentation import AugmentationStep, Scene, as_scene, augmentation_errors
from cpvt_det.data.images import read_image
from cpvt_det.data.records import ImageRecord

MAGNITUDES = 31
"""Number of RandAugment's magnitudes, which run from 0 to 30."""
WHOLE = torch.tensor([[0.5, 0.5, 1.0, 1.0]])
"""(1, 4) float, cxcywh: the box that covers the whole image."""


class RandomShortSide(v2.Transform):
    """Resize an image so that its short side has a length drawn from a list; both sides keep at least one pixel.

    Args:
        sizes: lengths of the short side in pixels to draw from, or a single one in evaluation. If empty or 0, images are not
            resized.
        max_size: limit of the long side in pixels.
    """

    def __init__(self, sizes: Sequence[int], max_size: int | None = None):
        super().__init__()
        self.sizes = [size for size in sizes if size > 0]
        self.max_size = max_size

    def forward(self, image: Tensor, *objects: Tensor) -> Any:
        """Resize the image and any boxes; labels are passed through."""
        if not self.sizes:
            return (image, *objects) if objects else image
        height, width = TF.get_size(image)
        scale = self.sizes[int(torch.randint(len(self.sizes), ()))] / min(height, width)
        if self.max_size:
            scale = min(scale, self.max_size / max(height, width))
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        image = TF.resize(image, size, antialias=True)
        return (image, TF.resize(objects[0], size), *objects[1:]) if objects else image


class RandomSizeCrop(v2.Transform):
    """Crop to a window of random sides at a random position.

    Args:
        low, high: smallest and largest side in pixels, both included. The sides of the image limit them, too.

    Raises:
        ValueError: an empty range.

    Source: facebookresearch/detr ``datasets/transforms.py`` (the sizes).
    """

    def __init__(self, low: int, high: int):
        super().__init__()
        if not 1 <= low <= high:
            raise ValueError(f"crop sides must be a range that starts at 1 or more, got {low} to {high}")
        self.low, self.high = low, high

    def forward(self, image: Tensor, boxes: tv_tensors.BoundingBoxes, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Crop to one window."""
        window = {}
        for extent, side, start in zip(TF.get_size(image), ("height", "width"), ("top", "left"), strict=True):
            low, high = min(self.low, extent), min(self.high, extent)
            window[side] = int(torch.randint(low, high + 1, ()))
            window[start] = int(torch.randint(extent - window[side] + 1, ()))
        return TF.crop(image, **window), TF.crop(boxes, **window), labels


class KeepVisible(v2.Transform):
    """Clip boxes to the image, and remove boxes that become too small, with their labels.

    Torchvision's own two transforms for this take five times as long.

    Args:
        min_side: smallest side in pixels of a clipped box; 0 allows any size above 0.
    """

    def __init__(self, min_side: float):
        super().__init__()
        self.min_side = min_side

    def forward(self, image: Tensor, boxes: tv_tensors.BoundingBoxes, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Clip and filter boxes, (G, 4) xyxy in pixels."""
        height, width = image.shape[-2:]
        clipped = boxes.as_subclass(Tensor).clamp(min=0).minimum(torch.tensor([width, height, width, height]))
        sides = clipped[:, 2:] - clipped[:, :2]
        kept = ((sides > 0) & (sides >= self.min_side)).all(1)
        return image, tv_tensors.wrap(clipped[kept], like=boxes), labels[kept]


def train_transform(
    sizes: Sequence[int],
    max_size: int | None,
    flip: bool = True,
    crop_sizes: Sequence[int] = (),
    crop_range: tuple[int, int] = (384, 600),
) -> v2.Transform:
    """DETR's augmentation: flip, then resize. Half of the images are resized, cropped and resized again instead of being resized
    once.

    A box is removed if a crop leaves less than a pixel of its width or height. Without a crop, all boxes are kept, however small,
    because evaluation counts them.

    Args:
        sizes, max_size: lengths of the short side and limit of the long side for the last resize, as in :class:`RandomShortSide`.
        flip: whether to mirror half of the images.
        crop_sizes: short sides before the crop in pixels; empty for no crops.
        crop_range: (smallest, largest) side of the crop in pixels, as in :class:`RandomSizeCrop`.

    Source: arXiv 2005.12872, appendix A.4.
    """
    resize: v2.Transform = v2.Compose([RandomShortSide(sizes, max_size), KeepVisible(0)])
    if crop_sizes:
        crop = [RandomShortSide(crop_sizes), RandomSizeCrop(*crop_range), RandomShortSide(sizes, max_size), KeepVisible(1)]
        resize = v2.RandomChoice([resize, v2.Compose(crop)])
    return v2.Compose([v2.RandomHorizontalFlip(0.5 if flip else 0.0), resize])


class Mapper:
    """Makes samples.

    Args:
        transform: transform of the image or, with ``with_targets``, of (image, boxes, labels).
        with_targets: whether samples get targets, for training.
        augmentations: augmentations applied to training images before ``transform``, in this order.
        records: images from which augmentations draw the images that they mix in.
        with_pixels: whether samples without targets get ``pixels``, the untransformed image, which is later cut into tiles.
    """

    def __init__(
        self,
        transform: v2.Transform,
        with_targets: bool,
        augmentations: Sequence[AugmentationStep] = (),
        records: Sequence[ImageRecord] = (),
        with_pixels: bool = False,
    ):
        self.transform = transform
        self.with_targets = with_targets
        self.augmentations = list(augmentations)
        self.records = records
        self.with_pixels = with_pixels

    @property
    def mixes(self) -> bool:
        """Whether a sample may show more than one image."""
        return any(step.mixes for step in self.augmentations)

    def without_mixing(self) -> "Mapper":
        """The same mapper without the augmentations that mix images."""
        mapper = copy.copy(self)
        mapper.augmentations = [step for step in self.augmentations if not step.mixes]
        return mapper

    def __call__(self, record: ImageRecord) -> Sample:
        """Make the sample of one record, using torch's global random state.

        Raises:
            DataError: the image cannot be read, or its size differs from the size in the JSON.
            ConfigError: an augmentation fails on this image.
        """
        sample = named(record)
        if not self.with_targets:
            image = _read(record)
            return {**sample, "image": self.prepare(image), **({"pixels": image} if self.with_pixels else {})}
        if self.augmentations:
            with other_generators_seeded():
                image, boxes, labels = self._augmented(record, len(self.augmentations))
        else:  # torchvision clips the boxes
            image, labels = tv_tensors.Image(_read(record)), torch.from_numpy(record.labels)
            boxes = tv_tensors.BoundingBoxes(record.boxes_xyxy, format="XYXY", canvas_size=image.shape[-2:], clamping_mode="soft")
        image, boxes, labels = self.transform(image, boxes, labels)
        height, width = image.shape[1:]
        boxes_cxcywh = xyxy_to_cxcywh(boxes.as_subclass(Tensor)) / torch.tensor([width, height, width, height])
        return {**sample, "image": image.as_subclass(Tensor), "targets": Targets(labels, boxes_cxcywh.to(torch.float32))}

    def prepare(self, image: Tensor) -> Tensor:
        """Transform an image without targets, (3, H, W) uint8 -> (3, h, w) uint8."""
        return self.transform(tv_tensors.Image(image)).as_subclass(Tensor)

    def _augmented(self, record: ImageRecord, count: int) -> Scene:
        """A record's image with its objects, after the first ``count`` augmentations."""
        scene = as_scene(_read(record), record.boxes_xyxy, torch.from_numpy(record.labels))
        for number, step in enumerate(self.augmentations[:count]):
            with augmentation_errors(step.name, scene, f"image {record.file_name} (id {record.image_id})"):
                scene = step(*scene, functools.partial(self._draw, number)) if step.mixes else step(*scene)
        return scene

    def _draw(self, count: int) -> Scene:
        """A randomly drawn image with its objects, after the first ``count`` augmentations."""
        return self._augmented(self.records[int(torch.randint(len(self.records), ()))], count)


def named(record: ImageRecord) -> Sample:
    """The entries of a sample that identify its image."""
    return {name: getattr(record, name) for name in ("file_name", "image_id", "height", "width")}


@contextlib.contextmanager
def other_generators_seeded() -> Iterator[None]:
    """Within this block, seed the global generators of numpy and ``random`` from torch's generator. Afterwards, restore their
    states.
    """
    states, seed = (np.random.get_state(), random.getstate()), int(torch.randint(2**32, ()))
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])


def _read(record: ImageRecord) -> Tensor:
    """The pixels of a record's image, (3, H, W) uint8, after checking that the image has the size that the record states."""
    image = read_image(record.file_name)
    if tuple(image.shape[1:]) != (record.height, record.width):
        raise DataError(
            f"image {record.file_name} (id {record.image_id}) has {image.shape[2]} x {image.shape[1]} pixels after rotation by "
            f"EXIF, but {record.width} x {record.height} in the annotations; correct its size there, or replace the image"
        )
    return image


def crop_transform(
    size: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: bool = True,
    randaugment: Sequence[int] = (),
    erase: float = 0.0,
    erase_with: Sequence[float] = (0, 0, 0),
) -> v2.Transform:
    """The augmentation of one image, with its steps in the same order as in DeiT.

    Args:
        size: side of the crop in pixels.
        scale: smallest and largest area of the crop window, as a fraction of the image's area.
        ratio: smallest and largest width of the window, as a multiple of its height.
        flip: whether to mirror half of the images.
        randaugment: number of operations and their magnitude, 0 to 30; empty for no RandAugment.
        erase: probability that a rectangle is erased.
        erase_with: RGB colour of erased pixels, three values from 0 to 255.

    Raises:
        ValueError: a value out of its range.

    Source: arXiv 2012.12877, table 9. Torchvision's RandAugment (arXiv 1909.13719) differs from timm's ``rand-m9-mstd0.5-inc1``:
    its magnitude has no noise. Torchvision's magnitude 27 of 30 is as strong as timm's 9 of 10, except for posterizing.
    """
    _require(size >= 1, f"the side of crops must be at least 1 pixel, got {size}")
    _require(
        0 < scale[0] <= scale[1] <= 1, f"the scale of crops must be a range of fractions of the area, within (0, 1], got {scale}"
    )
    _require(0 < ratio[0] <= ratio[1], f"the ratio of crops must be a range of positive numbers, got {ratio}")
    _require(0 <= erase <= 1, f"the probability of erasing must be from 0 to 1, got {erase}")
    steps: list[v2.Transform] = [
        v2.RandomResizedCrop(size, scale, ratio, InterpolationMode.BICUBIC, antialias=True),
        v2.RandomHorizontalFlip(0.5 if flip else 0.0),
    ]
    if len(randaugment):
        whole = len(randaugment) == 2 and all(type(value) is int for value in randaugment)
        known = whole and randaugment[0] >= 0 and 0 <= randaugment[1] < MAGNITUDES
        _require(known, f"RandAugment needs a number of operations and a magnitude from 0 to {MAGNITUDES - 1}, got {randaugment}")
        steps.append(v2.RandAugment(*randaugment, num_magnitude_bins=MAGNITUDES, interpolation=InterpolationMode.BILINEAR))
    if erase:
        steps.append(v2.RandomErasing(erase, value=[float(value) for value in erase_with]))
    return v2.Compose(steps)


def central_transform(size: int, crop_ratio: float) -> v2.Transform:
    """The transform of a test image: resize it, then crop its centre.

    Args:
        size: side of the crop in pixels.
        crop_ratio: side of the crop as a fraction of the resized short side. With 0, the short side is resized to ``size``, and
            the whole image is kept.

    Raises:
        ValueError: a value out of its range.
    """
    _require(size >= 1, f"the test size must be at least 1 pixel, got {size}")
    _require(0 <= crop_ratio <= 1, f"the crop ratio must be from 0 (no crop) to 1, got {crop_ratio}")
    resize = v2.Resize([int(size / (crop_ratio or 1))], InterpolationMode.BICUBIC, antialias=True)
    return v2.Compose([resize, v2.CenterCrop(size)]) if crop_ratio else resize


class ClassMapper(Mapper):
    """Makes samples whose targets are the label of the image and a box that covers the whole image."""

    def __call__(self, record: ImageRecord) -> Sample:
        """Make the sample of one record, using torch's global random state.

        Raises:
            DataError: the image cannot be read.
        """
        sample = {**named(record), "image": self.prepare(read_image(record.file_name))}
        return sample | ({"targets": Targets(torch.from_numpy(record.labels[:1]), WHOLE)} if self.with_targets else {})


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
