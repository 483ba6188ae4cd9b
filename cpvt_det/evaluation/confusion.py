# SPDX-License-Identifier: Apache-2.0
"""Which classes are confused, and which images have most mistakes, at one score threshold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpvt_det.evaluation.matching import IOU, ScoredImage


@dataclass(frozen=True)
class Mistakes:
    """The number of objects of an image without a detection of their class, and of detections without an object of theirs."""

    image_id: int
    missed: int
    false: int


def confusion_matrix(images: Sequence[ScoredImage], num_classes: int, threshold: float, iou: float = IOU) -> np.ndarray:
    """Count objects by their class and by the class of the detection matched to them.

    Detections are matched in order of falling score, whatever their class, as in :meth:`ScoredImage.match`. Those in a crowd are
    left out.

    Args:
        images: images of the whole data set.
        num_classes: number of classes K.
        threshold: lowest score of the detections that count.
        iou: smallest IoU of a detection and its object.

    Returns:
        (K + 1, K + 1) int64 array: rows are the true classes, columns the detected ones. The last column counts missed objects, the
        last row detections on no object.
    """
    counts = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    for image in (image.above(threshold) for image in images):
        matched = image.match(iou)
        for label, index in zip(image.found_labels, matched, strict=True):
            if index < 0:
                counts[-1, label] += 1
            elif not image.crowd[index]:
                counts[image.object_labels[index], label] += 1
        missed = ~image.crowd
        missed[matched[matched >= 0]] = False
        np.add.at(counts[:, -1], image.object_labels[missed], 1)
    return counts


def worst_images(images: Sequence[ScoredImage], threshold: float, count: int, iou: float = IOU) -> list[Mistakes]:
    """The images with most mistakes, without those that have none; of equal ones, the lower id first.

    Args:
        images, threshold, iou: arguments as of :func:`confusion_matrix`; but here an object and its detection must have one class.
        count: largest number of images to return.
    """
    mistakes = [_mistakes_in(image.above(threshold), iou) for image in images]
    wrong = [one for one in mistakes if one.missed + one.false]
    return sorted(wrong, key=lambda one: (-one.missed - one.false, one.image_id))[:count]


def _mistakes_in(image: ScoredImage, iou: float) -> Mistakes:
    missed = false = 0
    for part in (image.of_class(label) for label in np.union1d(image.object_labels, image.found_labels)):
        matched = part.match(iou)
        false += int((matched < 0).sum())
        missed += int((~part.crowd).sum()) - sum(not part.crowd[index] for index in matched if index >= 0)
    return Mistakes(image.image_id, missed, false)
