# SPDX-License-Identifier: Apache-2.0
"""The varifocal loss and the IoU-aware cross-entropy by value; what all that know overlaps share is in test_matchability.py."""

import itertools
import math

import pytest
import torch
from test_losses import B, D, K, Q, make_batch, make_criterion

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.common.errors import ConfigError
from cpvt_det.config import get_cfg
from cpvt_det.losses import AlignClassification, VarifocalClassification
from cpvt_det.losses.matcher import PaddedTargets

KINDS = {"varifocal": VarifocalClassification, "ia_bce": AlignClassification}


def slow_positive(name, logit, overlap):
    """The loss of a query's own class, by the papers' formulas."""
    p = 1 / (1 + math.exp(-logit))
    if name == "varifocal":
        return -overlap * (overlap * math.log(p) + (1 - overlap) * math.log(1 - p))
    target = max(0.01, p**0.25 * overlap**0.75)
    return -target * math.log(p) - (1 - target) * math.log(1 - p)


def slow_negative(name, logit):
    p = 1 / (1 + math.exp(-logit))
    return -(0.75 if name == "varifocal" else 1.0) * p**2 * math.log(1 - p)


def drawn():
    """Logits (2, 3, 5, K), classes of which some are none, and overlaps, of which some are 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 3, 5, K, generator=generator, dtype=torch.float64)
    classes = torch.randint(K + 1, (2, 3, 5), generator=generator)
    overlaps = torch.rand(2, 3, 5, generator=generator, dtype=torch.float64)
    overlaps[0, 0, :3], classes[0, 0, :3] = torch.tensor([0.0, 1.0, 0.001]), torch.tensor([0, 1, 0])
    return logits, classes, overlaps


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_the_papers_formula_query_by_query(name):
    logits, classes, overlaps = drawn()
    found = KINDS[name](K).loss(logits, classes, overlaps)
    for layer in range(2):
        expected = 0.0
        for image, query, k in itertools.product(range(3), range(5), range(K)):
            logit, overlap = float(logits[layer, image, query, k]), float(overlaps[layer, image, query])
            is_own = k == int(classes[layer, image, query])
            expected += slow_positive(name, logit, overlap) if is_own else slow_negative(name, logit)
        assert found[layer].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_take_for_constants_what_the_authors_do(name):
    """Targets, and in the varifocal loss the weights of negatives too; up to logits of 30 in size, against autograd."""
    logits = torch.linspace(-30, 30, 60, dtype=torch.float64).view(1, 4, 5, K).requires_grad_()
    classes, overlaps = torch.arange(20).view(1, 4, 5) % (K + 1), torch.rand(1, 4, 5, dtype=torch.float64)
    found = KINDS[name](K).loss(logits, classes, overlaps)
    own = torch.nn.functional.one_hot(classes, K + 1)[..., :K].double()
    p, q = logits.sigmoid(), overlaps[..., None]
    if name == "varifocal":
        target, weights = q, own * q + (1 - own) * 0.75 * p.detach() ** 2
    else:
        target, weights = (p.detach() ** 0.25 * q**0.75).clamp(min=0.01), own + (1 - own) * p**2
    entropies = torch.nn.functional.softplus(logits, threshold=40) - own * target * logits
    expected = (weights * entropies).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (found, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12


def test_varifocal_is_that_of_rt_detr_in_transformers():
    """Loss and gradient, for boxes that are given; the second image has no object."""
    rt_detr = pytest.importorskip("transformers.loss.loss_rt_detr")
    predictions, targets = make_batch(VarifocalClassification(K))
    criterion = make_criterion(VarifocalClassification(K))
    loss = criterion(predictions, targets).losses["loss_class"]
    theirs = torch.nn.Module()
    theirs.num_classes, theirs.alpha, theirs.gamma = K, 0.75, 2.0
    theirs._get_source_permutation_idx = lambda indices: (
        torch.cat([torch.full_like(queries, image) for image, (queries, _) in enumerate(indices)]),
        torch.cat([queries for queries, _ in indices]),
    )
    (matches,) = criterion.matcher((predictions, PaddedTargets.from_targets(targets, torch.float64)))
    labels, total = [{"class_labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets], 0.0
    for layer in range(D):
        here = [(matches.layer == layer) & (matches.image == image) for image in range(B)]
        indices = [(matches.query[own], matches.target[own]) for own in here]
        output = {"logits": predictions.logits[layer], "pred_boxes": predictions.boxes[layer]}
        count = sum(len(target) for target in targets)
        total = total + rt_detr.RTDetrLoss.loss_labels_vfl(theirs, output, labels, indices, count)["loss_vfl"]
    expected = criterion.weights["loss_class"] * total
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(value, predictions.logits)[0] for value in (loss, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12
    assert predictions.logits.shape == (D, B, Q, K)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("counts", [[0, 0], [1, 0], [9, 9]])
def test_gradients_are_finite_without_objects_too(name, counts):
    predictions, targets = make_batch(KINDS[name](K), counts)
    losses = make_criterion(KINDS[name](K))(predictions, targets).losses
    sum(losses.values()).backward()
    assert all(value.isfinite().all() for value in (*losses.values(), predictions.logits.grad, predictions.boxes.grad))
    assert (predictions.logits.grad != 0).any(-1).all()


@pytest.mark.parametrize(
    ("name", "key", "attribute"),
    [
        ("varifocal", "ALPHA", "factor"),
        ("varifocal", "GAMMA", "gamma"),
        ("ia_bce", "ALPHA", "alpha"),
        ("ia_bce", "GAMMA", "gamma"),
    ],
)
def test_numbers_come_from_the_config_and_are_refused_for_other_kinds(name, key, attribute):
    cfg = get_cfg()
    cfg.MODEL.NUM_CLASSES, cfg.MODEL.CRITERION.CLASSIFICATION.NAME, cfg.MODEL.CRITERION.CLASSIFICATION[key] = K, name, 0.5
    assert getattr(build_criterion(cfg).classification, attribute) == 0.5
    cfg.MODEL.CRITERION.CLASSIFICATION.NAME = "softmax"
    with torch.device("meta"), pytest.raises(ConfigError, match=f"unknown option of classification 'softmax' '{key.lower()}'"):
        build_detector(cfg)
