# SPDX-License-Identifier: Apache-2.0
"""A batch in parts: which images are computed together, on which canvas, and that nothing but the time changes."""

import pytest
import torch
from torch import nn

from cpvt_det.common.structures import level_padding_mask
from cpvt_det.fast.resnet import FastResNetBackbone, Part, in_parts, parts_of
from cpvt_det.models.backbones.resnet import ResNetBackbone

SIZES = ((96, 40), (50, 128), (90, 64))
"""Canvases of their own, in multiples of 32: 96x64, 64x128, 96x64; the batch's is 96x128."""
IN_PARTS = [Part((0, 2), (96, 64)), Part((1,), (64, 128))]


def batch(sizes=SIZES, canvas=(96, 128), dtype=torch.float64):
    torch.manual_seed(0)
    images, mask = torch.zeros(len(sizes), 3, *canvas, dtype=dtype), torch.ones(len(sizes), *canvas, dtype=torch.bool)
    for index, (height, width) in enumerate(sizes):
        images[index, :, :height, :width] = torch.randn(3, height, width, dtype=dtype)
        mask[index, :height, :width] = False
    return images.contiguous(memory_format=torch.channels_last), mask


def backbone(name="resnet18", norm="FrozenBN", **keys):
    torch.manual_seed(1)
    made = FastResNetBackbone(name, norm=norm, stages=(2, 3, 5), width=8, **keys).double()
    for module in made.modules():
        if hasattr(module, "running_var"):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
    return made.to(memory_format=torch.channels_last)


def parts_seen(monkeypatch, made, images, mask):
    """The canvases that are computed, as (images, height, width), and the maps."""
    seen, extract = [], ResNetBackbone.forward
    monkeypatch.setattr(ResNetBackbone, "forward", lambda made, x, m: seen.append((len(x), *x.shape[2:])) or extract(made, x, m))
    return seen, made(images, mask)


def test_images_of_one_canvas_are_a_part_in_the_order_of_the_batch():
    assert parts_of((96, 128), SIZES, 32) == IN_PARTS


def test_a_little_padding_is_computed_with_the_rest():
    """96x128 and 96x96 are 7/8 of two canvases; 96x128 and 96x128 all of it, though 20 columns of the second are padded."""
    assert parts_of((96, 128), ((96, 128), (96, 96)), 32) == [Part((0,), (96, 128)), Part((1,), (96, 96))]
    assert parts_of((96, 128), ((96, 128), (96, 108)), 32) == [Part((0, 1), (96, 128))]
    assert parts_of((320, 320), ((320, 320), (300, 280)), 32) == [Part((0, 1), (320, 320))]  # 0.95 of it


def test_maps_of_parts_lie_where_those_of_the_batch_do():
    """The map is the image itself, each second pixel: every image keeps its place and what is outside its canvas is zero."""
    images, mask = batch()
    (found,) = in_parts(lambda x, m: [x[..., ::2, ::2]], images, mask, IN_PARTS, [2])
    assert torch.equal(found, images[..., ::2, ::2])
    (found,) = in_parts(lambda x, m: [x[..., ::2, ::2] + 1], images, mask, IN_PARTS, [2])
    assert torch.equal(found[1, :, 32:], torch.zeros(3, 16, 64, dtype=torch.float64))
    assert torch.equal(found[0, :, :, 32:], torch.zeros(3, 48, 32, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "norm", "training"),
    [("resnet18", "FrozenBN", True), ("resnet50", "FrozenBN", True), ("resnet18", "BN", False), ("resnet18", "GN", True)],
)
def test_features_and_gradients_are_those_of_the_whole_batch(monkeypatch, name, norm, training):
    images, mask = batch()
    made = backbone(name, norm, freeze_at=1).train(training)
    seen, in_two = parts_seen(monkeypatch, made, images, mask)
    assert seen == [(2, 96, 64), (1, 64, 128)]
    cells = [~level_padding_mask(mask, stride)[:, None] for stride in made.strides]
    outcomes = []
    for maps in (in_two, ResNetBackbone.forward(made, images, mask)):
        made.zero_grad()
        sum((x * cell).square().sum() for x, cell in zip(maps, cells, strict=True)).backward()
        gradients = [parameter.grad for parameter in made.parameters() if parameter.grad is not None]
        outcomes.append([*(x * cell for x, cell in zip(maps, cells, strict=True)), *gradients])
    assert len(outcomes[0]) > 10
    for one, other in zip(*outcomes, strict=True):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()
    assert [x.shape for x in in_two] == [
        (3, 8 * 2**n * (4 if name == "resnet50" else 1), 96 // s, 128 // s) for n, s in ((0, 4), (1, 8), (3, 32))
    ]


def test_an_image_without_a_cell_has_a_canvas_too():
    assert parts_of((96, 128), [(96, 128), (0, 0)], 32) == [Part((0,), (96, 128)), Part((1,), (32, 32))]
    maps = backbone()(*batch([(96, 128), (0, 0)]))
    assert all(x.isfinite().all() and not x[1].any() for x in maps)


def test_norms_that_count_the_batch_get_it_whole(monkeypatch):
    seen, _ = parts_seen(monkeypatch, backbone(norm="BN").train(), *batch())
    assert seen == [(3, 96, 128)]


def test_norms_that_are_frozen_with_their_stages_count_nothing(monkeypatch):
    seen, _ = parts_seen(monkeypatch, backbone(norm="BN", freeze_at=5).train(), *batch())
    assert seen == [(2, 96, 64), (1, 64, 128)]


def test_padding_that_is_not_masked_is_computed(monkeypatch):
    """Its features reach into the image, as in the official code."""
    seen, _ = parts_seen(monkeypatch, backbone(mask_padding=False), *batch())
    assert seen == [(3, 96, 128)]


def test_a_program_of_any_size_is_not_cut(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    seen, _ = parts_seen(monkeypatch, backbone(), *batch())
    assert seen == [(3, 96, 128)]


def test_a_mask_of_another_form_is_not_cut(monkeypatch):
    images, mask = batch()
    mask[0, 3, 5] = True
    seen, _ = parts_seen(monkeypatch, backbone(), images.masked_fill(mask[:, None], 0), mask)
    assert seen == [(3, 96, 128)]
