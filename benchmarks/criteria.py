# SPDX-License-Identifier: Apache-2.0
"""Matcher and criterion of each implementation, with the same settings and the same calls on the same predictions."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.foreign_models import imported, without_cuda
from benchmarks.peers import official_deformable_detr, official_detr
from cpvt_det.common.structures import Predictions, Targets
from cpvt_det.losses import HungarianMatcher, SetCriterion, make_classification
from cpvt_det.losses.matcher import PaddedTargets

CLASSES = 91
LAYERS = 6
KINDS = {"softmax": CLASSES + 1, "focal": CLASSES, "denoising": CLASSES}
"""By name the logits of a query: of DETR, of Deformable-DETR, of DINO."""
CLASS_COST = {"softmax": 1.0, "focal": 2.0, "denoising": 2.0}
PAIRS = 100
"""Of denoising queries, positive and negative, for which DINO makes groups."""
L1, GIOU, BACKGROUND, ALPHA = 5.0, 2.0, 0.1, 0.25
PARTS = ["labels", "boxes", "cardinality"]  # what the official code and transformers expect

Pairs = list[tuple[Tensor, Tensor]]
"""For each image the matched queries and their targets."""


@dataclass(frozen=True)
class Criterion:
    """One implementation.

    Args:
        total: function of logits (D, B, Q, K') and boxes (D, B, Q, 4), stacked or as a sequence of D, that returns the weighted
            loss of all layers.
        match: function of the same arguments that returns, for each layer, the pairs of each image.
        stacked: True: the layers are given as one tensor.
    """

    total: Callable[[Any, Any], Tensor]
    match: Callable[[Any, Any], list[Pairs]]
    stacked: bool = False


def groups_of(targets: Sequence[Targets]) -> tuple[int, int]:
    """The number of denoising groups, and of queries in each: a positive and a negative for every object of the fullest image."""
    most = max(map(len, targets))
    return max(1, PAIRS // most), 2 * most


def num_denoising(kind: str, targets: Sequence[Targets]) -> int:
    """The number of denoising queries, which are before the others."""
    groups, size = groups_of(targets)
    return groups * size if kind == "denoising" else 0


def our_criterion(kind: str, targets: Sequence[Targets]) -> Criterion:
    matcher = HungarianMatcher(make_classification("focal" if kind == "denoising" else kind, CLASSES), CLASS_COST[kind], L1, GIOU)
    criterion = SetCriterion(matcher, class_weight=1.0, l1_weight=L1, giou_weight=GIOU)
    count, (groups, size) = num_denoising(kind, targets), groups_of(targets)
    here = torch.arange(size)
    objects = torch.stack([here.where(here < len(target), -1).repeat(groups) for target in targets]).to(targets[0].labels.device)

    def total(logits: Tensor, boxes: Tensor) -> Tensor:
        predictions = Predictions(logits[:, :, count:], boxes[:, :, count:])
        if count:
            predictions.denoising = Predictions(logits[:, :, :count], boxes[:, :, :count], objects=objects, groups=groups)
        return sum(criterion(predictions, targets).losses.values())

    def match(logits: Tensor, boxes: Tensor) -> list[Pairs]:
        logits, boxes = logits[:, :, count:], boxes[:, :, count:]
        (found,) = matcher((Predictions(logits, boxes), PaddedTargets.from_targets(targets, boxes.dtype)))
        here = [[(found.layer == layer) & (found.image == i) for i in range(len(targets))] for layer in range(len(logits))]
        return [[(found.query[pair], found.target[pair]) for pair in images] for images in here]

    return Criterion(total, match, stacked=True)


def official_criterion(kind: str, targets: Sequence[Targets], folder: Path) -> Criterion:
    """The criterion of a checkout: facebookresearch/detr for ``softmax``, fundamentalvision/Deformable-DETR for ``focal``."""
    official = official_detr(folder) if kind == "softmax" else official_deformable_detr(folder)
    matcher = official.HungarianMatcher(cost_class=CLASS_COST[kind], cost_bbox=L1, cost_giou=GIOU)
    weights = {f"loss_{part}{layer}": w for layer in _suffixes() for part, w in (("ce", 1.0), ("bbox", L1), ("giou", GIOU))}
    kinds = {"softmax": {"eos_coef": BACKGROUND}, "focal": {"focal_alpha": ALPHA}}
    criterion = official.SetCriterion(CLASSES, matcher, weights, losses=PARTS, **kinds[kind])
    criterion.to(targets[0].labels.device)
    wanted = [{"labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]

    def total(logits: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        *auxiliary, last = ({"pred_logits": a, "pred_boxes": b} for a, b in zip(logits, boxes, strict=True))
        losses = criterion({**last, "aux_outputs": auxiliary}, wanted)
        return sum(losses[name] * weight for name, weight in weights.items())

    def match(logits: Sequence[Tensor], boxes: Sequence[Tensor]) -> list[Pairs]:
        return [matcher({"pred_logits": a, "pred_boxes": b}, wanted) for a, b in zip(logits, boxes, strict=True)]

    return Criterion(total, match)


def dino_criterion(targets: Sequence[Targets], folder: Path) -> Criterion:
    """The criterion of a checkout of IDEA-Research/DINO, without its proposals."""
    detector, matchers, _ = imported(folder, "models.dino.dino", "models.dino.matcher")
    matcher = matchers.HungarianMatcher(CLASS_COST["denoising"], L1, GIOU)
    parts = (("ce", 1.0), ("bbox", L1), ("giou", GIOU))
    weights = {f"loss_{part}{group}{layer}": w for group in ("", "_dn") for layer in _suffixes() for part, w in parts}
    criterion = detector.SetCriterion(CLASSES, matcher, weights, ALPHA, PARTS)
    wanted = [{"labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
    count, (groups, _) = num_denoising("denoising", targets), groups_of(targets)

    def of_layers(logits: Sequence[Tensor], boxes: Sequence[Tensor], queries: slice) -> dict[str, Any]:
        *auxiliary, last = ({"pred_logits": a[:, queries], "pred_boxes": b[:, queries]} for a, b in zip(logits, boxes, strict=True))
        return {**last, "aux_outputs": auxiliary}

    def total(logits: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        known = {"output_known_lbs_bboxes": of_layers(logits, boxes, slice(count)), "pad_size": count, "num_dn_group": groups}
        with without_cuda() if logits[0].device.type == "cpu" else contextlib.nullcontext():
            losses = criterion({**of_layers(logits, boxes, slice(count, None)), "dn_meta": known}, wanted)
        return sum(losses[name] * weight for name, weight in weights.items())

    def match(logits: Sequence[Tensor], boxes: Sequence[Tensor]) -> list[Pairs]:
        return [
            matcher({"pred_logits": a[:, count:], "pred_boxes": b[:, count:]}, wanted) for a, b in zip(logits, boxes, strict=True)
        ]

    return Criterion(total, match)


def hf_criterion(kind: str, targets: Sequence[Targets]) -> Criterion:
    """The criterion of transformers' ``DetrForObjectDetection`` and ``DeformableDetrForObjectDetection``."""
    from transformers.loss import loss_deformable_detr as deformable
    from transformers.loss import loss_for_object_detection as detr

    loss = detr.ForObjectDetectionLoss if kind == "softmax" else deformable.DeformableDetrForObjectDetectionLoss
    matcher_class = detr.HungarianMatcher if kind == "softmax" else deformable.DeformableDetrHungarianMatcher
    costs = {"class_cost": CLASS_COST[kind], "bbox_cost": L1, "giou_cost": GIOU}
    config = argparse.Namespace(
        **costs,
        num_labels=CLASSES,
        eos_coefficient=BACKGROUND,
        focal_alpha=ALPHA,
        bbox_loss_coefficient=L1,
        giou_loss_coefficient=GIOU,
        auxiliary_loss=True,
        decoder_layers=LAYERS,
    )
    wanted = [{"class_labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
    device, matcher = targets[0].labels.device, matcher_class(**costs)

    def total(logits: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        return loss(logits[-1], wanted, device, boxes[-1], config, logits, boxes)[0]

    def match(logits: Sequence[Tensor], boxes: Sequence[Tensor]) -> list[Pairs]:
        return [matcher({"logits": a, "pred_boxes": b}, wanted) for a, b in zip(logits, boxes, strict=True)]

    return Criterion(total, match)


def _suffixes() -> list[str]:
    """Of the official names: none for the last layer, numbers for the others."""
    return ["", *(f"_{layer}" for layer in range(LAYERS - 1))]


def target_of_query(pairs: list[Pairs], queries: int) -> Tensor:
    """(D, B, Q) float: which target each query got, -1 for none."""
    found = torch.full((len(pairs), len(pairs[0]), queries), -1.0)
    for layer, images in enumerate(pairs):
        for image, (query, target) in enumerate(images):
            found[layer, image, query.cpu()] = target.cpu().float()
    return found
