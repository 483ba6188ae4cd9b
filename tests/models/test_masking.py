# SPDX-License-Identifier: Apache-2.0
"""The padding kept out of any network: each treatment is needed, and the probe refuses what looks at the padding all the same."""

import pytest
import torch
from torch import nn

from cpvt_det.common.structures import padding_mask_of
from cpvt_det.layers.norm import MaskedGroupNorm
from cpvt_det.models.backbones import masking
from cpvt_det.models.backbones.masking import (
    Grid,
    InexactError,
    Treatment,
    ValidCells,
    of_batch,
    probe,
    treat,
    unsettle,
)

DIVISOR = 16


class GlobalResponseNorm(nn.Module):
    """A norm over the whole map, whose weight is 0 at first, on channels that are last."""

    channel_dim = -1

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        return x + self.weight * x * x.norm(dim=(1, 2), keepdim=True)


class LastChannels(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Gate(nn.Module):
    """Squeeze and excitation, by a name that nobody knows."""

    def __init__(self, channels, reduce):
        super().__init__()
        self.reduce, self.fc = reduce, nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return x * self.fc(self.reduce(x)).sigmoid()


class Residual(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.scale = part, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.scale * self.part(x)


class Attention(nn.Module):
    def forward(self, x):
        tokens = x.flatten(2)
        return (tokens @ (tokens.mT @ tokens).softmax(-1)).view(x.shape)


class Table(nn.Module):
    """A table of positions stretched over the canvas: it reads no padding, and is another for an image in a batch."""

    def __init__(self, channels):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, channels, 7, 7))

    def forward(self, x):
        return x + nn.functional.interpolate(self.table, x.shape[2:], mode="bilinear")


class MeanBetweenModules(nn.Module):
    """What no table of module types can know."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x - self.conv(x).mean((2, 3), keepdim=True)


def mean(x):
    return x.mean((2, 3), keepdim=True)


def largest(x):
    return x.amax((2, 3), keepdim=True)


NEEDED = {
    "zero": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "lowest": lambda: nn.Sequential(nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(8, 8, 1)),
    "mean of valid": lambda: nn.AvgPool2d(3, 1, padding=1, count_include_pad=False),
    "mean": lambda: Gate(8, mean),
    "counted": lambda: MaskedGroupNorm(2, 8),
    "zero of any layout": lambda: LastChannels(GlobalResponseNorm(8)),
}


def network_with(part):
    """A stem of stride 4 whose outputs have both signs, the part, and what looks around it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 7, 4, 3), nn.BatchNorm2d(8), part(), nn.Conv2d(8, 8, 3, padding=1)).double().eval()


def try_out(network):
    """The treatments that the probe adds to those of known types."""
    images, watch = torch.randn(2, 3, 2 * DIVISOR, DIVISOR, dtype=torch.float64), masking.Watch(network, (2 * DIVISOR, DIVISOR))
    with torch.no_grad(), unsettle(network):
        network(images)
    treatments = watch.treatments()
    assert not watch.reason
    return probe(network, lambda x: [network(x)], treatments, DIVISOR)


@pytest.mark.parametrize("name", NEEDED)
def test_every_treatment_is_enough_and_needed(name, monkeypatch):
    kind = name.partition(" of any layout")[0]
    assert [part.kind for part in try_out(network_with(NEEDED[name]))] == (["mean"] if kind == "mean" else [])
    if kind == "mean":
        monkeypatch.setattr(masking, "_filled", lambda x, valid: x)
    else:
        before, _ = masking.HOOKS[kind]

        def leave_out(cells, module, args, grid):
            return None if name == kind or isinstance(module, GlobalResponseNorm) else before(cells, module, args, grid)

        monkeypatch.setitem(masking.HOOKS, kind, (leave_out, None))
        monkeypatch.setattr(masking, "COUNTING", ())
    with pytest.raises(InexactError, match="changes with the padding"):
        try_out(network_with(NEEDED[name]))


