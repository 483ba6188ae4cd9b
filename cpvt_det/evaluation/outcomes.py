# SPDX-License-Identifier: Apache-2.0
"""What becomes of every detection of an image, for all score thresholds at once."""

from dataclasses import dataclass

import numpy as np

from cpvt_det.evaluation.matching import IOU, ScoredImage

NOTHING = -1
"""In place of an object: a false detection."""
IGNORED = -2
"""In place of an object: a detection in a crowd, or beyond those that count per class and image."""


@dataclass(frozen=True)
class Outcomes:
    """The object of each detection of an image.

    Detections are matched by falling score, so those of lower scores change nothing: the matches at a threshold are these, of the
    detections that pass it.

    Attributes:
        same_class: (n,) int array: index of the object of the same class, ``NOTHING`` or ``IGNORED``; as AP counts it, and
            :func:`cpvt_det.evaluation.confusion.worst_images`.
        any_class: (n,) int array: likewise of an object of any class, as the confusion matrix counts it.
        found_at: (G,) float64 array: score of the detection of the same class that found each object; -1 if it was never found.
    """

    same_class: np.ndarray
    any_class: np.ndarray
    found_at: np.ndarray


def outcomes(image: ScoredImage, iou: float = IOU) -> Outcomes:
    """Match the detections of an image, class by class and whatever their class.

    Args:
        image: image with all its detections.
        iou: smallest IoU of a detection and its object.
    """
    same_class = np.full(len(image.scores), IGNORED)
    for label in image.labels:
        part, objects = image.of_class(label), np.flatnonzero(image.object_labels == label)
        found = np.flatnonzero(image.found_labels == label)[: len(part.scores)]
        matched = part.match(iou)
        same_class[found] = np.where(matched < 0, NOTHING, objects[matched] if len(objects) else NOTHING)
    any_class = image.match(iou)
    found_at = np.full(len(image.objects), -1.0)
    for matches in (same_class, any_class):
        on_object = np.flatnonzero(matches >= 0)
        matches[on_object[image.crowd[matches[on_object]]]] = IGNORED
    right = same_class >= 0
    found_at[same_class[right]] = image.scores[right]
    return Outcomes(same_class, any_class, found_at)
