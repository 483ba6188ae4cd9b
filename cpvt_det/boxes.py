# SPDX-License-Identifier: Apache-2.0
"""Boxes: pure functions on (..., 4) tensors. The format is part of every name."""

import torch
from torch import Tensor


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """Centre and size to corners.

    Args:
        boxes_cxcywh: (..., 4) float, in any unit.

    Returns:
        (..., 4) float, xyxy in the same unit.
    """
    center, size = boxes_cxcywh[..., :2], boxes_cxcywh[..., 2:]
    return torch.cat((center - 0.5 * size, center + 0.5 * size), dim=-1)


def xyxy_to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """Corners to centre and size; the inverse of :func:`cxcywh_to_xyxy`.

    Args:
        boxes_xyxy: (..., 4) float, in any unit.

    Returns:
        (..., 4) float, cxcywh in the same unit.
    """
    low, high = boxes_xyxy[..., :2], boxes_xyxy[..., 2:]
    return torch.cat(((low + high) / 2, high - low), dim=-1)


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """The logit of values in [0, 1], as if none were nearer than ``eps`` to 0 or 1; so it is finite.

    Args:
        x: (...) float.
        eps: the bound.

    Source: fundamentalvision/Deformable-DETR ``util/misc.py``.
    """
    x = x.clamp(0, 1)
    return (x.clamp(min=eps) / (1 - x).clamp(min=eps)).log()


def generalized_iou(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor) -> Tensor:
    """Generalised intersection over union, elementwise over broadcast leading dimensions.

    For all pairs of (N, 4) and (M, 4) call it with ``boxes1[:, None]`` and ``boxes2[None]``. Two boxes without area on
    one point count as 0, with zero gradient, where the plain quotient is NaN.

    Args:
        boxes1_xyxy: (..., 4) float.
        boxes2_xyxy: (..., 4) float, in the same unit.

    Returns:
        (...) float in [-1, 1].

    Source: arXiv 1902.09630, algorithm 1.
    """
    size1 = boxes1_xyxy[..., 2:] - boxes1_xyxy[..., :2]
    size2 = boxes2_xyxy[..., 2:] - boxes2_xyxy[..., :2]
    low_max, low_min = (
        torch.max(boxes1_xyxy[..., :2], boxes2_xyxy[..., :2]),
        torch.min(boxes1_xyxy[..., :2], boxes2_xyxy[..., :2]),
    )
    high_max, high_min = (
        torch.max(boxes1_xyxy[..., 2:], boxes2_xyxy[..., 2:]),
        torch.min(boxes1_xyxy[..., 2:], boxes2_xyxy[..., 2:]),
    )
    intersection = (high_min - low_max).clamp(min=0).prod(-1)
    hull = (high_max - low_min).prod(-1)
    union = size1.prod(-1) + size2.prod(-1) - intersection
    return _quotient(intersection, union) - _quotient(hull - union, hull)


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 where the denominator is 0; the inner ``where`` keeps NaN out of the gradient."""
    zero = denominator == 0
    return torch.where(zero, torch.zeros_like(numerator), numerator / torch.where(zero, torch.ones_like(denominator), denominator))
