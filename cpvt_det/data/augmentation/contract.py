# SPDX-License-Identifier: Apache-2.0
"""The contract and the registry of augmentations."""

from collections.abc import Callable

from torch import Tensor

from cpvt_det.common.registry import PartRegistry

Scene = tuple[Tensor, Tensor, Tensor]
"""An image and its objects: image (3, h, w) uint8 RGB; boxes (G, 4) float32 xyxy in pixels, within the image; labels (G,) int64 in
[0, K). Augmentations are called with torchvision's ``tv_tensors.Image`` and ``BoundingBoxes``, which are tensors."""

DrawScene = Callable[[], Scene]
"""Function that draws another training image at random, and applies to it the augmentations that come earlier in the list."""

AUGMENTATION_REGISTRY = PartRegistry("AUGMENTATION", "augmentation", chosen=frozenset({"min_visible"}))
"""Name in ``INPUT.AUGMENTATIONS`` -> a builder, called with the options of the entry.

The builder's result is called as ``augment(image, boxes, labels)`` and returns these three, as :data:`Scene` describes them; the
image may change in size. The boxes it returns may reach beyond the image, and it may remove boxes along with their labels.
Afterwards, all boxes are clipped, and those of which too little is left are removed
(:func:`cpvt_det.data.augmentation.step.clip_to_visible`). Do not change inputs in place.

- An augmentation with the attribute ``mixes = True`` combines images. It gets a fourth argument ``draw``, a
  :data:`DrawScene`, and is left out in the last ``INPUT.CLOSE_EPOCHS`` epochs.
- A builder with a parameter ``min_visible`` gets ``INPUT.MIN_VISIBLE``, for boxes that its augmentation must clip itself.
- Random numbers come from torch's global generator, ``random`` or ``numpy.random``, which are seeded for each image. Any other
  generator must be seeded from one of these at every call; otherwise a resumed run sees different images.
"""
