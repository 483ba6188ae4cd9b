# SPDX-License-Identifier: Apache-2.0
"""Precision and recall at each score threshold, and the best threshold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RECALLS = np.linspace(0, 1, 101)
"""Recall values at which COCO samples the precision."""


@dataclass(frozen=True)
class OperatingPoint:
    """A score threshold with its precision and recall. Detections whose score is at least the threshold count."""

    threshold: float
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        return 2 * self.precision * self.recall / (self.precision + self.recall)


@dataclass
class Curve:
    """Detections by descending score, each right or wrong. Detections in crowds are left out.

    Attributes:
        num_objects: number of objects, without crowds.
        scores: (n,) float64 array.
        right: (n,) bool array.
    """

    num_objects: int
    scores: np.ndarray
    right: np.ndarray

    @property
    def precision(self) -> np.ndarray:
        """(n,) float64: share of right detections among the first 1, 2, ... n."""
        return np.cumsum(self.right) / np.arange(1, len(self.right) + 1)

    @property
    def recall(self) -> np.ndarray:
        """(n,) float64: share of the objects that the first 1, 2, ... n detections find; NaN without objects."""
        return np.cumsum(self.right) / (self.num_objects or math.nan)

    def average_precision(self) -> float:
        """COCO's average precision: for each of 101 recalls, take the best precision at this recall or a higher one, then
        average; NaN without objects.

        Source: pycocotools ``cocoeval.py``, ``accumulate``.
        """
        if not self.num_objects:
            return math.nan
        envelope = np.maximum.accumulate(self.precision[::-1])[::-1]
        indices = np.searchsorted(self.recall, RECALLS, side="left")
        return float(np.append(envelope, np.zeros(1))[indices].mean())

    def best(self) -> OperatingPoint | None:
        """The point with the best F1. If several points have it, this is the one with the highest threshold. ``None`` if no
        detection is right, apart from those with a score of 0, which ``TEST.NMS`` gives to copies.
        """
        found, is_kept = np.cumsum(self.right), self.scores > 0
        if not self.num_objects or not self.right[is_kept].any():
            return None
        ends = np.flatnonzero(np.append(self.scores[1:] != self.scores[:-1], True) & is_kept)  # equal scores pass together
        best = ends[(2 * found[ends] / (ends + 1 + self.num_objects)).argmax()]  # the highest F1
        return OperatingPoint(float(self.scores[best]), float(found[best] / (best + 1)), float(found[best] / self.num_objects))


def pooled_curve(curves: Sequence[Curve]) -> Curve:
    """The curve of all classes together, for a common threshold."""
    scores, right = (np.concatenate([getattr(curve, name) for curve in curves]) for name in ("scores", "right"))
    order = np.argsort(-scores, kind="stable")
    return Curve(sum(curve.num_objects for curve in curves), scores[order], right[order])
