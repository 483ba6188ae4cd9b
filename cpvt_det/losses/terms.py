# SPDX-License-Identifier: Apache-2.0
"""Named losses over matched pairs, and their registry.

``fgl`` and ``ddf`` are D-FINE's losses for the distributions that define boxes. The first pulls the distributions towards the
object's sides, and the second pulls them towards the last layer's distributions. Source: arXiv 2410.13842, sections 4.1 and 4.2;
the arithmetic is that of Peterande/D-FINE.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from cpvt_det.common.boxes import cxcywh_to_xyxy, generalized_iou, intersection_over_union
from cpvt_det.common.registry import PartRegistry
from cpvt_det.common.structures import Predictions
from cpvt_det.losses.classification import Classification
from cpvt_det.losses.matcher import Matches, PaddedTargets

LEAST_ROOT = 1e-3  # smallest root of a number of queries per process, against division by 0


@dataclass
class Normalizers:
    """Scalars by which the losses are divided. The losses themselves are sums over the images of a whole step, on all processes.

    Attributes:
        boxes: divisor of the box losses.
        classes: divisor of the class loss.
        queries: numbers of a layer's queries with and without an object, divided by the number of processes. ``None`` if queries
            are counted in this batch only, as is done for proposals, hybrid and denoising queries.
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


@LOSS_REGISTRY.register_as("fgl")
def fine_grained_localization(matched: Matched) -> Tensor | None:
    """(D,): cross-entropy with the two bins around the true distance of each side, times the overlap of the layer's box with the
    object.

    ``None`` for predictions without distributions.
    """
    if (made := matched.predictions.distributions) is None:
        return None
    layer, image, query = matched.matches.layer, matched.matches.image, matched.matches.query
    has_sides = layer >= _first(matched)
    logits = made.logits[layer[has_sides] - _first(matched), image[has_sides], query[has_sides]]  # (P, 4, N + 1)
    bins, share = _bins_around(matched, has_sides)
    log = logits.log_softmax(-1)
    entropy = -(log.gather(-1, bins[..., None])[..., 0] * (1 - share) + log.gather(-1, bins[..., None] + 1)[..., 0] * share)
    overlaps = matched.overlaps[layer, image, query]
    values = torch.zeros_like(overlaps).masked_scatter(has_sides, entropy.sum(-1))
    return matched.mean_over_boxes(values * overlaps)


@LOSS_REGISTRY.register_as("ddf")
def decoupled_distillation(matched: Matched, temperature: float = 5.0) -> Tensor | None:
    """(D,): divergence of each layer's distributions from the last layer's, averaged separately over queries with an object and
    queries without one.

    The weight of a query is the overlap of its box with its object or, if it has no object, the last layer's score. The two means
    are then weighted by the square roots of the numbers of queries in them. ``None`` for predictions without distributions.
    """
    if (made := matched.predictions.distributions) is None:
        return None
    logits, first = made.logits, _first(matched)
    teacher = (logits[-1].detach() / temperature).softmax(-1)
    students = (logits[:-1] / temperature).log_softmax(-1)
    divergence = F.kl_div(students, teacher.expand_as(students), reduction="none").sum(-1) * temperature**2  # (D' - 1, B, Q, 4)
    has_object = torch.zeros_like(matched.overlaps, dtype=torch.bool)
    has_object[matched.matches.layer, matched.matches.image, matched.matches.query] = True
    has_object, overlaps = has_object[first:-1], matched.overlaps[first:-1]
    scores = matched.predictions.logits[-1].detach().sigmoid().amax(-1)
    losses = divergence.mean(-1) * torch.where(has_object, overlaps, scores)
    groups = (has_object, ~has_object)
    if matched.normalizers.queries is not None:
        counts = matched.normalizers.queries
        share = counts[0] > 0
    else:  # a mean over a part of a step's images counts by its share of the step's objects
        counts = [chosen.sum((1, 2)) for chosen in groups]
        share = sum(matched.targets.counts) * matched.predictions.groups / matched.normalizers.boxes
    roots = [count.to(losses.dtype).sqrt().clamp(min=LEAST_ROOT) for count in counts]
    sums = [(losses * chosen).sum((1, 2)) / root for chosen, root in zip(groups, roots, strict=True)]
    return F.pad((sums[0] + sums[1]) / (roots[0] + roots[1]) * share.to(losses.dtype), (first, 1))


def _first(matched: Matched) -> int:
    """Index of the first layer that has distributions."""
    return len(matched.predictions.logits) - len(matched.predictions.distributions.logits)


@torch.no_grad()
def _bins_around(matched: Matched, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For each chosen pair and side: the bin below the true distance, (P, 4) int64, and the weight of the bin above the true
    distance.
    """
    made, matches = matched.predictions.distributions, matched.matches
    starts = made.starts[matches.image[chosen], matches.query[chosen]]
    corners = cxcywh_to_xyxy(matched.target_boxes[chosen])
    units = starts[:, 2:] / made.scale + 1e-16
    low, high = (starts[:, :2] - corners[:, :2]) / units, (corners[:, 2:] - starts[:, :2]) / units
    distances = torch.cat((low, high), dim=-1) - made.scale / 2
    distances = distances.clamp(made.values[0], made.values[-1])
    bins = (torch.searchsorted(made.values, distances, right=True) - 1).clamp(max=len(made.values) - 2)
    below, above = made.values[bins], made.values[bins + 1]
    return bins, (distances - below) / (above - below)