class Twice(nn.Module):
    """One convolution, used twice at the same stride."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.convolution(self.convolution(x).relu())


def test_a_module_may_be_used_twice_at_one_stride_but_not_at_two():
    try_out(network_with(Twice))
    network = network_with(Twice)
    network[3] = nn.Sequential(nn.AvgPool2d(2), network[2].convolution)
    watch = masking.Watch(network, (2 * DIVISOR, DIVISOR))
    with torch.no_grad():
        network(torch.randn(2, 3, 2 * DIVISOR, DIVISOR, dtype=torch.float64))
    watch.treatments()
    assert watch.reason == "2.convolution is used at several strides"


@pytest.mark.parametrize(
    "part", [lambda: Gate(8, largest), lambda: Gate(8, lambda x: mean(x) + largest(x)), lambda: nn.Conv2d(8, 8, 1)]
)
def test_maxima_are_means_too_and_single_cells_are_left_alone(part):
    try_out(network_with(part))


@pytest.mark.parametrize(
    "part",
    [
        Attention,
        lambda: Table(8),
        lambda: MeanBetweenModules(8),
        lambda: Residual(Attention()),
        lambda: Residual(MeanBetweenModules(8)),
        lambda: Gate(8, lambda x: x.std((2, 3), keepdim=True)),
        lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
        lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="replicate"),
        lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
        lambda: nn.InstanceNorm2d(8),
    ],
)
def test_probe_refuses_what_looks_at_the_padding_even_behind_a_scale_of_zero(part):
    with pytest.raises(InexactError, match="changes with the padding"):
        try_out(network_with(part))


def test_refusal_names_the_module():
    with pytest.raises(InexactError, match=r"its map of stride 4 changes with the padding; 2.part \(Attention\) uses all cells"):
        try_out(network_with(lambda: Residual(Attention())))


@pytest.mark.parametrize(
    ("sides", "grid"),
    [
        ((8, 4), Grid(8)),
        ((2, 1), Grid(32)),
        ((33, 17), Grid(2, 1)),
        ((70, 38), Grid(1, 6)),
        ((31, 15), None),
        ((32, 15), None),
        ((4, 4), None),
    ],
)
def test_grid_of_a_map_by_its_sides(sides, grid):
    """On 64 x 32 pixels: 8 x 4 cells are of stride 8; 33 x 17 of stride 2, with a row and a column more."""
    assert Grid.of((64, 32), torch.zeros(2, 5, *sides)) == grid


def test_cells_that_a_network_has_added_are_padded():
    cells = ValidCells(padding_mask_of([(4, 2)], (4, 4)))
    assert cells.at(Grid(1, 3), torch.float)[0, 0].tolist() == [
        [0, 0, 0, 0, 0, 0, 0],
        *[[0, 1, 1, 0, 0, 0, 0]] * 4,
        *[[0, 0, 0, 0, 0, 0, 0]] * 2,
    ]


def test_hooks_do_nothing_outside_a_batch_and_where_nothing_is_padded():
    conv = nn.Conv2d(1, 1, 3, padding=1)
    images = torch.randn(1, 1, 4, 8)
    expected = conv(images)
    treat(conv, [Treatment("", "zero", Grid(1), Grid(1))])
    assert torch.equal(conv(images), expected)
    with of_batch(None):
        assert torch.equal(conv(images), expected)
    with of_batch(ValidCells(padding_mask_of([(4, 5)], (4, 8)))):
        assert not torch.equal(conv(images), expected)
    assert torch.equal(conv(images), expected)


def test_mean_of_the_filled_map_is_that_of_the_valid_cells():
    """Of 1, 2, 3, 6 valid in 2 x 4 cells: 3."""
    x = torch.tensor([[1.0, 2, 9, 9], [3, 6, 9, 9]])[None, None]
    valid = ValidCells(padding_mask_of([(2, 2)], (2, 4))).at(Grid(1), torch.float)
    assert masking._filled(x, valid).tolist() == [[[[1, 2, 3, 3], [3, 6, 3, 3]]]]
