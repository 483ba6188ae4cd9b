# SPDX-License-Identifier: Apache-2.0
"""Deformable-DETR: levels, queries, refinement, proposals; what DETR shares with it is in ``test_models.py``."""

import dataclasses
import functools
import math

import pytest
import torch
from test_models import alone_and_together, build, detect, draw_images, small_cfg
from tiny import ADDED_OR_INJECTED
from torch import nn
from torchvision.ops import box_iou

from cpvt_det.builders import build_criterion, build_detector, build_optimizer
from cpvt_det.common.boxes import cxcywh_to_xyxy, inverse_sigmoid
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import Levels, PaddedBatch, Predictions, Targets, padding_mask_of
from cpvt_det.layers.attention import DeformableAttention
from cpvt_det.layers.norm import MaskedGroupNorm
from cpvt_det.losses import FocalClassification, HungarianMatcher, SetCriterion
from cpvt_det.models import DeformableDETR, DeformableTransformer, ResNetBackbone
from cpvt_det.models.queries import PADDED_LOGIT, ProposedQueries
from cpvt_det.position.encoding import build_position

DEFORMABLE = {"META_ARCHITECTURE": "CPVTDeformableDetr", "CRITERION__CLASSIFICATION__NAME": "focal", "DETR__NUM_OBJECT_QUERIES": 6}
VARIANTS = {
    "single_scale": {"BACKBONE__STAGES": (5,), "DETECTOR__NUM_LEVELS": 1},
    "single_scale_dc5": {
        "BACKBONE__NAME": "resnet50",
        "BACKBONE__STAGES": (5,),
        "BACKBONE__DC5": True,
        "DETECTOR__NUM_LEVELS": 1,
    },
    "multi_scale": {"BACKBONE__STAGES": (3, 4, 5)},
    "two_more_levels": {"BACKBONE__STAGES": (3, 4)},
    "refine": {"BACKBONE__STAGES": (3, 4, 5), "DETECTOR__BOX_REFINEMENT": True},
    "two_stage": {"BACKBONE__STAGES": (3, 4, 5), "DETECTOR__BOX_REFINEMENT": True, "DETECTOR__TWO_STAGE": True},
}


def make(variant, seed=0, **overrides):
    return build(seed, **{**DEFORMABLE, **VARIANTS[variant], **overrides})


@functools.cache
def make_once(variant, **overrides):
    """As :func:`make`, in evaluation, made once for the tests that do not change it."""
    return make(variant, **overrides).eval().requires_grad_(False)


def levels_of(shapes, valid_sizes, dtype=torch.float64):
    """Levels of B images whose valid (h, w) on each level are given."""
    masks = [padding_mask_of(sizes, shape) for shape, sizes in zip(shapes, valid_sizes, strict=True)]
    return Levels.from_masks(masks, dtype)


def one_level(height, width, valid=None):
    return levels_of([(height, width)], [[valid or (height, width)]])


# Variants


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_has_its_shapes_strides_and_gradients(variant):
    model = make(variant, BACKBONE__FREEZE_AT=0).train()
    predictions = detect(model, draw_images(), model.size_divisibility)
    assert predictions.logits.shape == (3, 3, 6, 3)
    assert predictions.boxes.shape == (3, 3, 6, 4)
    assert ((predictions.boxes > 0) & (predictions.boxes < 1)).all()
    strides = {
        "single_scale": [32],
        "single_scale_dc5": [16],
        "two_more_levels": [8, 16, 32, 64],
    }.get(variant, [8, 16, 32, 64])
    assert model.strides == strides
    assert model.size_divisibility == strides[-1]
    total = predictions.logits.square().sum() + predictions.boxes.square().sum()
    if variant == "two_stage":
        total = total + predictions.proposals.logits.square().sum() + predictions.proposals.boxes.square().sum()
    else:
        assert predictions.proposals is None
    total.backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert unused == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_image_gets_the_same_answer_whatever_it_is_batched_with(variant):
    assert alone_and_together(make_once(variant), draw_images()) <= 1e-10


@pytest.mark.parametrize("position", ADDED_OR_INJECTED)
def test_two_stage_image_gets_the_same_answer_under_every_encoding(position):
    """Proposals included: which tokens are chosen does not depend on the padding either."""
    assert alone_and_together(make_once("two_stage", POSITION__NAME=position), draw_images()) <= 1e-10


@pytest.mark.parametrize("variant", ["multi_scale", "two_stage"])
@pytest.mark.parametrize("size", [(1, 1), (33, 65), (1, 140), (70, 2)])
def test_images_of_any_size_are_detected_in(variant, size):
    model = make_once(variant)
    for divisor in (64, 1):
        predictions = detect(model, [torch.ones(3, *size, dtype=torch.float64)], divisor)
        assert predictions.boxes.shape == (3, 1, 6, 4)
        assert torch.isfinite(predictions.logits).all()
        assert torch.isfinite(predictions.boxes).all()


