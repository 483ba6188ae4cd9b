# SPDX-License-Identifier: Apache-2.0
"""From samples to predictions, and from predictions to detections in pixels of the original images.

Place in the pipeline: during evaluation, after ``models/`` and before the rest of ``evaluation/``.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cpvt_det.common.boxes import cxcywh_to_xyxy, intersection_over_union
from cpvt_det.common.exporting import in_steps, is_exporting
from cpvt_det.common.structures import ClassLogits, Detections, Predictions, Size

CANDIDATES = 2
"""Detections that NMS looks at, per detection to return: the copies that it drops would otherwise take the places of others."""


class ScoreDecoder(Protocol):
    """The method of a classification that post-processing needs; every classification in ``losses/`` has it."""

    def decode(self, logits: Tensor, max_detections: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, labels and query indices, as :meth:`cpvt_det.losses.SoftmaxClassification.decode`."""


class PostProcessor:
    """Decodes the last layer's scores and scales its boxes.

    Args:
        classification: the classification that the model was trained with.
        max_detections: largest number of detections per image.
        nms: if two detections of a class have an intersection over union above this threshold, the detection with the lower score
            gets the score 0 and comes last. A threshold of 1 turns NMS off.

    Attributes:
        outputs: names of the outputs of :meth:`decode`, for exported programs.

    Raises:
        ValueError: ``max_detections`` below 1, or ``nms`` outside (0, 1].
    """

    outputs = ("boxes", "scores", "labels")

    def __init__(self, classification: ScoreDecoder, max_detections: int = 100, nms: float = 1.0):
        if max_detections < 1:
            raise ValueError(f"max_detections must be at least 1, got {max_detections}")
        if not 0 < nms <= 1:
            raise ValueError(f"nms must be above 0 and at most 1, got {nms}")
        self.classification = classification
        self.max_detections = max_detections
        self.nms = nms

    @torch.no_grad()
    def __call__(self, predictions: Predictions, original_sizes: Sequence[Size]) -> list[Detections]:
        """Decode.

        Args:
            predictions: predictions for B images, with boxes relative to the unpadded image.
            original_sizes: (h, w) of each image file.

        Returns:
            Detections of each image, clipped to it, best first.
        """
        boxes, scores, labels = self.decode(predictions)
        scale = boxes.new_tensor([(w, h, w, h) for h, w in original_sizes])[:, None]
        return [Detections(*parts) for parts in zip(boxes * scale, scores, labels, strict=True)]

    def decode(self, predictions: Predictions | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The best of the last layer's predictions.

        Args:
            predictions: predictions for B images, with boxes relative to the unpadded image. The output of an exported program, a
                tuple, is accepted too; it is already decoded.

        Returns:
            Boxes (B, n, 4) float, xyxy in [0, 1], relative to the unpadded image; scores (B, n) float, best first; labels (B, n)
            int64.
        """
        return predictions if isinstance(predictions, tuple) else self.rank(predictions)[:3]

    def rank(self, predictions: Predictions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The result of :meth:`decode`, and the index of each detection's query, (B, n) int64."""
        count = self.max_detections if self.nms == 1 else CANDIDATES * self.max_detections
        scores, labels, queries = self.classification.decode(predictions.logits[-1], count)
        boxes = predictions.boxes[-1].gather(1, queries[..., None].expand(-1, -1, 4))
        boxes = cxcywh_to_xyxy(boxes).clamp(0, 1)
        if self.nms < 1:
            scores = without_copies(boxes, scores, labels, self.nms)
            scores, order = scores.topk(min(self.max_detections, scores.shape[1]))
            boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
            labels, queries = labels.gather(1, order), queries.gather(1, order)
        return boxes, scores, labels, queries


def without_copies(boxes_xyxy: Tensor, scores: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """Scores of detections. A score becomes 0 if the detection's intersection over union with a better detection of the same
    class is above a threshold.

    A box whose score was set to 0 suppresses no other box. Which boxes are kept is computed for all boxes at once, from an estimate
    that is repeated until it stays the same: after k repetitions the best k boxes are right, and usually many more. An exported
    program goes from box to box instead. torchvision's ``batched_nms`` shifts the boxes of each class, which rounds them.

    Args:
        boxes_xyxy: (B, n, 4) float, in any unit.
        scores: (B, n) float, best first.
        labels: (B, n) int64.
        threshold: largest intersection over union that two detections of a class may have, above 0 and below 1.

    Returns:
        (B, n) float.
    """
    overlap = intersection_over_union(boxes_xyxy[:, :, None], boxes_xyxy[:, None])
    ranks = torch.arange(scores.shape[1], device=scores.device)
    stands_for = (overlap > threshold) & (labels[:, :, None] == labels[:, None]) & (ranks[:, None] < ranks)  # (B, better, n)
    kept = torch.ones_like(scores, dtype=torch.bool)
    if not is_exporting():
        while not torch.equal(kept, found := ~(stands_for & kept[:, :, None]).any(1)):
            kept = found
        return scores * kept

    def leave_out(rank: Tensor, kept: Tensor, stands_for: Tensor) -> tuple[Tensor, Tensor]:
        return kept & ~(stands_for.index_select(1, rank)[:, 0] & kept.index_select(1, rank)), stands_for

    return scores * in_steps(leave_out, (kept, stands_for), scores.shape[1])[0]


class ClassScores:
    """Decodes the answer of a classifier."""

    outputs = ("scores",)

    def decode(self, predictions: ClassLogits | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(B, K) float scores of the classes, which sum to 1. The output of an exported program, a tuple, already contains these
        scores.
        """
        return predictions if isinstance(predictions, tuple) else (predictions.scores(),)


@torch.no_grad()
def detect(detector: nn.Module, postprocess: PostProcessor, samples: Sequence[Mapping[str, Any]]) -> list[Detections]:
    """Detect the objects of samples, in pixels of the original images.

    Args:
        detector: a detector in evaluation mode.
        postprocess: post-processing for the detector's classification.
        samples: dicts with ``image`` (3, h, w) in [0, 255], and ``height`` and ``width`` of the original.
    """
    batch = detector.preprocess([sample["image"] for sample in samples])
    predictions = detector(batch.images, batch.padding_mask)
    return [found.cpu() for found in postprocess(predictions, [(sample["height"], sample["width"]) for sample in samples])]


@torch.no_grad()
def classify(classifier: nn.Module, samples: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """(K,) float scores of the classes for each sample, on the CPU; they sum to 1.

    Args:
        classifier: a classifier in evaluation mode.
        samples: dicts with ``image`` (3, h, w) in [0, 255].
    """
    batch = classifier.preprocess([sample["image"] for sample in samples])
    (scores,) = ClassScores().decode(classifier(batch.images, batch.padding_mask))
    return list(scores.cpu())


@contextlib.contextmanager
def evaluation_mode(detector: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; afterwards the previous mode is restored, even after an error."""
    training = detector.training
    detector.eval()
    try:
        yield
    finally:
        detector.train(training)
