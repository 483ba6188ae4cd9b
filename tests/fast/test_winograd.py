# SPDX-License-Identifier: Apache-2.0
"""Winograd's 3x3 convolution beside the direct one in float64: outputs and all gradients, on maps of every parity and size."""

import pytest
import torch
import torch.nn.functional as F

from cpvt_det.fast import convolution, winograd_numba
from cpvt_det.fast.convolution import convolve_3x3
from cpvt_det.ops import routes

SHAPES = [
    (1, 32, 32, 1, 1),
    (2, 48, 32, 2, 2),
    (2, 32, 64, 9, 7),
    (1, 33, 35, 5, 12),
    (3, 64, 48, 17, 30),
    (2, 32, 32, 1, 8),
]
"""B, C, C', H, W."""


def direct(x, weight, bias):
    return F.conv2d(x, weight, bias, padding=1)


def differentiated(call, inputs, grad, dtype):
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    out = call(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]


def drawn(batch, channels, out_channels, height, width):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, channels, height, width), (out_channels, channels, 3, 3), (out_channels,))
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    return inputs, torch.randn(batch, out_channels, height, width, generator=generator)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("block", [1, winograd_numba.BLOCK], ids=["row by row", "whole"])
def test_outputs_and_gradients_are_those_of_the_direct_sum(shape, layout, block, monkeypatch):
    monkeypatch.setattr(winograd_numba, "BLOCK", block)
    inputs, grad = drawn(*shape)
    expected = differentiated(direct, inputs, grad, torch.float64)
    inputs[:2] = [x.to(memory_format=layout) for x in inputs[:2]]
    found = differentiated(convolve_3x3, inputs, grad.to(memory_format=layout), torch.float32)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.shape == wanted.shape and actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())


def test_its_error_is_that_of_the_direct_sum_in_float32():
    """Which is between a half and twice, by the order in which a kernel adds."""
    inputs, grad = drawn(2, 128, 128, 24, 20)
    exact = differentiated(direct, inputs, grad, torch.float64)
    errors = []
    for call in (convolve_3x3, direct):
        found = differentiated(call, inputs, grad, torch.float32)
        errors.append([(a - b).square().mean().sqrt().item() for a, b in zip(found[:2], exact[:2], strict=True)])
    assert all(ours < 2 * theirs for ours, theirs in zip(*errors, strict=True)), errors


def test_without_a_bias_and_with_what_needs_no_gradient():
    inputs, grad = drawn(2, 32, 48, 6, 5)
    x, weight = inputs[0], inputs[1].requires_grad_()
    (of_weight,) = torch.autograd.grad(convolve_3x3(x, weight), weight, grad)
    (expected,) = torch.autograd.grad(direct(x, weight, None), weight, grad)
    torch.testing.assert_close(of_weight, expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    x, weight = inputs[0].requires_grad_(), inputs[1].detach()
    (of_x,) = torch.autograd.grad(convolve_3x3(x, weight), x, grad)
    torch.testing.assert_close(of_x, torch.autograd.grad(direct(x, weight, None), x, grad)[0], rtol=0, atol=2e-4)


def test_threads_share_the_rows():
    inputs, grad = drawn(2, 64, 64, 23, 18)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(differentiated(convolve_3x3, inputs, grad, torch.float32))
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-6 * one.abs().max().item())


def test_threads_hold_few_sums(monkeypatch):
    inputs, grad = drawn(2, 64, 64, 23, 18)
    expected = differentiated(convolve_3x3, inputs, grad, torch.float32)
    monkeypatch.setattr(winograd_numba, "MOST_SUMS", 2 * 16 * 64 * 64)
    pieces = winograd_numba._pieces(inputs[0], 64, 2)
    monkeypatch.setattr(winograd_numba, "cut", lambda length, work: [(i, i + 1) for i in range(length)])
    assert winograd_numba._pieces(inputs[0], 64, 2) == [(0, 12), (12, 24)] and pieces[-1][1] == 24
    found = differentiated(convolve_3x3, inputs, grad, torch.float32)
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=1e-6 * expected[2].abs().max().item())


def test_inference_mode_and_another_default_device():
    inputs, _ = drawn(2, 32, 32, 6, 5)
    with torch.inference_mode(), torch.device("meta"):
        found = convolve_3x3(*inputs)
    torch.testing.assert_close(found, direct(*inputs), rtol=0, atol=1e-4)


def test_nan_and_infinity_reach_the_output():
    inputs, _ = drawn(1, 32, 32, 6, 6)
    for value in (float("nan"), float("inf")):
        inputs[0][0, 3, 2, 2] = value
        assert not convolve_3x3(*inputs).isfinite().all()


@pytest.mark.parametrize(
    "form",
    [
        ((2, 2), (1, 1), (1, 1), 1),
        ((1, 1), (0, 0), (1, 1), 1),
        ((1, 1), (2, 2), (2, 2), 1),
        ((1, 1), (1, 1), (1, 1), 2),
    ],
    ids=["stride", "padding", "dilation", "groups"],
)
def test_other_convolutions_are_torch_s(form, monkeypatch):
    monkeypatch.setattr(routes, "is_on", lambda route: True)
    monkeypatch.setattr(convolution, "SMALL_WINOGRAD", 0)
    x, weight = torch.ones(1, 64, 8, 8), torch.ones(64, 64, 3, 3)
    assert convolution.fits_winograd(x, weight, (1, 1), (1, 1), (1, 1), 1)
    assert not convolution.fits_winograd(x, weight, *form)
    assert not convolution.fits_winograd(x, torch.ones(64, 64, 1, 1), (1, 1), (1, 1), (1, 1), 1)
    assert not convolution.fits_winograd(x[:, :16], torch.ones(64, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    assert not convolution.fits_winograd(x, weight.double(), (1, 1), (1, 1), (1, 1), 1)
    assert not convolution.fits_winograd(x, torch.ones(16, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    monkeypatch.setattr(convolution, "_winograd_kernels", lambda: None)  # numba is not there
    assert not convolution.fits_winograd(x, weight, (1, 1), (1, 1), (1, 1), 1)


@pytest.mark.parametrize(("instructions", "taken"), [(routes.IN_HALVES, [False, True]), ("AVX2", [True, True])])
def test_small_maps_are_direct_where_avx512_runs_in_halves(instructions, taken, monkeypatch):
    """64 channels, 86 x 86 cells: 2^28 multiplications and some more."""
    monkeypatch.setattr(routes, "instructions", lambda: instructions)
    weight = torch.ones(64, 64, 3, 3)
    found = [convolution.fits_winograd(torch.ones(1, 64, side, side), weight, (1, 1), (1, 1), (1, 1), 1) for side in (85, 86)]
    assert found == taken
