# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det analyze`` against counts by hand, and whatever way the products are made."""

import json

import pytest
import torch
from click.testing import CliRunner
from record_operations import CONFIGS, OPERATIONS, count_config
from tiny import DEFORMABLE, DETECTORS, ENCODED, random_config
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpvt_det.builders import build_detector
from cpvt_det.cli import main
from cpvt_det.ops import routes
from cpvt_det.visualize.costs import count_costs, measure, part_of

SIZE = (48, 80)


def make(**more):
    torch.manual_seed(0)
    detector = build_detector(random_config(**more)).eval()
    return detector, detector.preprocess([torch.zeros(3, *SIZE)])


def costs_of(**more):
    detector, batch = make(**more)
    return count_costs(detector, batch.images, batch.padding_mask)


def backbone_products(width=64):
    """ResNet-10 up to stage 3 on 48 x 80 pixels: the stem at 1/2, a block at 1/4, one at 1/8 with its shortcut."""
    stem = 24 * 40 * 7 * 7 * 3 * width
    second = 12 * 20 * 2 * 9 * width * width
    third = 6 * 10 * (9 * width * 2 * width + 9 * (2 * width) ** 2 + width * 2 * width)
    return stem + second + third


@pytest.mark.parametrize("encoding", ["none", "sine", "peg", "sine+peg"])
def test_detr_is_counted_as_by_hand(encoding):
    """N = 6 x 10 tokens of C = 16 channels, 6 queries, 32 channels in feed-forward networks, 1 encoder and 2 decoder layers."""
    tokens, channels, queries, wide = 60, 16, 6, 32
    costs = costs_of(MODEL__POSITION__NAME=encoding)
    attention = 4 * tokens * channels**2 + 2 * tokens**2 * channels
    layer = attention + 2 * tokens * channels * wide
    among = 4 * queries * channels**2 + 2 * queries**2 * channels
    cross = 2 * (queries + tokens) * channels**2 + 2 * queries * tokens * channels
    expected = {
        "backbone": backbone_products(),
        "projection": tokens * 128 * channels,
        "position": 0,
        "PEG": tokens * channels * 9 if "peg" in encoding else 0,
        "encoder": layer,
        "decoder": 2 * (among + cross + 2 * queries * channels * wide),
        "queries": 0,
        "heads": 2 * queries * (channels * 4 + 2 * channels**2 + channels * 4),  # K' = 4; the boxes' three layers
        "rest": 0,
    }
    assert costs.multiply_adds == expected


def test_deformable_detr_is_counted_as_by_hand():
    """Levels of 6 x 10 and 3 x 5 cells; 2 heads, 4 points: 16 offsets' pairs and weights a head; 5 for a channel of a sample."""
    tokens, channels, queries, wide, samples = 75, 16, 6, 32, 2 * 2 * 4
    costs = costs_of(**DEFORMABLE)

    def deformable(count):
        return count * channels * 3 * samples + (tokens + count) * channels**2 + 5 * count * channels * 2 * 4

    among = 4 * queries * channels**2 + 2 * queries**2 * channels
    heads = queries * (channels * 3 + 2 * channels**2 + channels * 4)
    expected = {
        "backbone": backbone_products(),
        "projection": 60 * 128 * channels + 15 * 9 * 128 * channels,
        "position": 0,
        "PEG": tokens * channels * 9,
        "encoder": deformable(tokens) + 2 * tokens * channels * wide,
        "decoder": 2 * (among + deformable(queries) + 2 * queries * channels * wide),
        # every token's proposal, then the queries made of the chosen boxes
        "queries": tokens * (channels**2 + channels * 3 + 2 * channels**2 + channels * 4) + queries * (2 * channels) ** 2,
        "heads": 2 * heads,
        "rest": 0,
    }
    assert costs.multiply_adds == expected


def test_activations_are_what_products_put_out():
    tokens, channels, queries, wide = 60, 16, 6, 32
    activations = costs_of(MODEL__POSITION__NAME="sine+peg").activations
    assert activations["projection"] == activations["PEG"] == tokens * channels
    assert activations["encoder"] == tokens * (3 * channels + channels + channels + wide + channels)
    assert activations["heads"] == 2 * queries * (4 + channels + channels + 4)
    assert activations["backbone"] == 64 * 24 * 40 + 2 * 64 * 12 * 20 + 3 * 128 * 6 * 10
    assert costs_of(**DEFORMABLE).activations["encoder"] == 75 * (16 + 32 + 16 + 16 + 16 + 32 + 16)


PEG = 9 * 16 + 2 * 16  # kernels, and the norm's weight and bias
SEPARABLE = 16 * 16 + PEG
PLAIN = 10 * 16  # kernels and biases
PEGS = {
    "peg_separable": SEPARABLE,
    "peg_stacked": 4 * SEPARABLE,
    "peg_twelve_1x1": 12 * (16 + 2 * 16),
    "peg_plain_separable": 16 * 16 + PLAIN,
    "peg_plain_stacked": 4 * (16 * 16 + PLAIN),
    "peg_plain_twelve_1x1": 12 * 2 * 16,
    **dict.fromkeys(("peg_plain", "peg_plain_frozen", "peg_plain_wide", "peg_plain_borderless", "table+peg_plain"), PLAIN),
    "peg_ffn": 10 * 32,  # kernels and biases of the inner channels
}
TABLES = {
    "learned": 2 * 50 * 8,
    **dict.fromkeys(("table", "table+peg_plain"), 14 * 14 * 16),
    "relative": 2 * 17 * 8,  # of one layer, a vector of a head's 8 channels for each offset of an axis
    "rope_mixed": 2 * 2 * 4,  # of one layer, a direction for each pair of channels
}


