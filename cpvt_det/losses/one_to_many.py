# SPDX-License-Identifier: Apache-2.0
"""The matching for MS-DETR's one-to-many supervision, which matches several queries with each object.

Place in the pipeline: after ``models/``, before ``losses/criterion.py``, for ``Predictions.one_to_many``.
"""

import torch

from cpvt_det.common import defaults
from cpvt_det.common.boxes import cxcywh_to_xyxy, intersection_over_union
from cpvt_det.common.structures import Predictions
from cpvt_det.losses.classification import pick_classes
from cpvt_det.losses.matcher import Matches, PaddedTargets

OVERLAP_SHARE = 0.7
"""Weight of the overlap in a pair's score; the probability of the object's class has the remaining weight."""


class OneToManyMatcher:
    """Matches each object with the queries that already fit it best. How many queries an object gets depends on how well they
    fit.

    The score of a query and an object is 0.7 times the overlap of their boxes plus 0.3 times the probability of the object's class.
    A query counts for the object with which it has its highest score, if this score is at least the threshold or if the query is
    the best one for some object. If n queries count for an object, it is matched with its n best queries, but with at most
    ``matches``.

    Args:
        matches: largest number of queries per object.
        threshold: lowest score of a query that counts.

    Raises:
        ValueError: fewer than one match, or a threshold outside (0, 1].

    Source: arXiv 2401.03989, section 3.2, and Atten4Vis/MS-DETR ``models/matcher_o2m.py``. This implementation differs from that
    code in two ways. First, a query that is among the best of two objects is matched here only with the object with which it has
    the higher score. MS-DETR's code adds both box losses, and its class target is whichever is written last. Second, if more than
    a quarter of the queries count, MS-DETR's code keeps only a random quarter of the queries.
    """

    def __init__(self, matches: int = defaults.MANY_MATCHES, threshold: float = defaults.MANY_THRESHOLD):
        if matches < 1:
            raise ValueError(f"many_matches must be at least 1, got {matches}")
        if not 0 < threshold <= 1:
            raise ValueError(f"many_threshold must be above 0 and at most 1, got {threshold}")
        self.matches = matches
        self.threshold = threshold

    @torch.no_grad()
    def __call__(self, predictions: Predictions, targets: PaddedTargets) -> Matches:
        """Match.

        Args:
            predictions: logits (D, B, Q, K) of sigmoids and boxes (D, B, Q, 4).
            targets: targets of the same B images.

        Returns:
            Pairs ordered by layer, image and query; each query is in at most one pair per layer.
        """
        scores = self._scores(predictions, targets)  # (D, B, T, Q), -1 for rows without an object
        if not scores.shape[2]:
            return Matches(*torch.zeros(4, 0, dtype=torch.int64, device=scores.device))
        highest, owner = scores.max(2)  # (D, B, Q)
        is_object = scores[..., :1] >= 0
        best = torch.zeros_like(scores).scatter_(3, scores.argmax(3, keepdim=True), 1).mul_(is_object).amax(2)
        counts = ((highest >= self.threshold) | (best > 0)).to(scores.dtype)
        counts = scores.new_zeros(scores.shape[:3]).scatter_add_(2, owner, counts)  # (D, B, T), of queries by object

        found, queries = scores.topk(min(self.matches, scores.shape[3]), dim=3)
        is_chosen = torch.arange(found.shape[3], device=scores.device) < counts[..., None]
        chosen = torch.full_like(scores, -1).scatter_(3, queries, found.where(is_chosen & is_object, -1))
        highest, owner = chosen.max(2)
        layer, image, query = (highest >= 0).nonzero(as_tuple=True)
        return Matches(layer, image, query, owner[layer, image, query])

    def _scores(self, predictions: Predictions, targets: PaddedTargets) -> torch.Tensor:
        wanted, boxes = cxcywh_to_xyxy(targets.boxes_cxcywh), cxcywh_to_xyxy(predictions.boxes)
        overlaps = intersection_over_union(wanted[None, :, :, None], boxes[:, :, None])
        probabilities = pick_classes(predictions.logits, targets.labels).sigmoid_()
        scores = OVERLAP_SHARE * overlaps + (1 - OVERLAP_SHARE) * probabilities
        numbers = torch.arange(scores.shape[2], device=scores.device)
        is_object = numbers < torch.tensor(targets.counts).to(scores.device, non_blocking=True)[:, None]
        return scores.where(is_object[None, :, :, None], -1)
