# SPDX-License-Identifier: Apache-2.0
"""The classification that is told how well boxes fit, by value: loss and cost against loops over floats."""

import itertools
import math

import pytest
import torch
from test_losses import COUNTS, WEIGHTS, B, D, K, Q, make_batch, make_criterion, slow_giou, slow_matching
from torch import nn

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.common.boxes import cxcywh_to_xyxy, intersection_over_union
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import Predictions, Targets
from cpvt_det.config import get_cfg
from cpvt_det.losses import (
    AlignClassification,
    FocalClassification,
    HungarianMatcher,
    MatchabilityClassification,
    SetCriterion,
    VarifocalClassification,
    make_classification,
)
from cpvt_det.losses.matcher import PaddedTargets

GAMMA = 1.5


def slow_iou(box1, box2):
    """Of two boxes (x, y, w, h), from their sides' overlaps."""
    overlaps = []
    for axis in range(2):
        low = max(box1[axis] - box1[axis + 2] / 2, box2[axis] - box2[axis + 2] / 2)
        high = min(box1[axis] + box1[axis + 2] / 2, box2[axis] + box2[axis + 2] / 2)
        overlaps.append(max(0.0, high - low))
    both = overlaps[0] * overlaps[1]
    return both / (box1[2] * box1[3] + box2[2] * box2[3] - both)


def slow_loss(logits, label, overlap, gamma=GAMMA):
    """The loss of one query: cross-entropy with the target overlap^gamma in its class, p^gamma times that with 0 elsewhere."""
    total = 0.0
    for k, logit in enumerate(logits):
        p = 1 / (1 + math.exp(-logit))
        if k == label:
            target = overlap**gamma
            total += -target * math.log(p) - (1 - target) * math.log(1 - p)
        else:
            total += -(p**gamma) * math.log(1 - p)
    return total


def slow_class_cost(logit, overlap):
    """The focal cost, alpha 0.25 and gamma 2, of the probability times the overlap's root."""
    p = overlap**0.5 / (1 + math.exp(-logit))
    return 0.75 * p**2 * math.log(1 - p + 1e-8) - 0.25 * (1 - p) ** 2 * math.log(p + 1e-8)


def slow_cost(logits, box, label, wanted):
    class_cost = slow_class_cost(logits[label], slow_iou(box, wanted))
    l1 = sum(abs(a - b) for a, b in zip(box, wanted, strict=True))
    return WEIGHTS["class"] * class_cost + WEIGHTS["l1"] * l1 - WEIGHTS["giou"] * slow_giou(box, wanted)


@pytest.fixture
def batch():
    """Predictions of 2 layers for 4 images with 2, 0, 3 and 1 objects, some of which fit."""
    predictions, targets = make_batch(MatchabilityClassification(K))
    with torch.no_grad():
        for image, target in enumerate(targets):
            near = target.boxes_cxcywh[:2] * torch.tensor([1.02, 0.98, 1.1, 0.9], dtype=torch.float64)
            predictions.boxes[:, image, 1 : 1 + len(near)] = near
    return predictions, targets


def test_by_hand():
    """Two queries and one class. The first has p = 1/2 and an overlap of 1/4, to the power of 1.5: 1/8.

    Its loss is -(1/8) log(1/2) - (7/8) log(1/2) = log 2; the second is no object with p = 1/2: 2^-1.5 log 2.
    """
    found = MatchabilityClassification(1).loss(torch.zeros(1, 1, 2, 1), torch.tensor([[[0, 1]]]), torch.tensor([[[0.25, 0.25]]]))
    assert found.tolist() == pytest.approx([(1 + 2**-1.5) * math.log(2)])


def test_the_cost_is_that_of_scores_times_the_root_of_overlaps(batch):
    predictions, targets = batch
    matcher = make_criterion(MatchabilityClassification(K)).matcher
    cost = matcher.cost(predictions, PaddedTargets.from_targets(targets, torch.float64)).detach()
    for layer, image, query in itertools.product(range(D), range(B), range(Q)):
        logits, box = predictions.logits[layer, image, query].tolist(), predictions.boxes[layer, image, query].tolist()
        for g in range(COUNTS[image]):
            label, wanted = int(targets[image].labels[g]), targets[image].boxes_cxcywh[g].tolist()
            assert float(cost[layer, image, g, query]) == pytest.approx(slow_cost(logits, box, label, wanted), abs=1e-12)


@pytest.mark.parametrize("kind", [MatchabilityClassification, VarifocalClassification, AlignClassification])
@pytest.mark.parametrize("logit", [-10.0, -4.6, -2.0, 0.0, 1.0, 10.0])
def test_of_two_boxes_with_the_same_scores_the_one_that_fits_is_cheaper(kind, logit):
    overlaps = torch.linspace(0, 1, 21, dtype=torch.float64).view(1, 1, 1, 21)
    cost = kind(K).cost(torch.full((1, 1, 21, K), logit, dtype=torch.float64), torch.tensor([[1]]), overlaps)[0, 0, 0]
    assert (cost.diff() < 0).all()


@pytest.mark.parametrize("kind", [MatchabilityClassification, VarifocalClassification, AlignClassification])
def test_of_two_boxes_that_fit_alike_the_one_with_the_higher_score_is_cheaper(kind):
    logits = torch.linspace(-10, 10, 21, dtype=torch.float64).view(1, 1, 21, 1).expand(1, 1, 21, K)
    cost = kind(K).cost(logits, torch.tensor([[1]]), torch.full((1, 1, 1, 21), 0.3, dtype=torch.float64))[0, 0, 0]
    assert (cost.diff() < 0).all()


