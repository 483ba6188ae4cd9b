# SPDX-License-Identifier: Apache-2.0
"""The same detections for every image: what a model must beat to have learned more than where objects usually are."""

import numpy as np
import torch

from cpvt_det.data.records import Records
from cpvt_det.structures import Detections


def constant_detections(records: Records, most: int = 100) -> Detections:
    """One box for each class: the mean of its training boxes, in shares of the sides of their images.

    The mean is taken of each corner coordinate, and so of centres, widths and heights too. The score of a class is the share of
    training images that contain it; the score decides only between classes, as all boxes of a class are equal.

    Args:
        records: images to train on.
        most: largest number of detections; the most frequent classes are kept.

    Returns:
        Boxes (k, 4) float32 in [0, 1] of any image, scores (k,) float32, labels (k,) int64; best first. Of k classes with boxes.
    """
    totals = np.zeros((0, 6))  # of each class: images, boxes, corners
    for block in records.blocks():
        totals = _add(totals, _totals(block))
    images = totals[:, 0]
    known = np.argsort(-images, kind="stable")[: np.count_nonzero(images)][:most]
    means = totals[known, 2:] / totals[known, 1:2]
    return Detections(
        torch.from_numpy(means.astype(np.float32)),
        torch.from_numpy((images[known] / max(1, len(records))).astype(np.float32)),
        torch.from_numpy(known.astype(np.int64)),
    )


def _totals(block: Records) -> np.ndarray:
    """(k, 6): of each class up to the last that is there, the number of images with it, that of its boxes, and their sum."""
    image_of, boxes, labels = block.boxes_to_learn()
    boxes = boxes / block.sizes[:, [1, 0, 1, 0]][image_of]
    number = labels.max(initial=-1) + 1
    classes = np.unique(image_of * number + labels) % max(1, number)  # of each image once
    columns = [np.bincount(classes, minlength=number), np.bincount(labels, minlength=number)]
    return np.stack([*columns, *(np.bincount(labels, column, number) for column in boxes.T)], axis=1).astype(np.float64)


def _add(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    longer[: len(shorter)] += shorter
    return longer