@pytest.mark.parametrize(("kind", "encoding"), ENCODED)
def test_parameters_are_all_of_them(kind, encoding):
    detector, batch = make(**{**DETECTORS[kind], "MODEL__POSITION__NAME": encoding})
    parameters = count_costs(detector, batch.images, batch.padding_mask).parameters
    assert sum(parameters.values()) == sum(parameter.numel() for parameter in detector.parameters())
    assert parameters["rest"] == 0
    of_a_level = PEGS.get(encoding, PEG) if "peg" in encoding else 0
    assert parameters["PEG"] == of_a_level * (2 if kind == "deformable" else 1)
    assert parameters["position"] == TABLES.get(encoding, 0)
    assert parameters["backbone"] == sum(parameter.numel() for parameter in detector.backbone.parameters())


@pytest.mark.parametrize("kind", DETECTORS)
def test_the_way_products_are_made_does_not_count(kind, monkeypatch):
    """Our ways for products and convolutions, norms folded into weights, the op's implementation, padding."""
    counts = []
    for ours, norm, implementation in ((True, "BN", "auto"), (False, "FrozenBN", "eager"), (True, "FrozenBN", "export")):
        monkeypatch.setattr(routes, "is_on", lambda route, ours=ours: ours)
        more = {"MODEL__BACKBONE__NORM": norm}
        more |= {"MODEL__DETECTOR__IMPLEMENTATION": implementation} if kind == "deformable" else {}
        counts.append(costs_of(**{**DETECTORS[kind], **more}))
    assert counts[0].multiply_adds == counts[1].multiply_adds == counts[2].multiply_adds
    assert counts[0].activations == counts[1].activations == counts[2].activations
    detector, _ = make(**DETECTORS[kind])
    padded = detector.preprocess([torch.zeros(3, 40, 50), torch.zeros(3, *SIZE)])
    assert count_costs(detector, padded.images, padded.padding_mask).multiply_adds["PEG"] == 2 * counts[0].multiply_adds["PEG"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_operations_of_a_config_are_those_of_every_machine(path):
    recorded = json.loads(OPERATIONS.read_text(encoding="utf-8"))
    assert count_config(path) == recorded[f"{path.parent.name}/{path.stem}"]


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda backend: backend.name)
@pytest.mark.parametrize("padded", [False, True])
def test_the_kernel_of_attention_does_not_count(backend, padded):
    """Those that a CPU has; the others need a GPU."""
    detector, batch = make()
    if padded:
        batch = detector.preprocess([torch.zeros(3, 40, 50), torch.zeros(3, *SIZE)])
    by_default = count_costs(detector, batch.images, batch.padding_mask)
    with sdpa_kernel(backend):
        assert count_costs(detector, batch.images, batch.padding_mask) == by_default


def test_counting_leaves_no_hooks_and_changes_nothing():
    detector, batch = make(**DEFORMABLE)
    with torch.no_grad():
        before = detector(batch.images, batch.padding_mask).logits
        count_costs(detector, batch.images, batch.padding_mask)
        assert torch.equal(before, detector(batch.images, batch.padding_mask).logits)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in detector.modules())


def test_the_longest_name_decides():
    names = ("position", "position.pegs.0.0.conv", "transformer.encoder.layers.0", "transformer", "positional")
    assert [part_of(name) for name in names] == ["position", "PEG", "encoder", "rest", "rest"]


def test_memory_is_that_of_one_call(monkeypatch):
    """192 MB that live during the call, not the 160 it was made with; roughly, as the system may take some back meanwhile."""
    monkeypatch.setattr("cpvt_det.visualize.costs.MIN_SECONDS", 0)

    class Wasteful(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = torch.ones(40_000_000)

        def forward(self, images, padding_mask):
            return torch.ones(48_000_000).sum()

    seconds, took = measure(Wasteful(), torch.zeros(1), torch.zeros(1))
    assert 130e6 < took < 250e6
    assert 0 < seconds < 5


def test_tables_are_printed_by_command(tmp_path, monkeypatch):
    monkeypatch.setattr("cpvt_det.visualize.costs.MIN_SECONDS", 0)
    config = tmp_path / "run.yaml"
    config.write_text(random_config().dump(), encoding="utf-8")
    words = ["analyze", "--config-file", str(config), "--runner", "builtin", "--sizes", "48x80,33"]
    result = CliRunner().invoke(main, [*words, "MODEL.NUM_CLASSES", "0"])
    assert result.exit_code == 0, result.output
    rows = {
        row[0]: row[1:] for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in result.output.splitlines()) if row
    }
    costs = costs_of(MODEL__NUM_CLASSES=80)
    assert result.output.startswith("DETR, peg, 80 classes")
    assert rows["all"][0] == f"{sum(costs.parameters.values()):,}"
    assert rows["all"][1] == f"{sum(costs.multiply_adds.values()) / 1e9:.4g}"
    assert rows["encoder"][3] == f"{costs.activations['encoder'] / 1e6:.4g}"
    assert rows["48x80"][0] == "48x80" and rows["33x33"][0] == "40x40"  # the canvas, in the last table of that name
    assert "PEG's share at" in rows and "rest" not in rows


@pytest.mark.detectron2
@pytest.mark.parametrize("kind", DETECTORS)
def test_detectron2s_detector_costs_the_same(kind, tmp_path):
    from cpvt_det.cli.train import build_any, load_any

    config = tmp_path / "run.yaml"
    config.write_text(random_config(**DETECTORS[kind]).dump(), encoding="utf-8")
    detector = build_any(load_any(str(config), (), "detectron2"), "detectron2")
    batch = detector.preprocess([torch.zeros(3, *SIZE)])
    assert type(detector).__module__.startswith("cpvt_det.d2")
    assert count_costs(detector, batch.images, batch.padding_mask) == costs_of(**DETECTORS[kind])
