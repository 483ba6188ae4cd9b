# SPDX-License-Identifier: Apache-2.0
"""Padded batches and their masks, box formats, and the way from predictions to detections in pixels."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cpvt_det.builders import build_postprocessor
from cpvt_det.common.boxes import cxcywh_to_xyxy, xyxy_to_cxcywh
from cpvt_det.common.structures import (
    Detections,
    PaddedBatch,
    Predictions,
    Targets,
    level_padding_mask,
    padding_mask_of,
    valid_sizes,
)
from cpvt_det.config import get_cfg
from cpvt_det.evaluation.answers import PostProcessor
from cpvt_det.losses import FocalClassification, SoftmaxClassification

# Padded batches


def test_batch_is_padded_with_zeros_at_the_right_and_the_bottom():
    images = [torch.full((3, 5, 9), 1.0), torch.full((3, 8, 2), 2.0)]
    batch = PaddedBatch.from_images(images, divisor=4)
    assert batch.images.shape == (2, 3, 8, 12)
    assert batch.image_sizes == [(5, 9), (8, 2)]
    for image, canvas, mask in zip(images, batch.images, batch.padding_mask, strict=True):
        _, height, width = image.shape
        assert torch.equal(canvas[:, :height, :width], image)
        assert canvas.sum() == image.sum()
        assert not mask[:height, :width].any()
        assert (~mask).sum() == height * width


@pytest.mark.parametrize(
    ("size", "canvas"), [((1, 1), (32, 32)), ((32, 64), (32, 64)), ((33, 65), (64, 96)), ((480, 640), (480, 640))]
)
def test_canvas_is_the_smallest_multiple_of_the_divisor(size, canvas):
    assert PaddedBatch.from_images([torch.zeros(3, *size)]).images.shape[2:] == canvas


def test_batch_keeps_dtype():
    assert PaddedBatch.from_images([torch.zeros(3, 2, 2, dtype=torch.float64)]).images.dtype == torch.float64


def test_images_are_normalised_on_the_canvas_and_the_padding_stays_zero():
    images = [torch.randint(256, (3, 4, 6), dtype=torch.uint8), torch.randint(256, (3, 5, 2), dtype=torch.uint8)]
    mean, std = torch.tensor([100.0, 110, 120])[:, None, None], torch.tensor([50.0, 60, 70])[:, None, None]
    batch = PaddedBatch.from_images(images, 4, mean, std)
    expected = PaddedBatch.from_images([(image - mean) / std for image in images], 4)
    assert batch.images.dtype == torch.float32
    assert torch.equal(batch.images, expected.images)
    assert torch.equal(batch.padding_mask, expected.padding_mask)


@pytest.mark.parametrize("large_pages", [True, False])
def test_a_canvas_of_many_megabytes_is_like_a_small_one(monkeypatch, large_pages):
    if not large_pages:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    images = [torch.randint(256, (3, 700, 901), dtype=torch.uint8), torch.randint(256, (3, 640, 1000), dtype=torch.uint8)]
    mean, std = torch.tensor([100.0, 110, 120])[:, None, None], torch.tensor([50.0, 60, 70])[:, None, None]
    batch = PaddedBatch.from_images(images, 64, mean, std)
    expected = torch.zeros(2, 3, 704, 1024)
    for image, place in zip(images, expected, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = (image - mean) / std
    assert torch.equal(batch.images, expected)
    assert torch.equal(batch.images.clone().requires_grad_().mul(2).detach(), 2 * expected)


def test_targets_are_pinned_whole(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    targets = Targets(torch.tensor([3]), torch.zeros(1, 4)).pin_memory()
    assert targets.labels.tolist() == [4]
    assert targets.boxes_cxcywh.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("shape", [(1, 5, 5), (3, 5), (3, 0, 5), (3, 5, 0), (2, 3, 5, 5)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(ValueError, match=r"images of shape \(3, h, w\) with h, w >= 1, got"):
        PaddedBatch.from_images([torch.zeros(3, 4, 4), torch.zeros(shape)])


def test_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one image"):
        PaddedBatch.from_images([])


# Masks


@pytest.mark.parametrize("stride", [8, 16, 32])
def test_level_mask_has_ceil_of_size_by_stride_cells(stride):
    """For all sizes from 1 to 70, whichever of the two sides it is."""
    canvas = (96, 128)
    for size in range(1, 71):
        cells = -(-size // stride)
        for sizes in ((size, 71 - size), (71 - size, size)):
            other = -(-(71 - size) // stride)
            mask = level_padding_mask(padding_mask_of([sizes], canvas), stride)
            assert mask.shape == (1, canvas[0] // stride, canvas[1] // stride)
            expected = (cells, other) if sizes[0] == size else (other, cells)
            assert torch.equal(mask, padding_mask_of([expected], tuple(mask.shape[1:])))


@pytest.mark.parametrize("stride", [8, 16, 32])
def test_level_mask_is_as_large_as_the_map_of_strided_convolutions(stride):
    """On a canvas of any size, and as large as the map that the image would have alone."""
    halve = nn.Conv2d(1, 1, kernel_size=3, stride=2, padding=1)
    for size in range(1, 71):
        feature = torch.zeros(1, 1, size, 71 - size)
        for _ in range(stride.bit_length() - 1):
            feature = halve(feature)
        assert level_padding_mask(torch.zeros(1, size, 71 - size, dtype=torch.bool), stride).shape[1:] == feature.shape[2:]
        on_canvas = level_padding_mask(padding_mask_of([(size, 71 - size)], (96, 96)), stride)
        assert (~on_canvas).sum() == feature.numel()


def test_mask_by_hand():
    """Sizes (1, 3) and (2, 2) on a canvas of 2 x 4; 1 is padded."""
    mask = padding_mask_of([(1, 3), (2, 2)], (2, 4))
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[[0, 0, 0, 1], [1, 1, 1, 1]], [[0, 0, 1, 1], [0, 0, 1, 1]]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_mask_that_is_not_bool_is_refused(dtype):
    with pytest.raises(TypeError, match=r"must be bool with True = padded, got torch\.\w+; use mask\.bool\(\)"):
        level_padding_mask(torch.zeros(1, 8, 8, dtype=dtype), 8)


# Records


def test_targets_and_detections_move_between_devices():
    targets = Targets(torch.tensor([1]), torch.rand(1, 4)).to("meta")
    assert targets.labels.device.type == targets.boxes_cxcywh.device.type == "meta"
    assert len(targets) == 1
    detections = Detections(torch.rand(2, 4), torch.rand(2), torch.tensor([0, 1])).cpu()
    assert detections.boxes_xyxy.shape == (2, 4)


# Boxes


def test_box_formats_by_hand():
    assert cxcywh_to_xyxy(torch.tensor([0.5, 0.4, 0.2, 0.6])).tolist() == pytest.approx([0.4, 0.1, 0.6, 0.7])
    assert xyxy_to_cxcywh(torch.tensor([10.0, 20.0, 40.0, 30.0])).tolist() == [25, 25, 30, 10]
    assert cxcywh_to_xyxy(torch.zeros(2, 0, 4)).shape == (2, 0, 4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4))
def test_box_formats_are_inverse(values):
    boxes = torch.tensor(values, dtype=torch.float64)
    assert torch.allclose(xyxy_to_cxcywh(cxcywh_to_xyxy(boxes)), boxes, atol=1e-9)
    assert torch.allclose(cxcywh_to_xyxy(xyxy_to_cxcywh(boxes)), boxes, atol=1e-9)


# Post-processing


def test_detections_are_in_pixels_of_each_original_image():
    """Query 1 is the best; its box [0.25, 0.5, 0.75, 1.0] of an image of 100 x 40 pixels and of one of 10 x 200."""
    boxes = torch.tensor([[0.1, 0.1, 0.2, 0.2], [0.5, 0.75, 0.5, 0.5]]).expand(2, 2, 2, 4)
    logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0]]).expand(2, 2, 2, 3)
    first, second = PostProcessor(SoftmaxClassification(2), 1)(Predictions(logits, boxes), [(40, 100), (200, 10)])
    assert first.boxes_xyxy.tolist() == [pytest.approx([25, 20, 75, 40])]
    assert second.boxes_xyxy.tolist() == [pytest.approx([2.5, 100, 7.5, 200])]
    assert first.labels.tolist() == second.labels.tolist() == [1]


def test_detections_are_clipped_to_the_image_and_best_first():
    boxes = torch.tensor([[0.0, 0.5, 0.4, 0.2], [1.0, 1.0, 0.5, 0.5]]).expand(1, 1, 2, 4)
    logits = torch.tensor([[0.0, 1.0], [2.0, -1.0]]).expand(1, 1, 2, 2)
    (found,) = PostProcessor(FocalClassification(2), 3)(Predictions(logits, boxes), [(10, 20)])
    assert found.labels.tolist() == [0, 1, 0]
    assert found.scores.tolist() == pytest.approx(torch.tensor([2.0, 1.0, 0.0]).sigmoid().tolist())
    expected = [[15, 7.5, 20, 10], [0, 4, 4, 6], [0, 4, 4, 6]]
    assert found.boxes_xyxy.tolist() == [pytest.approx(box, abs=1e-5) for box in expected]


def test_the_last_layer_is_the_answer():
    boxes = torch.full((3, 1, 1, 4), 0.5)
    logits = torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 1.0, 0.0]])[:, None, None]
    (found,) = PostProcessor(SoftmaxClassification(2))(Predictions(logits, boxes), [(8, 8)])
    assert found.labels.tolist() == [1]
    assert not found.scores.requires_grad


def test_copies_come_last_with_the_score_0_and_keep_their_queries():
    """Queries 0, 1 and 3 have nearly one box; 3 claims another class. Oracle: by hand."""
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.5, 0.5, 0.4, 0.42], [0.1, 0.1, 0.1, 0.1], [0.5, 0.5, 0.4, 0.4]])[None, None]
    logits = torch.full((1, 1, 4, 2), -9.0)
    logits[0, 0, [0, 1, 2, 3], [0, 0, 0, 1]] = torch.tensor([1.0, 2.0, 0.0, 0.5])
    predictions = Predictions(logits, boxes)
    post = PostProcessor(FocalClassification(2), 8, 0.7)
    found, scores, labels, queries = post.rank(predictions)
    assert queries[0, :4].tolist() == [1, 3, 2, 2] and labels[0, :4].tolist() == [0, 1, 0, 1]
    assert sorted(zip(queries[0, 4:].tolist(), labels[0, 4:].tolist(), strict=True)) == [(0, 0), (0, 1), (1, 1), (3, 0)]
    assert scores.tolist() == [pytest.approx([*torch.tensor([2.0, 0.5, 0.0, -9.0]).sigmoid().tolist(), 0, 0, 0, 0])]
    assert torch.equal(found, cxcywh_to_xyxy(boxes[0][:, queries[0]]))
    assert all(torch.equal(*parts) for parts in zip(post.decode(predictions), (found, scores, labels), strict=True))
    assert PostProcessor(FocalClassification(2), 4).rank(predictions)[3].tolist() == [[1, 0, 3, 2]]


def test_copies_take_no_place_from_other_detections():
    """Of two detections, the second is a copy of the first, so that the third comes in its place."""
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.5, 0.5, 0.4, 0.41], [0.1, 0.1, 0.1, 0.1]])[None, None]
    logits = torch.tensor([3.0, 2.0, 1.0])[None, None, :, None]
    scores, queries = PostProcessor(FocalClassification(1), 2, 0.7).rank(Predictions(logits, boxes))[1::2]
    assert queries.tolist() == [[0, 2]] and (scores > 0.5).all()


@pytest.mark.parametrize("nms", [0.0, -0.5, 1.5, float("nan")])
def test_a_threshold_of_nms_is_above_0_and_at_most_1(nms):
    with pytest.raises(ValueError, match="nms must be above 0 and at most 1"):
        PostProcessor(FocalClassification(2), 4, nms)


def test_postprocessor_of_the_config_keeps_its_number():
    cfg = get_cfg()
    cfg.MODEL.NUM_CLASSES = 5
    cfg.TEST.DETECTIONS_PER_IMAGE = 7
    (found,) = build_postprocessor(cfg)(Predictions(torch.randn(1, 1, 50, 6), torch.rand(1, 1, 50, 4)), [(9, 9)])
    assert len(found.scores) == 7


def test_sizes_are_read_from_a_mask():
    sizes = [(5, 7), (1, 3), (4, 7), (5, 1)]
    assert valid_sizes(padding_mask_of(sizes, (5, 7))) == sizes
    everywhere = torch.zeros(1, 5, 7, dtype=torch.bool)
    assert valid_sizes(everywhere) == [(5, 7)]
    assert valid_sizes(~everywhere) == [(0, 0)]
    for hole in ((0, 0), (2, 3), (4, 6)):
        mask = everywhere.clone()
        mask[(0, *hole)] = True
        assert valid_sizes(mask) is None
