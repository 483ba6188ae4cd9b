# SPDX-License-Identifier: Apache-2.0
"""Queries that exist in training only: the hybrid branch, denoising."""

import math

import pytest
import torch
from test_deformable_detr import DEFORMABLE, VARIANTS
from test_models import build
from test_queries import LEVELS, memory_of, source
from tiny import DEFORMABLE as TINY
from tiny import DINO, random_config
from torchvision.ops import sigmoid_focal_loss

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.common.boxes import cxcywh_to_xyxy
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import PaddedBatch, Predictions, Targets
from cpvt_det.losses import FocalClassification, HungarianMatcher, SetCriterion
from cpvt_det.models.box_queries import MixedQueries
from cpvt_det.models.denoising import ContrastiveDenoising
from cpvt_det.models.queries import ProposedQueries, Queries

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
    ],
)
def test_settings_of_the_branch_that_cannot_be_are_refused(more, message):
    config = {**TINY, "MODEL__QUERIES__NAME": "mixed", **{f"MODEL__{key}": value for key, value in more.items()}}
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        build_detector(random_config(**config))


def test_the_branch_matches_at_least_once():
    with pytest.raises(ConfigError, match=r"MODEL\.CRITERION: hybrid_matches must be at least 1, got 0"):
        build_criterion(random_config(**TINY, MODEL__CRITERION__HYBRID_MATCHES=0))


# Denoising


def denoising(pairs=7, num_classes=4, label_noise=0.0, box_noise=1.0):
    torch.manual_seed(0)
    return ContrastiveDenoising(8, num_classes, pairs, label_noise, box_noise).double()


def others(count=3, images=3, **more):
    """Queries that those of denoising are put before; a position of a box is its numbers, twice."""
    content, references = torch.randn(images, count, 8, dtype=torch.float64), torch.rand(images, count, 4, dtype=torch.float64)
    return Queries(content, references.repeat(1, 1, 2), references, **more)


def embed_boxes(boxes):
    return boxes.repeat(1, 1, 2)


def test_the_groups_by_hand():
    """Objects of three images: 2, none, 3; 7 pairs make 7 // 3 = 2 groups of 3 positives and 3 negatives."""
    queries = others()
    found = denoising()(queries, TARGETS, embed_boxes)
    assert (found.num_denoising, found.groups) == (12, 2)
    assert found.objects.tolist() == [[0, 1, -1, -1, -1, -1] * 2, [-1] * 12, [0, 1, 2, -1, -1, -1] * 2]
    for name in ("content", "positions", "references"):
        assert torch.equal(getattr(found, name)[:, 12:], getattr(queries, name))
    assert torch.equal(found.positions[:, :12], embed_boxes(found.references[:, :12]))


@pytest.mark.parametrize(("pairs", "groups"), [(1, 1), (2, 1), (3, 1), (5, 1), (6, 2), (100, 33)])
def test_every_group_has_all_objects_and_there_is_at_least_one(pairs, groups):
    found = denoising(pairs)(others(), TARGETS, embed_boxes)
    assert (found.groups, found.num_denoising) == (groups, groups * 6)


def test_without_noise_of_labels_contents_are_those_of_the_classes_and_zeros_fill_up():
    module = denoising()
    found = module(others(), TARGETS, embed_boxes)
    rows = [module.label_enc.weight[label] for label in (2, 0, 1, 1, 2)]
    zero = torch.zeros(8, dtype=torch.float64)
    expected = [[rows[0], rows[1], zero] * 4, [zero] * 12, rows[2:] * 4]
    for image, contents in enumerate(expected):
        assert torch.equal(found.content[image, :12], torch.stack(contents))
    assert (found.references[1, :12] == 0.5).all() and (found.references[0, 2:12:3] == 0.5).all()


def test_half_of_the_noised_labels_are_drawn_from_all_classes():
    """With the noise at 1, a half of 4 classes' labels are drawn again, of which a quarter come out as they were: 3/8 change."""
    module = denoising(pairs=500, label_noise=1.0)  # often: the mask of attention grows with the square of the queries
    with torch.no_grad():
        module.label_enc.weight[:] = torch.arange(4)[:, None]  # a content tells its class
    target = Targets(torch.tensor([2]), torch.tensor([[0.5, 0.5, 0.2, 0.2]]))
    found = torch.cat([module(others(images=1), [target], embed_boxes).content[0, :1000, 0] for _ in range(8)])
    shares = [float((found == label).double().mean()) for label in range(4)]
    assert shares == pytest.approx([1 / 8, 1 / 8, 5 / 8, 1 / 8], abs=0.02)


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_corners_of_positives_move_by_less_than_half_a_side_and_of_negatives_by_more(scale):
    """Of a box far from the border; in halves of its sides, evenly in (0, 1) and in (1, 2) times the scale, to both directions."""
    box = torch.tensor([[0.5, 0.45, 0.16, 0.1]], dtype=torch.float64)
    module, target = denoising(pairs=500, box_noise=scale), Targets(torch.tensor([1]), box)
    boxes = torch.cat([module(others(images=1), [target], embed_boxes).references[0, :1000] for _ in range(6)])
    # Sides turned around by noise count as 0: of those boxes the corners are not known.
    boxes = boxes.view(3000, 2, 4)
    for kind in range(2):
        whole = boxes[:, kind][(boxes[:, kind, 2:] > 0.002).all(-1)]
        moved = (cxcywh_to_xyxy(whole) - cxcywh_to_xyxy(box)) / (0.5 * box[:, [2, 3, 2, 3]]) / scale
        size = moved.abs()
        assert kind - 1e-9 <= float(size.min()) < kind + 0.01 and kind + 0.99 < float(size.max()) <= kind + 1 + 1e-9
        if kind == 0:
            assert len(whole) > 2900
            assert moved.mean().item() == pytest.approx(0, abs=0.03) and size.mean().item() == pytest.approx(0.5, abs=0.03)


