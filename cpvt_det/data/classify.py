# SPDX-License-Identifier: Apache-2.0
"""Turn a record into a sample for image classification: decode the image, then crop and augment it.

The augmentations are torchvision's. Their random numbers come from torch's generator, which the loader seeds from the run's seed,
the epoch and the image, so a resumed run repeats them. Mixup and CutMix, which mix images of a batch, are in
``solver/classify.py``.
"""

from collections.abc import Sequence

import torch
from torchvision.transforms import InterpolationMode, v2

from cpvt_det.common.structures import Targets
from cpvt_det.data.images import read_image
from cpvt_det.data.mapper import Mapper, Sample, named
from cpvt_det.data.records import ImageRecord

MAGNITUDES = 31
"""Number of RandAugment's magnitudes, which run from 0 to 30."""
WHOLE = torch.tensor([[0.5, 0.5, 1.0, 1.0]])
"""(1, 4) float, cxcywh: the box that covers the whole image."""


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
