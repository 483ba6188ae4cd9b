# SPDX-License-Identifier: Apache-2.0
"""No strided 1x1 convolution of few channels of any backbone reaches torch, whose weight's gradient would spoil memory."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from tiny import random_config
from torch import nn
from torch.overrides import TorchFunctionMode

from cpvt_det.builders import build_detector
from cpvt_det.models.backbones import BACKBONE_REGISTRY
from cpvt_det.ops.strided_1x1 import NARROW, guard_strided_1x1

TIMM = {"repvgg_a0": 4, "mobileone_s0": 3, "gernet_s": 3, "fastvit_t8": 3}
"""Networks with such a convolution -> last stage of the test."""
OWN = {"resnet10": 4, "resnet18": 8, "resnet34": 15, "resnet50": 2}
"""ResNets -> width with such convolutions."""


class Recorder(TorchFunctionMode):
    """The channels of convolutions in the unsafe form that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.unsafe: list[int] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (F.conv2d, torch.conv2d):
            self._see(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _see(self, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        is_strided = max(stride) > 1 if isinstance(stride, (tuple, list)) else stride > 1
        if weight.shape[2:] == (1, 1) and is_strided and groups == 1 and weight.shape[1] < NARROW:  # padding is 0 in all of these
            self.unsafe.append(weight.shape[1])


class Standardised(nn.Conv2d):
    """A convolution with arithmetic of its own, as NFNet's and BiT's."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class OwnBackbone(nn.Module):
    strides, channels, size_divisibility = [2], [6], 2

    def __init__(self):
        super().__init__()
        self.convolution = Standardised(3, 6, 1, stride=2)

    def forward(self, images, padding_mask):
        return [self.convolution(images)]


def unsafe_of_step(model, size=64):
    """What the forward pass of a training asks torch for; where that is nothing, the backward pass is run too."""
    model.train().requires_grad_()
    with Recorder() as recorder:
        maps = model.backbone(torch.randn(2, 3, size, size), torch.zeros(2, size, size, dtype=torch.bool))
    if not recorder.unsafe:
        sum(map_.square().mean() for map_ in maps).backward()
    return recorder.unsafe


@pytest.mark.parametrize(("name", "width"), OWN.items())
def test_resnets_of_any_width(name, width):
    cfg = random_config(MODEL__BACKBONE__NAME=name, MODEL__BACKBONE__WIDTH=width, MODEL__BACKBONE__STAGES=(5,))
    assert not unsafe_of_step(build_detector(cfg))


@pytest.mark.parametrize(("name", "stage"), TIMM.items())
def test_networks_of_timm(name, stage):
    pytest.importorskip("timm")
    words = {"NAME": f"timm/{name}", "STAGES": (stage,), "FREEZE_AT": 0, "MASK_PADDING": False}
    cfg = random_config(**{f"MODEL__BACKBONE__{key}": value for key, value in words.items()})
    detector = build_detector(cfg)
    assert not unsafe_of_step(detector)
    for module in detector.backbone.modules():
        vars(module).pop("forward", None)
    assert unsafe_of_step(detector)  # without the guard


def test_backbones_of_the_user():
    BACKBONE_REGISTRY.register_as("strided")(OwnBackbone)
    try:
        detector = build_detector(random_config(MODEL__BACKBONE__NAME="strided", MODEL__BACKBONE__STAGES=(1,)))
    finally:
        BACKBONE_REGISTRY._obj_map.pop("strided")
    assert not unsafe_of_step(detector)


@pytest.mark.parametrize("channels", [*range(1, NARROW + 1), 24])
@pytest.mark.parametrize("kind", [nn.Conv2d, Standardised])
def test_guarded_convolutions_are_those_of_float64(channels, kind):
    """Values, and the gradients by the map and the parameters, beside torch's own in float64 and contiguous memory."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(channels, channels, 1), kind(channels, 5, 1, stride=(2, 3)))
    plain = copy.deepcopy(network).double()
    guard_strided_1x1(network)
    network.to(memory_format=torch.channels_last)
    x = torch.randn(2, channels, 12, 9)
    found, expected = [], []
    for values, one, image in ((found, network, x.to(memory_format=torch.channels_last)), (expected, plain, x.double())):
        image = image.detach().requires_grad_()
        out = one(image)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        values += [out, image.grad, *(parameter.grad for parameter in one.parameters())]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))


def test_a_guarded_network_stays_itself():
    """Names, copies, files, other weights and hooks are as before; a copy has parameters of its own."""
    network = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 6, 1, stride=2))
    names, x = list(network.state_dict()), torch.randn(1, 4, 6, 4)
    expected = network(x)
    guard_strided_1x1(network)
    guard_strided_1x1(network)  # of a model that was guarded before
    assert torch.equal(network(x), expected) and list(network.state_dict()) == names and network[1].stride == (2, 2)
    calls = []
    network[1].register_forward_hook(lambda *_: calls.append(1))
    network(x)
    assert len(calls) == 1
    network[1]._forward_hooks.clear()
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        with torch.no_grad():
            other[1].weight.zero_()
        assert torch.equal(other(x)[0, :, 0, 0], other[1].bias) and torch.equal(network(x), expected)
        other.load_state_dict(network.state_dict())
        assert torch.equal(other(x), expected)
    other.load_state_dict({name: 2 * value for name, value in network.state_dict().items()}, assign=True)
    assert not torch.equal(other(x), expected)
    assert network.double()(x.double()).dtype == torch.float64
