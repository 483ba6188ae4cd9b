# SPDX-License-Identifier: Apache-2.0
"""What is left of boxes at the border of an image, or behind something that covers them."""

from collections.abc import Sequence

import torch
from torch import Tensor

MIN_SIDE = 1
"""Pixels; a box that is cut to less is removed."""


def clip_to_visible(boxes: Tensor, size: tuple[int, int], min_visible: float) -> tuple[Tensor, Tensor]:
    """Clip boxes to an image, and mark the ones to keep.

    Removed is a box without area, a box of which less than ``min_visible`` of the area is inside, and a box that is cut to less
    than a pixel in one direction. A box that is wholly inside is kept, however small, as resizing keeps it.

    Args:
        boxes: (G, 4) float, xyxy in pixels, which may reach beyond the image.
        size: (height, width) of the image.
        min_visible: smallest share of the area that has to be left, in [0, 1].

    Returns:
        (G, 4) the clipped boxes, and (G,) bool, True = keep.
    """
    height, width = size
    clipped = boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))
    sides = clipped[:, 2:] - clipped[:, :2]
    is_whole = (clipped == boxes).all(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    is_enough = (sides.prod(1) >= min_visible * areas) & (sides >= MIN_SIDE).all(1)
    return clipped, (sides > 0).all(1) & (is_whole | is_enough)


def overlap_areas(boxes: Tensor, other: Tensor) -> Tensor:
    """(G, 4) and (4,) xyxy -> (G,): the areas that boxes share with another box."""
    sides = boxes[:, 2:].minimum(other[2:]) - boxes[:, :2].maximum(other[:2])
    return sides.clamp(min=0).prod(1)


def visible_part(box: Tensor, covers: Sequence[Tensor]) -> Tensor:
    """The box around what stays visible of a box behind rectangles.

    Args:
        box: (4,) float, xyxy in pixels.
        covers: rectangles, (4,) each, xyxy in whole pixels, that together leave some of the box visible.
    """
    left, top = box[:2].floor().int().tolist()
    right, bottom = box[2:].ceil().int().tolist()
    is_free = torch.ones(bottom - top, right - left, dtype=torch.bool)
    for cover in covers:
        x0, y0, x1, y1 = cover.int().tolist()
        is_free[max(0, y0 - top) : max(0, y1 - top), max(0, x0 - left) : max(0, x1 - left)] = False
    rows, columns = (is_free.any(axis).nonzero()[:, 0] for axis in (1, 0))
    starts = torch.stack((left + columns[0], top + rows[0])).maximum(box[:2])
    return torch.cat((starts, torch.stack((left + columns[-1] + 1, top + rows[-1] + 1)).minimum(box[2:])))