@pytest.mark.parametrize("variant", ["multi_scale", "two_stage"])
@pytest.mark.parametrize("mask_padding", [True, False])
def test_what_lies_under_the_padding_is_not_seen(variant, mask_padding):
    model = make_once(variant, BACKBONE__MASK_PADDING=mask_padding)
    batch = PaddedBatch.from_images(draw_images(), model.size_divisibility)
    expected = model(batch.images, batch.padding_mask)
    for filling in (1e6, math.nan):
        images = batch.images.masked_fill(batch.padding_mask[:, None], filling)
        found = model(images, batch.padding_mask)
        assert torch.equal(found.boxes, expected.boxes)
        assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lone_image_gets_the_answer_of_the_official_arithmetic_without_any_padding(variant):
    """The official code pads a batch to its own largest image, so an image by itself not at all."""
    ours, official = make_once(variant), make_once(variant, BACKBONE__MASK_PADDING=False)
    for image in draw_images():
        found, expected = detect(ours, [image], ours.size_divisibility), detect(official, [image], 1)
        assert (found.logits - expected.logits).abs().max() <= 1e-10
        assert (found.boxes - expected.boxes).abs().max() <= 1e-10


def test_official_arithmetic_is_the_one_that_sees_the_padding():
    """The counter-test: with ``MASK_PADDING False`` an image's answer does depend on its canvas."""
    assert alone_and_together(make_once("multi_scale", BACKBONE__MASK_PADDING=False), draw_images()) > 1e-4


