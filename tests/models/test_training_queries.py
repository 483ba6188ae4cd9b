# SPDX-License-Identifier: Apache-2.0
"""Queries that exist in training only: the hybrid branch."""

import math

import pytest
import torch
from test_deformable_detr import DEFORMABLE, VARIANTS
from test_models import build
from test_queries import LEVELS, memory_of, source
from tiny import DEFORMABLE as TINY
from tiny import random_config

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.errors import ConfigError
from cpvt_det.losses import FocalClassification, HungarianMatcher, SetCriterion
from cpvt_det.models.queries import MixedQueries, ProposedQueries
from cpvt_det.structures import PaddedBatch, Predictions, Targets

SIZES = [(70, 45), (33, 90), (50, 64)]
WANTED = torch.tensor([[0.4, 0.5, 0.3, 0.4], [0.6, 0.5, 0.2, 0.5], [0.3, 0.3, 0.1, 0.2]])
NOTHING = Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
TARGETS = [Targets(torch.tensor([2, 0]), WANTED[:2]), NOTHING, Targets(torch.tensor([1, 1, 2]), WANTED)]


def make(name="mixed", **more):
    """A detector that is the same in training as in evaluation."""
    same = {"DETR__DROPOUT": 0.0, "BACKBONE__NORM": "FrozenBN", "POSITION__NAME": "sine"}
    return build(**DEFORMABLE, **VARIANTS["two_stage"], **same, QUERIES__NAME=name, **more)


def batch():
    generator = torch.Generator().manual_seed(2)
    images = [torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in SIZES]
    padded = PaddedBatch.from_images(images, 64)
    return padded.images, padded.padding_mask


def criterion(**more):
    return SetCriterion(HungarianMatcher(FocalClassification(3)), **more)


# The hybrid branch


@pytest.mark.parametrize("kind", [ProposedQueries, MixedQueries])
def test_the_branch_takes_the_next_best_proposals_in_training_alone(kind):
    queries, plain = source(kind, num_queries=4, hybrid=5), source(kind, num_queries=9)
    plain.load_state_dict(queries.state_dict())
    found, expected = queries(memory_of(), LEVELS, TARGETS[:2]), plain(memory_of(), LEVELS)
    assert found.num_hybrid == 5 and found.num_denoising == 0
    for name in ("content", "positions", "references"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    for evaluated in (queries(memory_of(), LEVELS), queries.eval()(memory_of(), LEVELS, TARGETS[:2])):
        assert evaluated.num_hybrid == 0 and evaluated.attention_mask is None
        assert torch.equal(evaluated.references, expected.references[:, :4])
        assert torch.equal(evaluated.content, expected.content[:, :4])


def test_the_two_groups_do_not_see_each_other():
    mask = source(hybrid=2, num_queries=3)(memory_of(), LEVELS, TARGETS[:2]).attention_mask
    hidden = -math.inf
    assert mask.tolist() == [[0, 0, 0, hidden, hidden]] * 3 + [[hidden, hidden, hidden, 0, 0]] * 2


@pytest.mark.parametrize("name", ["proposals", "mixed"])
def test_the_branch_changes_no_other_answer(name):
    """In training, with an image without objects between others; from weights of which the model without it has a part."""
    plain, hybrid = make(name).train(), make(name, QUERIES__HYBRID=7).train()
    fitting = {key: value[:6] if key == "queries.query_embed.weight" else value for key, value in hybrid.state_dict().items()}
    plain.load_state_dict(fitting)
    found, expected = hybrid(*batch(), TARGETS), plain(*batch(), TARGETS)
    assert expected.hybrid is None
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.boxes, expected.boxes, atol=1e-12, rtol=0)
    assert found.hybrid.logits.shape == (3, 3, 7, 3) and found.hybrid.boxes.shape == (3, 3, 7, 4)
    evaluated = hybrid.eval()(*batch(), TARGETS)
    assert evaluated.hybrid is None
    torch.testing.assert_close(evaluated.boxes, expected.boxes, atol=1e-12, rtol=0)


@pytest.mark.parametrize("times", [1, 2, 6])
def test_the_loss_of_the_branch_is_that_of_repeated_objects(times):
    """Over the number of repeated objects; of 3 x 6 of them 9 queries leave some without a match."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, 9, 3, generator=generator)
    boxes = torch.rand(2, 3, 9, 4, generator=generator) * 0.4 + 0.3
    decoded = Predictions(torch.zeros(2, 3, 4, 3), torch.full((2, 3, 4, 4), 0.5), hybrid=Predictions(logits, boxes))
    found = criterion(hybrid_matches=times)(decoded, TARGETS).losses
    repeated = [Targets(t.labels.repeat(times), t.boxes_cxcywh.repeat(times, 1)) for t in TARGETS]
    alone = criterion()(Predictions(logits, boxes), repeated).losses
    assert len(found) == 2 * len(alone)
    for name, value in alone.items():
        assert torch.equal(found[name.replace("loss_", "loss_hybrid_")], value)


def test_an_object_takes_its_nearest_queries():
    """Two objects 0.5 apart and three boxes beside each, 0.01, 0.02 and 0.05 off: the mean of the two nearest is 0.015."""
    wanted = torch.tensor([(0.2, 0.3, 0.2, 0.2), (0.7, 0.3, 0.2, 0.2)])
    shift = torch.tensor([(0.05, 0, 0, 0), (0.01, 0, 0, 0), (0.02, 0, 0, 0)])
    boxes = (wanted[:, None] + shift).view(1, 1, 6, 4).requires_grad_()
    branch = Predictions(torch.zeros(1, 1, 6, 3), boxes)
    decoded = Predictions(torch.zeros(1, 1, 4, 3), torch.full((1, 1, 4, 4), 0.5), hybrid=branch)
    loss = criterion(hybrid_matches=2)(decoded, [Targets(torch.tensor([2, 0]), wanted)]).losses["loss_hybrid_l1"]
    assert loss.item() == pytest.approx(5.0 * 0.015, rel=1e-4)
    loss.backward()
    assert boxes.grad[0, 0].any(-1).tolist() == [False, True, True] * 2


def test_numbers_of_the_branch_that_are_not_finite_are_told_by_image():
    logits = torch.zeros(1, 3, 2, 3)
    logits[0, 1, 0, 0] = math.nan
    decoded = Predictions(
        torch.zeros(1, 3, 4, 3), torch.full((1, 3, 4, 4), 0.5), hybrid=Predictions(logits, logits.new_ones(1, 3, 2, 4))
    )
    assert criterion()(decoded, TARGETS).finite.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"QUERIES__HYBRID": -1}, "the number of queries of the hybrid branch must be at least 0, got -1"),
        ({"QUERIES__NAME": "", "QUERIES__HYBRID": 5}, "MODEL.QUERIES.HYBRID is 5, but MODEL.QUERIES.NAME is empty"),
        ({"CRITERION__HYBRID_MATCHES": 3}, "MODEL.CRITERION.HYBRID_MATCHES is 3, but MODEL.QUERIES.HYBRID is 0"),
    ],
)
def test_settings_of_the_branch_that_cannot_be_are_refused(more, message):
    config = {**TINY, "MODEL__QUERIES__NAME": "mixed", **{f"MODEL__{key}": value for key, value in more.items()}}
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        build_detector(random_config(**config))


def test_the_branch_matches_at_least_once():
    with pytest.raises(ConfigError, match=r"MODEL\.CRITERION: hybrid_matches must be at least 1, got 0"):
        build_criterion(random_config(**TINY, MODEL__CRITERION__HYBRID_MATCHES=0))
