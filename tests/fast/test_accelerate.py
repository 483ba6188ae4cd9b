# SPDX-License-Identifier: Apache-2.0
"""Every faster class beside the plain one it takes the place of: outputs and gradients, with padding; and what it leaves alone."""

import copy

import pytest
import torch
from tiny import random_config
from torch import nn

from cpvt_det.builders import build_detector
from cpvt_det.common.structures import Levels, padding_mask_of
from cpvt_det.fast import FASTER, accelerate
from cpvt_det.layers.attention import Attention, DeformableAttention
from cpvt_det.models.backbones.resnet import ResNetBackbone
from cpvt_det.models.deformable_detr import (
    DeformableDecoderLayer,
    DeformableEncoder,
    DeformableEncoderLayer,
)
from cpvt_det.models.detector import Memory
from cpvt_det.models.detr import DecoderLayer
from cpvt_det.models.encoder import Encoder, EncoderLayer
from cpvt_det.models.necks import ProjectionNeck
from cpvt_det.models.real_time_detr import ConvNorm, RepVGGBlock
from cpvt_det.ops import routes
from cpvt_det.position import build_position

C, HEADS = 32, 4
SHAPES, SIZES = [(12, 17), (6, 9)], [[(12, 9), (6, 5)], [(5, 17), (3, 9)], [(12, 17), (6, 9)]]
"""Two levels, and the valid cells of three images on each: the third has no padding."""
LAYER = (C, HEADS, 48, 0.0)


@pytest.fixture(autouse=True)
def forgotten():
    routes.is_on.cache_clear()
    yield
    routes.is_on.cache_clear()


def layout(num_levels, sizes=SIZES):
    masks = [padding_mask_of([image[level] for image in sizes], SHAPES[level]) for level in range(num_levels)]
    return Levels.from_masks(masks, torch.float32)


def drawn(*shape):
    return torch.randn(*shape, requires_grad=True)


def of_tokens(levels):
    return drawn(*levels.padding_mask.shape, C), drawn(*levels.padding_mask.shape, C)


def points(levels):
    return levels.to_level_coordinates(levels.centers())


def attention():
    levels = layout(1)
    return Attention(C, HEADS), (drawn(3, 5, C), *of_tokens(levels), levels.padding_mask), None


def deformable_attention():
    levels = layout(2)
    tokens, queries = of_tokens(levels)
    return DeformableAttention(C, HEADS, 2, 3), (queries, points(levels), tokens, levels), levels.padding_mask


def encoder_layer():
    levels = layout(1)
    return EncoderLayer(*LAYER, False), (*of_tokens(levels), levels.padding_mask), levels.padding_mask


def decoder_layer():
    levels = layout(1)
    memory = Memory(*of_tokens(levels))
    return DecoderLayer(*LAYER, False), (drawn(3, 5, C), drawn(3, 5, C), memory, levels.padding_mask), None


def deformable_encoder_layer():
    levels = layout(2)
    return DeformableEncoderLayer(*LAYER, 2, 3), (*of_tokens(levels), points(levels), levels), levels.padding_mask


def deformable_decoder_layer(kind=DeformableDecoderLayer):
    levels = layout(2)
    references = levels.to_level_coordinates(torch.rand(3, 5, 2))
    return kind(*LAYER, 2, 3), (drawn(3, 5, C), drawn(3, 5, C), references, of_tokens(levels)[0], levels), None


def encoder():
    levels = layout(1)
    arguments = (*of_tokens(levels), levels.padding_mask, levels.shapes, build_position("peg", C, 1, 2, HEADS).eval())
    return Encoder(2, *LAYER, False), arguments, levels.padding_mask


def deformable_encoder():
    levels = layout(2)
    arguments = (*of_tokens(levels), levels, build_position("peg", C, 2, 2, HEADS).eval())
    return DeformableEncoder(2, *LAYER, 2, 3), arguments, levels.padding_mask


def resnet():
    mask = padding_mask_of([(96, 64), (50, 160), (96, 160)], (96, 160))
    images = torch.randn(3, 3, 96, 160).masked_fill(mask[:, None], 0)
    return ResNetBackbone("resnet18", stages=(5,), width=32), (images, mask), None


def projection():
    mask = padding_mask_of([(96, 64), (50, 160), (96, 160)], (96, 160))
    return ProjectionNeck([48], [16], C), ([drawn(3, 48, 6, 10)], mask), None


