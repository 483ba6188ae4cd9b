# SPDX-License-Identifier: Apache-2.0
"""Mixed query selection: places of the encoder's proposals, learned contents, and positions that follow the boxes."""

import math
import re

import pytest
import torch
from test_deformable_detr import DEFORMABLE, VARIANTS, levels_of
from test_models import alone_and_together, build, detect, draw_images
from tiny import DEFORMABLE as TINY
from tiny import random_config
from torch import nn

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import Predictions, Targets
from cpvt_det.losses import FocalClassification, HungarianMatcher, SetCriterion
from cpvt_det.models.box_queries import MixedQueries
from cpvt_det.models.queries import ProposedQueries

MIXED = {**DEFORMABLE, **VARIANTS["two_stage"], "QUERIES__NAME": "mixed"}
KINDS = {
    "content of each": {},
    "content shared": {"QUERIES__SHARED_CONTENT": True},
    "positions refined": {"QUERIES__REFINED_POSITIONS": True},
    "classes": {"QUERIES__CLASS_PROPOSALS": True, "QUERIES__REFINED_POSITIONS": True},
}
LEVELS = levels_of([(3, 5), (2, 3)], [[(3, 5), (2, 3)], [(2, 3), (1, 2)]])  # two images; the second is padded


def memory_of(seed=0):
    return torch.randn(2, 21, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def source(kind=MixedQueries, num_queries=4, seed=0, **more):
    """A query source that is not as at its start: corrected boxes, scores that differ."""
    torch.manual_seed(seed)
    made = kind(8, num_queries, num_logits=3, prior_probability=0.01, **more).double()
    nn.init.normal_(made.bbox_embed.layers[-1].weight, std=0.5)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_gets_the_same_answer_whatever_it_is_batched_with(kind):
    model = build(**MIXED, **KINDS[kind]).eval().requires_grad_(False)
    assert alone_and_together(model, draw_images()) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind):
    model = build(**MIXED, **KINDS[kind], BACKBONE__FREEZE_AT=0).train()
    predictions = detect(model, draw_images(), model.size_divisibility)
    assert predictions.boxes.shape == (3, 3, 6, 4)
    parts = [predictions.logits, predictions.boxes, predictions.proposals.logits, predictions.proposals.boxes]
    sum(part.square().sum() for part in parts).backward()
    assert [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None] == []


def test_places_are_those_of_the_proposals_and_contents_are_learned():
    mixed, proposed = source(), source(ProposedQueries)
    proposed.load_state_dict(mixed.state_dict(), strict=False)
    found, expected = mixed(memory_of(), LEVELS), proposed(memory_of(), LEVELS)
    for name in ("references", "positions"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.proposals.boxes, expected.proposals.boxes)
    assert not found.references.requires_grad
    for image in range(2):
        assert torch.equal(found.content[image], mixed.query_embed.weight)
    assert torch.equal(mixed(memory_of(1), LEVELS).content, found.content)
    assert found.embed_boxes is None


def test_with_a_shared_content_the_number_of_queries_can_change_after_training():
    trained, more = source(shared_content=True), source(num_queries=7, seed=1, shared_content=True)
    more.load_state_dict(trained.state_dict())  # strictly
    few, many = trained(memory_of(), LEVELS), more(memory_of(), LEVELS)
    for name in ("content", "positions", "references"):
        assert torch.equal(getattr(few, name), getattr(many, name)[:, :4])
    assert len(trained.query_embed.weight) == 1 and torch.equal(many.content[1, 6], trained.query_embed.weight[0])


def slow_position(head, box):
    """The position of one box (x, y, w, h) by floats: sines and cosines of 2 pi times each, then two layers with ReLU between.

    For 8 channels each number has 4 of them: sine and cosine at the wavelengths 1 and 10000^(2/4) = 100. The row y is first.
    """
    angles = [2 * math.pi * box[index] for index in (1, 0, 2, 3)]
    x = [wave(angle / length) for angle in angles for length in (1, 100) for wave in (math.sin, math.cos)]
    for number, layer in enumerate(head.layers):
        rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
        x = [sum(weight * value for weight, value in zip(row, x, strict=True)) + bias for row, bias in rows]
        x = x if number else [max(0.0, value) for value in x]
    return x


