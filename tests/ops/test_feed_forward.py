# SPDX-License-Identifier: Apache-2.0
"""Feed-forward networks by blocks of rows: the numbers and gradients of torch's layers, and what of them is kept."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpvt_det.layers.checkpointing import recomputed
from cpvt_det.ops import dropout as dropping
from cpvt_det.ops import feed_forward as blocks
from cpvt_det.ops import linear as torch_linear
from cpvt_det.ops import routes
from cpvt_det.ops.dropout import Dropout
from cpvt_det.ops.linear import Linear

FAST, SLOW = ("hidden", "linear", "dropout"), ("hidden", "dropout")
"""Ways of a processor whose products are quicker than new pages, and of another one."""


@pytest.fixture(params=[FAST, SLOW], ids=["fast products", "slow products"], autouse=True)
def small_blocks(request, monkeypatch):
    """The way on every processor: blocks of five rows of 24 numbers, from 100 numbers on."""
    monkeypatch.setattr(routes, "is_on", lambda route: route in request.param)
    monkeypatch.setattr(torch_linear, "SMALL", 1)
    monkeypatch.setattr(torch_linear, "SMALL_PRODUCT", 1)
    monkeypatch.setattr(blocks, "LARGE", 100)
    monkeypatch.setattr(blocks, "BLOCK", 5 * 24)


def layers(frozen=()):
    torch.manual_seed(0)
    first, second = Linear(8, 24), Linear(24, 6)
    for name in frozen:
        (first if name.startswith("first") else second).get_parameter(name.partition(".")[2]).requires_grad_(False)
    return first, second


def outcome(call, x, first, second):
    """The output, and all gradients."""
    out = call(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    inputs = [tensor for tensor in (x, *first.parameters(), *second.parameters()) if tensor.requires_grad]
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("shape", [(23, 8), (2, 10, 8), (5, 3, 8), (1, 6, 8)], ids=str)
@pytest.mark.parametrize(
    "frozen",
    [(), ("first.weight",), ("first.weight", "first.bias"), ("second.weight", "second.bias"), ("x",)],
    ids=lambda names: "+".join(names) or "none",
)
def test_it_is_torch_s_in_float64(shape, frozen):
    first, second = layers([name for name in frozen if name != "x"])
    x = torch.randn(shape, requires_grad="x" not in frozen)
    found = outcome(lambda x: Dropout(0.0).feed_forward(first, second, x), x, first, second)
    exact = [copy.deepcopy(layer).double() for layer in (first, second)]
    wide = x.detach().double().requires_grad_(x.requires_grad)
    wanted = outcome(
        lambda x: F.linear(F.linear(x, exact[0].weight, exact[0].bias).relu(), exact[1].weight, exact[1].bias), wide, *exact
    )
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-6 * float(other.detach().abs().max()))


def test_a_view_is_fed_too():
    first, second = layers()
    x = torch.randn(2, 8, 9).transpose(1, 2)
    wanted = F.linear(F.linear(x, first.weight, first.bias).relu(), second.weight, second.bias)
    torch.testing.assert_close(Dropout(0.0).feed_forward(first, second, x), wanted)


LAYOUTS = {
    "rows": lambda: torch.randn(2, 40, 8),
    "columns": lambda: torch.randn(1, 8, 80).transpose(1, 2),
    "one row": lambda: torch.randn(1, 8).expand(80, 8),
}


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("own_kernel", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropped_numbers_are_torch_s_in_float64(layout, probability, own_kernel, monkeypatch):
    """What is dropped is what the layers one by one drop from the same seed; sums and gradients are then worked out in float64."""
    if not own_kernel:
        monkeypatch.setattr(dropping, "_kernel", lambda: None)
    first, second = layers()
    x, dropout = LAYOUTS[layout]().requires_grad_(), Dropout(probability)
    torch.manual_seed(1)
    with torch.no_grad():
        rectified = first(x).relu()
        factors = (dropout.of_relu(first, x) / rectified).double()  # 0 / 0 where the ReLU is zero
    kept = factors[rectified > 0] > 0
    assert (kept.double().mean() - (1 - probability)).abs() < 0.1
    assert all(abs(factor - 1 / (1 - probability)) < 1e-4 for factor in factors[rectified > 0][kept].tolist())
    factors = factors.nan_to_num(0)
    torch.manual_seed(1)
    found = outcome(lambda x: dropout.feed_forward(first, second, x), x, first, second)
    exact = [copy.deepcopy(layer).double() for layer in (first, second)]
    wanted = outcome(lambda x: exact[1](exact[0](x).relu() * factors), x.detach().double().requires_grad_(), *exact)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5 * float(other.detach().abs().max()))


def kept_by(dropout):
    """Sizes of what a feed-forward network keeps for its backward pass, each tensor once."""
    first, second = layers()
    x, kept = torch.randn(40, 8, requires_grad=True), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.update({tensor.data_ptr(): tensor.shape}) or tensor, lambda tensor: tensor
    ):
        dropout.feed_forward(first, second, x)
    return sorted(tuple(shape) for shape in kept.values())


def test_the_numbers_between_are_kept_where_a_product_is_slow_or_some_are_dropped():
    few, all_ = [(6, 24), (24,), (24, 8), (40, 8)], [(6, 24), (24,), (24, 8), (40, 8), (40, 24)]
    is_fast = routes.is_on("linear")
    assert kept_by(Dropout(0.0)) == (few if is_fast else all_)
    assert kept_by(Dropout(0.5)) == all_


def test_nothing_is_kept_of_an_answer(monkeypatch):
    seen = []
    monkeypatch.setattr(blocks, "feed_forward", lambda *arguments: seen.append(len(arguments)))
    with torch.no_grad():
        Dropout(0.5).eval().feed_forward(*layers(), torch.randn(40, 8))
    assert seen == [5]


def test_layers_made_again_drop_the_same():
    """Recomputation in the backward pass (``MODEL.CHECKPOINTING``) draws from the same seed."""
    first, second = layers()
    x, found = torch.randn(40, 8, requires_grad=True), []
    for run in (lambda call, x: call(x), recomputed):
        torch.manual_seed(2)
        found.append(outcome(lambda x, run=run: run(lambda x: Dropout(0.4).feed_forward(first, second, x), x), x, first, second))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Extended(Linear):
    """A layer of a user's that adds to the product."""

    def forward(self, x, rectify=False):
        return super().forward(x) + 1


