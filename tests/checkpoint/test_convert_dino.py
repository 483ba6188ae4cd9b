# SPDX-License-Identifier: Apache-2.0
"""Weights of DINO, DAB-Deformable-DETR and H-DETR: names, class rows of proposals and of denoising, and a zero PEG beside them."""

import argparse
import json
import re

import pytest
import torch
from click.testing import CliRunner
from fvcore.common.config import CfgNode
from test_convert_deformable import NAMES, config, rename, same, to_detrex, to_official
from tiny import DINO as TINY
from tiny import overrides, random_config

from cpvt_det.builders import build_detector
from cpvt_det.checkpoint import convert_state_dict, load_weights, read_weights
from cpvt_det.checkpoint.convert import detect_source
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.cli import main
from cpvt_det.common.class_names import COCO_CLASSES, COCO_ROWS, Classes
from cpvt_det.common.errors import WeightsError

STAGED = {"BOX_REFINEMENT": True, "TWO_STAGE": True}
DINO = {"NAME": "mixed", "CLASS_PROPOSALS": True, "REFINED_POSITIONS": True, "DENOISING": 3}
QUERIES = {
    "DINO": DINO,
    "H-DETR": {"NAME": "mixed", "HYBRID": 3},
    "DAB": {"NAME": "anchors", "SCALED_POSITIONS": True},
    "DAB, two stages": {**DINO, "DENOISING": 0, "SCALED_POSITIONS": True, "TOKEN_CONTENT": True},
}
EXPECTED = {
    "dino": {
        "backbone.0.body.layer1.0.conv1.weight": "backbone.body.layer1.0.conv1.weight",
        "input_proj.3.1.bias": "input_proj.3.1.bias",
        "label_enc.weight": "queries.denoising.label_enc.weight",
        "transformer.tgt_embed.weight": "queries.query_embed.weight",
        "transformer.enc_output.weight": "queries.enc_output.weight",
        "transformer.enc_output_norm.bias": "queries.enc_output_norm.bias",
        "transformer.enc_out_class_embed.bias": "queries.class_embed.bias",
        "transformer.enc_out_bbox_embed.layers.2.weight": "queries.bbox_embed.layers.2.weight",
        "transformer.decoder.ref_point_head.layers.1.bias": "queries.ref_point_head.layers.1.bias",
        "transformer.decoder.norm.weight": "transformer.decoder.norm.weight",
        "transformer.decoder.layers.0.linear1.weight": "transformer.decoder.layers.0.linear1.weight",
        "transformer.level_embed": "transformer.level_embed",
        "transformer.decoder.bbox_embed.0.layers.0.weight": "bbox_embed.0.layers.0.weight",
        "class_embed.0.weight": "class_embed.0.weight",
    },
    "dino, over Swin": {
        "backbone.0.patch_embed.proj.weight": "backbone.body.patch_embed.proj.weight",
        "backbone.0.layers.1.blocks.0.attn.relative_position_bias_table": (
            "backbone.body.layers.1.blocks.0.attn.relative_position_bias_table"
        ),
        "backbone.0.norm1.weight": "backbone.body.norm1.weight",
        "transformer.enc_out_class_embed.weight": "queries.class_embed.weight",
    },
    "detrex_deformable_detr": {
        "backbone.res3.0.conv1.weight": "backbone.body.layer2.0.conv1.weight",
        "neck.convs.0.conv.weight": "input_proj.0.0.weight",
        "neck.convs.2.norm.weight": "input_proj.2.1.weight",
        "neck.convs.3.conv.weight": "input_proj.3.0.weight",
        "neck.extra_convs.0.conv.weight": "input_proj.4.0.weight",
        "neck.extra_convs.1.norm.weight": "input_proj.5.1.weight",
        "label_enc.weight": "queries.denoising.label_enc.weight",
        "transformer.tgt_embed.weight": "queries.query_embed.weight",
        "transformer.level_embeds": "transformer.level_embed",
        "transformer.enc_output.weight": "queries.enc_output.weight",
        "transformer.decoder.ref_point_head.layers.0.weight": "queries.ref_point_head.layers.0.weight",
        "transformer.decoder.norm.bias": "transformer.decoder.norm.bias",
        "transformer.decoder.layers.0.attentions.1.value_proj.weight": "transformer.decoder.layers.0.cross_attn.value_proj.weight",
        "transformer.decoder.class_embed.0.bias": "class_embed.0.bias",
        "class_embed.1.bias": "queries.class_embed.bias",
    },
    "detrex_deformable_detr, DAB over Swin": {
        "backbone.patch_embed.proj.bias": "backbone.body.patch_embed.proj.bias",
        "backbone.layers.0.blocks.1.norm2.weight": "backbone.body.layers.0.blocks.1.norm2.weight",
        "backbone.norm3.bias": "backbone.body.norm3.bias",
        "tgt_embed.weight": "queries.query_embed.weight",
        "refpoint_embed.weight": "queries.refpoint_embed.weight",
        "transformer.level_embeds": "transformer.level_embed",
        "transformer.decoder.query_scale.layers.1.weight": "queries.query_scale.layers.1.weight",
        "transformer.decoder.ref_point_head.layers.1.weight": "queries.ref_point_head.layers.1.weight",
    },
}