def test_refined_positions_are_a_network_of_the_sines_of_row_column_width_and_height():
    queries = source(refined_positions=True)
    found = queries(memory_of(), LEVELS)
    for image in range(2):
        for query in range(4):
            expected = slow_position(queries.ref_point_head, found.references[image, query].tolist())
            assert found.positions[image, query].tolist() == pytest.approx(expected, abs=1e-12)
    assert found.embed_boxes(found.references).equal(found.positions)


@pytest.mark.parametrize("refined", [False, True])
def test_in_the_decoder_positions_follow_the_boxes_or_stay(refined):
    """What each layer gets as positions, beside what the layer before has made of the boxes."""
    model = build(**MIXED, QUERIES__REFINED_POSITIONS=refined).eval()
    seen = []
    for layer in model.transformer.decoder.layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    made = []
    model.queries.register_forward_hook(lambda *parts: made.append(parts[-1]))
    boxes = detect(model, draw_images(), 64).boxes
    places = [made[0].references, boxes[0], boxes[1]] if refined else [made[0].references] * 3
    for positions, place in zip(seen, places, strict=True):
        assert torch.equal(positions, model.queries.embed_boxes(place))
    assert torch.equal(seen[0], seen[1]) != refined


def test_proposals_with_classes_are_chosen_by_their_best_class_and_alone_seen_by_the_loss():
    queries, of_objects = source(class_proposals=True), source()
    of_objects.load_state_dict(queries.state_dict())
    asked = []
    queries.bbox_embed.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0].shape))
    found, everything = queries(memory_of(), LEVELS), of_objects(memory_of(), LEVELS).proposals
    assert [shape[:2] for shape in asked] == [(2, 4)]  # of no other token
    scores = everything.logits[0].amax(-1)
    assert found.proposals.logits.shape == (1, 2, 4, 3) and found.proposals.by_class
    for image in range(2):
        best = sorted(range(21), key=lambda token: -scores[image, token])[:4]
        assert torch.equal(found.proposals.logits[0, image], everything.logits[0, image, best])
        assert torch.equal(found.references[image], everything.boxes[0, image, best])
    assert found.proposals.boxes.requires_grad and not found.references.requires_grad