def hooked():
    first, second = layers()
    first.register_forward_hook(lambda module, inputs, out: out + 1)
    return Dropout(0.0), first, second


def extended():
    first, second = layers()
    wrapped = Extended(8, 24)
    wrapped.load_state_dict(first.state_dict())
    return Dropout(0.0), wrapped, second


def test_a_layer_that_does_more_is_called():
    """A hook sees the ReLU of the first layer, a subclass adds before it."""
    x = torch.randn(40, 8)
    dropout, first, second = hooked()
    product = F.linear(x, first.weight, first.bias)
    torch.testing.assert_close(dropout.feed_forward(first, second, x), second(product.relu() + 1))
    dropout, first, second = extended()
    torch.testing.assert_close(dropout.feed_forward(first, second, x), second((product + 1).relu()))


@pytest.mark.parametrize("case", ["few", "bf16", "no bias"])
def test_blocks_are_for_many_numbers_in_float32(case, monkeypatch):
    monkeypatch.setattr(blocks, "feed_forward", lambda *_: pytest.fail("blocks"))
    first, second = layers()
    if case == "no bias":
        second.bias = None
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "bf16"):
        Dropout(0.0).feed_forward(first, second, torch.randn(4 if case == "few" else 40, 8))
    with pytest.raises(pytest.fail.Exception, match="blocks"):
        Dropout(0.5).eval().feed_forward(*layers(), torch.randn(40, 8))


def test_a_program_holds_the_plain_layers():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.dropout = *layers(), Dropout(0.0)

        def forward(self, x):
            return self.dropout.feed_forward(self.first, self.second, x)

    program = torch.export.export(Network().eval(), (torch.randn(40, 8),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("linear" in target for target in targets) == 2 and sum("relu" in target for target in targets) == 1