def convolution_block(kind, *arguments):
    """Of the hybrid encoder, with drawn statistics of its norms; the third image is empty."""
    mask = padding_mask_of([(12, 9), (5, 17), (0, 0)], (12, 17))[:, None]
    block = kind(*arguments, norm="BN")
    for norm in block.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
    return block, (drawn(3, C, 12, 17), ~mask), mask


MAKERS = {
    nn.Linear: lambda: (nn.Linear(C, 64), (drawn(3, 200, C),), None),
    nn.Conv2d: lambda: (nn.Conv2d(C, 48, 3, padding=1), (drawn(2, C, 23, 31),), None),
    nn.Dropout: lambda: (nn.Dropout(0.0), (drawn(3, 5),), None),
    Attention: attention,
    DeformableAttention: deformable_attention,
    EncoderLayer: encoder_layer,
    DecoderLayer: decoder_layer,
    DeformableEncoderLayer: deformable_encoder_layer,
    DeformableDecoderLayer: deformable_decoder_layer,
    ConvNorm: lambda: convolution_block(ConvNorm, C, 48, 3),
    RepVGGBlock: lambda: convolution_block(RepVGGBlock, C),
    Encoder: encoder,
    DeformableEncoder: deformable_encoder,
    ProjectionNeck: projection,
    ResNetBackbone: resnet,
}


def outcome(module, arguments, padded):
    """What a module answers, but at padded tokens, and the gradients of its parameters and inputs."""
    out = module(*arguments)
    if isinstance(out, tuple) and isinstance(out[0], list):  # of a neck
        out = out[0]
    outs = [one for one in (out if isinstance(out, (list, tuple)) else [out]) if one is not None]
    if padded is not None:
        outs = [one.masked_fill(padded if padded.ndim == one.ndim else padded[..., None], 0) for one in outs]
    wanted = [one for one in (*module.parameters(), *arguments) if isinstance(one, torch.Tensor) and one.requires_grad]
    generator = torch.Generator().manual_seed(1)
    loss = sum((one * torch.randn(one.shape, generator=generator)).sum() for one in outs)
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [*outs, *(one for one in found if one is not None)]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("plain", FASTER, ids=lambda kind: kind.__name__)
def test_a_faster_class_computes_what_the_plain_one_does(plain, training):
    torch.manual_seed(0)
    module, arguments, padded = MAKERS[plain]()
    for name, parameter in module.named_parameters():
        if "norm" not in name and plain is not ResNetBackbone:
            nn.init.normal_(parameter, std=0.1)
    module.train(training)
    faster = accelerate(copy.deepcopy(module))
    assert type(faster) is FASTER[plain] and type(module) is plain and isinstance(faster, plain)
    assert list(faster.state_dict()) == list(module.state_dict())
    one, other = outcome(faster, arguments, padded), outcome(module, arguments, padded)
    assert len(one) == len(other) > 1 or plain is nn.Dropout
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("name", ["CPVTDetr", "CPVTDeformableDetr"])
def test_a_detector_answers_the_same_and_one_switch_leaves_all_out(monkeypatch, name):
    stages = {"MODEL__BACKBONE__STAGES": (3, 4, 5)} if name == "CPVTDeformableDetr" else {}
    cfg, answers = random_config(MODEL__META_ARCHITECTURE=name, **stages), []
    mask = padding_mask_of([(128, 100), (60, 160)], (128, 160))
    images = torch.randn(2, 3, 128, 160)
    for switch in ("", "all"):
        monkeypatch.setenv(routes.SWITCH, switch)
        routes.is_on.cache_clear()
        torch.manual_seed(0)
        detector = build_detector(cfg).eval()
        assert {type(part) for part in detector.modules()}.isdisjoint(FASTER.values()) == (switch == "all")
        answers.append(detector(images, mask))
    torch.testing.assert_close(answers[0].logits, answers[1].logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(answers[0].boxes, answers[1].boxes, rtol=0, atol=1e-5)


class Own(nn.Linear):
    """A user's layer."""


def test_what_others_wrote_stays_as_it_is():
    foreign = type("Network", (nn.Sequential,), {"__module__": "timm.models.network"})(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), Own(2, 2), foreign, nn.Sequential(nn.Linear(2, 2)))
    accelerate(model)
    assert [type(part) for part in model] == [FASTER[nn.Linear], Own, type(foreign), nn.Sequential]
    assert type(foreign[0]) is nn.Linear and type(model[3][0]) is FASTER[nn.Linear]


def test_an_accelerated_model_is_accelerated_once_and_can_be_copied():
    model = accelerate(accelerate(nn.Sequential(nn.Linear(2, 2))))
    assert type(copy.deepcopy(model)[0]) is FASTER[nn.Linear]


