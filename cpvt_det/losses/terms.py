# SPDX-License-Identifier: Apache-2.0
"""Named losses over matched pairs, and their registry."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpvt_det.common.boxes import cxcywh_to_xyxy, generalized_iou, intersection_over_union
from cpvt_det.common.registry import PartRegistry
from cpvt_det.common.structures import Predictions
from cpvt_det.losses.classification import Classification
from cpvt_det.losses.matcher import Matches, PaddedTargets


@dataclass
class Normalizers:
    """Scalars by which the losses are divided. The losses themselves are sums over the images of a whole step, on all processes.

    Attributes:
        boxes: divisor of the box losses.
        classes: divisor of the class loss.
        queries: numbers of a layer's queries with and without an object, divided by the number of processes. ``None`` if queries
            are counted in this batch only, as is done for denoising queries.
    """

    boxes: Tensor
    classes: Tensor
    queries: tuple[Tensor, Tensor] | None = None


@dataclass
class Matched:
    """Predictions and their matched targets, as P pairs over all layers. Every loss takes this as its argument.

    Attributes:
        predictions: logits (D, B, Q, K') and boxes (D, B, Q, 4).
        targets: targets of the B images.
        matches: indices of the pairs.
        classification: the kind of class scores.
        normalizers: divisors of the step.
        boxes: (P, 4) float, cxcywh, predicted boxes of the pairs.
        target_boxes: (P, 4) float, cxcywh, target boxes of the pairs.
        classes: (D, B, Q) int64, the class that every query should predict, K for no object.
    """

    predictions: Predictions
    targets: PaddedTargets
    matches: Matches
    classification: Classification
    normalizers: Normalizers
    boxes: Tensor = field(init=False)
    target_boxes: Tensor = field(init=False)
    classes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        logits, matches, targets = self.predictions.logits, self.matches, self.targets
        self.boxes = self.predictions.boxes[matches.layer, matches.image, matches.query]
        self.target_boxes = targets.boxes_cxcywh[matches.image, matches.target]
        self.classes = torch.full(logits.shape[:3], self.classification.num_classes, dtype=torch.int64, device=logits.device)
        self.classes[matches.layer, matches.image, matches.query] = targets.labels[matches.image, matches.target]

    @functools.cached_property
    def overlaps(self) -> Tensor:
        """(D, B, Q) float without gradient: intersection over union of every query's box with the box of its target; 0 for
        queries without a target.
        """
        matches, overlaps = self.matches, torch.zeros_like(self.predictions.logits[..., 0])
        pairs = intersection_over_union(cxcywh_to_xyxy(self.boxes), cxcywh_to_xyxy(self.target_boxes))
        overlaps[matches.layer, matches.image, matches.query] = pairs
        return overlaps

    def mean_over_boxes(self, values: Tensor) -> Tensor:
        """(P,) losses of pairs -> (D,), their sums per layer divided by the number of boxes."""
        sums = self.predictions.boxes.new_zeros(len(self.predictions.logits)).index_add(0, self.matches.layer, values)
        return sums / self.normalizers.boxes.to(values.dtype)


LOSS_REGISTRY = PartRegistry("LOSS", "loss", chosen=frozenset({"matched"}))
"""Name -> a function with the argument ``matched``, a :class:`Matched`, and options as further arguments. It returns an unweighted
loss per layer, (D,) float, or ``None`` where it does not apply, for example to proposals without the inputs that it needs. Every
loss is also computed for proposals and denoising queries. In the metrics of a step it is called ``loss_<name>``. ``class``, ``l1``
and ``giou`` have their own weights in the config, and a weight of 0 leaves a loss out; ``MODEL.CRITERION.LOSSES`` adds others."""

Loss = Callable[[Matched], Tensor | None]


@LOSS_REGISTRY.register_as("class")
def class_loss(matched: Matched) -> Tensor:
    """(D,): the classification's loss over all queries."""
    classification = matched.classification
    uses_overlaps = getattr(classification, "uses_overlaps", False)  # user-defined classes may omit it
    overlaps = (matched.overlaps,) if uses_overlaps else ()
    losses = classification.loss(matched.predictions.logits, matched.classes, *overlaps)
    return losses / matched.normalizers.classes.to(losses.dtype)


@LOSS_REGISTRY.register_as("l1")
def l1_loss(matched: Matched) -> Tensor:
    """(D,): the mean L1 distance of the boxes' four numbers."""
    return matched.mean_over_boxes((matched.boxes - matched.target_boxes).abs().sum(-1))


@LOSS_REGISTRY.register_as("giou")
def giou_loss(matched: Matched) -> Tensor:
    """(D,): the mean of 1 - GIoU; source: arXiv 1902.09630."""
    return matched.mean_over_boxes(1 - generalized_iou(cxcywh_to_xyxy(matched.boxes), cxcywh_to_xyxy(matched.target_boxes)))
