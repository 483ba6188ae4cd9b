# SPDX-License-Identifier: Apache-2.0
"""Linear layers and convolutions on the faster library: the same numbers and gradients, wherever they run."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from cpvt_det.fast import convolution as convolution_module
from cpvt_det.fast import layers
from cpvt_det.fast.convolution import FastConv2d, convolve
from cpvt_det.fast.layers import FastEncoderLayer, FastLinear, linear
from cpvt_det.layers.norm import folded
from cpvt_det.ops import routes


@pytest.fixture(
    params=[(), ("linear", "pointwise"), ("pointwise", "rows"), tuple(routes.ROUTES)], ids=lambda taken: "+".join(taken) or "torch"
)
def library(request, monkeypatch):
    """All ways on every processor."""
    monkeypatch.setattr(routes, "instructions", lambda: "AVX512")
    monkeypatch.setattr(routes, "is_on", lambda route: route in request.param)
    for module in (layers, convolution_module):
        monkeypatch.setattr(module, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(layers, "SMALL_INPUT", 0)
    monkeypatch.setattr(convolution_module, "SMALL_WINOGRAD", 0)
    return request.param


def convolved(convolution, x, norm=None):
    """The convolution by the faster function, with the norm after it, if any, folded in."""
    return convolve(convolution, x, *((convolution.weight, convolution.bias) if norm is None else folded(convolution, norm)))


def gradients(call, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad((out * weights).sum(), inputs)


def assert_near(actual, expected, share=2e-6):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=0, atol=share * float(b.detach().abs().max()))


@pytest.mark.parametrize("shape", [(48,), (7, 48), (2, 5, 48), (1, 300, 48), (2, 3, 4, 48), (0, 48)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_is_torch_s(library, shape, dtype):
    x, weight, bias = torch.randn(shape, dtype=dtype), torch.randn(33, 48, dtype=dtype), torch.randn(33, dtype=dtype)
    if not x.numel():
        assert linear(x, weight, bias).shape == (0, 33)
        return
    out = linear(x, weight, bias)
    assert out.is_contiguous()
    assert_near(gradients(linear, x, weight, bias), gradients(F.linear, x, weight, bias))
    assert_near(gradients(linear, x, weight), gradients(F.linear, x, weight))


@pytest.mark.parametrize(
    ("instructions", "with_gradients", "taken"),
    [
        ("AVX512", True, [False, True, True]),
        ("AVX512", False, [False, True, True]),
        (routes.IN_HALVES, True, [False, False, False]),
        (routes.IN_HALVES, False, [False, False, True]),
    ],
)
def test_only_products_that_gain_are_convolutions(instructions, with_gradients, taken, monkeypatch):
    """Where AVX-512 runs in halves, these have no gradients and are four times as large."""
    monkeypatch.setattr(routes, "is_on", lambda route: True)
    monkeypatch.setattr(routes, "instructions", lambda: instructions)
    convolve, seen = F.conv2d, []
    monkeypatch.setattr(F, "conv2d", lambda *args, **more: seen.append(True) or convolve(*args, **more))
    found = []
    for rows in (500, 520, 2050):  # just below 2^23 multiplications, just above, and just above 2^25
        seen.clear()
        with torch.set_grad_enabled(with_gradients):
            linear(torch.randn(rows, 128), torch.randn(128, 128))
        found.append(bool(seen))
    assert found == taken


def test_a_wrapper_of_a_linear_layer_is_called_before_the_relu():
    """As of LoRA, which adds to the product."""

    class Wrapper(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x) - 1

    layer, last, x = FastLinear(4, 6), FastLinear(6, 4), torch.randn(3, 4)
    feed_forward = FastEncoderLayer(4, 1, 6, 0.0, pre_norm=False).feed_forward
    assert torch.equal(feed_forward(Wrapper(layer), last, x), last((layer(x) - 1).relu()))
    assert torch.equal(feed_forward(layer, last, x), last(layer(x).relu()))


def test_linear_takes_a_view(library):
    x, weight = torch.randn(2, 48, 9).transpose(1, 2), torch.randn(99, 48)[33:66]
    assert_near(gradients(linear, x, weight), gradients(F.linear, x, weight))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "bias"),
    [(1, 1, 0, False), (1, 2, 0, True), (1, 1, 1, True), (3, 1, 1, False), (3, 1, 1, True), (3, 1, 0, False), (3, 2, 1, True)],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_with_its_norm_is_torch_s(library, kernel, stride, padding, bias, layout):
    convolution = nn.Conv2d(40, 32, kernel, stride, padding, bias=bias)
    norm = FrozenBatchNorm2d(32)
    for buffer in norm.buffers():
        buffer.uniform_(0.5, 1.5)
    x = torch.randn(2, 40, 9, 7).to(memory_format=layout).requires_grad_()
    for found, expected in (
        (lambda x: convolved(convolution, x), convolution),
        (lambda x: convolved(convolution, x, norm), lambda x: norm(convolution(x))),
    ):
        steps = []
        for call in (found, expected):
            convolution.zero_grad()
            x.grad = None
            out = call(x)
            out.square().mean().backward()
            steps.append((out, x.grad, *(parameter.grad.clone() for parameter in convolution.parameters())))
        assert_near(*steps)
    before = convolved(convolution, x, norm)
    norm.bias += 1
    torch.testing.assert_close(convolved(convolution, x, norm), before + 1)  # no folded weight was kept


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(1, (2, 3), (0, 0)), (3, (2, 2), (0, 0)), (3, (2, 2), (1, 0)), (3, (2, 2), (0, 1))]
)
def test_gradients_of_strides_and_paddings_that_differ(library, kernel, stride, padding):
    convolution = nn.Conv2d(16, 24, kernel, stride, padding)
    x = torch.randn(2, 16, 9, 7).to(memory_format=torch.channels_last)

    def call(x, weight, bias):
        return F.conv2d(x, weight, bias, stride, padding)

    out = convolved(convolution, x.requires_grad_())
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    found = torch.autograd.grad((out * weights).sum(), [x, convolution.weight, convolution.bias])
    assert_near([out, *found], gradients(call, x, convolution.weight, convolution.bias))


@pytest.mark.parametrize("channels", [32, 96])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_convolution_of_other_channels_is_torch_s_error(library, channels, kernel):
    with pytest.raises(RuntimeError, match="channels"):
        convolved(nn.Conv2d(64, 64, kernel, padding=kernel // 2), torch.randn(1, channels, 6, 5))


@pytest.mark.parametrize("kernel", [1, 3])
def test_one_image_without_a_batch_is_convolved_too(library, kernel):
    convolution, x = nn.Conv2d(32, 32, kernel, padding=kernel // 2), torch.randn(32, 6, 5)
    torch.testing.assert_close(convolved(convolution, x), convolution(x))


def test_padding_by_name_is_torch_s(library):
    convolution, x = nn.Conv2d(32, 32, 3, stride=2, padding="valid"), torch.randn(1, 32, 6, 5)
    convolved(convolution, x).sum().backward()
    torch.testing.assert_close(convolved(convolution, x), convolution(x))


NARROW = """
import torch
from torch import nn
from cpvt_det.fast.convolution import FastConv2d
from cpvt_det.ops.strided_1x1 import guard_strided_1x1
torch.set_num_threads(1)
for channels in range(1, 16):
    for kind in (FastConv2d, nn.Conv2d):
        for _ in range(8):
            network = nn.Sequential(kind(channels, 2 * channels, 1, stride=2, bias=False))
            guard_strided_1x1(network)
            images = torch.randn(2, channels, 64, 64).to(memory_format=torch.channels_last)
            network(images).sum().backward()
