# SPDX-License-Identifier: Apache-2.0
"""One-to-many supervision of the same queries (MS-DETR): what matches, the loss, the layers, and settings that cannot be."""

import math
import re

import pytest
import torch
from test_deformable_detr import DEFORMABLE, VARIANTS
from test_models import alone_and_together, build, draw_images
from test_training_queries import NOTHING, TARGETS, batch
from tiny import DEFORMABLE as TINY
from tiny import random_config
from torchvision.ops import box_iou, sigmoid_focal_loss

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.common.boxes import cxcywh_to_xyxy
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import Predictions, Targets
from cpvt_det.losses import FocalClassification, HungarianMatcher, OneToManyMatcher, SetCriterion
from cpvt_det.losses.matcher import PaddedTargets

MIXED = {**DEFORMABLE, "DETECTOR__BOX_REFINEMENT": True, "DETECTOR__MIXED_SUPERVISION": True, "DETR__DROPOUT": 0.0}
MIXED["POSITION__NAME"] = "sine"
KINDS = {
    "one stage": MIXED,
    "two stages": {**MIXED, **VARIANTS["two_stage"], "QUERIES__NAME": "mixed", "DETECTOR__LOOK_FORWARD_TWICE": True},
    "DINO": {**MIXED, **VARIANTS["two_stage"], "QUERIES__NAME": "mixed", "DETECTOR__FINAL_NORM": True, "QUERIES__DENOISING": 7},
}


