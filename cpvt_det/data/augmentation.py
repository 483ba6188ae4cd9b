# SPDX-License-Identifier: Apache-2.0
"""Augmentations that are chosen by name, and that move boxes along with the pixels: their contract, one entry of
``INPUT.AUGMENTATIONS`` (an augmentation, the check of its result, and the removal of boxes), torchvision's augmentations of one
image, under torchvision's names, and ours, which combine several images on the canvas of the first.

Three kinds of torchvision's are left out. After the first kind, boxes no longer match the pixels: ``RandomErasing``, and
``ElasticTransform``, which moves only a box's corners. The second kind does not accept boxes. The third kind, mirroring and
resizing, has its own config keys.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from cpvt_det.common.errors import BadInputError, ConfigError, UnknownNameError, first_line
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
Afterwards, all boxes are clipped, and those of which too little is left are removed (:func:`clip_to_visible`). Do not change
inputs in place.

- An augmentation with the attribute ``mixes = True`` combines images. It gets a fourth argument ``draw``, a
  :data:`DrawScene`, and is left out in the last ``INPUT.CLOSE_EPOCHS`` epochs.
- A builder with a parameter ``min_visible`` gets ``INPUT.MIN_VISIBLE``, for boxes that its augmentation must clip itself.
- Random numbers come from torch's global generator, ``random`` or ``numpy.random``, which are seeded for each image. Any other
  generator must be seeded from one of these at every call; otherwise a resumed run sees different images.
"""

MIN_SIDE = 1
"""Smallest side in pixels; a box that is clipped to a smaller side is removed."""
THIN = 2
"""Smallest side of a mosaic's corner in pixels, because torch 2.14 fails to resize to 1 x 1. A canvas that is less than two such
corners wide or high is left unchanged."""
COLOURS = ("ColorJitter", "GaussianBlur", "GaussianNoise", "JPEG", "RandomAdjustSharpness", "RandomAutocontrast")
COLOURS += ("RandomChannelPermutation", "RandomEqualize", "RandomGrayscale", "RandomInvert", "RandomPhotometricDistort")
COLOURS += ("RandomPosterize", "RandomSolarize")
PLACES = ("CenterCrop", "Pad", "RandomAffine", "RandomCrop", "RandomPerspective", "RandomResizedCrop", "RandomRotation")
PLACES += ("RandomVerticalFlip", "RandomZoomOut", "ScaleJitter")
GROUPS = ("RandomApply", "RandomChoice", "RandomOrder")
"""Augmentations that wrap other augmentations: their option ``transforms`` is a list like ``INPUT.AUGMENTATIONS``."""
MODES = {mode.value: mode for mode in v2.InterpolationMode}


def clip_to_visible(boxes: Tensor, size: tuple[int, int], min_visible: float) -> tuple[Tensor, Tensor]:
    """Clip boxes to an image, and mark the ones to keep.

    A box is removed if it has no area, if less than ``min_visible`` of its area is inside, or if it is cut to less than a pixel in
    one direction. A box that is completely inside is kept, however small, because resizing keeps such boxes, too.

    Args:
        boxes: (G, 4) float, xyxy in pixels, which may reach beyond the image.
        size: (height, width) of the image.
        min_visible: smallest share of the area that must be left, in [0, 1].

    Returns:
        (G, 4) the clipped boxes, and (G,) bool, True = keep.
    """
    height, width = size
    clipped = boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))
    sides = clipped[:, 2:] - clipped[:, :2]
    is_whole = (clipped == boxes).all(1)
    is_enough = (sides.prod(1) >= min_visible * (boxes[:, 2:] - boxes[:, :2]).prod(1)) & (sides >= MIN_SIDE).all(1)
    return clipped, (sides > 0).all(1) & (is_whole | is_enough)


def as_scene(image: Tensor, boxes: Any, labels: Tensor) -> Scene:
    """Convert an image and its objects to torchvision's types, so that torchvision's transforms do not clip the boxes.

    Args:
        image, labels: as in :data:`Scene`.
        boxes: array or tensor, as in :data:`Scene`.
    """
    plain = torch.as_tensor(boxes, dtype=torch.float32).as_subclass(Tensor)
    placed = tv_tensors.BoundingBoxes(plain, format="XYXY", canvas_size=image.shape[-2:], clamping_mode=None)
    return tv_tensors.Image(image), placed, labels


@contextlib.contextmanager
def augmentation_errors(name: str, scene: Scene, where: str) -> Iterator[None]:
    """Turn errors of an augmentation within this block into errors that name the augmentation and the image.

    Args:
        name: name of the augmentation.
        scene: scene that the augmentation is called with.
        where: name of the image.

    Raises:
        ConfigError: the augmentation failed.
    """
    try:
        yield
    except BadInputError:
        raise
    except Exception as error:  # torchvision's and the user's code may raise anything
        (height, width), count = scene[0].shape[-2:], len(scene[2])
        size = f"{width} x {height} pixels and {count} boxes"
        raise ConfigError(f"INPUT.AUGMENTATIONS: {name!r} failed on {where}, {size}: {first_line(error)}") from error


class AugmentationStep:
    """An augmentation whose result is checked, and whose boxes are clipped afterwards.

    Args:
        name: registered name of the augmentation, for messages.
        augment: augmentation, as in :data:`AUGMENTATION_REGISTRY`.
        min_visible: as in :func:`clip_to_visible`.

    Attributes:
        mixes: whether the result shows more than one image.
    """

    def __init__(self, name: str, augment: Callable[..., Scene], min_visible: float):
        self.name = name
        self.augment = augment
        self.min_visible = min_visible
        self.mixes = bool(getattr(augment, "mixes", False))

    def __call__(self, image: Tensor, boxes: Tensor, labels: Tensor, draw: DrawScene | None = None) -> Scene:
        """Augment a scene; ``draw`` is for augmentations that mix images.

        Raises:
            TypeError: the result is not a :data:`Scene`.
        """
        found = self.augment(image, boxes, labels, draw) if self.mixes else self.augment(image, boxes, labels)
        if wrong := _fault(found):
            raise TypeError(f"it must return image, boxes and labels, but {wrong}")
        image, boxes, labels = found
        clipped, kept = clip_to_visible(boxes.as_subclass(Tensor), image.shape[-2:], self.min_visible)
        return as_scene(image, clipped[kept], labels[kept])


def _fault(found: Any) -> str:
    """Description of the fault in an augmentation's result; empty if there is none."""
    parts = found if isinstance(found, (tuple, list)) else (found,)
    if len(parts) != 3 or not all(isinstance(part, Tensor) for part in parts):
        return f"returned {', '.join(type(part).__name__ for part in parts) or 'nothing'}"
    image, boxes, labels = parts
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        return f"the image is {image.dtype} of shape {tuple(image.shape)} and not uint8 of shape (3, height, width)"
    if not boxes.is_floating_point() or boxes.shape != (len(boxes), 4):
        return f"the boxes are {boxes.dtype} of shape {tuple(boxes.shape)} and not floats of shape (boxes, 4)"
    if labels.dtype != torch.int64 or labels.shape != boxes.shape[:1]:
        return (
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)} and not int64 of shape ({len(boxes)},), one for each box"
        )
    corners = boxes.as_subclass(Tensor)
    is_right = (corners[:, :2] <= corners[:, 2:]).all()  # false for NaN too
    return "" if is_right else "a box is not [x0, y0, x1, y1] with x0 <= x1 and y0 <= y1"


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
