# SPDX-License-Identifier: Apache-2.0
"""Matching detections to objects: ground truth and detections image by image, and COCO's rule of matching them.

``evaluation/coco.py`` leaves this to its backends, but not all of them return the matches.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from pycocotools import mask

from cpvt_det.evaluation.ground_truth import COUNTED, GroundTruth

IOU = 0.5
"""Smallest IoU of a detection and the object that it may be matched to."""


@dataclass
class ScoredImage:
    """The objects and the detections of one image; boxes xywh in pixels.

    Attributes:
        image_id: id of the image in the data.
        objects: (G, 4) float64 array, boxes of the objects.
        object_labels: (G,) int array in [0, K).
        crowd: (G,) bool array, True for regions in which detections count neither as right nor as wrong.
        found: (n, 4) float64 array, boxes of the detections, by falling score.
        found_labels: (n,) int array in [0, K).
        scores: (n,) float64 array.
        counted: number of detections of a class that count, the best ones; ``None``: all.
    """

    image_id: int
    objects: np.ndarray
    object_labels: np.ndarray
    crowd: np.ndarray
    found: np.ndarray
    found_labels: np.ndarray
    scores: np.ndarray
    counted: int | None = COUNTED

    @cached_property
    def labels(self) -> frozenset[int]:
        """The classes of its objects and detections."""
        return frozenset((*self.object_labels.tolist(), *self.found_labels.tolist()))

    def of_class(self, label: int) -> "ScoredImage":
        """The image with the objects of one class and its best detections, as many as count."""
        objects, found = self.object_labels == label, np.flatnonzero(self.found_labels == label)[: self.counted]
        return ScoredImage(
            self.image_id,
            *(values[objects] for values in (self.objects, self.object_labels, self.crowd)),
            *(values[found] for values in (self.found, self.found_labels, self.scores)),
            self.counted,
        )

    def above(self, threshold: float) -> "ScoredImage":
        """The image without detections of lower scores."""
        kept = int((self.scores >= threshold).sum())
        return replace(self, found=self.found[:kept], found_labels=self.found_labels[:kept], scores=self.scores[:kept])

    def match(self, iou: float = IOU) -> np.ndarray:
        """(n,) int array: index of each detection's object, which may be a crowd, or -1.

        In order of falling score, each detection is matched to the free object of largest IoU, if that is at least ``iou``; else to
        a crowd, to which any number of detections may be matched.

        Source: pycocotools ``cocoeval.py``, ``evaluateImg``.
        """
        matched = np.full(len(self.scores), -1)
        if not len(self.objects) or not len(self.found):
            return matched
        ious = mask.iou(self.found, self.objects, self.crowd.astype(np.uint8).tolist())
        free = ~self.crowd
        for row, overlaps in enumerate(ious):
            for candidates in (free, self.crowd):
                near = np.where(candidates & (overlaps >= min(iou, 1 - 1e-10)), overlaps, -1.0)
                best = len(near) - 1 - int(near[::-1].argmax())  # the last of equal ones, as in the source
                if near[best] >= 0:
                    matched[row] = best
                    free[best] = False
                    break
        return matched


def pair_images(
    ground_truth: GroundTruth, results: Sequence[dict[str, Any]], class_ids: Sequence[int], counted: int | None = None
) -> list[ScoredImage]:
    """Collect the objects and detections of each image.

    Args:
        ground_truth: objects of the images.
        results: detections in COCO's results format.
        class_ids: the category id of each label.
        counted: number of detections per class and image that count; ``None``: that of the ground truth.

    Returns:
        One entry per image of the ground truth, by rising id.
    """
    label_of = {class_id: label for label, class_id in enumerate(class_ids)}
    found = defaultdict(list)
    for result in results:
        found[result["image_id"]].append((*result["bbox"], label_of[result["category_id"]], result["score"]))
    ids, objects = ground_truth.image_ids, ground_truth.objects
    starts = np.searchsorted(ground_truth.image_of, np.arange(len(ids) + 1))
    boxes, labels, crowds = (np.ascontiguousarray(objects[name]) for name in ("xywh", "label", "crowd"))
    images = []
    for index in np.argsort(ids).tolist():
        here = np.array(found[int(ids[index])], dtype=float).reshape(-1, 6)
        here = here[np.argsort(-here[:, 5], kind="stable")]
        rows = slice(starts[index], starts[index + 1])
        there = (boxes[rows], labels[rows].astype(int), crowds[rows])
        detected = (np.ascontiguousarray(here[:, :4]), here[:, 4].astype(int), here[:, 5])
        images.append(ScoredImage(int(ids[index]), *there, *detected, counted or ground_truth.counted))
    return images