def test_a_convolution_that_pads_otherwise_is_torch_s():
    convolution, x = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), torch.randn(1, 3, 5, 6)
    assert torch.equal(accelerate(copy.deepcopy(convolution))(x), convolution(x))


def with_subclass(body):
    body.layer1[0].conv2 = type("Doubled", (nn.Conv2d,), {"forward": lambda self, x: 2 * nn.Conv2d.forward(self, x)})(8, 8, 3, 1, 1)


def with_hook(body):
    body.layer1[0].conv2.register_forward_hook(lambda module, inputs, out: 2 * out)


def with_hook_on_a_norm(body):
    body.layer1[0].bn2.register_forward_hook(lambda module, inputs, out: 2 * out)


@pytest.mark.parametrize("change", [with_subclass, with_hook, with_hook_on_a_norm])
def test_convolutions_and_norms_that_do_more_are_called(change):
    torch.manual_seed(0)
    backbone = ResNetBackbone("resnet10", stages=(2,), width=8)
    change(backbone.body)
    mask = padding_mask_of([(64, 64), (32, 48)], (64, 64))
    images = torch.randn(2, 3, 64, 64).masked_fill(mask[:, None], 0)
    (plain,) = backbone(images, mask)
    (found,) = accelerate(backbone)(images, mask)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))


def layer_and_input(dropout):
    torch.manual_seed(0)
    return EncoderLayer(C, HEADS, 48, dropout, False), torch.randn(2, 5, C)


def test_dropout_is_that_of_its_own_module():
    layer, x = layer_and_input(0.5)
    expected = layer.eval()(x, None, None)
    layer = accelerate(layer).train()
    layer.dropout.eval()
    layer.self_attn.dropout = 0.0
    torch.testing.assert_close(layer(x, None, None), expected)
    layer.dropout = nn.Identity()
    torch.testing.assert_close(layer(x, None, None), expected)
    layer.eval().dropout = accelerate(nn.Dropout(0.5)).train()
    assert not torch.allclose(layer(x, None, None), expected)


def test_an_image_without_a_valid_key_is_no_nan_in_training():
    attention, x = accelerate(Attention(C, HEADS, dropout=0.5)).train(), torch.randn(2, 5, C)
    mask = torch.tensor([[False] * 5, [True] * 5])
    assert attention(x, x, x, mask).isfinite().all()


def test_an_accelerated_resnet_compiles_to_one_graph():
    backbone = accelerate(ResNetBackbone("resnet10", stages=(2,), width=8)).eval()
    images, mask = torch.randn(1, 3, 64, 64), torch.zeros(1, 64, 64, dtype=torch.bool)
    compiled = torch.compile(backbone, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images, mask)[0], backbone(images, mask)[0], rtol=0, atol=1e-4)


def test_an_accelerated_linear_layer_compiles_to_one_graph():
    layer, x = accelerate(nn.Linear(256, 256)), torch.randn(600, 256)  # large enough to be a convolution on some processors
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-5)


def test_gradients_of_torch_func_go_through_dropout():
    layer, x = accelerate(nn.Dropout(0.5)).train(), torch.ones(3)
    assert torch.func.grad(lambda x: layer(x).sum())(x).shape == (3,)


def test_norms_of_the_hybrid_encoder_are_folded_in_evaluation_alone():
    """One convolution for a block of two branches and two norms; a norm that somebody watches is called."""
    (block, (x, valid), _), calls = convolution_block(RepVGGBlock, C), []
    block = accelerate(block).eval()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    with torch.profiler.profile() as profile:
        block(x, valid)
    names = [event.name for event in profile.events()]
    assert not any("batch_norm" in name for name in names)
    assert sum(name in ("aten::conv2d", "_Winograd") for name in names) == 1
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    block.conv2.norm.register_forward_hook(lambda *_: calls.append(1))
    block(x, valid)
    assert calls == [1]


def test_a_resnet_with_batch_norms_folds_them_in_evaluation():
    _, (images, mask), _ = resnet()
    plain = ResNetBackbone("resnet18", stages=(3, 5), width=32, norm="BN").eval()
    for norm in plain.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2)
    fast = accelerate(copy.deepcopy(plain))
    with torch.profiler.profile() as profile:
        found = fast(images, mask)
    assert not any("batch_norm" in event.name for event in profile.events())
    for one, other in zip(found, plain(images, mask), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.detach().abs().max()))