print("whole")
"""


@pytest.mark.parametrize("instructions", ["", "AVX2"])
def test_narrow_strided_convolutions_leave_memory_whole(instructions):
    """With the processor's own instructions, and with AVX2 alone: torch's own spoil it, ``tests/upstream/strided_1x1.py``."""
    environment = {**os.environ, **({"ONEDNN_MAX_CPU_ISA": instructions} if instructions else {})}
    ended = subprocess.run([sys.executable, "-c", NARROW], env=environment, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "whole\n"), ended.stderr


@pytest.mark.parametrize("channels", [1, 7, 8, 15, 16])
@pytest.mark.parametrize("size", [(9, 7), (8, 4), (1, 1)], ids=str)
def test_narrow_strided_convolutions_are_as_by_hand(library, channels, size):
    convolution = nn.Conv2d(channels, 5, 1, stride=(2, 3))
    x, weight, bias = torch.randn(2, channels, *size), convolution.weight, convolution.bias
    cells = torch.zeros(2, -(-size[0] // 2), -(-size[1] // 3), 5)
    for i in range(cells.shape[1]):
        for j in range(cells.shape[2]):
            cells[:, i, j] = x[:, :, 2 * i, 3 * j] @ weight[:, :, 0, 0].T + bias
    torch.testing.assert_close(convolved(convolution, x), cells.permute(0, 3, 1, 2))


def test_half_precision_stays_with_torch_s_own_product(library):
    layer, x = FastLinear(48, 32), torch.randn(5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_library_that_is_switched_off_stays_off(library):
    layer, x = FastLinear(48, 32), torch.randn(5, 48)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_an_exported_program_holds_plain_layers(library):
    model = nn.Sequential(FastConv2d(3, 8, 1), nn.Flatten(2), FastLinear(20, 6)).eval()
    program = torch.export.export(model, (torch.randn(1, 3, 4, 5),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("linear" in target for target in targets) == 1
    (node,) = (node for node in program.graph.nodes if "conv2d" in str(node.target))
    assert 2 not in [number for argument in node.args[3:] for number in (argument if isinstance(argument, list) else [argument])]


def test_state_dicts_are_those_of_torch_s_layers():
    for ours, torch_s in ((FastLinear(4, 6), nn.Linear(4, 6)), (FastConv2d(4, 6, 3), nn.Conv2d(4, 6, 3))):
        ours.load_state_dict(torch_s.state_dict())
        assert isinstance(copy.deepcopy(ours), type(torch_s))