def test_boxes_stay_inside_the_image_and_have_sides():
    corner = torch.tensor([[0.02, 0.97, 0.04, 0.06], [0.5, 0.5, 1.0, 1.0]], dtype=torch.float64)
    found = denoising(pairs=1000)(others(images=1), [Targets(torch.tensor([1, 0]), corner)], embed_boxes).references
    boxes = found[0, : 2 * 1000]
    assert ((boxes > 5e-4) & (boxes < 1 - 5e-4)).all()
    low, high = cxcywh_to_xyxy(boxes).split(2, dim=-1)
    assert low.min() > -1e-3 and high.max() < 1 + 1e-3


def sees(query, key, groups, size, hybrid):
    """Whether a query sees another: first the groups, then 3 real queries, then those of the hybrid branch."""
    kinds = []
    for index in (query, key):
        group = index // size if index < groups * size else None
        kinds.append(("group", group) if group is not None else ("real" if index < groups * size + 3 else "hybrid", None))
    if kinds[0][0] == "group":
        return kinds[1][0] != "group" or kinds[0] == kinds[1]
    return kinds[0] == kinds[1]


@pytest.mark.parametrize("hybrid", [0, 2])
def test_groups_see_themselves_and_the_others_who_do_not_see_them(hybrid):
    count, mask = 3 + hybrid, None
    if hybrid:
        mask = torch.zeros(count, count, dtype=torch.float64)
        mask[3:, :3] = mask[:3, 3:] = -math.inf
    found = denoising()(others(count, attention_mask=mask, num_hybrid=hybrid), TARGETS, embed_boxes)
    expected = [[0.0 if sees(q, k, 2, 6, hybrid) else -math.inf for k in range(12 + count)] for q in range(12 + count)]
    assert found.attention_mask.tolist() == expected
    assert found.num_hybrid == hybrid


NOISE = {"QUERIES__DENOISING": 7, "QUERIES__LABEL_NOISE": 0.8}


@pytest.mark.parametrize("name", ["proposals", "mixed"])
@pytest.mark.parametrize("more", [{}, {"QUERIES__HYBRID": 4}], ids=["alone", "with the branch"])
def test_denoising_changes_no_other_answer(name, more):
    """In training, with an image without objects between others, and with the branch's."""
    plain, noised = make(name, **more).train(), make(name, **more, **NOISE).train()
    plain.load_state_dict({key: value for key, value in noised.state_dict().items() if "denoising" not in key})
    found, expected = noised(*batch(), TARGETS), plain(*batch(), TARGETS)
    pairs = [(found, expected)] + ([(found.hybrid, expected.hybrid)] if more else [])
    for one, two in pairs:
        torch.testing.assert_close(one.logits, two.logits, atol=1e-12, rtol=0)
        torch.testing.assert_close(one.boxes, two.boxes, atol=1e-12, rtol=0)
    assert expected.denoising is None
    assert found.denoising.logits.shape == (3, 3, 12, 3) and found.denoising.objects.shape == (3, 12)


def test_in_evaluation_there_is_none_of_it():
    model = make(**NOISE, QUERIES__HYBRID=4, QUERIES__REFINED_POSITIONS=True).eval()

    def forbidden(*_):
        raise AssertionError("denoising in evaluation")

    model.queries.denoising.register_forward_pre_hook(forbidden)
    before = torch.get_rng_state()
    found, without = model(*batch(), TARGETS), model(*batch())
    assert torch.equal(torch.get_rng_state(), before)
    assert found.denoising is found.hybrid is None and torch.equal(found.logits, without.logits)
    plain = make(QUERIES__REFINED_POSITIONS=True).eval()
    fitting = {key: value for key, value in model.state_dict().items() if "denoising" not in key}
    plain.load_state_dict({**fitting, "queries.query_embed.weight": model.queries.query_embed.weight[:6]})
    assert torch.equal(plain(*batch()).logits, found.logits)


