# SPDX-License-Identifier: Apache-2.0
"""Whole classifiers against timm's in float64, with its random weights: scores, loss, every gradient; for docs/parity.md."""

import os

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from cpvt_det.builders import backbone_position, build_detector
from cpvt_det.checkpoint.convert import convert_state_dict
from cpvt_det.checkpoint.load import load_weights
from cpvt_det.config import load_cfg
from cpvt_det.losses.class_training import ClassCriterion

SIZE, CLASSES = (80, 80), 7  # a square, as its grid is read from the number of rows of a table
MODELS = {
    "deit_tiny": "deit_tiny_patch16_224",
    "deit_small": "deit_small_patch16_224",
    "deit_base": "deit_base_patch16_224",
    "deit_tiny, distilled": "deit_tiny_distilled_patch16_224",
    "deit_small, distilled": "deit_small_distilled_patch16_224",
    "tnt_small": "tnt_s_patch16_224",
    "tnt_small_legacy": "tnt_s_legacy_patch16_224",
}
"""Ours, and timm's name."""
FEWER_LAYERS = {} if os.environ.get("TEST_THREADS") else {"small": 3, "base": 1}
"""Size -> layers of the larger ones: 12 for the record of ``benchmarks/parity.py``, which sets the variable; they need up to 6 GB
in float64."""


def pair(name):
    """Both with the same weights; heads, tables and tokens are drawn wider than they start, so that scores differ."""
    torch.manual_seed(0)
    depth = next((layers for size, layers in FEWER_LAYERS.items() if size in name), 12)
    theirs = timm.create_model(MODELS[name], num_classes=CLASSES, img_size=SIZE, depth=depth).double().eval()
    for key, parameter in theirs.named_parameters():
        if key.startswith("head") or parameter.ndim == 1 or not key.endswith("weight"):
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1 and key.endswith("weight")), std=0.2)
    family, distilled = name.partition(",")[0], "distilled" in name
    words = ["MODEL.BACKBONE.NAME", family, "MODEL.BACKBONE.NUM_TOKENS", str(1 + distilled), "MODEL.DEVICE", "cpu"]
    words += ["MODEL.BACKBONE.DEPTH", str(depth)]
    cfg = load_cfg(f"imagenet/{'tnt_small' if 'tnt' in family else 'deit_tiny'}.yaml", words)
    cfg.MODEL.NUM_CLASSES = CLASSES
    if backbone_position(cfg) == "table":
        cfg.MODEL.BACKBONE.POSITION.GRID = [SIZE[0] // 16, SIZE[1] // 16]
    ours = build_detector(cfg).double().eval()
    report = load_weights(ours, theirs.state_dict())
    assert not report.is_partial and report.source == family.partition("_")[0]
    return ours, theirs


def assert_near(actual, expected, tolerance, what):
    """Close, and with ``pytest -s`` the table of docs/parity.md."""
    print(f"| {what} | {(actual - expected).abs().max().item():.1e} | {expected.abs().max().item():.3g} |")
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_scores_losses_and_gradients_are_timm_s(name):
    """Of a distilled one both heads' scores, and the loss with a teacher, half for each head (arXiv 2012.12877, equation 3)."""
    ours, theirs = pair(name)
    images, labels, taught = torch.randn(2, 3, *SIZE, dtype=torch.float64), torch.tensor([3, 0]), torch.tensor([5, 0])
    logits, distilled = ours(images, torch.zeros(2, *SIZE, dtype=torch.bool)).logits, "distilled" in name
    if distilled:
        theirs.set_distilled_training(True)
        theirs.train()  # only then timm gives both heads; no layer of it drops anything
    expected = torch.stack(theirs(images)) if distilled else theirs(images)[None]
    assert expected.std() > 0.1
    assert_near(logits, expected, 1e-12, f"{name}, float64 | logits")
    losses = ClassCriterion(0.1)(logits, F.one_hot(labels, CLASSES).double(), taught if distilled else None).losses
    found = sum(losses.values())
    wanted = F.cross_entropy(expected[0], labels, label_smoothing=0.1)
    wanted = 0.5 * wanted + 0.5 * F.cross_entropy(expected[1], taught) if distilled else wanted
    assert_near(found, wanted, 1e-12, f"{name}, float64 | loss")
    found.backward()
    wanted.backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None}
    gradients = convert_state_dict(gradients, "tnt" if "tnt" in name else "deit")
    own = dict(ours.named_parameters())
    assert gradients.keys() == own.keys()
    gaps = {key: (parameter.grad - gradients[key]).abs().max().item() for key, parameter in own.items()}
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    print(f"| {name}, float64 | any gradient | {max(gaps.values()):.1e} | {largest:.3g} |")
    assert {key: gap for key, gap in gaps.items() if not gap <= 1e-10} == {}