def predicted(seed=0, layers=2, queries=20, near=True):
    """Boxes, many of which are near one of an object's."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(layers, 3, queries, 3, generator=generator, dtype=torch.float64)
    boxes = 0.3 + 0.4 * torch.rand(layers, 3, queries, 4, generator=generator, dtype=torch.float64)
    if near:
        for image, target in enumerate(TARGETS):
            for number, box in enumerate(target.boxes_cxcywh):
                noise = 0.03 * torch.randn(layers, 5, 4, generator=generator, dtype=torch.float64)
                boxes[:, image, 5 * number : 5 * number + 5] = box + noise
    return Predictions(logits, boxes)


def slow_pairs(logits, boxes, target, matches, threshold):
    """One layer and image, in Python floats: {query: object}."""
    scores = [
        [
            0.7 * float(box_iou(cxcywh_to_xyxy(wanted[None].double()), cxcywh_to_xyxy(box[None])))
            + 0.3 / (1 + math.exp(-float(logit[label])))
            for box, logit in zip(boxes, logits, strict=True)
        ]
        for label, wanted in zip(target.labels.tolist(), target.boxes_cxcywh, strict=True)
    ]
    queries = range(len(boxes))
    best = {max(queries, key=row.__getitem__) for row in scores}
    owners = [max(range(len(scores)), key=lambda number: scores[number][query]) for query in queries] if scores else []
    counted = [query for query in queries if scores and (scores[owners[query]][query] >= threshold or query in best)]
    chosen = {}
    for number, row in enumerate(scores):
        count = min(matches, sum(owners[query] == number for query in counted))
        for query in sorted(queries, key=lambda query: -row[query])[:count]:
            if query not in chosen or scores[chosen[query]][query] < row[query]:
                chosen[query] = number
    return chosen


@pytest.mark.parametrize(("matches", "threshold"), [(6, 0.4), (1, 0.4), (3, 0.6), (100, 0.05), (6, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_those_of_the_rule_in_python(matches, threshold, seed):
    """Three images with 2, no and 3 objects, two layers."""
    predictions, padded = predicted(seed), PaddedTargets.from_targets(TARGETS, torch.float64)
    found = OneToManyMatcher(matches, threshold)(predictions, padded)
    pairs = list(zip(*(part.tolist() for part in (found.layer, found.image, found.query, found.target)), strict=True))
    assert pairs == sorted(pairs)
    for layer in range(2):
        for image, target in enumerate(TARGETS):
            expected = slow_pairs(predictions.logits[layer, image], predictions.boxes[layer, image], target, matches, threshold)
            assert {query: number for at, of, query, number in pairs if (at, of) == (layer, image)} == expected


def test_an_object_that_nothing_fits_has_its_best_query():
    """Overlaps are small and classes improbable: each object has the one query that fits it best, or none that another owns."""
    predictions = predicted(near=False)
    found = OneToManyMatcher(6, 0.99)(predictions, PaddedTargets.from_targets(TARGETS, torch.float64))
    assert 2 <= len(found.query) <= 2 * 5 and 1 not in found.image.tolist()


@pytest.mark.parametrize("count", [1, 3])
def test_images_without_objects_have_no_pairs(count):
    predictions = predicted()
    nothing = Predictions(predictions.logits[:, :count], predictions.boxes[:, :count])
    found = OneToManyMatcher()(nothing, PaddedTargets.from_targets([NOTHING] * count, torch.float64))
    assert [len(part) for part in (found.layer, found.image, found.query, found.target)] == [0] * 4


def test_fewer_queries_than_matches():
    found = OneToManyMatcher(6, 0.01)(predicted(queries=15), PaddedTargets.from_targets(TARGETS, torch.float64))
    few = OneToManyMatcher(60, 0.01)(predicted(queries=15), PaddedTargets.from_targets(TARGETS, torch.float64))
    assert 0 < len(found.query) <= len(few.query) <= 2 * 2 * 15


def test_the_loss_is_that_of_these_pairs_over_the_number_of_objects():
    """The focal loss of torchvision with the weight 2, and the L1 distance with 5, over 5 objects, not over the pairs."""
    many, main = predicted(4), predicted(5, queries=4, near=False)
    criterion = SetCriterion(HungarianMatcher(FocalClassification(3)), class_weight=1.0)
    predictions = Predictions(main.logits, main.boxes, one_to_many=many)
    losses, plain = (criterion(given, TARGETS).losses for given in (predictions, main))
    matches = criterion.one_to_many(many, PaddedTargets.from_targets(TARGETS, torch.float64))
    wanted, distance = torch.zeros_like(many.logits), 0.0
    for layer, image, query, number in zip(matches.layer, matches.image, matches.query, matches.target, strict=True):
        wanted[layer, image, query, TARGETS[image].labels[number]] = 1
        distance += float((many.boxes[layer, image, query] - TARGETS[image].boxes_cxcywh[number]).abs().sum())
    expected = 2 * sigmoid_focal_loss(many.logits, wanted, reduction="sum").item() / 5
    assert losses["loss_many_class"].item() == pytest.approx(expected, rel=1e-10)
    assert losses["loss_many_l1"].item() == pytest.approx(5 * distance / 5, rel=1e-6)
    assert {name: float(value) for name, value in losses.items() if "many" not in name} == {n: float(v) for n, v in plain.items()}


def test_numbers_that_are_not_finite_are_told_by_image():
    many = predicted()
    many.logits[1, 2, 0, 0] = math.nan
    main = predicted(1)
    found = SetCriterion(HungarianMatcher(FocalClassification(3)))(Predictions(main.logits, main.boxes, one_to_many=many), TARGETS)
    assert found.finite.tolist() == [True, True, False]


# The layers


def test_candidates_are_what_queries_are_before_they_see_each_other():
    """The first layer step by step: cross-attention, then self-attention; each with its own feed-forward network and norms."""
    model = build(**KINDS["one stage"], BACKBONE__NORM="FrozenBN").train()
    layer, calls = model.transformer.decoder.layers[0], []
    layer.register_forward_hook(lambda _, given, made: calls.append((given, made)))
    predictions = model(*batch(), TARGETS)
    (queries, positions, points, memory, levels, _), (made, candidates) = calls[0]
    seen = layer.norm1(queries + layer.cross_attn(queries + positions, points, memory, levels))
    torch.testing.assert_close(candidates, layer.norm4(seen + layer.linear4(layer.linear3(seen).relu())), atol=1e-12, rtol=0)
    placed = seen + positions
    met = layer.norm2(seen + layer.self_attn(placed, placed, seen))
    torch.testing.assert_close(made, layer.norm3(met + layer.linear2(layer.linear1(met).relu())), atol=1e-12, rtol=0)
    many = predictions.one_to_many
    torch.testing.assert_close(many.logits[0], model.class_embed[0](candidates), atol=1e-12, rtol=0)
    start = torch.cat((points[:, :, 0] / levels.valid_ratios[:, :1], torch.full_like(points[:, :, 0], 0.5)), -1).logit()
    torch.testing.assert_close(many.boxes[0], (model.bbox_embed[0](candidates) + start).sigmoid(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_of_the_real_queries_and_in_training_alone(kind):
    model = build(**KINDS[kind], **({"QUERIES__HYBRID": 4} if kind == "DINO" else {}), BACKBONE__NORM="FrozenBN").train()
    found = model(*batch(), TARGETS)
    assert found.one_to_many.logits.shape == found.logits.shape == (3, 3, 6, 3)
    assert found.one_to_many.boxes.shape == (3, 3, 6, 4)
    evaluated = model.eval()(*batch(), TARGETS)
    assert evaluated.one_to_many is None
    torch.testing.assert_close(evaluated.boxes, found.boxes, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns_with_and_without_objects(kind):
    for targets in (TARGETS, [NOTHING] * 3):
        model = build(**KINDS[kind], BACKBONE__FREEZE_AT=0).train()
        losses = SetCriterion(HungarianMatcher(FocalClassification(3)))(model(*batch(), targets), targets).losses
        sum(losses.values()).backward()
        assert [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None] == []
        aux = [value.grad.abs().sum() for name, value in model.named_parameters() if "linear4.weight" in name]
        assert len(aux) == 3 and all(gradient > 0 for gradient in aux)


def test_an_image_gets_the_same_answer_whatever_it_is_batched_with():
    model = build(**KINDS["two stages"]).eval().requires_grad_(False)
    assert alone_and_together(model, draw_images()) <= 1e-10


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"CRITERION__MANY_MATCHES": 0}, "many_matches must be at least 1, got 0"),
        ({"CRITERION__MANY_THRESHOLD": 0.0}, "many_threshold must be above 0 and at most 1, got 0.0"),
        ({"CRITERION__MANY_THRESHOLD": 1.5}, "many_threshold must be above 0 and at most 1, got 1.5"),
        (
            {"CRITERION__CLASSIFICATION__NAME": "softmax", "DETECTOR__TWO_STAGE": False},
            "MIXED_SUPERVISION needs sigmoid scores for its matching",
        ),
        (
            {"META_ARCHITECTURE": "CPVTDetr", "CRITERION__CLASSIFICATION__NAME": "softmax", "DETECTOR__TWO_STAGE": False},
            "unknown option of MODEL.META_ARCHITECTURE 'CPVTDetr' 'mixed_supervision'",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(more, message):
    keys = {**TINY, "MODEL__DETECTOR__MIXED_SUPERVISION": True, **{f"MODEL__{key}": value for key, value in more.items()}}
    if "META_ARCHITECTURE" in more:
        keys = {key: value for key, value in keys.items() if "DETECTOR" not in key or "MIXED" in key or "META" in key}
    cfg = random_config(**keys)
    with pytest.raises(ConfigError, match=re.escape(message)):
        (build_criterion if message.startswith("many") else build_detector)(cfg)


def test_the_criterion_of_a_config_has_its_numbers():
    keys = {**TINY, "MODEL__DETECTOR__MIXED_SUPERVISION": True, "MODEL__CRITERION__MANY_CLASS_WEIGHT": 0.5}
    criterion = build_criterion(random_config(**keys, MODEL__CRITERION__MANY_MATCHES=4, MODEL__CRITERION__MANY_THRESHOLD=0.3))
    assert (criterion.one_to_many.matches, criterion.one_to_many.threshold) == (4, 0.3)
    assert criterion.many_weights == {"loss_class": 0.5, "loss_l1": 5.0, "loss_giou": 2.0}


@pytest.mark.parametrize(("own", "many"), [(0.0, 2.0), (2.0, 0.0), (0.0, 0.0)])
def test_each_class_loss_is_left_out_by_its_own_weight(own, many):
    weights = {"MODEL__CRITERION__CLASS_WEIGHT": own, "MODEL__CRITERION__MANY_CLASS_WEIGHT": many}
    cfg = random_config(**{**TINY, "MODEL__DETECTOR__MIXED_SUPERVISION": True, **weights})
    generator = torch.Generator().manual_seed(0)
    boxes = 0.2 + 0.3 * torch.rand(1, 2, 6, 4, generator=generator)
    predictions = Predictions(torch.randn(1, 2, 6, cfg.MODEL.NUM_CLASSES, generator=generator), boxes)
    predictions.one_to_many = predictions
    losses = build_criterion(cfg)(predictions, [Targets(torch.tensor([0]), boxes[0, i, :1]) for i in range(2)]).losses
    assert ("loss_class" in losses, "loss_many_class" in losses) == (own > 0, many > 0)
    assert {"loss_l1", "loss_many_l1", "loss_giou", "loss_many_giou"} <= losses.keys()