@pytest.mark.parametrize("implementation", ["numba", "eager", "export"])
def test_implementations_of_the_op_give_one_model(implementation):
    expected = detect(make_once("two_stage"), draw_images())
    found = detect(make_once("two_stage", DETECTOR__IMPLEMENTATION=implementation), draw_images())
    torch.testing.assert_close(found.boxes, expected.boxes, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_model_runs_under_autocast_and_answers_in_float32(dtype):
    torch.manual_seed(0)
    model = build_detector(small_cfg(**DEFORMABLE, **VARIANTS["two_stage"])).train()
    images = draw_images(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        predictions = detect(model, images, 64)
    expected = detect(model.eval(), images, 64)
    assert predictions.boxes.dtype == predictions.logits.dtype == torch.float32
    assert predictions.proposals.boxes.dtype == torch.float32
    assert (predictions.proposals.boxes - expected.proposals.boxes).abs().max() < 0.05
    predictions.boxes.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# Levels


def test_valid_ratios_and_centers_by_hand():
    """Two levels of 2 x 4 and 1 x 2 cells; the second image fills 1 x 3 and 1 x 2 of them.

    Its ratios are (3/4, 1/2) and (2/2, 1/1). The first row of its first level has centres x = 0.5/3, 1.5/3, 2.5/3, and 3.5/3 in
    the padding, y = 0.5/1; the second row is padding at y = 1.5.
    """
    levels = levels_of([(2, 4), (1, 2)], [[(2, 4), (1, 3)], [(1, 2), (1, 2)]])
    assert levels.shapes == [(2, 4), (1, 2)]
    assert levels.valid_ratios.tolist() == [[[1, 1], [1, 1]], [[0.75, 0.5], [1, 1]]]
    assert levels.padding_mask[1].tolist() == [False, False, False, True, True, True, True, True, False, False]
    centers = levels.centers()
    assert centers.shape == (2, 10, 2)
    x = torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.float64)
    torch.testing.assert_close(centers[1, :4, 0], x / 3)
    torch.testing.assert_close(centers[1, :8, 1], torch.tensor([0.5] * 4 + [1.5] * 4, dtype=torch.float64))
    torch.testing.assert_close(centers[0, :4, 0], x / 4)
    torch.testing.assert_close(centers[:, 8:, 0], torch.tensor([[0.25, 0.75]] * 2, dtype=torch.float64))
    assert (centers[:, 8:, 1] == 0.5).all()


@pytest.mark.parametrize("canvas", [50, 64, 72, 96, 128])
def test_centers_are_the_same_numbers_on_every_canvas(canvas):
    """The outer ones of 50 cells, 0.01 and 0.99, are the bounds of proposals: the last digit decides."""
    mask = torch.ones(1, 2, canvas, dtype=torch.bool)
    mask[..., :50] = False
    centers = Levels.from_masks([mask], torch.float32).centers()[0, :50, 0]
    assert torch.equal(centers, (torch.arange(50) + 0.5) / 50)


def test_projected_maps_keep_their_digits_in_group_norm():
    """A mean of 100 deviations costs about 1e-5; torch's kernel for channels_last, as the maps of the backbone are, 3e-2."""
    maps = (1 + torch.randn(2, 32, 16, 24, dtype=torch.float64) / 100).contiguous(memory_format=torch.channels_last)
    normalised = MaskedGroupNorm(32, 32)(maps.float())
    assert (normalised - MaskedGroupNorm(32, 32).double()(maps)).abs().max() < 1e-4


def test_points_and_boxes_are_placed_on_every_padded_map():
    levels = levels_of([(2, 4), (1, 2)], [[(1, 3)], [(1, 2)]])
    point = torch.tensor([[[0.5, 0.8]]], dtype=torch.float64)
    torch.testing.assert_close(
        levels.to_level_coordinates(point), torch.tensor([[[[0.375, 0.4], [0.5, 0.8]]]], dtype=torch.float64)
    )
    box = torch.tensor([[[0.5, 0.8, 0.4, 0.2]]], dtype=torch.float64)
    expected = torch.tensor([[[[0.375, 0.4, 0.3, 0.1], [0.5, 0.8, 0.4, 0.2]]]], dtype=torch.float64)
    torch.testing.assert_close(levels.to_level_coordinates(box), expected)


def test_reference_point_of_a_token_is_its_own_cell_on_its_own_level():
    """Placed back on its padded level, a token's centre is the middle of its cell, whatever the padding."""
    shapes = [(3, 5), (2, 3)]
    levels = levels_of(shapes, [[(3, 5), (2, 4)], [(2, 3), (1, 2)]])
    placed = levels.to_level_coordinates(levels.centers())  # (B, N, L, 2)
    start = 0
    for level, (height, width) in enumerate(shapes):
        own = placed[:, start : start + height * width, level].unflatten(1, (height, width))
        for row in range(height):
            for column in range(width):
                expected = torch.tensor([(column + 0.5) / width, (row + 0.5) / height], dtype=torch.float64)
                torch.testing.assert_close(own[:, row, column], expected.expand(2, -1))
        start += height * width


# The attention module


def test_heads_start_in_eight_directions_and_points_one_cell_apart():
    """The first heads of eight look right, down right and down; their points are 1, 2, ... cells away; weights are equal."""
    attention = DeformableAttention(16, num_heads=8, num_levels=2, num_points=3)
    offsets = attention.sampling_offsets.bias.view(8, 2, 3, 2)
    for level in range(2):
        torch.testing.assert_close(offsets[0, level], torch.tensor([[1.0, 0], [2, 0], [3, 0]]), atol=1e-6, rtol=0)
        torch.testing.assert_close(offsets[1, level], torch.tensor([[1.0, 1], [2, 2], [3, 3]]), atol=1e-5, rtol=0)
        torch.testing.assert_close(offsets[2, level], torch.tensor([[0.0, 1], [0, 2], [0, 3]]), atol=1e-6, rtol=0)
    assert not attention.sampling_offsets.weight.any()
    assert not attention.attention_weights.weight.any()
    assert not attention.attention_weights.bias.any()


def identity_attention(num_points=1, num_heads=1):
    """One level, values and outputs as they are, no offsets."""
    attention = DeformableAttention(4, num_heads, num_levels=1, num_points=num_points).double()
    nn.init.zeros_(attention.sampling_offsets.bias)
    for layer in (attention.value_proj, attention.output_proj):
        nn.init.eye_(layer.weight)
    return attention


def test_attention_reads_the_token_under_its_reference_point():
    attention = identity_attention()
    tokens = torch.randn(1, 6, 4, dtype=torch.float64)
    points = torch.tensor([[(column + 0.5) / 3, (row + 0.5) / 2] for row in range(2) for column in range(3)], dtype=torch.float64)
    found = attention(torch.zeros_like(tokens), points[None, :, None], tokens, one_level(2, 3))
    torch.testing.assert_close(found, tokens)


def test_offsets_are_cells_around_a_point_and_parts_of_a_box_around_its_centre():
    """On 2 x 4 cells an offset of (1, -1) moves a point by one column and one row; with 2 points to half of a side of 0.5,
    a box's point by 0.5 / 2 / 2 = 1/8 of the width."""
    attention = identity_attention()
    attention.sampling_offsets.bias.data = torch.tensor([1.0, -1.0], dtype=torch.float64)
    tokens = torch.randn(1, 8, 4, dtype=torch.float64)
    query = torch.zeros(1, 1, 4, dtype=torch.float64)
    at = torch.tensor([[[[1.5 / 4, 1.5 / 2]]]], dtype=torch.float64)  # row 1, column 1
    torch.testing.assert_close(attention(query, at, tokens, one_level(2, 4))[0, 0], tokens[0, 2])  # row 0, column 2
    attention = identity_attention(num_points=2)
    attention.sampling_offsets.bias.data = torch.tensor([2.0, 0.0, -2.0, 0.0], dtype=torch.float64)
    box = torch.tensor([[[[0.5, 0.25, 0.5, 0.1]]]], dtype=torch.float64)
    # +-2 * 1/8 of the width from the middle: columns 2.5 and 0.5 of row 0.
    expected = (tokens[0, 3] + tokens[0, 2] + tokens[0, 1] + tokens[0, 0]) / 4
    torch.testing.assert_close(attention(query, box, tokens, one_level(2, 4))[0, 0], expected)


def test_padded_tokens_count_as_zeros():
    attention = identity_attention()
    tokens = torch.randn(1, 6, 4, dtype=torch.float64)
    levels = one_level(2, 3, valid=(2, 2))
    mask = levels.padding_mask[..., None]
    assert mask.flatten().tolist() == [False, False, True, False, False, True]
    points = torch.rand(1, 5, 1, 2, dtype=torch.float64)
    query = torch.zeros(1, 5, 4, dtype=torch.float64)
    found = attention(query, points, tokens.masked_fill(mask, math.nan), levels)
    torch.testing.assert_close(found, attention(query, points, tokens.masked_fill(mask, 0), one_level(2, 3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": 10, "num_heads": 4}, "multiple of num_heads, got 10 channels and 4 heads"),
        ({"num_levels": 0}, "attention needs at least one level and at least one point per level, got 0 levels and 1 points"),
        ({"num_points": -1}, "attention needs at least one level and at least one point per level, got 1 levels and -1 points"),
    ],
)
def test_attention_refuses_what_it_cannot_attend_with(arguments, message):
    with pytest.raises(ValueError, match=message):
        DeformableAttention(**{"channels": 8, "num_heads": 2, "num_levels": 1, "num_points": 1, **arguments})


@pytest.mark.parametrize("shape", [(1, 2, 1, 3), (1, 1, 1, 2), (2, 2, 1, 2), (1, 2, 2, 2), (1, 2, 2)])
def test_attention_refuses_references_of_another_shape(shape):
    tokens = torch.randn(1, 6, 4).double()
    with pytest.raises(ValueError, match=r"reference_points must be \(1, 2, 1, 2\) or \(1, 2, 1, 4\), got"):
        identity_attention()(tokens[:, :2], torch.rand(shape).double(), tokens, one_level(2, 3))


def test_attention_refuses_masks_of_another_type_or_shape():
    attention, levels = identity_attention(), one_level(2, 3)
    tokens, points = torch.randn(1, 6, 4).double(), torch.rand(1, 2, 1, 2).double()
    with pytest.raises(TypeError, match=r"padding_mask must be bool with True = padded, got torch\.int64"):
        attention(tokens[:, :2], points, tokens, dataclasses.replace(levels, padding_mask=levels.padding_mask.long()))
    with pytest.raises(ValueError, match=r"tokens \(1, 6, 4\) need a padding_mask \(B, N\), got \(1, 1\)"):
        attention(tokens[:, :2], points, tokens, dataclasses.replace(levels, padding_mask=levels.padding_mask[:, :1]))


# Position encodings


def test_level_embedding_stays_whatever_the_encoding_is():
    for position in ("none", "sine", "table", "peg", "sine+peg"):
        model = make("multi_scale", POSITION__NAME=position)
        detect(model, draw_images(), 64).boxes.sum().backward()
        assert model.transformer.level_embed.grad.abs().sum(1).gt(0).all()


def test_peg_is_one_a_level_or_shared():
    """9 C weights a PEG, beside the norm's 2 C."""
    for share, count in ((False, 4), (True, 1)):
        model = make("multi_scale", POSITION__NAME="peg", POSITION__SHARE_LEVELS=share)
        assert sum(parameter.numel() for parameter in model.position.parameters()) == count * (9 + 2) * 32


@pytest.mark.parametrize("norm", ["BN", "GN"])
def test_shared_peg_normalises_all_levels_together(norm):
    """Its statistics are one set, so what it learnt in training is what it does in evaluation, on levels of unlike scale too."""
    torch.manual_seed(0)
    peg = build_position("peg", 8, num_levels=3, num_layers=1, share_levels=True, norm=norm).double()
    shapes = [(6, 9), (3, 5), (2, 3)]
    levels = levels_of(shapes, [[(6, 9), (5, 7)], [(3, 5), (3, 4)], [(2, 3), (2, 2)]])
    scale = torch.cat([torch.full((h * w, 1), s) for (h, w), s in zip(shapes, (0.5, 1.0, 4.0), strict=True)]).double()
    tokens = torch.randn(2, 75, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scale
    for _ in range(200):
        trained = peg.inject(tokens, levels.padding_mask, shapes, 0)
    evaluated = peg.eval().inject(tokens, levels.padding_mask, shapes, 0)
    torch.testing.assert_close(evaluated, trained, atol=0.02, rtol=0.02)
    if norm == "BN":  # moved once a step, not once a level
        assert int(peg.pegs["0"][0].norm.num_batches_tracked) == 200


def test_shared_peg_convolves_each_level_by_itself():
    peg = build_position("peg", 8, num_levels=2, num_layers=1, share_levels=True, norm="none").double()
    tokens, shapes = torch.randn(1, 14, 8, dtype=torch.float64), [(2, 4), (3, 2)]
    none = torch.zeros(1, 14, dtype=torch.bool)
    found = peg.inject(tokens, none, shapes, 0)
    one = peg.pegs["0"][0]
    parts = [one(part, none[:, : part.shape[1]], shape) for part, shape in zip(tokens.split([8, 6], 1), shapes, strict=True)]
    assert torch.equal(found, torch.cat(parts, dim=1))


def test_peg_acts_on_each_level_as_on_a_map_of_its_own():
    model = make_once("multi_scale", POSITION__NAME="peg")
    shapes = [(3, 5), (2, 3), (1, 2), (1, 1)]
    levels = levels_of(shapes, [[(2, 4)], [(1, 2)], [(1, 1)], [(1, 1)]])
    tokens = torch.randn(1, 24, 32, dtype=torch.float64)
    found = model.position.inject(tokens, levels.padding_mask, shapes, 0)
    lengths = [15, 6, 2, 1]
    parts = zip(model.position.pegs["0"], tokens.split(lengths, 1), levels.padding_mask.split(lengths, 1), shapes, strict=True)
    assert torch.equal(found, torch.cat([peg(part, mask, shape) for peg, part, mask, shape in parts], dim=1))


def test_zero_initialised_peg_beside_sine_changes_nothing():
    plain = make("two_stage", POSITION__NAME="sine_offset").eval()
    both = make("two_stage", POSITION__NAME="sine_offset+peg", POSITION__PEG__ZERO_INIT=True).eval()
    missing = both.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert all(name.startswith("position.pegs.") for name in missing)
    first, second = (detect(model, draw_images(), 64) for model in (plain, both))
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.boxes, second.boxes)


# Refinement


def test_refined_references_carry_no_gradient_to_the_layer_before():
    model = make("refine").train()
    predictions = detect(model, draw_images(), 64)
    predictions.boxes[2].sum().backward()
    assert [bool(head.layers[-1].weight.grad.any()) for head in model.bbox_embed] == [False, False, True]


def test_without_corrections_every_layer_repeats_its_reference():
    """Box heads of zeros but for the first's -2: every layer answers the reference points with sides of sigmoid(-2)."""
    model = make("refine").eval()
    for head in model.bbox_embed:
        nn.init.zeros_(head.layers[-1].weight)
        nn.init.zeros_(head.layers[-1].bias)
    model.bbox_embed[0].layers[-1].bias.data[2:] = -2.0
    boxes = detect(model, draw_images(), 64).boxes
    torch.testing.assert_close(boxes[1], boxes[0])
    torch.testing.assert_close(boxes[2], boxes[0])
    torch.testing.assert_close(boxes[..., 2:], torch.full_like(boxes[..., 2:], 1 / (1 + math.exp(2))))


def test_first_boxes_are_small_and_centred_on_the_reference_points():
    torch.manual_seed(0)
    model = build_detector(small_cfg(**DEFORMABLE, **VARIANTS["multi_scale"])).eval()
    predictions = detect(model, draw_images(dtype=torch.float32), 64)
    queries = model.queries(torch.zeros(1, 1, 32), None)
    torch.testing.assert_close(predictions.boxes[0, :, :, :2], queries.references.expand(3, -1, -1))
    assert (predictions.boxes[..., 2:] - 1 / (1 + math.exp(2))).abs().max() < 1e-6
    torch.testing.assert_close(predictions.logits.sigmoid().mean(), torch.tensor(0.01), atol=0.01, rtol=0)


def test_inverse_sigmoid_inverts_and_is_finite_at_the_ends():
    x = torch.tensor([0.0, 1e-5, 0.25, 0.5, 1.0, -3.0, 2.0], dtype=torch.float64)
    y = inverse_sigmoid(x)
    torch.testing.assert_close(y[1:4].sigmoid(), x[1:4], atol=1e-10, rtol=0)
    assert y[0] == y[5] == -y[4] == -y[6] == pytest.approx(math.log(1e-5), abs=1e-4)


# Proposals


def propose(levels, num_queries=4, seed=0):
    torch.manual_seed(seed)
    queries = ProposedQueries(8, num_queries, num_logits=3, prior_probability=0.01).double()
    memory = torch.randn(len(levels.padding_mask), levels.padding_mask.shape[1], 8, dtype=torch.float64)
    return queries, memory, queries(memory, levels)


def test_proposals_start_at_their_cell_with_a_side_that_doubles():
    """Heads start without corrections, so a proposal is its anchor: cell middle and 0.05, 0.1 of the image."""
    levels = levels_of([(2, 4), (1, 2)], [[(2, 4), (1, 3)], [(1, 2), (1, 2)]])
    _, _, found = propose(levels)
    boxes = found.proposals.boxes
    assert boxes.shape == (1, 2, 10, 4)
    torch.testing.assert_close(boxes[0, 0, 5], torch.tensor([1.5 / 4, 1.5 / 2, 0.05, 0.05], dtype=torch.float64))
    torch.testing.assert_close(boxes[0, 1, 1], torch.tensor([1.5 / 3, 0.5, 0.05, 0.05], dtype=torch.float64))
    torch.testing.assert_close(boxes[0, 1, 9], torch.tensor([0.75, 0.5, 0.1, 0.1], dtype=torch.float64))


def test_queries_are_the_tokens_most_like_an_object():
    levels = levels_of([(3, 4)], [[(3, 4), (2, 3)]])
    _, _, found = propose(levels)
    scores = found.proposals.logits[0, ..., 0]
    for image in range(2):
        best = sorted(range(12), key=lambda token: -scores[image, token])[:4]
        torch.testing.assert_close(found.references[image], found.proposals.boxes[0, image, best])
    assert not found.references.requires_grad
    assert found.content.shape == found.positions.shape == (2, 4, 8)


def test_proposals_that_overlap_a_better_one_are_chosen_last():
    """Greedily, best first: of boxes three quarters of an image wide few survive; then the others, best first, then the padding."""
    levels = levels_of([(3, 4)], [[(3, 4), (2, 3)]])
    queries, memory, _ = propose(levels, num_queries=12)
    queries.nms_threshold = 0.3
    nn.init.constant_(queries.bbox_embed.layers[-1].bias[2:], 4.0)
    found = queries(memory, levels)
    boxes, scores = cxcywh_to_xyxy(found.proposals.boxes[0]), found.proposals.logits[0, ..., 0]
    for image, tokens in enumerate((list(range(12)), [0, 1, 2, 4, 5, 6])):
        kept, others = [], []
        for token in sorted(tokens, key=lambda token: -scores[image, token]):
            overlaps = box_iou(boxes[image, token][None], boxes[image, kept])
            (others if (overlaps > 0.3).any() else kept).append(token)
        assert kept
        assert others
        expected = found.proposals.boxes[0, image, kept + others]
        torch.testing.assert_close(found.references[image, : len(tokens)], expected)


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.5])
def test_proposals_nms_needs_a_threshold(threshold):
    with pytest.raises(ConfigError, match="NMS threshold of proposals must be above 0 and at most 1, got"):
        make("two_stage", QUERIES__NMS_THRESHOLD=threshold)


