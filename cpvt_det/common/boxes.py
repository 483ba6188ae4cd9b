# SPDX-License-Identifier: Apache-2.0
"""Functions on boxes, which are (..., 4) tensors. The names of arguments state the box format."""

import torch
from torch import Tensor


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """Convert centre and size to corners.

    Args:
        boxes_cxcywh: (..., 4) float, cxcywh in any unit.

    Returns:
        (..., 4) float, xyxy in the same unit.
    """
    center, size = boxes_cxcywh[..., :2], boxes_cxcywh[..., 2:]
    return torch.cat((center - 0.5 * size, center + 0.5 * size), dim=-1)


def xyxy_to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """Convert corners to centre and size; the inverse of :func:`cxcywh_to_xyxy`.

    Args:
        boxes_xyxy: (..., 4) float, xyxy in any unit.

    Returns:
        (..., 4) float, cxcywh in the same unit.
    """
    low, high = boxes_xyxy[..., :2], boxes_xyxy[..., 2:]
    return torch.cat(((low + high) / 2, high - low), dim=-1)


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """The logit of values in [0, 1]; values closer to 0 or 1 than ``eps`` are clamped, so the result is finite.

    Args:
        x: (...) float in [0, 1].
        eps: smallest distance to 0 and 1.

    Source: fundamentalvision/Deformable-DETR ``util/misc.py``.
    """
    return (x.clamp(eps, 1.0) / (1 - x).clamp(eps, 1.0)).log()


def generalized_iou(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Generalised intersection over union, elementwise over broadcast leading dimensions.

    For all pairs of (N, 4) and (M, 4) boxes, call it with ``boxes1[:, None]`` and ``boxes2[None]``. For two boxes of zero area at
    the same point, the result is 0 with zero gradient; plain division would give NaN.

    Args:
        boxes1_xyxy: (..., 4) float, xyxy.
        boxes2_xyxy: (..., 4) float, xyxy in the same unit.

    Returns:
        (...) float in [-1, 1].

    Source: arXiv 1902.09630, algorithm 1.
    """
    size1 = boxes1_xyxy[..., 2:] - boxes1_xyxy[..., :2]
    size2 = boxes2_xyxy[..., 2:] - boxes2_xyxy[..., :2]
    low_max = torch.max(boxes1_xyxy[..., :2], boxes2_xyxy[..., :2])
    low_min = torch.min(boxes1_xyxy[..., :2], boxes2_xyxy[..., :2])
    high_max = torch.max(boxes1_xyxy[..., 2:], boxes2_xyxy[..., 2:])
    high_min = torch.min(boxes1_xyxy[..., 2:], boxes2_xyxy[..., 2:])
    intersection = (high_min - low_max).clamp(min=0).prod(-1)
    hull = (high_max - low_min).prod(-1)
    union = size1.prod(-1) + size2.prod(-1) - intersection
    return _quotient(intersection, union) - _quotient(hull - union, hull)


@torch.no_grad()
def intersection_over_union(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Intersection over union without a gradient, elementwise over broadcast leading dimensions; 0 where both boxes have zero
    area.

    Args:
        boxes1_xyxy: (..., 4) float, xyxy, without negative side lengths.
        boxes2_xyxy: (..., 4) float, xyxy in the same unit.

    Returns:
        (...) float in [0, 1].
    """
    low, high = torch.max(boxes1_xyxy[..., :2], boxes2_xyxy[..., :2]), torch.min(boxes1_xyxy[..., 2:], boxes2_xyxy[..., 2:])
    intersection = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (boxes1_xyxy, boxes2_xyxy)]
    return _quotient(intersection, areas[0] + areas[1] - intersection)


@torch.no_grad()
def pairwise_generalized_iou(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """:func:`generalized_iou` for all pairs, without a gradient and three times as fast; used for matching costs.

    Args:
        boxes1_xyxy: (..., N, 4) float, without negative side lengths.
        boxes2_xyxy: (..., M, 4) float, in the same unit; leading dimensions broadcast.

    Returns:
        (..., N, M) float in [-1, 1].
    """
    # (..., N, 4) -> (4, ..., N, 1) and (..., M, 4) -> (4, ..., 1, M): values of one coordinate are neighbours in memory.
    left1, top1, right1, bottom1 = boxes1_xyxy.movedim(-1, 0).contiguous()[..., None]
    left2, top2, right2, bottom2 = boxes2_xyxy.movedim(-1, 0).contiguous()[..., None, :]
    width1, height1, width2, height2 = right1 - left1, bottom1 - top1, right2 - left2, bottom2 - top2
    width = torch.minimum(right1, right2).sub_(torch.maximum(left1, left2))  # of the intersection; negative for a gap
    height = torch.minimum(bottom1, bottom2).sub_(torch.maximum(top1, top2))
    tiny = torch.finfo(width.dtype).tiny  # zero area divided by zero area is then 0
    hull = (width1 + width2).sub_(width).mul_((height1 + height2).sub_(height)).clamp_(min=tiny)
    intersection = width.clamp_(min=0).mul_(height.clamp_(min=0))
    union = (width1 * height1 + width2 * height2).sub_(intersection).clamp_(min=tiny)
    return intersection.div_(union).add_(union.div_(hull)).sub_(1)


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, or 0 where the denominator is 0; the inner ``where`` keeps NaN out of the gradient."""
    zero = denominator == 0
    return torch.where(zero, torch.zeros_like(numerator), numerator / torch.where(zero, torch.ones_like(denominator), denominator))
