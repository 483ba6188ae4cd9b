# SPDX-License-Identifier: Apache-2.0
"""Augmentations that combine several images on the canvas of the first."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from cpvt_det.data.augmentation.step import AUGMENTATION_REGISTRY, DrawScene, Scene, clip_to_visible

THIN = 2
"""Smallest side of a corner in pixels, because torch 2.14 fails to resize to 1 x 1. A canvas that is less
than two such corners wide or high is left unchanged."""


class Mixing:
    """Base class that applies its subclass's ``mix(scene, draw)`` to a random part of the images.

    Args:
        p: probability that an image is mixed, in [0, 1].
    """

    mixes = True

    def __init__(self, p: float):
        self.p = p

    def __call__(self, image: Tensor, boxes: Tensor, labels: Tensor, draw: DrawScene) -> Scene:
        """Mix, or leave the image unchanged."""
        is_mixed = torch.rand(()) < self.p and min(image.shape[-2:]) >= 2 * THIN
        return self.mix((image, boxes, labels), draw) if is_mixed else (image, boxes, labels)


@AUGMENTATION_REGISTRY.register_as("Mosaic")
class Mosaic(Mixing):
    """Four images in the corners of one canvas; each corner shows a random window of its image.

    Args:
        p: probability.
        center: range of the point where the four images meet, as fractions of the canvas's sides.
        zoom: range of the magnification; at 1, a corner shows the largest window that its shape allows.
        min_visible: as in :func:`clip_to_visible`, for objects at the borders of windows.

    Raises:
        ValueError: a centre outside the canvas, or a magnification below 1.

    Source: arXiv 2004.10934, section 3.3; the windows there are placed differently.
    """

    def __init__(
        self, p: float = 0.5, center: Sequence[float] = (0.3, 0.7), zoom: Sequence[float] = (1.0, 1.5), min_visible: float = 0.0
    ):
        super().__init__(p)
        _require_range("center", center, 0, 1)
        _require_range("zoom", zoom, 1, None)
        self.center, self.zoom, self.min_visible = center, zoom, min_visible

    def mix(self, scene: Scene, draw: DrawScene) -> Scene:
        """Put the image and three others into the corners, in random order."""
        height, width = scene[0].shape[-2:]
        y, x = (min(side - THIN, max(THIN, round(side * _uniform(self.center)))) for side in (height, width))
        corners = [(0, 0, y, x), (0, x, y, width), (y, 0, height, x), (y, x, height, width)]
        scenes = [scene, draw(), draw(), draw()]
        canvas, boxes, labels = scene[0].as_subclass(Tensor).clone(), [], []
        for (top, left, bottom, right), number in zip(corners, torch.randperm(4).tolist(), strict=True):
            image, moved, kept_labels = self._window(scenes[number], (bottom - top, right - left))
            canvas[:, top:bottom, left:right] = image
            boxes.append(moved + moved.new_tensor([left, top, left, top]))
            labels.append(kept_labels)
        return canvas, torch.cat(boxes), torch.cat(labels)

    def _window(self, scene: Scene, size: tuple[int, int]) -> Scene:
        """A random window of an image, resized to the size of a corner."""
        image, boxes, labels = scene
        whole = image.shape[-2:]
        scale = max(side / own for side, own in zip(size, whole, strict=True)) * _uniform(self.zoom)
        window = [min(own, max(1, round(side / scale))) for side, own in zip(size, whole, strict=True)]
        top, left = (_below(own - side + 1) for own, side in zip(whole, window, strict=True))
        cut = TF.resized_crop(image.as_subclass(Tensor), top, left, *window, list(size), antialias=True)
        moved = _scaled(boxes.as_subclass(Tensor) - boxes.new_tensor([left, top, left, top]), window, size)
        moved, kept = clip_to_visible(moved, size, self.min_visible)
        return cut, moved[kept], labels[kept]


@AUGMENTATION_REGISTRY.register_as("MixUp")
class MixUp(Mixing):
    """The weighted mean of two images, with the objects of both. The second image is resized to fit into the canvas and put at a
    random place.

    Args:
        p: probability.
        share: range of the first image's weight in the pixels that both images cover.

    Raises:
        ValueError: shares outside [0, 1].

    Source: arXiv 1902.04103, section 3.1. Objects have no weights here, so by default the shares are close to a half.
    """

    def __init__(self, p: float = 0.5, share: Sequence[float] = (0.4, 0.6)):
        super().__init__(p)
        _require_range("share", share, 0, 1)
        self.share = share

    def mix(self, scene: Scene, draw: DrawScene) -> Scene:
        """Mix one other image in."""
        image, boxes, labels = scene
        other, other_boxes, other_labels = draw()
        canvas, before = image.as_subclass(Tensor).clone(), other.shape[-2:]
        scale = min(side / own for side, own in zip(canvas.shape[-2:], before, strict=True))
        size = [max(1, round(own * scale)) for own in before]
        top, left = (_below(side - own + 1) for side, own in zip(canvas.shape[-2:], size, strict=True))
        place = canvas[:, top : top + size[0], left : left + size[1]]
        resized = TF.resize(other.as_subclass(Tensor), size, antialias=True).float()
        place.copy_(resized.lerp(place.float(), _uniform(self.share)).round())
        moved = _scaled(other_boxes.as_subclass(Tensor), before, size) + boxes.new_tensor([left, top, left, top])
        return canvas, torch.cat((boxes.as_subclass(Tensor), moved)), torch.cat((labels, other_labels))


def _require_range(name: str, pair: Sequence[float], low: float, high: float | None) -> None:
    if len(pair) != 2 or not low <= pair[0] <= pair[1] or (high is not None and pair[1] > high):
        bounds = f"from at least {low:g}" + ("" if high is None else f" to at most {high:g}")
        raise ValueError(f"{name} must be a range [low, high] {bounds}, got {list(pair)}")


def _uniform(bounds: Sequence[float]) -> float:
    low, high = bounds
    return low + (high - low) * float(torch.rand(()))


def _below(end: int) -> int:
    """A random integer from 0 to end - 1."""
    return int(torch.randint(end, ()))


def _scaled(boxes: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """(G, 4) xyxy in an image of size ``before`` -> in the same image resized to ``after``, both (height, width)."""
    y, x = (new / old for new, old in zip(after, before, strict=True))
    return boxes * boxes.new_tensor([x, y, x, y])