@pytest.mark.parametrize("by_class", [False, True])
def test_the_loss_of_proposals_is_by_class_or_of_objects(by_class):
    """The same as the decoder's loss for objects of their own classes, or of class 0; the second image has no object."""
    criterion = SetCriterion(HungarianMatcher(FocalClassification(3)))
    generator = torch.Generator().manual_seed(3)
    logits, boxes = torch.randn(1, 2, 5, 3, generator=generator), torch.rand(1, 2, 5, 4, generator=generator) * 0.4 + 0.3
    wanted = torch.tensor([[0.4, 0.5, 0.3, 0.4], [0.6, 0.5, 0.2, 0.5]])
    nothing = Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    decoded = Predictions(torch.zeros(1, 2, 4, 3), torch.full((1, 2, 4, 4), 0.5), Predictions(logits, boxes, by_class=by_class))
    found = criterion(decoded, [Targets(torch.tensor([2, 1]), wanted), nothing]).losses
    labels = torch.tensor([2, 1] if by_class else [0, 0])
    for name, value in criterion(Predictions(logits, boxes), [Targets(labels, wanted), nothing]).losses.items():
        assert torch.equal(found[name.replace("loss_", "loss_proposal_")], value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"DETECTOR__TWO_STAGE": False}, "QUERIES.NAME is 'mixed', but MODEL.DETECTOR.TWO_STAGE is False; set TWO_STAGE to True"),
        ({"CRITERION__CLASSIFICATION__NAME": "softmax"}, "the query source 'mixed' ranks proposals by sigmoid scores"),
        (
            {"QUERIES__NAME": "proposals", "QUERIES__SHARED_CONTENT": True},
            "unknown option of query source 'proposals' 'shared_content'",
        ),
        (
            {"META_ARCHITECTURE": "CPVTDetr", "QUERIES__REFINED_POSITIONS": True},
            "REFINED_POSITIONS needs box refinement: set MODEL.DETECTOR.BOX_REFINEMENT to True",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(more, message):
    config = {**TINY, "MODEL__QUERIES__NAME": "mixed", **{f"MODEL__{key}": value for key, value in more.items()}}
    if "META_ARCHITECTURE" in more:
        config = {key: value for key, value in config.items() if "DETECTOR" not in key or "META" in key}
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_detector(random_config(**config))


def test_detr_takes_mixed_queries_too():
    """Contents, and positions of proposals; its decoder attends to all tokens."""
    more = {"MODEL__QUERIES__NAME": "mixed", "MODEL__CRITERION__CLASSIFICATION__NAME": "focal"}
    detector, criterion = build_detector(random_config(**more)), build_criterion(random_config(**more))
    batch = detector.preprocess([torch.rand(3, 40, 72), torch.rand(3, 64, 33)])
    predictions = detector(batch.images, batch.padding_mask)
    nothing = Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    assert "loss_proposal_class" in criterion(predictions, [nothing, nothing]).losses


# The decoder


TWICE, NORM = "DETECTOR__LOOK_FORWARD_TWICE", "DETECTOR__FINAL_NORM"


def decode(model, images):
    """Predictions, and the inputs of every decoder layer's call."""
    inputs = []
    for layer in model.transformer.decoder.layers:
        layer.register_forward_hook(lambda _, given, made: inputs.append((given, made)))
    return detect(model, images, 64), inputs


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_a_layer_s_loss_corrects_its_own_boxes_and_with_look_forward_twice_those_before(twice, norm):
    """The box heads that the boxes of each of three layers have a gradient for."""
    model = build(**MIXED, **{TWICE: twice, NORM: norm}).train()
    boxes = detect(model, draw_images(), 64).boxes
    heads = [head.layers[-1].weight for head in model.bbox_embed]
    for layer in range(3):
        gradients = torch.autograd.grad(boxes[layer].square().sum(), heads, retain_graph=True, allow_unused=True)
        reached = [gradient is not None and bool(gradient.any()) for gradient in gradients]
        assert reached == [number == layer or (twice and number == layer - 1) for number in range(3)]


@pytest.mark.parametrize("norm", [False, True])
def test_look_forward_twice_changes_gradients_and_no_answer(norm):
    """In training too; dropout off."""
    answers = []
    for twice in (False, True):
        model = build(**MIXED, **{TWICE: twice, NORM: norm, "DETR__DROPOUT": 0.0, "BACKBONE__NORM": "FrozenBN"}).train()
        predictions = detect(model, draw_images(), 64)
        answers.append((predictions.logits, predictions.boxes))
        assert predictions.boxes.requires_grad
    assert all(torch.equal(first, second) for first, second in zip(*answers, strict=True))


@pytest.mark.parametrize("twice", [False, True])
def test_the_final_norm_stands_before_the_heads_and_not_between_the_layers(twice):
    """Layer by layer from the inputs and outputs of each: the loss's boxes are made after the norm, the next layer's before."""
    model = build(**MIXED, **{TWICE: twice, NORM: True}).train()
    norm = model.transformer.decoder.norm
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    (predictions, calls), refined = decode(model, draw_images()), []
    for layer, (given, made) in enumerate(calls):
        queries, _, points, _, levels, _ = given
        place = points[:, :, 0] / levels.valid_ratios[:, :1].repeat(1, 1, 2)  # of the first level's padded map -> of the image
        if layer:
            assert torch.equal(queries, calls[layer - 1][1])
            torch.testing.assert_close(place, refined[-1], atol=1e-12, rtol=0)
        box_head, start = model.bbox_embed[layer], torch.log(place / (1 - place))
        torch.testing.assert_close(predictions.logits[layer], model.class_embed[layer](norm(made)), atol=1e-10, rtol=0)
        torch.testing.assert_close(predictions.boxes[layer], (box_head(norm(made)) + start).sigmoid(), atol=1e-9, rtol=0)
        refined.append((box_head(made) + start).sigmoid())


def test_look_forward_twice_needs_refinement():
    config = {**TINY, "MODEL__DETECTOR__TWO_STAGE": False, "MODEL__DETECTOR__BOX_REFINEMENT": False}
    with pytest.raises(ConfigError, match="LOOK_FORWARD_TWICE needs box refinement: set MODEL.DETECTOR.BOX_REFINEMENT to True"):
        build_detector(random_config(**config, MODEL__DETECTOR__LOOK_FORWARD_TWICE=True))
