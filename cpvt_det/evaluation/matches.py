# SPDX-License-Identifier: Apache-2.0
"""Objects and detections of a test set as arrays, and their matches: the basis of thresholds, curves, confusion and report.

AP itself is computed by the library that ``evaluation/coco.py`` calls. It does not return its matches, so its matching rule is
implemented again here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pycocotools import mask

from cpvt_det.evaluation.thresholds import Curve

IOU = 0.5
"""Smallest IoU at which a detection may be matched to an object."""
NOTHING = -1
"""Stands in place of an object's index for a false detection."""
IGNORED = -2
"""Stands in place of an object's index for a detection in a crowd, or for one beyond those that count per class and image."""
COUNTED = 100
"""How many of the best detections count per class and image, as in COCO. If any image has more objects of a class, all detections
count."""


@dataclass(frozen=True)
class GroundTruth:
    """The images of a test set and their objects.

    Attributes:
        image_ids: (N,) int64.
        image_of: (A,) int64, ascending, index of the image of each object.
        objects: (A,) of ``cpvt_det.data.records.BOX``.
    """

    image_ids: np.ndarray
    image_of: np.ndarray
    objects: np.ndarray

    @property
    def counted(self) -> int | None:
        """:data:`COUNTED`; ``None`` if all detections count, because one class has more objects in an image, without crowds."""
        labels = self.objects["label"].astype(np.int64)
        pairs = (self.image_of * (labels.max(initial=0) + 1) + labels)[~self.objects["crowd"]]
        most_of_a_class = np.unique(pairs, return_counts=True)[1].max(initial=0)
        return COUNTED if most_of_a_class <= COUNTED else None

    def annotations(self, class_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Objects as COCO's annotations, with ids from 1, because 0 means "no match".

        Args:
            class_ids: category id of each label.
        """
        categories = np.array(class_ids)[self.objects["label"]]
        columns = [self.image_ids[self.image_of], categories]
        columns += [self.objects["xywh"], self.objects["area"], self.objects["crowd"].astype(int)]
        rows = enumerate(zip(*(column.tolist() for column in columns), strict=True), start=1)
        return [{"id": n, "image_id": i, "category_id": c, "bbox": b, "area": a, "iscrowd": k} for n, (i, c, b, a, k) in rows]


class Matches:
    """The objects and the detections of a test set, image by image, and the object matched to each detection.

    Detections are matched in order of descending score, so a detection does not affect detections with higher scores. To apply a
    score threshold, it is therefore enough to leave out the matches of the detections below the threshold.

    Args:
        truth: images and their objects.
        image_ids, labels, boxes, scores: arrays with all detections. Their shapes and dtypes are, in this order: (n,) int64; (n,)
            int64 in [0, K); (n, 4) float64, xywh in pixels; (n,) float64.
        counted: number of best detections that count per class and image; ``None`` for all.

    Attributes:
        image_ids: (N,) int64, ascending.
        record_of: (N,) int64, index of each image in ``truth``.
        objects: (A,) of ``cpvt_det.data.records.BOX``.
        image_of_object: (A,) int64, ascending, index of the image of each object.
        image_of: (n,) int64, ascending, index of the image of each detection. The detections of an image are sorted by descending
            score.
        labels, boxes, scores: the arguments, in the order of ``image_of``.
    """

    def __init__(
        self,
        truth: GroundTruth,
        image_ids: np.ndarray,
        labels: np.ndarray,
        boxes: np.ndarray,
        scores: np.ndarray,
        counted: int | None = COUNTED,
    ):
        self.record_of = np.argsort(truth.image_ids)
        self.image_ids, self.counted = truth.image_ids[self.record_of], counted
        image_of = np.argsort(self.record_of)[truth.image_of]
        order = np.argsort(image_of, kind="stable")
        self.objects, self.image_of_object = truth.objects[order], image_of[order]
        order = np.lexsort((-scores, image_ids))
        self.image_of = np.searchsorted(self.image_ids, image_ids[order])
        self.labels, self.boxes, self.scores = labels[order], boxes[order], scores[order]

    def of_image(self, index: int) -> tuple[slice, slice]:
        """The ranges of objects and of detections that belong to an image."""
        objects, found = (np.searchsorted(images, (index, index + 1)) for images in (self.image_of_object, self.image_of))
        return slice(*objects.tolist()), slice(*found.tolist())

    @cached_property
    def same_class(self) -> np.ndarray:
        """(n,) int64: index of the object of the same class matched to each detection, ``NOTHING`` or ``IGNORED``, as in AP."""
        matched = self._match(same_class=True)
        if self.counted is not None:
            groups = self.image_of * (self.labels.max(initial=0) + 1) + self.labels
            order = np.argsort(groups, kind="stable")
            groups = groups[order]
            matched[order[np.arange(len(order)) - np.searchsorted(groups, groups) >= self.counted]] = IGNORED
        return matched

    @cached_property
    def any_class(self) -> np.ndarray:
        """(n,) int64: like :meth:`same_class`, but with objects of any class and for all detections, as in the confusion matrix."""
        return self._match(same_class=False)

    @cached_property
    def found_at(self) -> np.ndarray:
        """(A,) float64: score of the detection of the same class that found each object; -1 if it was never found."""
        found_at, right = np.full(len(self.objects), -1.0), self.same_class >= 0
        found_at[self.same_class[right]] = self.scores[right]
        return found_at

    def _match(self, same_class: bool) -> np.ndarray:
        matched = np.full(len(self.scores), NOTHING)
        boxes, labels, crowd = (np.ascontiguousarray(self.objects[name]) for name in ("xywh", "label", "crowd"))
        for index in np.intersect1d(self.image_of_object, self.image_of).tolist():
            objects, found = self.of_image(index)
            ious = mask.iou(self.boxes[found], boxes[objects], crowd[objects].astype(np.uint8).tolist())
            if same_class:
                ious = np.where(self.labels[found, None] == labels[objects], ious, -1.0)
            columns = _pair(ious, crowd[objects])
            matched[found] = np.where(columns < 0, columns, columns + objects.start)
        return matched

    def curves(self, num_classes: int) -> list[Curve]:
        """The curve of each class, from the detections that count."""
        taken = np.flatnonzero(self.same_class != IGNORED)
        taken = taken[np.lexsort((-self.scores[taken], self.labels[taken]))]
        parts = np.split(taken, np.searchsorted(self.labels[taken], np.arange(1, num_classes)))
        counts = np.bincount(self.objects["label"][~self.objects["crowd"]], minlength=num_classes).tolist()
        return [Curve(count, self.scores[part], self.same_class[part] >= 0) for count, part in zip(counts, parts, strict=True)]

    def confusion(self, num_classes: int, threshold: float) -> np.ndarray:
        """Count objects by their class and by the class of the detection matched to them, which may differ.

        Args:
            num_classes: number of classes K.
            threshold: minimum score for a detection to count.

        Returns:
            (K + 1, K + 1) int64 array: rows are the true classes, and columns are the detected classes. The last column counts
            missed objects, and the last row counts detections without an object.
        """
        counts = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
        taken = (self.scores >= threshold) & (self.any_class != IGNORED)
        labels = np.append(self.objects["label"], num_classes)  # NOTHING is the last one
        np.add.at(counts, (labels[self.any_class[taken]], self.labels[taken]), 1)
        missed = np.append(~self.objects["crowd"], False)
        missed[self.any_class[taken]] = False
        np.add.at(counts[:, -1], labels[missed], 1)
        return counts

    def mistakes(self, threshold: float) -> np.ndarray:
        """(N, 2) int64, two counts for each image: objects without a detection of the same class, and detections without an
        object of the same class.

        Args:
            threshold: minimum score for a detection to count.
        """
        missed = ~self.objects["crowd"] & (self.found_at < threshold)
        false = (self.same_class == NOTHING) & (self.scores >= threshold)
        images = self.image_of_object[missed], self.image_of[false]
        return np.stack([np.bincount(which, minlength=len(self.image_ids)) for which in images], axis=1)

    def worst(self, threshold: float, most: int) -> list[int]:
        """Indices of the images with the most :meth:`mistakes`; ties are sorted by id. Images without a mistake are left out."""
        total = self.mistakes(threshold).sum(axis=1)
        return [index for index in np.argsort(-total, kind="stable")[:most].tolist() if total[index]]


def _pair(ious: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """(n,) int64: index of the object of each detection of an image, ``NOTHING`` or ``IGNORED``, from their (n, G) overlaps.

    In order of descending score, each detection is matched to the free object with the largest IoU, if this IoU is at least
    ``IOU``. Otherwise, it is matched to a crowd, to which any number of detections may be matched.

    Source: pycocotools ``cocoeval.py``, ``evaluateImg``.
    """
    matched, free = np.full(len(ious), NOTHING), ~crowd
    for row in np.flatnonzero((ious >= IOU).any(axis=1)):
        for candidates in (free, crowd):
            near = np.where(candidates, ious[row], -1.0)
            best = len(near) - 1 - int(near[::-1].argmax())  # the last of equal ones, as in the source
            if near[best] >= IOU:
                matched[row] = IGNORED if crowd[best] else best
                free[best] = False
                break
    return matched
