# SPDX-License-Identifier: Apache-2.0
"""PEG's ablations: what each has and does, by count and by value. Their contract is in test_position.py, with all encodings'."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

from cpvt_det.common.structures import padding_mask_of
from cpvt_det.position import PEGDetection, build_position
from studies.ablations import BorderlessPEG, FrozenPEG, SeparablePEG, WidePEG, stacked_separable, stacked_single_cell

CHANNELS, SHAPE = 16, (5, 7)
SIZES = [(5, 7), (4, 3), (2, 6), (1, 1)]  # valid (h, w) of the images of a batch


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(len(SIZES), SHAPE[0] * SHAPE[1], CHANNELS, generator=generator, dtype=torch.float64)
    return tokens, padding_mask_of(SIZES, SHAPE).flatten(1)


def make(kind, **options):
    """In evaluation, with norms unlike their initial values."""
    torch.manual_seed(1)
    peg = kind(CHANNELS, **options).double().eval()
    for tensor in [*peg.parameters(), *peg.buffers()]:
        if tensor.dim() == 1 and tensor.is_floating_point():
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return peg


def weights_of_convolutions(name, **options):
    encoding = build_position(name, CHANNELS, **options)
    return sum(module.weight.numel() for module in encoding.modules() if isinstance(module, torch.nn.Conv2d))


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("peg", {}, 9 * CHANNELS),
        ("peg", {"kernel_size": 1}, CHANNELS),
        ("peg", {"kernel_size": 5}, 25 * CHANNELS),
        ("peg", {"kernel_size": 7}, 49 * CHANNELS),
        ("peg", {"kernel_size": 27, "positions": [-1]}, 729 * CHANNELS),
        ("peg", {"positions": [0, 1, 2, 3, 4, 5]}, 6 * 9 * CHANNELS),
        ("peg_separable", {}, CHANNELS**2 + 9 * CHANNELS),
        ("peg_stacked", {}, 4 * (CHANNELS**2 + 9 * CHANNELS)),
        ("peg_frozen", {}, 9 * CHANNELS),
        ("peg_wide", {}, 9 * CHANNELS),
        ("peg_borderless", {}, 9 * CHANNELS),
        ("peg_twelve_1x1", {}, 12 * CHANNELS),
        ("peg_query_key", {}, 9 * CHANNELS),
    ],
)
def test_weights_of_the_convolutions_are_as_many_as_expected(name, options, count):
    assert weights_of_convolutions(name, **options) == count


@pytest.mark.parametrize(("options", "variance"), [({}, 2 / 9), ({"kernel_size": 5}, 2 / 25)])
def test_wide_starts_with_the_variance_of_twins_and_no_bias(options, variance):
    torch.manual_seed(0)
    peg = WidePEG(512, plain=True, norm="none", **options)
    assert peg.conv.weight.var().item() == pytest.approx(variance, rel=0.1) and not peg.conv.bias.any()
    assert WidePEG(4).conv.bias is None


def test_separable_is_depthwise_then_pointwise():
    tokens, mask = make_batch()
    peg = make(SeparablePEG, norm="none")
    maps = tokens.masked_fill(mask[..., None], 0).transpose(1, 2).unflatten(2, SHAPE)
    mixed = F.conv2d(F.conv2d(maps, peg.conv[0].weight, padding=1, groups=CHANNELS), peg.conv[1].weight)
    expected = tokens + F.relu(mixed).flatten(2).transpose(1, 2)
    torch.testing.assert_close(peg(tokens, mask, SHAPE)[~mask], expected[~mask], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [SeparablePEG, BorderlessPEG, FrozenPEG])
def test_folding_changes_nothing_but_rounding(kind):
    tokens, mask = make_batch()
    peg = make(kind)
    before = peg(tokens, mask, SHAPE)
    torch.testing.assert_close(peg.fold()(tokens, mask, SHAPE), before, rtol=0, atol=1e-12)


def test_frozen_trains_its_norm_alone():
    peg = make(FrozenPEG, zero_init=True)
    assert {name for name, parameter in peg.named_parameters() if parameter.requires_grad} == {"norm.weight", "norm.bias", "scale"}


@pytest.mark.parametrize("kernel_size", [3, 5, 7])
@pytest.mark.parametrize("mask_input", [True, False])
def test_borderless_repeats_the_border_of_each_image(kernel_size, mask_input):
    """Against torch's replicating pad of every image cut out alone; its border is that of the image, not of the canvas."""
    tokens, mask = make_batch()
    peg = make(BorderlessPEG, kernel_size=kernel_size, norm="none", mask_input=mask_input)
    found = peg(tokens, mask, SHAPE).unflatten(1, SHAPE)
    for image, (h, w) in enumerate(SIZES):
        own = tokens[image].unflatten(0, SHAPE)[:h, :w].permute(2, 0, 1)[None]
        padded = F.pad(own, [kernel_size // 2] * 4, mode="replicate")
        expected = own + F.relu(F.conv2d(padded, peg.conv.weight, groups=CHANNELS))
        torch.testing.assert_close(found[image, :h, :w].permute(2, 0, 1)[None], expected, rtol=0, atol=1e-12)


def test_on_a_constant_map_borderless_tells_no_place_and_peg_does():
    tokens, mask = torch.ones(1, 35, CHANNELS, dtype=torch.float64), torch.zeros(1, 35, dtype=torch.bool)
    for kind, tells in ((BorderlessPEG, False), (PEGDetection, True)):
        found = make(kind)(tokens, mask, SHAPE)[0]
        assert (found.std(0).max() > 1e-6) == tells


def test_an_image_without_a_valid_token_stays_as_it_is():
    tokens, mask = make_batch()
    mask[1] = True
    assert torch.equal(make(BorderlessPEG)(tokens, mask, SHAPE)[1], tokens[1])


@pytest.mark.parametrize("build", [stacked_separable, stacked_single_cell])
def test_stacks_are_their_members_in_turn(build):
    tokens, mask = make_batch()
    stack = make(build)
    expected = tokens
    for peg in stack:
        expected = peg(expected, mask, SHAPE)
    assert torch.equal(stack(tokens, mask, SHAPE), expected)
    assert not torch.equal(expected, stack[0](tokens, mask, SHAPE))


def test_twelve_of_one_cell_see_no_neighbour():
    tokens, mask = make_batch()
    stack = make(stacked_single_cell)
    changed = tokens.clone()
    changed[0, 17] += 1
    differ = (stack(tokens, mask, SHAPE) != stack(changed, mask, SHAPE))[0].any(-1)
    assert differ.nonzero().tolist() == [[17]]


def test_query_key_adds_the_branch_to_queries_and_keys_and_leaves_the_tokens():
    tokens, mask = make_batch()
    encoding = make(lambda channels: build_position("peg_query_key", channels))
    (embedding,) = encoding([tokens.transpose(1, 2).unflatten(2, SHAPE)], [mask.unflatten(1, SHAPE)])
    expected = encoding.pegs[0](tokens, mask, SHAPE) - tokens
    torch.testing.assert_close(embedding.flatten(2).transpose(1, 2)[~mask], expected[~mask], rtol=0, atol=1e-12)
    assert all(encoding.inject(tokens, mask, [SHAPE], layer) is tokens for layer in range(-1, 6))


def test_the_engine_registers_them_and_the_package_does_not():
    """In a process of its own, as all tests know them."""
    code = "from cpvt_det.position import POSITION_REGISTRY as known; print('peg_frozen' in known)"
    code += "; import studies.engine.plan; print('peg_frozen' in known, 'peg_plain_frozen' in known)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
