# SPDX-License-Identifier: Apache-2.0
"""Compare an exported program with the detector that it was made from, on canvas and batch sizes other than the traced ones."""

import math
from collections.abc import Collection
from dataclasses import replace

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from cpvt_det.checkpoint.exported import Run
from cpvt_det.common.boxes import intersection_over_union
from cpvt_det.common.structures import Detections, PaddedBatch, Size
from cpvt_det.evaluation.answers import ClassScores, PostProcessor
from cpvt_det.export.program import Canvas, largest_sides
from cpvt_det.models import ImageModel

TRACED = (2, 3, 4)  # number of images, and height and width in largest strides; all differ from the numbers below
NEAR = 0.01  # tolerance for an intersection over union in half precision
UNSEEN = ((1, 2, 5), (3, 5, 3), (4, 6, 6))


def traced_canvas(detector: ImageModel, batch: int | None = None, size: Size | None = None) -> Canvas:
    """A small canvas to trace at; ``batch`` and ``size`` fix its dimensions."""
    stride = detector.size_divisibility
    height, width = size or (side * stride for side in _within(detector, TRACED[1:]))
    return Canvas(batch or TRACED[0], height, width)


def unseen_canvases(detector: ImageModel, traced: Canvas, dynamic: Collection[str]) -> list[Canvas]:
    """Three canvases that differ from the traced one in every dynamic dimension, as far as a learned table allows such sizes."""
    stride = detector.size_divisibility
    canvases = [Canvas(batch, *(side * stride for side in _within(detector, sides))) for batch, *sides in UNSEEN]
    return [replace(traced, **{name: getattr(canvas, name) for name in dynamic}) for canvas in canvases]


def _within(detector: ImageModel, sides: Collection[int]) -> list[int]:
    return [min(side, largest_sides(detector) or side) for side in sides]


@torch.no_grad()
def compare(
    detector: ImageModel, postprocess: PostProcessor | ClassScores, run: Run, canvas: Canvas, seed: int = 0, masked: bool = True
) -> float:
    """Run the model and the program on the same generated images, all of different sizes.

    Args:
        detector: a model on the CPU, in evaluation mode, not prepared for export.
        postprocess: post-processor that is part of the program.
        run: the program.
        canvas: shape of the batch.
        seed: seed of the images.
        masked: whether the program has a padding mask; without one, all images fill the canvas.

    Returns:
        The largest difference of a score, or of a box coordinate as a fraction of the image's side.
    """
    stride = detector.size_divisibility
    images = draw_images(canvas, stride, seed)
    if not masked:
        images = [F.interpolate(image[None], (canvas.height, canvas.width))[0] for image in images]
    batch, pixels = detector.preprocess(images), PaddedBatch.from_images([image.float() for image in images], stride)
    predictions = detector(batch.images, batch.padding_mask)
    answers = run(pixels.images, pixels.padding_mask)
    if isinstance(postprocess, ClassScores):
        return _largest(answers[0] - predictions.scores())
    # All pairs of query and class are used, so that ties at the cut-off do not count as differences.
    everything = PostProcessor(postprocess.classification, predictions.logits[-1, 0].numel()).decode(predictions)
    pairs = zip(zip(*answers, strict=True), zip(*everything, strict=True), strict=True)
    return max(difference(Detections(*found), Detections(*expected), postprocess.nms) for found, expected in pairs)


def difference(found: Detections, expected: Detections, nms: float = 1.0) -> float:
    """The largest difference of a box coordinate or a score.

    Scores are compared by rank. Boxes are compared in one-to-one pairs of the same label. The pairs are chosen for the smallest
    differences in box and score, because the order of detections with equal scores is not defined. With NMS, rounding may move an
    overlap across the NMS threshold, and this must not count as a difference. So with NMS, only the best score and the boxes that
    were kept are compared. In addition, the suppressed detections must be exactly the found boxes that are copies of kept ones.

    Args:
        found: n detections, best first; with NMS, copies have the score 0.
        expected: n or more detections, best first, without NMS.
        nms: NMS threshold of the post-processor.

    Returns:
        The difference, in the unit of the boxes or of the scores. It is infinite if a number is not finite, a label occurs more
        often than expected, a copy was not suppressed, or a detection that is not a copy was suppressed.
    """
    kept = (found.scores != 0) | (nms == 1)
    if nms < 1 and not _copies_are(~kept, found, nms):
        return math.inf
    ranks = len(found.scores) if nms == 1 else 1  # the best one is never a copy
    largest = _largest(found.scores[:ranks] - expected.scores[:ranks])
    for label in found.labels[kept].unique():
        here, there = kept & (found.labels == label), expected.labels == label
        of_boxes = (found.boxes_xyxy[here][:, None] - expected.boxes_xyxy[there]).abs().amax(-1)
        of_scores = (found.scores[here][:, None] - expected.scores[there]).abs()
        cost = torch.maximum(of_boxes, of_scores)
        if not cost.isfinite().all() or cost.shape[0] > cost.shape[1]:
            return math.inf
        largest = max(largest, _largest(cost[linear_sum_assignment(cost)]))
    return largest


def _copies_are(copies: Tensor, found: Detections, nms: float) -> bool:
    """Whether each detection marked in ``copies`` (n,) bool overlaps an unmarked one of the same class by more than ``nms``, and no
    two unmarked ones overlap by as much."""
    overlap = intersection_over_union(found.boxes_xyxy[:, None].float(), found.boxes_xyxy[None].float())
    overlap = overlap.masked_fill(found.labels[:, None] != found.labels, 0).fill_diagonal_(0)
    of_copies, of_others = overlap[copies][:, ~copies], overlap[~copies][:, ~copies]
    return bool((of_copies > nms - NEAR).any(1).all() and (of_others < nms + NEAR).all())


def draw_images(canvas: Canvas, stride: int, seed: int = 0) -> list[Tensor]:
    """Coloured patches with noise, (3, h, w) uint8 each, of different sizes up to the canvas."""
    generator = torch.Generator().manual_seed(seed)
    images = []
    for index in (number % 8 for number in range(canvas.batch)):
        height = canvas.height - stride // 3 if index % 2 == 0 else canvas.height * 2 // (3 + index)
        width = canvas.width - stride // 2 if index % 3 == 0 else canvas.width * 3 // (4 + index)
        patches = torch.rand(1, 3, 5, 7, generator=generator) * 200
        noise = torch.rand(3, height, width, generator=generator) * 55
        images.append((F.interpolate(patches, (height, width))[0] + noise).to(torch.uint8))
    return images


def _largest(differences: Tensor) -> float:
    largest = differences.abs().max().item() if differences.numel() else 0.0
    return math.inf if math.isnan(largest) else largest