def test_the_loss_of_denoising_is_that_of_positives_over_all_groups():
    """The focal loss of torchvision and the L1 distance, over 5 objects in 2 groups; fillers and negatives have no object."""
    found = denoising(label_noise=0.5)(others(), TARGETS, embed_boxes)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, 12, 4, generator=generator, dtype=torch.float64)
    boxes = torch.rand(2, 3, 12, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.3
    group = Predictions(logits, boxes, objects=found.objects, groups=found.groups)
    decoded = Predictions(torch.zeros(2, 3, 4, 4).double(), torch.full((2, 3, 4, 4), 0.5).double(), denoising=group)
    losses = SetCriterion(HungarianMatcher(FocalClassification(4)))(decoded, TARGETS).losses
    wanted, distance = torch.zeros(2, 3, 12, 4, dtype=torch.float64), 0.0
    for image, target in enumerate(TARGETS):
        for number, label in enumerate(target.labels.tolist()):
            for query in (number, 6 + number):
                wanted[:, image, query, label] = 1
                distance += float((boxes[:, image, query] - target.boxes_cxcywh[number]).abs().sum())
    expected = sigmoid_focal_loss(logits, wanted, reduction="sum").item() / (5 * 2)
    assert losses["loss_denoising_class"].item() == pytest.approx(expected, rel=1e-10)
    assert losses["loss_denoising_l1"].item() == pytest.approx(5 * distance / (5 * 2), rel=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_without_any_object_losses_are_zero_and_every_parameter_has_a_gradient(count):
    """So that the processes of a run go on together when one of them has no object."""
    model = make(**NOISE, BACKBONE__FREEZE_AT=0).train()
    images, masks = batch()
    predictions = model(images[:count], masks[:count], [NOTHING] * count)
    result = criterion()(predictions, [NOTHING] * count)
    assert predictions.denoising.logits.shape == (3, count, 0, 3)
    parts = ("class", "l1", "giou")
    assert [result.losses[f"loss_denoising_{part}"].item() for part in parts] == [0, 0, 0]
    sum(result.losses.values()).backward()
    assert [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None] == []
    assert not model.queries.denoising.label_enc.weight.grad.any() and result.finite.all()


def test_noise_is_a_function_of_torch_s_random_state():
    """Which a step sets from seed, iteration and process."""
    module, made = denoising(label_noise=1.0), []
    queries = others()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found = module(queries, TARGETS, embed_boxes)
        made.append((found.content, found.references))
    assert all(torch.equal(first, second) for first, second in zip(*made[:2], strict=True))
    assert not any(torch.equal(first, second) for first, second in zip(*made[1:], strict=True))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"DENOISING": -3}, "denoising needs at least one class and one pair, got 3 classes and -3 pairs"),
        ({"DENOISING": 5, "LABEL_NOISE": 1.5}, "label_noise must be from 0 to 1, got 1.5"),
        ({"DENOISING": 5, "BOX_NOISE": 0.0}, "box_noise must be above 0 and at most 1, got 0.0"),
        (
            {"BOX_NOISE": 0.5},
            "MODEL.QUERIES.BOX_NOISE has no effect without denoising: set MODEL.QUERIES.DENOISING to a number of pairs",
        ),
        ({"NAME": "learned", "DENOISING": 5}, "'learned', but MODEL.DETECTOR.TWO_STAGE is True"),
    ],
)
def test_settings_of_denoising_that_cannot_be_are_refused(more, message):
    config = {**TINY, "MODEL__QUERIES__NAME": "mixed", **{f"MODEL__QUERIES__{key}": value for key, value in more.items()}}
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        build_detector(random_config(**config))


@pytest.mark.parametrize("name", ["", "learned", "mixed", "proposals"])
@pytest.mark.parametrize(
    "mechanism",
    [{"HYBRID": 5}, {"DENOISING": 5}, {"CLASS_PROPOSALS": True}, {"SHARED_CONTENT": True}, {"REFINED_POSITIONS": True}],
    ids=str,
)
def test_a_mechanism_that_needs_two_stages_is_refused_without_them(name, mechanism):
    """Whatever the query source is said to be, and before a model is there."""
    keys = {"NAME": name, **mechanism}
    config = {**TINY, "MODEL__DETECTOR__TWO_STAGE": False, **{f"MODEL__QUERIES__{key}": value for key, value in keys.items()}}
    untaken = f"unknown option of query source 'learned' '{next(iter(mechanism)).lower()}'"
    staged = "MODEL.QUERIES.NAME is '(mixed|proposals)', but MODEL.DETECTOR.TWO_STAGE is False"
    with pytest.raises(ConfigError, match=untaken if name in ("", "learned") else staged):
        build_detector(random_config(**config))


def test_no_classes_and_no_numbers_are_refused_before_the_first_step():
    with pytest.raises(ConfigError, match=r"MODEL\.NUM_CLASSES is 0; set it"):
        build_detector(random_config(**DINO, MODEL__NUM_CLASSES=0))
    with pytest.raises(ValueError, match="got 0 classes and 5 pairs"):
        ContrastiveDenoising(8, 0, 5)
    with pytest.raises(ValueError, match="box_noise must be above 0 and at most 1, got nan"):
        ContrastiveDenoising(8, 3, 5, box_noise=math.nan)
