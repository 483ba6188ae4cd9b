# SPDX-License-Identifier: Apache-2.0
"""Weights of DeiT, as timm saves them, in our vision transformers; and what is refused."""

import logging

import pytest
import timm
import torch
from safetensors.torch import save_file
from tiny import random_config
from torch import nn

from cpvt_det.builders import build_backbone, build_detector
from cpvt_det.checkpoint import convert_state_dict, load_backbone_weights, load_weights
from cpvt_det.checkpoint.convert import detect_source
from cpvt_det.common.errors import WeightsError

BACKBONE = {"NAME": "deit_tiny", "STAGES": (4,), "NORM": "FrozenBN", "FREEZE_AT": 2, "DEPTH": 2}
TABLE = {"POSITION__GRID": (3, 3)}
BEFORE_PEG = {
    "NAME": "cpvt_tiny",
    "POSITION__NAME": "table+peg_plain",
    "POSITION__TABLE__GRID": (3, 3),
    "POSITION__PEG_PLAIN__ZERO_INIT": True,
}


def config(**more):
    more = {**BACKBONE, **({} if "POSITION__NAME" in more else TABLE), **more}
    return random_config(**{f"MODEL__BACKBONE__{key}": value for key, value in more.items()})


def make(**more):
    torch.manual_seed(0)
    return build_backbone(config(**more)).double().eval()


def theirs(distilled=False, **more):
    torch.manual_seed(1)
    name = "deit_tiny_distilled_patch16_224" if distilled else "deit_tiny_patch16_224"
    model = timm.create_model(name, **{"depth": 2, "img_size": 48, "num_classes": 7, **more}).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def saved(model, path, kind):
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if kind == "timm":
        save_file(state, path)
    else:  # as facebookresearch/deit has them
        torch.save({"model": state}, path)
    return str(path)


def tokens_of(backbone, size=(48, 48)):
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        special, patches, _ = backbone.tokens(images, torch.zeros(2, *size, dtype=torch.bool))
    return images, patches if special is None else torch.cat((special, patches), 1)


@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("kind", ["timm", "facebook"])
def test_a_file_of_deit_is_a_backbone_s_weights(kind, distilled, tmp_path):
    model = theirs(distilled)
    backbone = make(NUM_TOKENS=1 + distilled)
    load_backbone_weights(backbone, saved(model, tmp_path / ("w.safetensors" if kind == "timm" else "w.pth"), kind), "deit_tiny")
    images, found = tokens_of(backbone)
    with torch.no_grad():
        assert (found - model.forward_features(images)).abs().max() < 1e-12


@pytest.mark.parametrize("distilled", [False, True])
def test_every_name_of_a_deit_has_a_place_in_a_classifier(distilled):
    """Also the heads, in the rows that they have."""
    model = theirs(distilled)
    state = model.state_dict()
    assert detect_source(state) == "deit"
    found = convert_state_dict(state, "deit")
    assert sum(tensor.numel() for tensor in found.values()) == sum(tensor.numel() for tensor in state.values())
    assert torch.equal(found["class_embed.weight"], state["head.weight"])
    assert ("distilled_embed.bias" in found) == distilled
    names = {name for name in found if name.startswith("backbone.")}
    assert names == {f"backbone.{name}" for name in make(NUM_TOKENS=1 + distilled).state_dict()}


@pytest.mark.parametrize("name", ["none", "peg_plain"])
def test_without_a_table_deit_s_is_left_out_and_reported(name, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    backbone = make(NAME="cpvt_tiny", POSITION__NAME=name)
    before = {key: tensor.clone() for key, tensor in backbone.state_dict().items()}
    load_backbone_weights(backbone, saved(theirs(), tmp_path / "w.pth", "facebook"), "cpvt_tiny")
    after = backbone.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if not key.startswith("position.")}
    assert "special_positions, position.table left out" in caplog.text
    assert ("position.pegs.0.0.conv.weight, position.pegs.0.0.conv.bias not in the file" in caplog.text) == (name == "peg_plain")


def test_a_deit_beside_a_zero_initialised_peg_is_the_same_model_at_first(tmp_path):
    """Bit for bit, also at sizes that the table is interpolated to; and the PEG learns."""
    weights = saved(theirs(), tmp_path / "w.pth", "facebook")
    deit, cpvt = make(), make(**BEFORE_PEG)
    for backbone in (deit, cpvt):
        load_backbone_weights(backbone, weights, "a vision transformer")
    for size in ((48, 48), (80, 48)):
        assert torch.equal(tokens_of(deit, size)[1], tokens_of(cpvt, size)[1])
    images = torch.randn(1, 3, 48, 48).double()
    cpvt(images, torch.zeros(1, 48, 48, dtype=torch.bool))[0].square().sum().backward()
    assert cpvt.position.pegs["0"][0].scale.grad.any()


def test_a_table_has_its_place_beside_a_peg_in_whole_models_too(tmp_path):
    """By MODEL.WEIGHTS: a detector on DeiT starts one with a PEG beside the table."""
    source, target = (build_detector(config(**more)) for more in ({}, BEFORE_PEG))
    report = load_weights(target, {"model": source.state_dict()})
    assert torch.equal(target.backbone.position.additive.table, source.backbone.position.table)
    assert report.unexpected == [] and all(".pegs." in name for name in report.missing)


def test_a_detector_s_trunk_is_the_weights_of_another_s(tmp_path):
    source, target = build_detector(config()), make()
    torch.save({"model": source.state_dict()}, tmp_path / "w.pth")
    load_backbone_weights(target, str(tmp_path / "w.pth"), "deit_tiny")
    assert all(torch.equal(tensor.float(), source.backbone.state_dict()[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (
            {"img_size": 64},
            {},
            r"has a table of 4 x 4 cells, the backbone's has 3 x 3: set MODEL.BACKBONE.POSITION.GRID to \(4, 4\)",
        ),
        ({"img_size": (48, 80)}, {}, "the table has 16 rows; without the 1 of extra tokens, their number is not a square"),
        (
            {"no_embed_class": True},
            {},
            "the table has 9 rows; .*not a square.*; with them it is, as in DeiT III",
        ),
        ({"depth": 3}, {}, r"only the file has encoder.layers.2"),
        ({}, {"DEPTH": 3}, r"only the network has encoder.layers.2"),
        ({"embed_dim": 96}, {}, r"is \(1, 96\), not \(1, 192\)"),
        ({"distilled": True}, {}, r"special_tokens is \(2, 192\), not \(1, 192\)"),
        ({"class_token": False, "global_pool": "avg"}, {}, "not weights of DeiT: they have no cls_token"),
    ],
)
def test_weights_of_another_model_are_refused(model, more, message, tmp_path):
    path = saved(theirs(**model), tmp_path / "w.pth", "facebook")
    with pytest.raises(WeightsError, match=message):
        load_backbone_weights(make(**more), path, "deit_tiny")


def test_other_weights_and_missing_files_are_refused(tmp_path):
    torch.save({"model": timm.create_model("resnet10t").state_dict()}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"has no weights of this backbone, .*; its first tensor is conv1.0.weight"):
        load_backbone_weights(make(), str(tmp_path / "w.pth"), "deit_tiny")
    with pytest.raises(WeightsError, match=r"is a file of weights, got 'DEFAULT'"):
        load_backbone_weights(make(), "DEFAULT", "deit_tiny")
