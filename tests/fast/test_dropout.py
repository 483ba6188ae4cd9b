# SPDX-License-Identifier: Apache-2.0
"""Dropout by our own kernel: as many, as independent and as reproducible as torch's."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpvt_det.fast import layers
from cpvt_det.fast.layers import FastDropout, dropout
from cpvt_det.ops import numba_threads as kernels

pytest.importorskip("numba")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def kept_of(count: int, probability: float, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return dropout(torch.ones(count), probability) != 0


def assert_share(found: torch.Tensor, expected: float) -> None:
    """Within five standard deviations."""
    assert abs(found.double().mean().item() - expected) < 5 * math.sqrt(expected * (1 - expected) / found.numel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_scale_of_the_rest(probability, dtype):
    torch.manual_seed(1)
    x = torch.randn(1000, 211, dtype=torch.float64).abs().add(0.5).to(dtype)
    out = dropout(x, probability)
    assert out.dtype == dtype
    assert_share(out == 0, probability)
    kept = out != 0
    torch.testing.assert_close(out[kept], x[kept] / (1 - probability), rtol=max(1e-4, torch.finfo(dtype).eps), atol=0)


def test_elements_are_independent():
    """Of their neighbours in memory, of those that the same random number decides on, of other calls and of other seeds."""
    probability, count = 0.3, 1 << 20
    agree = probability**2 + (1 - probability) ** 2
    kept = kept_of(count, probability)
    for lag in (1, 2, 255, 256, 257, 512, 2048, 1 << 16):
        assert_share(kept[lag:] == kept[:-lag], agree)
    assert_share(kept == (dropout(torch.ones(count), probability) != 0), agree)
    assert_share(kept == kept_of(count, probability, seed=1), agree)
    sums = kept.view(-1, 1024).double().sum(1)  # binomial in every block
    assert sums.var().item() == pytest.approx(1024 * probability * (1 - probability), rel=0.25)


def test_it_follows_torch_s_seed_and_no_number_of_threads(monkeypatch):
    monkeypatch.setattr(kernels, "SMALL_WORK", 1)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(kept_of(100_001, 0.1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    assert not torch.equal(found[0], kept_of(100_001, 0.1, seed=1))


def relu_dropout(x, probability):
    return dropout(x, probability, rectify=True)


@pytest.mark.parametrize("function", [dropout, relu_dropout])
def test_gradients(function):
    """Also the second, and of an input that is no plain block of memory; the same seed every time."""
    x = torch.randn(7, 5, dtype=torch.float64).t().requires_grad_()

    def call(x):
        torch.manual_seed(3)
        return function(x, 0.4)

    assert torch.autograd.gradcheck(call, x)
    assert torch.autograd.gradgradcheck(lambda x: call(x).square(), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_and_dropout_in_one(dtype):
    x = torch.randn(3, 700, dtype=torch.float64).to(dtype).requires_grad_()
    torch.manual_seed(2)
    expected = dropout(F.relu(x), 0.25)
    torch.manual_seed(2)
    out = relu_dropout(x, 0.25)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (out, expected)))


@pytest.mark.parametrize("function", [dropout, relu_dropout])
def test_nan_is_not_lost(function):
    out = function(torch.full((1000,), -math.nan), 0.1)
    assert_share(out.isnan(), 0.9)


@pytest.mark.parametrize("probability", [0.0, 1.0, 1 - 1e-7])
def test_the_ends_are_torch_s(probability):
    torch.manual_seed(0)
    expected = F.dropout(torch.ones(64), probability)
    torch.manual_seed(0)
    assert torch.equal(dropout(torch.ones(64), probability), expected)


def test_nothing_happens_in_evaluation_and_to_nothing():
    x = torch.linspace(-1, 1, 9)
    assert torch.equal(FastDropout(0.5).eval()(x), x)
    assert torch.equal(dropout(x, 0.5, training=False, rectify=True), x.relu())
    assert (x < 0).any()  # it was not overwritten
    assert dropout(torch.ones(0, 4), 0.5).shape == (0, 4)


def test_elsewhere_it_is_torch_s(monkeypatch):
    assert dropout(torch.ones(3, device="meta"), 0.1).shape == (3,)
    program = torch.export.export(nn.Sequential(FastDropout(0.1)).train(), (torch.ones(3, 4),))
    assert any("dropout" in str(node.target) for node in program.graph.nodes)
    monkeypatch.setattr(layers, "_dropout_kernel", lambda: None)
    found = []
    for call in (dropout, F.dropout):
        torch.manual_seed(0)
        found.append(call(torch.ones(100), 0.1))
    assert torch.equal(*found)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_with_dropout_is_torch_s_up_to_what_is_drawn(padded, monkeypatch):
    monkeypatch.setattr(layers, "dropout", lambda x, probability: x)
    layer = layers.FastAttention(16, 4, dropout=0.1)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = padded
    queries, tokens = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    torch.testing.assert_close(layer(queries, tokens, tokens, mask), layer.eval()(queries, tokens, tokens, mask))
