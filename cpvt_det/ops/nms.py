# SPDX-License-Identifier: Apache-2.0
"""The order in which proposals are chosen: the best come first, and proposals that a better one suppresses come last."""

import math

import torch
from torch import Tensor
from torchvision.ops import nms

from cpvt_det.common.exporting import in_steps, is_exporting

CANDIDATES = 4  # boxes that are examined first, per box to choose
SUPPRESSED = 1e3  # subtracted from the scores of boxes suppressed by a better one; twice this from those of padded boxes


def nms_topk(boxes_xyxy: Tensor, scores: Tensor, padded: Tensor, threshold: float, count: int) -> Tensor:
    """Choose boxes by score; boxes whose intersection over union with a better one exceeds ``threshold`` come last.

    torchvision's operator is first called on only a few boxes, because its time grows with the square of the number of boxes. It
    is called for each image separately, because ``batched_nms`` shifts the boxes of each image, and the rounding then depends on
    the batch. An exported program uses :func:`nms_topk_exportable`.

    Args:
        boxes_xyxy: (B, N, 4) float, in any unit.
        scores: (B, N) float, of absolute value below 1e3 / 2.
        padded: (B, N) bool, True = chosen only when nothing else is left.
        threshold: intersection over union above which a better box suppresses another, above 0 and below 1.
        count: Q, at most N.

    Returns:
        (B, Q) int64, indices of the chosen boxes, in the order in which they were chosen.
    """
    if is_exporting():
        return nms_topk_exportable(boxes_xyxy, scores, padded, threshold, count)
    order = (scores - 2 * SUPPRESSED * padded).argsort(dim=1, descending=True, stable=True)
    numbers = (~padded).sum(1).tolist()
    chosen = [
        _first_apart(boxes, ranked, number, threshold, count)
        for boxes, ranked, number in zip(boxes_xyxy, order, numbers, strict=True)
    ]
    return torch.stack(chosen)


def _first_apart(boxes_xyxy: Tensor, order: Tensor, number: int, threshold: float, count: int) -> Tensor:
    """One image's choice: (count,) indices from ``order`` (N,), whose first ``number`` boxes are not padded.

    Whether a box is kept depends only on better boxes. Once ``count`` boxes are kept, worse boxes need not be examined.
    """
    looked = 0
    kept = order[:0]
    while len(kept) < count and looked < number:
        looked = min(number, max(CANDIDATES * count, 4 * looked))
        ranks = torch.arange(looked, 0, -1, dtype=boxes_xyxy.dtype, device=boxes_xyxy.device)
        kept = nms(boxes_xyxy[order[:looked]], ranks, threshold)
    is_left = torch.ones_like(order, dtype=torch.bool)
    is_left[kept] = False
    return order[torch.cat((kept, is_left.nonzero()[:, 0]))[:count]]


def nms_topk_exportable(boxes_xyxy: Tensor, scores: Tensor, padded: Tensor, threshold: float, count: int) -> Tensor:
    """:func:`nms_topk` in ``count`` steps. Each step takes the best remaining box and moves the boxes that overlap it to the
    back.

    Whether a box is moved to the back depends only on boxes with higher scores, so the first ``count`` steps select the same boxes
    as one step for every box would. A step needs neither a matrix of all pairs nor shapes that depend on the data.
    """
    sides = boxes_xyxy[..., 2:] - boxes_xyxy[..., :2]
    places = torch.arange(count, device=scores.device).expand(scores.shape[0], -1)

    def take_best(number: Tensor, left: Tensor, chosen: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        boxes, areas, behind, places = given
        best = left.argmax(1, keepdim=True)
        box = boxes.gather(1, best[..., None].expand(-1, -1, 4))  # (B, 1, 4)
        common = (torch.minimum(boxes[..., 2:], box[..., 2:]) - torch.maximum(boxes[..., :2], box[..., :2])).clamp(min=0)
        intersection = common[..., 0] * common[..., 1]
        overlap = intersection / (areas.gather(1, best) + areas - intersection)
        left = torch.where(overlap > threshold, torch.minimum(left, behind), left).scatter(1, best, -math.inf)
        return left, torch.where(places == number, best, chosen), *given

    given = boxes_xyxy, sides[..., 0] * sides[..., 1], scores - SUPPRESSED, places
    return in_steps(take_best, (scores - 2 * SUPPRESSED * padded, torch.zeros_like(places), *given), count)[1]
