# SPDX-License-Identifier: Apache-2.0
"""What is taken for what, and which images go wrong most, at one score threshold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpvt_det.evaluation.matching import IOU, ScoredImage


@dataclass(frozen=True)
class Mistakes:
    """Of one image: objects that no detection of their class has, and detections that have no object of theirs."""

    image_id: int
    missed: int
    false: int


def confusion_matrix(images: Sequence[ScoredImage], num_classes: int, threshold: float, iou: float = IOU) -> np.ndarray:
    """Count objects by their class and that of the detection on them.

    Detections are matched by falling score, whatever their class, as in :meth:`ScoredImage.match`. Those in a crowd are left out.

    Args:
        images: of the whole data set.
        num_classes: K.
        threshold: detections of lower scores are left out.
        iou: from which a detection is on an object.

    Returns:
        (K + 1, K + 1) int64 array: rows are the truth, columns the detection. The last column is missed objects, the last row
        detections on no object.
    """
    counts = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    for image in (image.above(threshold) for image in images):
        matched = image.match(iou)
        for label, place in zip(image.found_labels, matched, strict=True):
            if place < 0:
                counts[-1, label] += 1
            elif not image.crowd[place]:
                counts[image.object_labels[place], label] += 1
        missed = ~image.crowd
        missed[matched[matched >= 0]] = False
        np.add.at(counts[:, -1], image.object_labels[missed], 1)
    return counts


def worst_images(images: Sequence[ScoredImage], threshold: float, count: int, iou: float = IOU) -> list[Mistakes]:
    """The images with most mistakes, those with none left out; of equal ones that with the lower id first.

    Args:
        images, threshold, iou: as of :func:`confusion_matrix`; but here an object and its detection have one class.
        count: how many at most.
    """
    mistakes = [_mistakes_in(image.above(threshold), iou) for image in images]
    wrong = [one for one in mistakes if one.missed + one.false]
    return sorted(wrong, key=lambda one: (-one.missed - one.false, one.image_id))[:count]


def _mistakes_in(image: ScoredImage, iou: float) -> Mistakes:
    missed = false = 0
    for part in (image.of_class(label) for label in np.union1d(image.object_labels, image.found_labels)):
        matched = part.match(iou)
        false += int((matched < 0).sum())
        missed += int((~part.crowd).sum()) - sum(not part.crowd[place] for place in matched if place >= 0)
    return Mistakes(image.image_id, missed, false)
