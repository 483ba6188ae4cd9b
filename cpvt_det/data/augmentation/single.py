# SPDX-License-Identifier: Apache-2.0
"""torchvision's augmentations of a single image, under torchvision's names.

Three kinds are left out. After the first kind, boxes no longer match the pixels: ``RandomErasing``, and ``ElasticTransform``,
which moves only a box's corners. The second kind does not accept boxes. The third kind, mirroring and resizing, has its own
config keys.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from cpvt_det.common.errors import UnknownNameError
from cpvt_det.data.augmentation.step import AUGMENTATION_REGISTRY, Scene

COLOURS = ("ColorJitter", "GaussianBlur", "GaussianNoise", "JPEG", "RandomAdjustSharpness", "RandomAutocontrast")
COLOURS += ("RandomChannelPermutation", "RandomEqualize", "RandomGrayscale", "RandomInvert", "RandomPhotometricDistort")
COLOURS += ("RandomPosterize", "RandomSolarize")
PLACES = ("CenterCrop", "Pad", "RandomAffine", "RandomCrop", "RandomPerspective", "RandomResizedCrop", "RandomRotation")
PLACES += ("RandomVerticalFlip", "RandomZoomOut", "ScaleJitter")
GROUPS = ("RandomApply", "RandomChoice", "RandomOrder")
"""Augmentations that wrap other augmentations: their option ``transforms`` is a list like ``INPUT.AUGMENTATIONS``."""
MODES = {mode.value: mode for mode in v2.InterpolationMode}


def _from_torchvision(name: str) -> Callable[..., v2.Transform]:
    transform = getattr(v2, name)

    @functools.wraps(transform)
    def build(**options: Any) -> v2.Transform:
        mode = options.get("interpolation")
        if isinstance(mode, str):
            if mode not in MODES:
                raise UnknownNameError("interpolation", mode, MODES)
            options["interpolation"] = MODES[mode]
        return transform(**options)

    return build


for _name in (*COLOURS, *PLACES, *GROUPS):
    AUGMENTATION_REGISTRY.register_as(_name)(_from_torchvision(_name))


@AUGMENTATION_REGISTRY.register_as("RandomIoUCrop")
class RandomIoUCrop(v2.RandomIoUCrop):
    """torchvision's SSD crop, changed so that it ends for every image and removes boxes by the same rule as other augmentations.

    torchvision's own version removes each box whose centre is outside the crop, however much of the object is still visible.

    Args:
        min_scale, max_scale: sides of the crop as fractions of the image's sides.
        min_aspect_ratio, max_aspect_ratio: width over height of the crop, in pixels, regardless of the image's own ratio.
        sampler_options: overlaps, from which one is drawn for each image. A crop must have at least this overlap with some box;
            an overlap of 1 leaves the image whole. ``None`` means 0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.
        trials: number of crops that are tried for an overlap, before another overlap is drawn.

    Raises:
        ValueError: ``sampler_options`` do not contain 1. For some images no other overlap can be reached, so the search would
            never end.

    Source: arXiv 1512.02325, section 2.2.
    """

    def __init__(
        self,
        min_scale: float = 0.3,
        max_scale: float = 1.0,
        min_aspect_ratio: float = 0.5,
        max_aspect_ratio: float = 2.0,
        sampler_options: Sequence[float] | None = None,
        trials: int = 40,
    ):
        super().__init__(min_scale, max_scale, min_aspect_ratio, max_aspect_ratio, sampler_options, trials)
        if max(self.options, default=0) < 1:
            raise ValueError(f"sampler_options must contain 1, which keeps the image whole, got {list(self.options)}")

    def forward(self, image: Tensor, boxes: Tensor, labels: Tensor) -> Scene:
        """Crop. An image without boxes is left whole immediately, whereas torchvision would leave it whole only after many
        trials.
        """
        return super().forward(image, boxes, labels) if len(boxes) else (image, boxes, labels)

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Crop the image or the boxes, if a crop was drawn."""
        window = {name: value for name, value in params.items() if name != "is_within_crop_area"}
        return self._call_kernel(TF.crop, inpt, **window) if window else inpt