def make_config(kind, num_classes=3, num_queries=4, deformable=None, **queries):
    keys = {**QUERIES[kind], **queries}
    changes = {"BOX_REFINEMENT": True} if kind == "DAB" else STAGED
    name = keys.pop("POSITION", "sine_offset")
    cfg = config(
        num_classes=num_classes,
        NUM_OBJECT_QUERIES=num_queries,
        NAME=name,
        PEG=CfgNode({"ZERO_INIT": True}) if "peg" in name else None,
        **changes,
    )
    cfg.MODEL.DETECTOR.FINAL_NORM = kind == "DINO"
    cfg.MODEL.DETECTOR.LOOK_FORWARD_TWICE = kind in ("DINO", "H-DETR")
    for key, value in keys.items():
        cfg.MODEL.QUERIES[key] = value
    return cfg


def make(kind, seed=0, **changes):
    """A small one with weights that all differ."""
    torch.manual_seed(seed)
    model = build_detector(make_config(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


def to_dino(state_dict):
    """The proposals' heads by names of their own, and one row of the classes' vectors that stands for nothing."""
    pairs = (
        (r"^class_embed\.2\.", "transformer.enc_out_class_embed."),
        (r"^bbox_embed\.2\.", "transformer.enc_out_bbox_embed."),
        (r"^transformer\.decoder\.(class|bbox)_embed\.2\..*", "dropped"),
        (r"^query_embed\.", "transformer.tgt_embed."),
        (r"^transformer\.denoising\.", ""),
        (r"^transformer\.ref_point_head\.", "transformer.decoder.ref_point_head."),
    )
    theirs = rename(to_official(state_dict), pairs)
    theirs.pop("dropped")
    theirs["label_enc.weight"] = torch.cat((theirs["label_enc.weight"], torch.ones_like(theirs["label_enc.weight"][:1])))
    return theirs


def to_detrex_names(state_dict, one_stage=False):
    pairs = (
        (r"^query_embedding\.", "tgt_embed." if one_stage else "transformer.tgt_embed."),
        (r"^transformer\.denoising\.", ""),
        (r"^transformer\.(ref_point_head|query_scale)\.", r"transformer.decoder.\1."),
        (r"^transformer\.refpoint_embed\.", "refpoint_embed."),
    )
    return rename(to_detrex(state_dict), pairs)


FOREIGN = {
    "DINO of its authors": ("DINO", "dino", to_dino),
    "DINO of detrex": ("DINO", "detrex_deformable_detr", to_detrex_names),
    "DAB of detrex": ("DAB", "detrex_deformable_detr", lambda state: to_detrex_names(state, one_stage=True)),
    "two-stage DAB of detrex": ("DAB, two stages", "detrex_deformable_detr", to_detrex_names),
    "H-DETR": ("H-DETR", "deformable_detr", to_official),
}


def batch_of(model):
    batch = model.preprocess([torch.rand(3, 40, 100) * 255, torch.rand(3, 64, 30) * 255])
    return batch.images, batch.padding_mask


# Names


@pytest.mark.parametrize("case", EXPECTED)
def test_names_are_those_written_down(case):
    source = case.partition(",")[0]
    weights = {name: torch.full((1,), float(number)) for number, name in enumerate(EXPECTED[case])}
    expected = {ours: weights[theirs] for theirs, ours in EXPECTED[case].items()}
    assert detect_source(weights) == source
    assert same(convert_state_dict(weights, source), expected)


@pytest.mark.parametrize("case", FOREIGN)
def test_every_name_of_every_source_converts(case):
    kind, source, to_theirs = FOREIGN[case]
    ours = make(kind).state_dict()
    theirs = to_theirs(ours)
    assert detect_source(theirs) == source and detect_source(ours) is None
    assert not {name for name in theirs if re.match(r"queries\.|position\.", name)}
    assert same(convert_state_dict(theirs, source), ours)
    other = make(kind, seed=1)
    report = load_weights(other, theirs)
    assert not report.is_partial and same(other.state_dict(), ours)


def test_the_vector_of_no_class_is_left_out_and_no_other():
    theirs = to_dino(make("DINO").state_dict())
    assert len(theirs["label_enc.weight"]) == 4
    assert torch.equal(convert_state_dict(theirs, "dino")["queries.denoising.label_enc.weight"], theirs["label_enc.weight"][:3])


# Classes


@pytest.mark.parametrize("case", ["DINO of its authors", "DINO of detrex"])
def test_files_of_coco_are_read_by_name_for_every_head_of_classes(case):
    """91 rows by category id, or 80 in order -> dog, a ship, cat."""
    kind, _, to_theirs = FOREIGN[case]
    classes = COCO_ROWS if case == "DINO of its authors" else COCO_CLASSES
    first, second = make(kind, num_classes=len(classes)), make(kind, seed=1)
    fresh = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    theirs = to_theirs(first.state_dict())
    assert read_weights(theirs).classes == classes
    report = load_weights(second, theirs, ("dog", "ship", "cat"))
    dog, cat = (classes.names.index(name) for name in ("dog", "cat"))
    heads = ["class_embed.0.weight", "class_embed.1.bias", "queries.class_embed.weight", "queries.class_embed.bias"]
    for name in (*heads, "queries.denoising.label_enc.weight"):
        old, new = first.state_dict()[name], second.state_dict()[name]
        assert torch.equal(new, torch.stack((old[dog], fresh[name][1], old[cat]))), name
    assert report.rows_by_name == {"dog": dog, "ship": None, "cat": cat}


def test_another_number_of_unknown_classes_starts_anew_in_training_and_is_refused_in_evaluation(tmp_path):
    first = make("DINO", num_classes=5)
    torch.save(to_dino(first.state_dict()), tmp_path / "dino.pth")
    cfg, classes = make_config("DINO"), Classes((0, 1, 2), NAMES)
    cfg.MODEL.WEIGHTS = str(tmp_path / "dino.pth")
    second = make("DINO", seed=1)
    fresh = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    load_initial_weights(cfg, second, classes)
    heads = {name for name in fresh if re.search(r"class_embed|label_enc", name)}
    assert len(heads) == 2 * 3 + 1
    for name, tensor in second.state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, fresh[name] if name in heads else first.state_dict()[name]), name
    with pytest.raises(WeightsError, match=r"only part of the config's model.*7 re-initialised"):
        load_initial_weights(cfg, second, classes, for_evaluation=True)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("there", "here"), [(True, False), (False, True)])
