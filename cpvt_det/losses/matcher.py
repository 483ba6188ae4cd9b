# SPDX-License-Identifier: Apache-2.0
"""Hungarian matching of predictions with targets, for all decoder layers at once.

Place in the pipeline: after ``models/``, before ``losses/criterion.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cpvt_det.common import defaults
from cpvt_det.common.boxes import cxcywh_to_xyxy, intersection_over_union, pairwise_generalized_iou
from cpvt_det.common.structures import Predictions, Targets
from cpvt_det.losses.classification import Classification


@dataclass
class PaddedTargets:
    """The targets of a batch as rectangular tensors; rows beyond ``counts`` are zeros.

    Attributes:
        labels: (B, T) int64.
        boxes_cxcywh: (B, T, 4) float.
        counts: number of objects G of each image.
    """

    labels: Tensor
    boxes_cxcywh: Tensor
    counts: list[int]

    @classmethod
    def from_targets(cls, targets: Sequence[Targets], dtype: torch.dtype) -> "PaddedTargets":
        """Stack the targets of B images, padded to the largest number of objects; boxes are converted to ``dtype``."""
        labels = pad_sequence([target.labels for target in targets], batch_first=True)
        boxes = pad_sequence([target.boxes_cxcywh.to(dtype) for target in targets], batch_first=True)
        return cls(labels, boxes, [len(target.labels) for target in targets])


@dataclass
class Matches:
    """Matched pairs, as parallel (P,) int64 index tensors on the predictions' device."""

    layer: Tensor
    image: Tensor
    query: Tensor
    target: Tensor


class HungarianMatcher:
    """Assigns queries one-to-one to targets with the least total cost, for each layer and image.

    Args:
        classification: the kind of classification, which defines the class cost.
        class_cost, l1_cost, giou_cost: weights of the three costs.

    Source: arXiv 2005.12872, section 3.1.
    """

    def __init__(
        self,
        classification: Classification,
        class_cost: float = defaults.CLASS_WEIGHT,
        l1_cost: float = defaults.L1_WEIGHT,
        giou_cost: float = defaults.GIOU_WEIGHT,
    ):
        self.classification = classification
        self.class_cost = class_cost
        self.l1_cost = l1_cost
        self.giou_cost = giou_cost

    @torch.no_grad()
    def __call__(self, *groups: tuple[Predictions, PaddedTargets]) -> list[Matches]:
        """Match all groups, waiting for the device only once.

        Args:
            groups: pairs of predictions, of D layers for B images, and the targets of these images.

        Returns:
            For every group, min(Q, G) pairs for each layer and image, ordered by layer, image and query. If predictions are not
            finite, the pairs are meaningless, but there are as many pairs as usual. So no process stops here, and all processes
            of a run can skip the step together.
        """
        from scipy.optimize import linear_sum_assignment  # the import takes half a second, which prediction can save

        costs, matches = [self.cost(*group) for group in groups], []
        on_host = torch.cat([cost.flatten() for cost in costs]).cpu().split([cost.numel() for cost in costs])  # the one copy
        for (_, targets), made, copied in zip(groups, costs, on_host, strict=True):
            cost = copied.view_as(made).numpy()
            if not np.isfinite(cost).all():
                cost = np.where(np.isfinite(cost), cost, 0)
            layers, images, _, queries = cost.shape
            solved = [linear_sum_assignment(one[:n]) for layer in cost for one, n in zip(layer, targets.counts, strict=True)]
            target, query = (np.concatenate([np.zeros(0, dtype=np.int64), *parts]) for parts in zip(*solved, strict=True))
            number = np.repeat(np.arange(layers * images), [len(found) for found, _ in solved])  # layer * B + image
            order = np.argsort(number * queries + query)
            index = np.stack((number // images, number % images, query, target))[:, order]
            matches.append(Matches(*torch.from_numpy(index).to(made.device, non_blocking=True)))
        return matches

    def cost(self, predictions: Predictions, targets: PaddedTargets) -> Tensor:
        """(D, B, T, Q) float costs. Targets come before queries, because the solver is faster that way. Rows without a target are
        meaningless.
        """
        boxes, wanted = predictions.boxes, targets.boxes_cxcywh
        corners, wanted_corners = cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(wanted)[None]
        arguments = (predictions.logits, targets.labels)
        if getattr(self.classification, "uses_overlaps", False):
            arguments += (intersection_over_union(wanted_corners[..., None, :], corners[:, :, None]),)
        cost = self.class_cost * self.classification.cost(*arguments)
        cost.add_(torch.cdist(wanted[None], boxes, p=1), alpha=self.l1_cost)
        return cost.sub_(pairwise_generalized_iou(wanted_corners, corners), alpha=self.giou_cost)
