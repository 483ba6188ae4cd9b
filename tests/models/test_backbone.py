# SPDX-License-Identifier: Apache-2.0
"""The ResNets: torchvision's names and numbers, strides, frozen stages, narrow widths, and what is refused."""

import itertools
from unittest import mock

import pytest
import torch
import torchvision
from test_models import small_cfg

from cpvt_det.builders import build_backbone, build_detector
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.structures import padding_mask_of
from cpvt_det.fast import accelerate, resnet
from cpvt_det.models import ResNetBackbone


class NarrowResNet(torchvision.models.ResNet):
    """torchvision's own network, but with a stem of 16 channels and stages in proportion."""

    def _make_layer(self, block, planes, *args, **more):
        if planes == 64:
            self.inplanes = 16
            self.conv1, self.bn1 = torch.nn.Conv2d(3, 16, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(16)
        return super()._make_layer(block, planes // 4, *args, **more)


def narrow_resnet(name):
    """torchvision's network of a name, narrow, with random weights: in float64 with gradients a full one has hundreds of MB."""
    with mock.patch("torchvision.models.resnet.ResNet", NarrowResNet):
        return getattr(torchvision.models, name)(weights=None)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101"])
def test_names_and_shapes_are_torchvision_s(name):
    with torch.device("meta"):
        own, other = ResNetBackbone(name, norm="BN").body.state_dict(), getattr(torchvision.models, name)(weights=None).state_dict()
    shapes = {key: tensor.shape for key, tensor in other.items() if not key.startswith("fc.")}
    assert {key: tensor.shape for key, tensor in own.items()} == shapes


@pytest.mark.parametrize(("name", "width"), [("resnet18", 64), ("resnet34", 64), ("resnet50", 64), ("resnet101", 16)])
def test_backbone_without_padding_is_torchvision_s(name, width):
    """The same numbers on images without padding; both have the same tensors, which are 200 MB of a ResNet-50."""
    with torch.device("meta"):
        backbone = ResNetBackbone(name, norm="BN", stages=(2, 3, 4, 5), width=width).eval().double()
    reference = (narrow_resnet(name) if width == 16 else getattr(torchvision.models, name)(weights=None)).eval().double()
    missing, unexpected = backbone.body.load_state_dict(reference.state_dict(), strict=False, assign=True)
    assert missing == []
    assert unexpected == ["fc.weight", "fc.bias"]
    nodes = {f"layer{stage - 1}": str(stage) for stage in (2, 3, 4, 5)}
    images = torch.ones(1, 3, 64, 96, dtype=torch.float64)
    expected = torchvision.models._utils.IntermediateLayerGetter(reference, nodes)(images)
    found = backbone(images, torch.zeros(1, 64, 96, dtype=torch.bool))
    for own, other, channels in zip(found, expected.values(), backbone.channels, strict=True):
        assert own.shape[1] == channels
        assert torch.equal(own, other)


@pytest.mark.parametrize(("dilation", "stride"), [(False, 32), (True, 16)])
def test_dc5_has_the_stride_of_stage_four(dilation, stride):
    with torch.device("meta"):
        backbone = ResNetBackbone("resnet101", stages=(4, 5), dc5=dilation)
        maps = backbone(torch.zeros(1, 3, 96, 64), torch.zeros(1, 96, 64, dtype=torch.bool))
    assert backbone.strides == [16, stride]
    assert [tuple(level.shape) for level in maps] == [(1, 1024, 6, 4), (1, 2048, 96 // stride, 64 // stride)]


def test_dc5_sets_the_divisor_of_the_canvas():
    with torch.device("meta"):
        plain, dilated = (
            build_detector(small_cfg(BACKBONE__NAME="resnet50", BACKBONE__DC5=dc5, BACKBONE__STAGES=(5,))) for dc5 in (False, True)
        )
    assert (plain.size_divisibility, dilated.size_divisibility) == (32, 16)


def test_dc5_of_basic_blocks_is_a_config_error():
    with pytest.raises(ConfigError, match="resnet18 has no dilated stage 5"):
        build_detector(small_cfg(BACKBONE__DC5=True, BACKBONE__STAGES=(5,)))


@pytest.mark.parametrize("freeze_at", range(6))
def test_freeze_at_freezes_the_stages_up_to_it(freeze_at):
    """1 is the stem, 2 the first residual stage (torchvision's layer1)."""
    body = ResNetBackbone("resnet18", norm="BN", freeze_at=freeze_at).body
    trained = {name for name, parameter in body.named_parameters() if parameter.requires_grad}
    stages = [("conv1.", "bn1."), ("layer1.",), ("layer2.",), ("layer3.",), ("layer4.",)]
    expected = {name for name, _ in body.named_parameters() if name.startswith(tuple(itertools.chain(*stages[freeze_at:])))}
    assert trained == expected


def test_stages_after_the_last_one_used_are_not_built():
    backbone = build_backbone(small_cfg(BACKBONE__STAGES=(4,)))
    assert not hasattr(backbone.body, "layer4")
    assert backbone.strides == [16]
    assert backbone.channels == [256]


@pytest.mark.parametrize(("name", "dilation"), [("resnet10", False), ("resnet50", True)])
def test_a_quarter_of_the_width_is_a_quarter_of_every_stage(name, dilation):
    with torch.device("meta"):
        narrow, full = (ResNetBackbone(name, "BN", (2, 3, 4, 5), dilation, width=width) for width in (16, 64))
        images, padding_mask = torch.zeros(1, 3, 96, 64), torch.zeros(1, 96, 64, dtype=torch.bool)
        found, expected = narrow(images, padding_mask), full(images, padding_mask)
    assert narrow.strides == full.strides
    assert [level.shape[1] for level in found] == narrow.channels == [channels // 4 for channels in full.channels]
    assert [level.shape[2:] for level in found] == [level.shape[2:] for level in expected]
    for own, other in zip(narrow.body.modules(), full.body.modules(), strict=True):
        if isinstance(own, torch.nn.Conv2d):
            assert own.out_channels == other.out_channels // 4
            assert (own.stride, own.padding, own.dilation) == (other.stride, other.padding, other.dilation)


def test_narrow_backbone_starts_as_torchvision_s_do():
    """Convolutions: a variance of 2 / (out channels x kernel cells); of layer3's second one 2 / (128 x 9)."""
    weight = ResNetBackbone("resnet10", "BN", (4,), width=32).body.layer3[0].conv2.weight
    assert weight.shape == (128, 128, 3, 3)
    assert weight.var().item() == pytest.approx(2 / (128 * 9), rel=0.03)


def test_backbone_without_width_is_refused():
    with pytest.raises(ConfigError, match="backbone width must be at least 1, got 0"):
        build_detector(small_cfg(BACKBONE__WIDTH=0))


@pytest.mark.parametrize("stages", [(), (1,), (6,), (2, 7)])
def test_stages_that_do_not_exist_are_refused(stages):
    with pytest.raises(ValueError, match="among 2, 3, 4, 5"):
        ResNetBackbone("resnet18", stages=stages)


def test_unknown_backbone_and_norm_list_the_known():
    with pytest.raises(UnknownNameError, match=r"unknown backbone 'resnet19'.*known: .*resnet101, resnet101d, resnet18"):
        build_detector(small_cfg(BACKBONE__NAME="resnet19"))
    with pytest.raises(UnknownNameError, match="unknown backbone norm 'LN'; known: BN, FrozenBN, GN, SyncBN"):
        build_detector(small_cfg(BACKBONE__NORM="LN"))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("norm", ["FrozenBN", "BN"])
def test_zeros_by_sizes_are_zeros_by_mask(name, norm, monkeypatch):
    """Writing to the padding alone, and multiplying by the mask: outputs, and gradients of images and weights, to the digit."""
    torch.manual_seed(0)
    backbone = accelerate(ResNetBackbone(name, norm, stages=(2, 5), freeze_at=0, width=8)).double()
    images = torch.randn(3, 3, 64, 96, dtype=torch.float64)
    mask = padding_mask_of([(64, 96), (33, 50), (1, 96)], (64, 96))
    found = []
    for sizes_of in (resnet.valid_sizes, lambda mask: None):
        monkeypatch.setattr(resnet, "valid_sizes", sizes_of)
        inputs = images.masked_fill(mask[:, None], 0).requires_grad_()
        maps = ResNetBackbone.forward(backbone, inputs, mask)
        total = sum((map_ * torch.linspace(-1, 1, map_.numel(), dtype=map_.dtype).view(map_.shape)).sum() for map_ in maps)
        grads = torch.autograd.grad(total, [inputs, *(part for part in backbone.parameters() if part.requires_grad)])
        found.append([*maps, *grads])
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)
        assert expected.any()