def test_rows_that_are_classes_and_rows_that_are_objects_are_not_taken_for_each_other(there, here, named):
    first, second = (make("DINO", seed=seed, CLASS_PROPOSALS=kind) for seed, kind in enumerate((there, here)))
    fresh = second.queries.class_embed.weight.clone()
    cfg = make_config("DINO", CLASS_PROPOSALS=there)
    node = {"config": cfg.dump(), "classes": {"ids": [0, 1, 2], "names": list(NAMES)}}
    report = load_weights(second, {"model": first.state_dict(), "cpvt_det": node}, ("tree", "ship", "cat") if named else NAMES)
    assert torch.equal(second.queries.class_embed.weight, fresh)
    assert report.remade.keys() == {"queries.class_embed.weight", "queries.class_embed.bias"}
    assert "the rows are classes in only one of weights and model" in report.table()


@pytest.mark.parametrize("by_class", [False, True])
def test_our_checkpoints_tell_what_rows_of_proposals_are(by_class):
    cfg = make_config("DINO", CLASS_PROPOSALS=by_class)
    state = build_detector(cfg).state_dict()
    assert read_weights({"model": state, "cpvt_det": {"config": cfg.dump()}}).class_proposals is by_class
    assert read_weights({"model": state}).class_proposals is None


# Use