def test_losses_are_the_sums_over_layers_and_images(batch):
    """The second image has no object; the matching by trying every assignment."""
    predictions, targets = batch
    found = make_criterion(MatchabilityClassification(K))(predictions, targets).losses
    expected = {"loss_class": 0.0, "loss_l1": 0.0}
    for layer, (image, target) in itertools.product(range(D), enumerate(targets)):
        logits, boxes = predictions.logits[layer, image].tolist(), predictions.boxes[layer, image].tolist()
        labels, wanted = target.labels.tolist(), target.boxes_cxcywh.tolist()
        cost = [
            [slow_cost(own, box, *pair) for pair in zip(labels, wanted, strict=True)]
            for own, box in zip(logits, boxes, strict=True)
        ]
        pairs = dict(slow_matching(cost))
        for query in range(Q):
            g = pairs.get(query)
            overlap = slow_iou(boxes[query], wanted[g]) if query in pairs else 0.0
            expected["loss_class"] += 0.7 * slow_loss(logits[query], labels[g] if query in pairs else None, overlap) / sum(COUNTS)
            if query in pairs:
                distance = sum(abs(a - b) for a, b in zip(boxes[query], wanted[g], strict=True))
                expected["loss_l1"] += 5.0 * distance / sum(COUNTS)
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_the_gradient_takes_weights_and_overlaps_for_constants(gamma):
    """Against autograd over the definition, up to logits of 30 in size."""
    logits = torch.linspace(-30, 30, 60, dtype=torch.float64).view(1, 4, 5, K).requires_grad_()
    classes, overlaps = torch.arange(20).view(1, 4, 5) % (K + 1), torch.rand(1, 4, 5, dtype=torch.float64)
    found = MatchabilityClassification(K, gamma).loss(logits, classes, overlaps)
    wanted = nn.functional.one_hot(classes, K + 1)[..., :K].double()
    weights = wanted + (1 - wanted) * logits.detach().sigmoid() ** gamma
    target = wanted * overlaps[..., None] ** gamma
    expected = nn.functional.binary_cross_entropy_with_logits(logits, target, weights, reduction="sum")
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (found, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12


def test_the_class_loss_moves_no_box(batch):
    predictions, targets = batch
    loss = make_criterion(MatchabilityClassification(K))(predictions, targets).losses["loss_class"]
    assert torch.autograd.grad(loss, predictions.boxes, allow_unused=True) == (None,)


@pytest.mark.parametrize("counts", [[0, 0], [1, 0], [9, 9]])
def test_every_head_gets_a_finite_gradient_without_objects_too(counts):
    predictions, targets = make_batch(MatchabilityClassification(K), counts)
    losses = make_criterion(MatchabilityClassification(K))(predictions, targets).losses
    sum(losses.values()).backward()
    assert all(value.isfinite().all() for value in (*losses.values(), predictions.logits.grad, predictions.boxes.grad))
    assert (predictions.logits.grad != 0).any(-1).all()


def test_boxes_without_area_have_no_overlap():
    corner = torch.tensor([0.5, 0.5, 0.0, 0.0])
    logits, boxes = torch.zeros(1, 1, 2, K, requires_grad=True), corner.expand(1, 1, 2, 4).clone().requires_grad_()
    losses = make_criterion(MatchabilityClassification(K))(Predictions(logits, boxes), [Targets(torch.tensor([0]), corner[None])])
    sum(losses.losses.values()).backward()
    assert logits.grad.isfinite().all() and boxes.grad.isfinite().all()


def test_intersection_over_union_by_hand_and_by_loops():
    """Unit squares: the same, 1; side by side, 0; half over, (1/2) / (3/2)."""
    square = torch.tensor([0.0, 0.0, 1.0, 1.0])
    other = torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 2.0, 1.0], [0.5, 0.0, 1.5, 1.0], [0.3, 0.3, 0.3, 0.3]])
    assert intersection_over_union(square, other).tolist() == pytest.approx([1, 0, 1 / 3, 0])
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(n, 4, generator=generator, dtype=torch.float64) for n in (9, 7))
    found = intersection_over_union(cxcywh_to_xyxy(first)[:, None], cxcywh_to_xyxy(second))
    for row, one in enumerate(first.tolist()):
        assert found[row].tolist() == pytest.approx([slow_iou(one, two) for two in second.tolist()], abs=1e-12)


# Names


def test_it_is_chosen_by_name_and_has_its_power():
    assert make_classification("mal", K).gamma == GAMMA
    cfg = get_cfg()
    cfg.MODEL.NUM_CLASSES, cfg.MODEL.CRITERION.CLASSIFICATION.NAME, cfg.MODEL.CRITERION.CLASSIFICATION.GAMMA = K, "mal", 2.0
    assert build_criterion(cfg).classification.gamma == 2.0
    cfg.MODEL.CRITERION.CLASSIFICATION.NAME = "softmax"
    with torch.device("meta"), pytest.raises(ConfigError, match="unknown option of classification 'softmax' 'gamma'"):
        build_detector(cfg)


def test_a_kind_of_ones_own_need_not_know_of_overlaps():
    class Own:
        """Focal, without the attribute."""

        def __init__(self):
            self.focal = FocalClassification(K)
            self.num_classes = K

        def __getattr__(self, name):
            if name in ("uses_overlaps", "focal"):
                raise AttributeError(name)
            return getattr(self.focal, name)

    predictions, targets = make_batch(FocalClassification(K))
    found, expected = (
        SetCriterion(HungarianMatcher(kind))(predictions, targets).losses for kind in (Own(), FocalClassification(K))
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())
