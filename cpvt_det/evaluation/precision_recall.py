# SPDX-License-Identifier: Apache-2.0
"""Precision and recall of each class over the score threshold, and the best threshold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpvt_det.evaluation.matching import IOU, ScoredImage

RECALLS = np.linspace(0, 1, 101)
"""Recall values at which COCO samples the precision."""


@dataclass(frozen=True)
class OperatingPoint:
    """A score threshold with its precision and recall: detections with this score or a higher one count."""

    threshold: float
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        return 2 * self.precision * self.recall / (self.precision + self.recall)


@dataclass
class Curve:
    """Detections by falling score, each right or wrong; those in crowds are left out.

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
        """(n,) float64: share of right detections among those down to each score."""
        return np.cumsum(self.right) / np.arange(1, len(self.right) + 1)

    @property
    def recall(self) -> np.ndarray:
        """(n,) float64: share of the objects found by the detections down to each score; NaN without objects."""
        return np.cumsum(self.right) / (self.num_objects or math.nan)

    def average_precision(self) -> float:
        """COCO's average precision: mean over 101 recalls of the best precision at that recall or above; NaN without objects.

        Source: pycocotools ``cocoeval.py``, ``accumulate``.
        """
        if not self.num_objects:
            return math.nan
        envelope = np.maximum.accumulate(self.precision[::-1])[::-1]
        indices = np.searchsorted(self.recall, RECALLS, side="left")
        return float(np.append(envelope, np.zeros(1))[indices].mean())

    def best(self) -> OperatingPoint | None:
        """The threshold of the highest F1, the highest one of several; ``None`` if no detection is right."""
        if not self.num_objects or not self.right.any():
            return None
        ends = np.flatnonzero(np.append(self.scores[1:] != self.scores[:-1], True))  # equal scores pass a threshold together
        found = np.cumsum(self.right)
        best = ends[(2 * found[ends] / (ends + 1 + self.num_objects)).argmax()]  # the highest F1
        return OperatingPoint(float(self.scores[best]), float(found[best] / (best + 1)), float(found[best] / self.num_objects))


def class_curve(images: Sequence[ScoredImage], label: int, iou: float = IOU) -> Curve:
    """The curve of one class, of the detections that count."""
    scores, right, num_objects = [np.zeros(0)], [np.zeros(0, dtype=bool)], 0
    for image in (image.of_class(label) for image in images if label in image.labels):
        matched = image.match(iou)
        ignored = (matched >= 0) & image.crowd[matched] if len(image.crowd) else np.zeros(len(matched), dtype=bool)
        scores.append(image.scores[~ignored])
        right.append(matched[~ignored] >= 0)
        num_objects += int((~image.crowd).sum())
    return _sorted_curve(num_objects, np.concatenate(scores), np.concatenate(right))


def pooled_curve(curves: Sequence[Curve]) -> Curve:
    """The curve of all classes together, for a common threshold."""
    parts = [np.concatenate(values) for values in zip(*((curve.scores, curve.right) for curve in curves), strict=True)]
    return _sorted_curve(sum(curve.num_objects for curve in curves), *parts)


def _sorted_curve(num_objects: int, scores: np.ndarray, right: np.ndarray) -> Curve:
    order = np.argsort(-scores, kind="stable")
    return Curve(num_objects, scores[order], right[order])
