# SPDX-License-Identifier: Apache-2.0
"""Attention against ``nn.MultiheadAttention`` with the same parameters, whatever the inputs share."""

import pytest
import torch
from torch import nn

from cpvt_det.layers import Attention

CHANNELS, HEADS = 24, 4

# Which of queries, keys and values are one object, and the products that their projection takes.
SHARING = {"all": 1, "queries and keys": 2, "keys and values": 2, "none": 3}


def make_pair():
    torch.manual_seed(0)
    attention = Attention(CHANNELS, HEADS).double()
    reference = nn.MultiheadAttention(CHANNELS, HEADS, batch_first=True).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    reference.load_state_dict(attention.state_dict())
    return attention, reference


def make_inputs(sharing):
    generator = torch.Generator().manual_seed(1)
    draw = lambda length: torch.randn(3, length, CHANNELS, generator=generator, dtype=torch.float64)  # noqa: E731
    queries, keys, values = draw(9), draw(9), draw(9)
    if sharing == "all":
        return queries, queries, queries
    if sharing == "queries and keys":
        return queries, queries, values
    if sharing == "keys and values":
        return draw(5), keys, keys
    return draw(5), keys, values


def make_mask():
    """The second image has one valid key, the third two thirds of them."""
    mask = torch.zeros(3, 9, dtype=torch.bool)
    mask[1, 1:] = True
    mask[2, 3:6] = True
    return mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sharing", SHARING)
def test_attention_is_that_of_multihead_attention(sharing, masked):
    attention, reference = make_pair()
    queries, keys, values = make_inputs(sharing)
    mask = make_mask() if masked else None
    expected, _ = reference(queries, keys, values, key_padding_mask=mask, need_weights=False)
    assert (attention(queries, keys, values, mask) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("sharing", SHARING)
def test_gradients_are_those_of_multihead_attention(sharing):
    attention, reference = make_pair()
    inputs = make_inputs(sharing)
    attention(*inputs, make_mask()).square().sum().backward()
    reference(*inputs, key_padding_mask=make_mask(), need_weights=False)[0].square().sum().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in attention.named_parameters():
        assert (parameter.grad - expected[name].grad).abs().max() < 1e-10, name


@pytest.mark.parametrize("sharing", SHARING)
def test_sharing_an_input_changes_the_products_and_not_the_numbers(sharing, monkeypatch):
    attention, _ = make_pair()
    inputs = make_inputs(sharing)
    apart = attention(*(x.clone() for x in inputs), make_mask())
    linear, products = nn.functional.linear, []
    monkeypatch.setattr(attention, "_linear", lambda *args: products.append(args[0]) or linear(*args))
    shared = attention(*inputs, make_mask())
    assert len(products) == SHARING[sharing]
    assert (shared - apart).abs().max() < 1e-12


def test_masked_keys_are_not_seen():
    attention, _ = make_pair()
    queries, keys, values = make_inputs("none")
    mask = make_mask()
    before = attention(queries, keys, values, mask)
    after = attention(queries, keys.masked_fill(mask[..., None], 1e6), values.masked_fill(mask[..., None], -7.0), mask)
    assert torch.equal(before, after)
    assert not torch.equal(before, attention(queries, keys, values))


def test_initial_values_are_those_of_multihead_attention():
    """From the same seed, to the bit."""
    torch.manual_seed(3)
    attention = Attention(CHANNELS, HEADS)
    torch.manual_seed(3)
    reference = nn.MultiheadAttention(CHANNELS, HEADS)
    assert set(attention.state_dict()) == set(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert torch.equal(attention.state_dict()[name], value), name


def test_dropout_acts_in_training_alone():
    torch.manual_seed(0)
    attention = Attention(CHANNELS, HEADS, dropout=0.5)
    x = torch.randn(1, 9, CHANNELS)
    assert not torch.equal(attention(x, x, x), attention(x, x, x))
    attention.eval()
    assert torch.equal(attention(x, x, x), attention(x, x, x))


@pytest.mark.parametrize(("channels", "heads"), [(24, 5), (24, 0), (4, 8)])
def test_heads_that_do_not_divide_the_channels_are_refused(channels, heads):
    with pytest.raises(ValueError, match=f"got {channels} channels and {heads} heads"):
        Attention(channels, heads)
