# SPDX-License-Identifier: Apache-2.0
"""Detection in tiles of large images: choose the tiles, detect objects in each, and merge them into the objects of the image.

Source: SAHI (arXiv 2202.06934), sections 3 and 4: overlapping slices in addition to the whole image, and merging by intersection
over the smaller box. Differences are described where they occur.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cpvt_det.common.errors import UnknownNameError
from cpvt_det.common.structures import Detections
from cpvt_det.evaluation.answers import PostProcessor, detect

MERGES = ("ios", "nms")
SMALLEST = 32
"""Smallest side of a tile in pixels: that of one cell of a detector's coarsest map. It cuts a 12-megapixel photograph into 18,000
tiles."""
SAME = 0.5
"""Overlap above which two detections of one class, from two windows, are one object."""
NEAR = 0.01
"""Distance from a border, as a fraction of the tile's side, within which a box counts as touching it. A box that was cut there
seldom ends exactly on the border."""
CUT = 0.5
"""Factor on a cut object's score, used only in the order of merging, because another window may show the whole object."""


class Window(NamedTuple):
    """A rectangular part of an image, in pixels of the image."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Tiling:
    """How images are cut into tiles, and how the detections of the tiles are merged.

    Attributes:
        size: side of a tile in pixels, at least 32; an image that fits into one tile is not cut.
        overlap: smallest fraction of a tile's side that neighbouring tiles share, from 0 to below 1. An object no larger than the
            shared part is completely inside one of them.
        merge: measure of overlap that decides whether two detections are the same object. ``nms`` takes the intersection over
            union. ``ios`` does so too, unless one of the two boxes is cut by its tile; then it takes the intersection over the
            smaller box.
        whole: whether to detect objects in the whole image as well, to find objects that are larger than a tile.

    Raises:
        ValueError: a size that is not a whole number or is below 32, or an overlap outside [0, 1).
        UnknownNameError: an unknown ``merge``.
    """

    size: int
    overlap: float = 0.2
    merge: str = "ios"
    whole: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, Integral) or self.size < SMALLEST:
            raise ValueError(f"the side of a tile must be a whole number of at least {SMALLEST} pixels, got {self.size}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"the overlap of tiles must be a fraction of their side, from 0 to below 1, got {self.overlap}")
        if self.merge not in MERGES:
            raise UnknownNameError("way to merge tiles", self.merge, MERGES)

    def windows(self, height: int, width: int) -> list[Window]:
        """The parts of an image to detect objects in; together they cover the image. If the whole image is one of them, it comes
        first.
        """
        rows, columns = (_starts(extent, self.size, self.overlap) for extent in (height, width))
        tiles = [Window(y, x, min(self.size, height), min(self.size, width)) for y in rows for x in columns]
        return tiles if len(tiles) == 1 or not self.whole else [Window(0, 0, height, width), *tiles]


def _starts(extent: int, size: int, overlap: float) -> list[int]:
    """Start of each tile along one side. There are as few tiles as the overlap allows; they are evenly spaced, and the last one
    ends where the image ends.
    """
    if extent <= size:
        return [0]
    step = max(1, math.floor(size * (1 - overlap) + 1e-6))  # 100 * (1 - 0.9) is 9.999999999999998
    last = -(-(extent - size) // step)
    return [round(number * (extent - size) / last) for number in range(last + 1)]


def detect_tiles(
    detector: nn.Module,
    postprocess: PostProcessor,
    samples: Sequence[Mapping[str, Any]],
    prepare: Callable[[Tensor], Tensor],
    tiling: Tiling,
    batch_size: int,
) -> list[Detections]:
    """Apply :func:`cpvt_det.evaluation.answers.detect` in tiles.

    Args:
        detector: a detector in evaluation mode.
        postprocess: post-processing for the detector's classification.
        samples: samples with ``image`` as for ``detect``, and ``pixels`` (3, H, W) uint8, the image before ``prepare``.
        prepare: function that prepares a tile for the detector like a whole image, by resizing it.
        tiling: size and overlap of the tiles, and the rule by which detections are merged.
        batch_size: number of windows per batch.

    Returns:
        Detections of each image, in pixels of the image, best first; at most as many as the post-processing allows.
    """
    windows = [tiling.windows(sample["height"], sample["width"]) for sample in samples]
    jobs = [(sample, window) for sample, parts in zip(samples, windows, strict=True) for window in parts]
    found: list[Detections] = []
    for start in range(0, len(jobs), batch_size):
        views = []
        for sample, (top, left, height, width) in jobs[start : start + batch_size]:
            is_whole = (height, width) == (sample["height"], sample["width"])
            image = sample["image"] if is_whole else prepare(sample["pixels"][:, top : top + height, left : left + width])
            views.append({"image": image, "height": height, "width": width})
        found += detect(detector, postprocess, views)
    merged = []
    for sample, parts in zip(samples, windows, strict=True):
        own, found = found[: len(parts)], found[len(parts) :]
        merged.append(merge_windows(own, parts, (sample["height"], sample["width"]), tiling.merge, postprocess.max_detections))
    return merged


def merge_windows(
    found: Sequence[Detections], windows: Sequence[Window], size: tuple[int, int], merge: str, max_detections: int
) -> Detections:
    """Merge the detections of an image's windows into detections of the image, each object once.

    Detections are visited in order of descending score, where the scores of cut objects are halved. A detection is kept unless it
    shows the same object as an earlier one of its class from another window. Detections of one window never suppress each other,
    because a DETR predicts each object only once. SAHI lets them suppress each other, too, and it replaces merged boxes by their
    union.

    Args:
        found: detections of each window, on the CPU, boxes in pixels of the window.
        windows: windows of the image; if there is only one, its detections are returned unchanged.
        size: (height, width) of the image.
        merge: as in :attr:`Tiling.merge`.
        max_detections: largest number of detections.

    Returns:
        Detections in pixels of the image, best first. If scores are equal, detections of earlier windows come first.
    """
    if len(windows) == 1:
        return found[0]
    corners = [torch.tensor([window.left, window.top] * 2) for window in windows]
    boxes = torch.cat([one.boxes_xyxy + corner for one, corner in zip(found, corners, strict=True)])
    scores, labels = (torch.cat([getattr(one, name) for one in found]) for name in ("scores", "labels"))
    is_cut = torch.cat([_touches(one.boxes_xyxy, window, size) for one, window in zip(found, windows, strict=True)])
    origin = torch.repeat_interleave(torch.tensor([len(one.scores) for one in found]))
    kept = _choose(*(part.numpy() for part in (boxes.double(), scores, labels, is_cut, origin)), merge)
    kept = kept[scores[kept].argsort(descending=True, stable=True)][:max_detections]
    return Detections(boxes[kept], scores[kept], labels[kept])


def _touches(boxes_xyxy: Tensor, window: Window, size: tuple[int, int]) -> Tensor:
    """(n,) bool, whether a box ends at a border of its window that is not a border of the image."""
    top, left, height, width = window
    near = torch.tensor([width, height]) * NEAR
    low_is_inside = torch.tensor([left > 0, top > 0])
    high_is_inside = torch.tensor([left + width < size[1], top + height < size[0]])
    low = (boxes_xyxy[:, :2] <= near) & low_is_inside
    high = (boxes_xyxy[:, 2:] >= torch.tensor([width, height]) - near) & high_is_inside
    return (low | high).any(1)


def _choose(
    boxes: np.ndarray, scores: np.ndarray, labels: np.ndarray, is_cut: np.ndarray, origin: np.ndarray, merge: str
) -> Tensor:
    """Indices of the detections to keep, in ascending order.

    Args:
        boxes: (n, 4) float64, xyxy in pixels of the image.
        scores: (n,) float.
        labels: (n,) int64.
        is_cut: (n,) bool.
        origin: (n,) int64, number of the window that each detection comes from.
        merge: as in :attr:`Tiling.merge`.
    """
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    left = np.argsort(-scores * np.where(is_cut, CUT, 1), kind="stable")
    kept = []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        sides = np.minimum(boxes[best, 2:], boxes[left, 2:]) - np.maximum(boxes[best, :2], boxes[left, :2])
        common = sides.clip(min=0).prod(1)
        smaller, union = np.minimum(areas[best], areas[left]), areas[best] + areas[left] - common
        by_smaller = (merge == "ios") & (is_cut[best] | is_cut[left])
        is_same = common > SAME * np.where(by_smaller, smaller, union)
        left = left[~(is_same & (labels[left] == labels[best]) & (origin[left] != origin[best]))]
    return torch.tensor(sorted(kept), dtype=torch.int64)