@pytest.mark.parametrize("case", FOREIGN)
def test_a_zero_peg_beside_converted_weights_changes_no_bit(case):
    kind, _, to_theirs = FOREIGN[case]
    theirs = to_theirs(make(kind).state_dict())
    converted = make(kind, seed=1).eval()
    with_peg = build_detector(make_config(kind, POSITION="sine_offset+peg")).eval()
    assert not load_weights(converted, theirs).is_partial
    assert {name.split(".")[1] for name in load_weights(with_peg, theirs).missing} == {"pegs"}
    batch = batch_of(converted)
    first, second = (model(*batch) for model in (converted, with_peg))
    assert torch.equal(first.logits, second.logits) and torch.equal(first.boxes, second.boxes)
    assert first.boxes.std(2).mean() > 1e-3  # queries differ


def test_an_evaluation_needs_no_more_than_the_file_as_its_authors_save_it(drawn_coco, tmp_path):
    """With the options of their command beside the weights, and without a step of conversion."""
    more = {**TINY, "MODEL__QUERIES__HYBRID": 0}
    detector = build_detector(random_config(**more))
    file = tmp_path / "checkpoint0011_4scale.pth"
    torch.save({"model": to_dino(detector.state_dict()), "args": argparse.Namespace(lr=1e-4), "epoch": 11}, file)
    words = overrides(drawn_coco.files, tmp_path / "eval", **more, MODEL__WEIGHTS=file, TEST__PICTURES=0)
    command = ["train", "--runner", "builtin", "--config-file", "_detectron2.yaml", "--eval-only", *words]
    ended = CliRunner().invoke(main, command)
    assert ended.exit_code == 0, ended.output
    assert "AP" in json.loads((tmp_path / "eval/results.json").read_text())["bbox"]
    found = json.loads((tmp_path / "eval/inference/coco_instances_results.json").read_text())
    assert len({round(detection["score"], 6) for detection in found}) > 10


def test_the_labels_of_denoising_are_not_missed_in_a_model_without_it(tmp_path):
    """A DINO that is only evaluated needs no denoising."""
    first = make("DINO")
    torch.save(to_dino(first.state_dict()), tmp_path / "dino.pth")
    cfg = make_config("DINO", DENOISING=0)
    cfg.MODEL.WEIGHTS = str(tmp_path / "dino.pth")
    second = build_detector(cfg).eval()
    load_initial_weights(cfg, second, Classes((0, 1, 2), NAMES), for_evaluation=True)
    report = load_weights(second, first.state_dict())
    assert not report.is_partial and report.table() == "every tensor loaded"
    batch = batch_of(second)
    assert torch.equal(second(*batch).logits, first.eval()(*batch).logits)


def test_of_a_hybrid_branch_an_evaluation_takes_the_queries_of_the_best_proposals():
    first = make("H-DETR").eval()
    cfg = make_config("H-DETR", HYBRID=0)
    second = build_detector(cfg).eval()
    report = load_weights(second, first.state_dict())
    own = second.queries.query_embed.weight
    assert not report.is_partial
    assert torch.equal(own, first.queries.query_embed.weight[: len(own)])
    batch = batch_of(second)
    assert torch.equal(second(*batch).logits, first(*batch).logits)
    assert "queries.query_embed.weight" in load_weights(first, second.state_dict()).remade  # too few are not made up


def test_learned_boxes_of_another_number_of_queries_start_anew(tmp_path):
    first = make("DAB", num_queries=7)
    torch.save(first.state_dict(), tmp_path / "dab.pth")
    cfg, second = make_config("DAB"), make("DAB", seed=1)
    cfg.MODEL.WEIGHTS = str(tmp_path / "dab.pth")
    fresh = second.queries.refpoint_embed.weight.clone()
    load_initial_weights(cfg, second, Classes((0, 1, 2), NAMES))
    assert torch.equal(second.queries.refpoint_embed.weight, fresh)