def test_padded_tokens_are_no_proposals():
    levels = levels_of([(3, 4)], [[(3, 4), (2, 3)]])
    queries, memory, found = propose(levels)
    padded = levels.padding_mask[1]
    assert (found.proposals.logits[0, 1, padded] == PADDED_LOGIT).all()
    assert (found.proposals.logits[0, 1, ~padded] > PADDED_LOGIT).all()
    assert (found.references[1] < 1).all()
    memory[1, padded] = 1e6
    again = queries(memory, levels)
    for name in ("content", "positions", "references"):
        assert torch.equal(getattr(again, name), getattr(found, name))


def test_padded_tokens_have_no_loss_and_no_gradient():
    """Losses of the proposals are the same on a larger canvas, and so are the gradients."""
    criterion = SetCriterion(HungarianMatcher(FocalClassification(3)))
    targets = [Targets(torch.tensor([2, 1]), torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.7, 0.6, 0.4, 0.2]], dtype=torch.float64))]
    tight, loose = levels_of([(2, 3)], [[(2, 3)]]), levels_of([(4, 5)], [[(2, 3)]])
    results = []
    for levels in (tight, loose):
        torch.manual_seed(0)
        queries = ProposedQueries(8, 4, num_logits=3, prior_probability=0.01).double()
        memory = torch.randn(1, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        height, width = levels.shapes[0]
        memory = nn.functional.pad(memory, (0, 0, 0, width - 3, 0, height - 2), value=5.0).flatten(1, 2)
        found = queries(memory, levels)
        decoded = Predictions(torch.zeros(1, 1, 4, 3).double(), torch.full((1, 1, 4, 4), 0.5).double(), found.proposals)
        losses = criterion(decoded, targets).losses
        assert set(losses) == {f"loss_{part}{name}" for part in ("", "proposal_") for name in ("class", "l1", "giou")}
        total = sum(value for name, value in losses.items() if "proposal" in name)
        total.backward()
        results.append([total.detach(), *(p.grad for p in queries.parameters() if p.grad is not None)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, atol=1e-12, rtol=0)


def test_image_of_fewer_tokens_than_queries_gets_all_its_queries():
    levels = levels_of([(1, 2)], [[(1, 2), (1, 1)]])
    _, _, found = propose(levels, num_queries=5)
    assert found.references.shape == (2, 5, 4)
    assert torch.isfinite(found.content).all()
    # What fills up is the same for both: no token of either.
    assert torch.equal(found.references[0, 2:], found.references[1, 2:])
    assert (found.references[:, 2:] == 1).all()


def test_tokens_outside_the_range_of_anchors_do_not_see_their_memory():
    """The middle of the first of 200 cells is at 0.0025 < 0.01: as in the official code, such a token counts as empty."""
    levels = levels_of([(2, 200)], [[(2, 200)]])
    queries, memory, found = propose(levels)
    memory[:, [0, 199, 200, 399]] = 7.0
    again = queries(memory, levels)
    assert torch.equal(again.proposals.logits, found.proposals.logits)
    assert (found.proposals.boxes[0, 0, 0] == 1).all()


@pytest.mark.parametrize("times", [1, 3, 4])
def test_proposal_losses_are_those_of_objects_of_one_class(times):
    """With several matches an object stands several times; of 4 x 3 of them 9 proposals leave 3 without a match."""
    criterion = build_criterion(small_cfg(**DEFORMABLE, CRITERION__PROPOSAL_MATCHES=times))
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, 2, 9, 3, generator=generator)
    boxes = torch.rand(1, 2, 9, 4, generator=generator) * 0.4 + 0.3
    labels, wanted = torch.tensor([2, 1, 2]), torch.rand(3, 4, generator=generator) * 0.4 + 0.3
    nothing = Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    decoded = Predictions(torch.zeros(1, 2, 4, 3), torch.full((1, 2, 4, 4), 0.5), Predictions(logits, boxes))
    found = criterion(decoded, [Targets(labels, wanted), nothing]).losses
    objects = Targets(torch.zeros(3 * times, dtype=torch.int64), wanted.repeat(times, 1))
    alone = criterion(Predictions(logits, boxes), [objects, nothing]).losses
    for name, value in alone.items():
        assert torch.equal(found[name.replace("loss_", "loss_proposal_")], value)


def test_an_object_takes_its_nearest_proposals():
    """Two objects 0.5 apart and three proposals beside each, 0.01, 0.02 and 0.05 off: the mean of the two nearest is 0.015."""
    criterion = build_criterion(small_cfg(**DEFORMABLE, CRITERION__PROPOSAL_MATCHES=2))
    wanted = torch.tensor([(0.2, 0.3, 0.2, 0.2), (0.7, 0.3, 0.2, 0.2)])
    shift = torch.tensor([(0.05, 0, 0, 0), (0.01, 0, 0, 0), (0.02, 0, 0, 0)])
    boxes = (wanted[:, None] + shift).view(1, 1, 6, 4).requires_grad_()
    decoded = Predictions(torch.zeros(1, 1, 4, 3), torch.full((1, 1, 4, 4), 0.5), Predictions(torch.zeros(1, 1, 6, 3), boxes))
    loss = criterion(decoded, [Targets(torch.tensor([2, 0]), wanted)]).losses["loss_proposal_l1"]
    assert loss.item() == pytest.approx(5.0 * 0.015, rel=1e-4)
    loss.backward()
    assert boxes.grad[0, 0].any(-1).tolist() == [False, True, True] * 2


def test_proposals_match_at_least_once():
    with pytest.raises(ConfigError, match="MODEL.CRITERION: proposal_matches must be at least 1, got 0"):
        build_criterion(small_cfg(**DEFORMABLE, CRITERION__PROPOSAL_MATCHES=0))


# Settings


def test_offsets_and_reference_points_learn_at_their_own_rate():
    cfg = small_cfg(**DEFORMABLE, **VARIANTS["multi_scale"])
    cfg.SOLVER.BASE_LR, cfg.SOLVER.BACKBONE_LR, cfg.SOLVER.POINTS_LR_MULTIPLIER = 2e-4, 1e-5, 0.25
    model = build_detector(cfg)
    rate_of = {id(p): group["lr"] for group in build_optimizer(cfg, model).param_groups for p in group["params"]}
    rates = {name: rate_of[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    slow = {name for name, rate in rates.items() if rate == 2e-4 * 0.25}
    assert slow == {name for name in rates if "sampling_offsets" in name or "reference_points" in name}
    assert len(slow) == 2 * (2 + 3) + 2
    assert {rate for name, rate in rates.items() if name.startswith("backbone")} == {1e-5}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({**VARIANTS["two_stage"], "DETECTOR__BOX_REFINEMENT": False}, "two_stage needs box_refinement"),
        ({**VARIANTS["two_stage"], "CRITERION__CLASSIFICATION__NAME": "softmax"}, "CLASSIFICATION.NAME to focal"),
        ({**VARIANTS["multi_scale"], "DETECTOR__NUM_LEVELS": 2}, "num_levels is 2, fewer than the 3 maps"),
        (
            {**VARIANTS["multi_scale"], "DETECTOR__PRE_NORM": True},
            "unknown option of MODEL.META_ARCHITECTURE .CPVTDeformableDetr. .pre_norm.",
        ),
        ({**VARIANTS["multi_scale"], "DETR__DEC_LAYERS": 0}, "at least one layer"),
        ({**VARIANTS["multi_scale"], "DETR__NUM_OBJECT_QUERIES": 0}, "num_queries must be at least 1"),
        ({**VARIANTS["multi_scale"], "META_ARCHITECTURE": "CPVTDetr"}, "uses one feature map"),
        (
            {"META_ARCHITECTURE": "CPVTDetr", "DETECTOR__BOX_REFINEMENT": True},
            "unknown option of MODEL.META_ARCHITECTURE .CPVTDetr. .box_refinement.",
        ),
        (
            {**VARIANTS["multi_scale"], "DETECTOR__DECODER_POSITION": "none"},
            "unknown option of MODEL.META_ARCHITECTURE .CPVTDeformableDetr. .decoder_position.",
        ),
        (
            {**VARIANTS["multi_scale"], "DETECTOR__ENC_POINTS": 0},
            "attention needs at least one level and at least one point per level",
        ),
        ({**VARIANTS["multi_scale"], "DETECTOR__IMPLEMENTATION": "cuda"}, "unknown implementation 'cuda'"),
        ({**VARIANTS["two_stage"], "DETR__HIDDEN_DIM": 6, "DETR__NHEADS": 2}, "multiples of 4"),
    ],
)
def test_settings_that_cannot_be_had_are_told(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_detector(small_cfg(**{**DEFORMABLE, **overrides}))


def test_model_is_built_without_a_config():
    backbone = ResNetBackbone("resnet18", stages=(4, 5))
    transformer = DeformableTransformer(1, 1, channels=16, num_heads=2, ffn_channels=16, num_levels=3)
    position = build_position("peg", 16, num_levels=3, num_layers=1)
    model = DeformableDETR(backbone, position, transformer, 16, num_queries=5, num_logits=2, num_levels=3).eval()
    batch = model.preprocess([torch.randint(256, (3, 50, 70))])
    assert model(batch.images, batch.padding_mask).logits.shape == (1, 1, 5, 2)


def test_parts_of_other_numbers_of_levels_are_refused():
    backbone, position = ResNetBackbone("resnet18", stages=(4, 5)), build_position("none", 16)
    transformer = DeformableTransformer(1, 1, channels=16, num_heads=2, ffn_channels=16, num_levels=4)
    with pytest.raises(ValueError, match="num_levels is 3, but the transformer has 4"):
        DeformableDETR(backbone, position, transformer, 16, num_queries=5, num_logits=2, num_levels=3)


# What compilers and exporters make of it


class Answers(nn.Module):
    """A detector with plain tensors as its answer."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, images, padding_mask):
        predictions = self.detector(images, padding_mask)
        return predictions.logits, predictions.boxes


SHALLOW = {"DETR__ENC_LAYERS": 1, "DETR__DEC_LAYERS": 2}
"""Every part once, and a decoder layer after another: tracing takes its time per layer."""


def test_exported_model_takes_other_sizes_and_batches():
    """A one-stage detector; ``tests/export`` has two-stage detectors."""
    model = Answers(make_once("multi_scale", **SHALLOW))
    batch = PaddedBatch.from_images(draw_images(), 64)
    count, height, width = (torch.export.Dim(name, min=1, max=8) for name in ("count", "height", "width"))
    sizes = {"images": {0: count, 2: 64 * height, 3: 64 * width}, "padding_mask": {0: count, 1: 64 * height, 2: 64 * width}}
    exported = torch.export.export(model, (batch.images, batch.padding_mask), dynamic_shapes=sizes)
    assert "cpvt_det" not in str(exported.graph)
    other = PaddedBatch.from_images(draw_images([(150, 70), (64, 200)]), 64)
    for found, expected in zip(
        exported.module()(other.images, other.padding_mask), model(other.images, other.padding_mask), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_compiled_model_gives_the_same_answers_at_two_sizes():
    model = Answers(make_once("two_stage", **SHALLOW))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for sizes in ([(68, 45), (33, 76)], [(150, 70)]):
        batch = PaddedBatch.from_images(draw_images(sizes), 64)
        found, expected = (detector(batch.images, batch.padding_mask) for detector in (compiled, model))
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
