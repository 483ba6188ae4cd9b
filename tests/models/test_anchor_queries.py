# SPDX-License-Identifier: Apache-2.0
"""Learned boxes as queries, positions that are scaled by what was decoded, and contents of the proposals' tokens (DAB)."""

import re

import pytest
import torch
from test_deformable_detr import DEFORMABLE, VARIANTS
from test_models import alone_and_together, build, detect, draw_images
from test_queries import LEVELS, memory_of, slow_position, source
from test_training_queries import TARGETS, batch
from tiny import DEFORMABLE as TINY
from tiny import random_config

from cpvt_det.builders import build_detector
from cpvt_det.common.errors import ConfigError
from cpvt_det.models import AnchorQueries

ANCHORS = {**DEFORMABLE, "DETECTOR__BOX_REFINEMENT": True, "QUERIES__NAME": "anchors"}
STAGED = {**DEFORMABLE, **VARIANTS["two_stage"], "QUERIES__NAME": "mixed", "QUERIES__REFINED_POSITIONS": True}
KINDS = {
    "anchors": ANCHORS,
    "anchors, scaled": {**ANCHORS, "QUERIES__SCALED_POSITIONS": True},
    "two stages, scaled": {**STAGED, "QUERIES__SCALED_POSITIONS": True},
    "contents of tokens": {**STAGED, "QUERIES__TOKEN_CONTENT": True, "QUERIES__CLASS_PROPOSALS": True},
}


def anchors(**more):
    torch.manual_seed(0)
    return AnchorQueries(8, 5, **more).double()


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_gets_the_same_answer_whatever_it_is_batched_with(kind):
    model = build(**KINDS[kind]).eval().requires_grad_(False)
    assert alone_and_together(model, draw_images()) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind):
    model = build(**KINDS[kind], BACKBONE__FREEZE_AT=0).train()
    predictions = detect(model, draw_images(), model.size_divisibility)
    parts = [predictions.logits, predictions.boxes]
    parts += [predictions.proposals.logits, predictions.proposals.boxes] if predictions.proposals else []
    sum(part.square().sum() for part in parts).backward()
    assert [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None] == []


def test_queries_are_learned_boxes_the_same_for_every_image():
    queries = anchors()
    torch.nn.init.normal_(queries.query_embed.weight)
    found = queries(memory_of(), LEVELS)
    boxes = 1 / (1 + torch.exp(-queries.refpoint_embed.weight))
    for image in range(2):
        torch.testing.assert_close(found.references[image], boxes, atol=1e-15, rtol=0)
        assert torch.equal(found.content[image], queries.query_embed.weight)
    expected = slow_position(queries.ref_point_head, found.references[1, 3].tolist())
    assert found.positions[1, 3].tolist() == pytest.approx(expected, abs=1e-12)
    assert found.proposals is None and found.references.requires_grad
    assert 0.04 < AnchorQueries(8, 1000)(memory_of().float(), LEVELS).references.min() < 0.06  # logit -3


@pytest.mark.parametrize("kind", ["anchors, scaled", "two stages, scaled"])
def test_positions_are_scaled_by_a_network_of_what_the_layer_before_decoded(kind):
    """The first layer's are not; the boxes are those that the layer before has made."""
    model = build(**KINDS[kind]).eval()
    seen, made = [], []
    for layer in model.transformer.decoder.layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    model.queries.register_forward_hook(lambda *parts: made.append(parts[-1]))
    boxes = detect(model, draw_images(), 64).boxes
    plain = [model.queries.embed_boxes(place) for place in (made[0].references, boxes[0], boxes[1])]
    scales = [1, *(model.queries.query_scale(inputs[0]) for inputs in seen[1:])]
    for inputs, positions, scale in zip(seen, plain, scales, strict=True):
        torch.testing.assert_close(inputs[1], positions * scale, atol=1e-12, rtol=0)
    assert not torch.equal(seen[1][1], plain[1])


def test_contents_are_the_features_of_the_chosen_tokens():
    queries, learned = source(token_content=True), source()
    found = queries(memory_of(), LEVELS)
    learned.load_state_dict(queries.state_dict(), strict=False)
    assert torch.equal(found.references, learned(memory_of(), LEVELS).references)
    tokens, _, logits = queries._score(memory_of(), LEVELS, 4)
    for image in range(2):
        best = sorted(range(21), key=lambda token: -logits[image, token, 0])[:4]
        assert torch.equal(found.content[image], tokens[image, best])
    assert not found.content.requires_grad and tokens.requires_grad
    assert "query_embed.weight" not in queries.state_dict()


def test_an_exported_program_takes_any_batch():
    batch = torch.export.Dim("batch", min=1, max=9)
    queries = Positions(anchors(scaled_positions=True).eval())
    program = torch.export.export(queries, (memory_of(),), dynamic_shapes=({0: batch},)).module()
    for count in (1, 3):
        memory = torch.randn(count, 21, 8, dtype=torch.float64)
        assert torch.equal(program(memory), queries(memory))


class Positions(torch.nn.Module):
    """The positions alone, as a program returns tensors."""

    def __init__(self, queries):
        super().__init__()
        self.queries = queries

    def forward(self, memory):
        return self.queries(memory, LEVELS).positions


def test_denoising_comes_before_learned_boxes_in_training_alone():
    model = build(**ANCHORS, QUERIES__DENOISING=7, DETR__DROPOUT=0.0).train()
    predictions = model(*batch(), TARGETS)
    assert predictions.logits.shape[2] == 6 and predictions.denoising.logits.shape == (3, 3, 12, 3)
    assert model.eval()(*batch(), TARGETS).denoising is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"TWO_STAGE": True}, "QUERIES.NAME is 'anchors', but MODEL.DETECTOR.TWO_STAGE is True; set TWO_STAGE to False"),
        ({"HYBRID": 3}, "unknown option of query source 'anchors' 'hybrid'"),
        (
            {"BOX_REFINEMENT": False, "SCALED_POSITIONS": True},
            "SCALED_POSITIONS needs box refinement: set MODEL.DETECTOR.BOX_REFINEMENT",
        ),
        ({"NAME": "mixed", "TWO_STAGE": True, "SCALED_POSITIONS": True}, "scaled_positions needs refined_positions"),
        ({"NAME": "mixed", "TWO_STAGE": True, "TOKEN_CONTENT": True, "SHARED_CONTENT": True}, "with token_content there are none"),
        ({"NAME": "", "TOKEN_CONTENT": True}, "unknown option of query source 'learned' 'token_content'"),
    ],
)
def test_settings_that_cannot_be_are_refused(more, message):
    nodes = {"TWO_STAGE": "DETECTOR", "BOX_REFINEMENT": "DETECTOR"}
    keys = {**TINY, "MODEL__QUERIES__NAME": "anchors", "MODEL__DETECTOR__TWO_STAGE": False}
    keys |= {f"MODEL__{nodes.get(key, 'QUERIES')}__{key}": value for key, value in more.items()}
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_detector(random_config(**keys))


def test_channels_for_the_sines_of_four_numbers():
    with pytest.raises(ValueError, match="channels in multiples of 4, because each of four numbers is encoded; got 6"):
        AnchorQueries(6, 5)
    with pytest.raises(ValueError, match="num_queries must be at least 1, got 0"):
        AnchorQueries(8, 0)
