# SPDX-License-Identifier: Apache-2.0
"""The same detections for every image: what a model must beat to have learned more than where objects usually are."""

from collections.abc import Sequence

import numpy as np
import torch

from cpvt_det.data.coco import ImageRecord
from cpvt_det.structures import Detections


def constant_detections(records: Sequence[ImageRecord], most: int = 100) -> Detections:
    """One box for each class: the mean of its training boxes, in shares of the sides of their images.

    The mean is taken of each corner coordinate, and so of centres, widths and heights too. The score of a class is the share of
    training images that contain it; the score decides only between classes, as all boxes of a class are equal.

    Args:
        records: images to train on.
        most: largest number of detections; the most frequent classes are kept.

    Returns:
        Boxes (k, 4) float32 in [0, 1] of any image, scores (k,) float32, labels (k,) int64; best first. Of k classes with boxes.
    """
    sides = [np.array([r.width, r.height, r.width, r.height], dtype=np.float64) for r in records]
    boxes = [record.boxes_xyxy / side for record, side in zip(records, sides, strict=True)]
    boxes, labels = np.concatenate([np.zeros((0, 4)), *boxes]), np.concatenate([[], *(r.labels for r in records)]).astype(int)
    images = np.bincount(np.concatenate([[], *(np.unique(r.labels) for r in records)]).astype(int))
    known = np.argsort(-images, kind="stable")[: np.count_nonzero(images)][:most]
    means = [boxes[labels == label].mean(0) for label in known]
    return Detections(
        torch.from_numpy(np.array(means, dtype=np.float32).reshape(-1, 4)),
        torch.from_numpy((images[known] / max(1, len(records))).astype(np.float32)),
        torch.from_numpy(known.astype(np.int64)),
    )
