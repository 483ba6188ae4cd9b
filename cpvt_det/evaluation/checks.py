# SPDX-License-Identifier: Apache-2.0
"""The checks of the evaluator's input; each message names the image id."""

from collections.abc import Sequence

import numpy as np
import torch

from cpvt_det.structures import Detections


def check_classes(class_ids: Sequence[int], class_names: Sequence[str]) -> None:
    """Refuse class ids and names that are not unique, or do not form pairs.

    Raises:
        ValueError: no class, a different number of ids and names, or one that occurs twice.
    """
    if len(class_ids) == 0 or len(class_ids) != len(class_names):
        raise ValueError(f"expected one name for each class id, got {len(class_ids)} ids and {len(class_names)} names")
    for kind, values in (("id", list(class_ids)), ("name", list(class_names))):
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise ValueError(f"class {kind} {twice[0]!r} occurs more than once; each class needs its own")


def checked_arrays(image_id: int, detections: Detections, num_classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes xyxy (n, 4) float64, scores (n,) float64 and labels (n,) int64 of detections that can be evaluated.

    Raises:
        ValueError: tensors of the wrong shape, or labels that are not integers; scores or boxes that are not finite, a label
            outside [0, K), or a box that is not xyxy.
    """
    where = f"the detections of image id {image_id!r}"
    boxes, scores, labels = detections.boxes_xyxy, detections.scores, detections.labels
    if scores.ndim != 1 or boxes.shape != (len(scores), 4) or labels.shape != scores.shape:
        shapes = ", ".join(str(tuple(values.shape)) for values in (boxes, scores, labels))
        raise ValueError(f"{where}: expected boxes (n, 4), scores (n,) and labels (n,), got {shapes}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{where}: labels must be integers, got {labels.dtype}")
    boxes, scores = (values.detach().cpu().double().numpy() for values in (boxes, scores))
    labels = labels.cpu().long().numpy()
    for name, values in (("scores", scores[:, None]), ("boxes", boxes)):
        bad = int((~np.isfinite(values)).any(axis=1).sum())
        if bad:
            raise ValueError(f"{where}: {bad} of {len(scores)} {name} are not finite; the weights are probably broken")
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise ValueError(f"{where}: label {int(outside[0])} is not in [0, {num_classes})")
    inverted = boxes[(boxes[:, 2:] < boxes[:, :2]).any(axis=1)]
    if len(inverted):
        raise ValueError(f"{where}: box {inverted[0].tolist()} is not xyxy: x2 is below x1, or y2 below y1")
    return boxes, scores, labels
