# SPDX-License-Identifier: Apache-2.0
"""Weights of other Deformable-DETRs: names, the heads that layers share or not, proposals' rows, and a zero PEG beside them."""

import re

import pytest
import safetensors.torch
import torch
from fvcore.common.config import CfgNode

from cpvt_det.builders import build_detector
from cpvt_det.checkpoint import convert_state_dict, load_weights, read_weights
from cpvt_det.checkpoint.convert import detect_source
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.common.class_names import COCO_CLASSES, COCO_ROWS, Classes
from cpvt_det.common.errors import WeightsError
from cpvt_det.config import get_cfg

NAMES = ("cat", "dog", "tree")
VARIANTS = {
    "single scale": {"STAGES": (4,), "NUM_LEVELS": 1},
    "multi-scale": {},
    "refinement": {"BOX_REFINEMENT": True},
    "two stages": {"BOX_REFINEMENT": True, "TWO_STAGE": True},
}
EXPECTED = {
    "deformable_detr": {
        "backbone.0.body.layer1.0.downsample.0.weight": "backbone.body.layer1.0.downsample.0.weight",
        "backbone.1.row_embed.weight": "position.row_embed.weight",
        "input_proj.3.1.bias": "input_proj.3.1.bias",
        "query_embed.weight": "queries.query_embed.weight",
        "transformer.level_embed": "transformer.level_embed",
        "transformer.reference_points.weight": "queries.reference_points.weight",
        "transformer.encoder.layers.0.self_attn.sampling_offsets.weight": (
            "transformer.encoder.layers.0.self_attn.sampling_offsets.weight"
        ),
        "transformer.decoder.layers.0.self_attn.in_proj_weight": "transformer.decoder.layers.0.self_attn.in_proj_weight",
        "transformer.decoder.layers.0.cross_attn.value_proj.bias": "transformer.decoder.layers.0.cross_attn.value_proj.bias",
        "transformer.decoder.layers.0.norm3.weight": "transformer.decoder.layers.0.norm3.weight",
        "class_embed.0.weight": "class_embed.0.weight",
        "bbox_embed.0.layers.2.bias": "bbox_embed.0.layers.2.bias",
    },
    "detrex_deformable_detr": {
        "backbone.stem.conv1.weight": "backbone.body.conv1.weight",
        "backbone.stem.conv1.norm.running_var": "backbone.body.bn1.running_var",
        "backbone.res2.0.shortcut.weight": "backbone.body.layer1.0.downsample.0.weight",
        "backbone.res2.0.shortcut.norm.bias": "backbone.body.layer1.0.downsample.1.bias",
        "backbone.res5.2.conv3.weight": "backbone.body.layer4.2.conv3.weight",
        "backbone.res5.2.conv3.norm.weight": "backbone.body.layer4.2.bn3.weight",
        "position_embedding.col_embed.weight": "position.col_embed.weight",
        "neck.convs.2.conv.bias": "input_proj.2.0.bias",
        "neck.convs.2.norm.weight": "input_proj.2.1.weight",
        "neck.extra_convs.0.conv.weight": "input_proj.3.0.weight",
        "neck.extra_convs.0.norm.bias": "input_proj.3.1.bias",
        "query_embedding.weight": "queries.query_embed.weight",
        "transformer.level_embeds": "transformer.level_embed",
        "transformer.reference_points.bias": "queries.reference_points.bias",
        "transformer.encoder.layers.0.attentions.0.output_proj.weight": "transformer.encoder.layers.0.self_attn.output_proj.weight",
        "transformer.encoder.layers.0.ffns.0.layers.0.0.weight": "transformer.encoder.layers.0.linear1.weight",
        "transformer.encoder.layers.0.norms.1.bias": "transformer.encoder.layers.0.norm2.bias",
        "transformer.decoder.layers.0.attentions.0.attn.out_proj.weight": "transformer.decoder.layers.0.self_attn.out_proj.weight",
        "transformer.decoder.layers.0.attentions.1.attention_weights.bias": (
            "transformer.decoder.layers.0.cross_attn.attention_weights.bias"
        ),
        "transformer.decoder.layers.0.ffns.0.layers.1.bias": "transformer.decoder.layers.0.linear2.bias",
        "transformer.decoder.layers.0.norms.0.weight": "transformer.decoder.layers.0.norm2.weight",
        "transformer.decoder.layers.0.norms.1.weight": "transformer.decoder.layers.0.norm1.weight",
        "transformer.decoder.layers.0.norms.2.weight": "transformer.decoder.layers.0.norm3.weight",
    },
    "hf_deformable_detr": {
        "model.backbone.conv_encoder.model.layer2.0.conv1.weight": "backbone.body.layer2.0.conv1.weight",
        "model.backbone.model.encoder.stages.0.layers.0.shortcut.convolution.weight": "backbone.body.layer1.0.downsample.0.weight",
        "model.position_embedding.row_embeddings.weight": "position.row_embed.weight",
        "model.input_proj.0.0.weight": "input_proj.0.0.weight",
        "model.query_position_embeddings.weight": "queries.query_embed.weight",
        "model.level_embed": "transformer.level_embed",
        "model.reference_points.weight": "queries.reference_points.weight",
        "model.encoder.layers.0.self_attn_layer_norm.weight": "transformer.encoder.layers.0.norm1.weight",
        "model.encoder.layers.0.final_layer_norm.weight": "transformer.encoder.layers.0.norm2.weight",
        "model.encoder.layers.0.fc1.weight": "transformer.encoder.layers.0.linear1.weight",
        "model.decoder.layers.0.self_attn.out_proj.weight": "transformer.decoder.layers.0.self_attn.out_proj.weight",
        "model.decoder.layers.1.self_attn.o_proj.weight": "transformer.decoder.layers.1.self_attn.out_proj.weight",
        "model.decoder.layers.0.self_attn_layer_norm.bias": "transformer.decoder.layers.0.norm2.bias",
        "model.decoder.layers.0.encoder_attn.output_proj.weight": "transformer.decoder.layers.0.cross_attn.output_proj.weight",
        "model.decoder.layers.0.encoder_attn_layer_norm.bias": "transformer.decoder.layers.0.norm1.bias",
        "model.decoder.layers.0.final_layer_norm.bias": "transformer.decoder.layers.0.norm3.bias",
        "model.decoder.layers.0.mlp.fc2.weight": "transformer.decoder.layers.0.linear2.weight",
        "class_embed.0.weight": "class_embed.0.weight",
    },
}


def config(variant="multi-scale", num_classes=3, **changes):
    """``changes`` are the position's ``NAME`` and ``PEG``, and ``NUM_OBJECT_QUERIES``."""
    keys = {**VARIANTS[variant], **changes}
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.NUM_CLASSES = "CPVTDeformableDetr", num_classes
    cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.STAGES = "resnet10", keys.pop("STAGES", (2, 3, 4))
    cfg.MODEL.POSITION.NAME, cfg.MODEL.POSITION.PEG = keys.pop("NAME", "sine_offset"), keys.pop("PEG", None)
    small = {"HIDDEN_DIM": 8, "NHEADS": 2, "DIM_FEEDFORWARD": 8, "ENC_LAYERS": 1, "DEC_LAYERS": 2, "DROPOUT": 0.0}
    for key, value in {**small, "NUM_OBJECT_QUERIES": keys.pop("NUM_OBJECT_QUERIES", 4)}.items():
        cfg.MODEL.DETR[key] = value
    for key, value in keys.items():
        cfg.MODEL.DETECTOR[key] = value
    cfg.MODEL.CRITERION.CLASSIFICATION.NAME = "focal"
    return cfg


def detector(*arguments, seed=0, **changes):
    """A small one with weights that all differ: some start as constants."""
    torch.manual_seed(seed)
    model = build_detector(config(*arguments, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


def numbered(state_dict):
    """Ours, with heads numbered as elsewhere, and their aliases: the official names, but for the queries and the backbone."""
    layers = 2
    refined, two_stage = "class_embed.1.weight" in state_dict, "queries.enc_output.weight" in state_dict
    named = {}
    for name, tensor in state_dict.items():
        kind = re.match(r"(queries\.)?(class|bbox)_embed\.", name)
        if not kind:
            named[name] = tensor
        elif kind[1]:
            named[re.sub(r"^queries\.(class|bbox)_embed\.", rf"\1_embed.{layers}.", name)] = tensor
        else:
            named |= {name: tensor} if refined else {name.replace(".0.", f".{n}.", 1): tensor for n in range(layers)}
    aliased = [kind for kind, needed in (("bbox", refined), ("class", two_stage)) if needed]
    return named | {f"transformer.decoder.{n}": t for n, t in named.items() if n.split("_embed")[0] in aliased}


def to_official(state_dict):
    pairs = (
        (r"^backbone\.body\.", "backbone.0.body."),
        (r"^position\.", "backbone.1."),
        (r"^queries\.query_embed", "query_embed"),
        (r"^queries\.", "transformer."),
    )
    return rename(numbered(state_dict), pairs)


def to_detrex(state_dict):
    pairs = (
        (r"^backbone\.body\.conv1", "backbone.stem.conv1"),
        (r"^backbone\.body\.bn1", "backbone.stem.conv1.norm"),
        *((rf"^backbone\.body\.layer{n}", f"backbone.res{n + 1}") for n in (1, 2, 3, 4)),
        (r"\.bn(\d)\.", r".conv\1.norm."),
        (r"\.downsample\.0", ".shortcut"),
        (r"\.downsample\.1", ".shortcut.norm"),
        (r"^position\.", "position_embedding."),
        (r"^input_proj\.([012])\.0", r"neck.convs.\1.conv"),
        (r"^input_proj\.([012])\.1", r"neck.convs.\1.norm"),
        (r"^input_proj\.3\.0", "neck.extra_convs.0.conv"),
        (r"^input_proj\.3\.1", "neck.extra_convs.0.norm"),
        (r"^queries\.query_embed", "query_embedding"),
        (r"^queries\.", "transformer."),
        ("level_embed$", "level_embeds"),
        (r"(encoder.*)\.self_attn", r"\1.attentions.0"),
        (r"(decoder.*)\.self_attn", r"\1.attentions.0.attn"),
        (r"\.cross_attn", ".attentions.1"),
        (r"\.linear1", ".ffns.0.layers.0.0"),
        (r"\.linear2", ".ffns.0.layers.1"),
        (r"(encoder.*)\.norm1", r"\1.norms.0"),
        (r"(encoder.*)\.norm2", r"\1.norms.1"),
        (r"(decoder.*)\.norm2", r"\1.norms.0"),
        (r"(decoder.*)\.norm1", r"\1.norms.1"),
        (r"(decoder.*)\.norm3", r"\1.norms.2"),
    )
    return rename(numbered(state_dict), pairs)


def to_transformers(state_dict, new=True):
    """Over a timm backbone, in transformers 5 or 4."""
    pairs = (
        (r"^backbone\.body\.", "model.backbone.model." if new else "model.backbone.conv_encoder.model."),
        (r"^position\.(row|col)_embed", "model.position_embedding." + r"\1_embeddings"),
        (r"col_embeddings", "column_embeddings"),
        (r"^input_proj\.", "model.input_proj."),
        (r"^queries\.query_embed", "model.query_position_embeddings"),
        (r"^queries\.", "model."),
        (r"(encoder.*)\.norm1", r"\1.self_attn_layer_norm"),
        (r"(encoder.*)\.norm2", r"\1.final_layer_norm"),
        (r"(decoder.*)\.norm1", r"\1.encoder_attn_layer_norm"),
        (r"(decoder.*)\.norm2", r"\1.self_attn_layer_norm"),
        (r"(decoder.*)\.norm3", r"\1.final_layer_norm"),
        (r"\.cross_attn", ".encoder_attn"),
        (r"(layers.*)\.out_proj", r"\1.o_proj" if new else r"\1.out_proj"),
        (r"\.linear(\d)", r".mlp.fc\1" if new else r".fc\1"),
        (r"^transformer\.", "model."),
    )
    split = {}
    for name, tensor in rename(numbered(state_dict), pairs).items():
        if ".in_proj_" in name:
            for part, value in zip("qkv", tensor.chunk(3), strict=True):
                split[name.replace(".in_proj_", f".{part}_proj.")] = value
        else:
            split[name] = tensor
    return split


def rename(state_dict, pairs):
    for pattern, replacement in pairs:
        state_dict = {re.sub(pattern, replacement, name): tensor for name, tensor in state_dict.items()}
    return state_dict


FOREIGN = {
    "official": ("deformable_detr", to_official),
    "detrex": ("detrex_deformable_detr", to_detrex),
    "transformers 5": ("hf_deformable_detr", to_transformers),
    "transformers 4": ("hf_deformable_detr", lambda state_dict: to_transformers(state_dict, new=False)),
}
CASES = [(layout, variant) for layout in FOREIGN for variant in VARIANTS]


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def checkpoint_of(model, names=NAMES):
    return {"model": model.state_dict(), "cpvt_det": {"classes": {"ids": list(range(len(names))), "names": list(names)}}}


# Names


@pytest.mark.parametrize("source", EXPECTED)
def test_names_are_those_written_down(source):
    weights = {name: torch.full((1,), float(number)) for number, name in enumerate(EXPECTED[source])}
    assert detect_source(weights) == source
    expected = {ours: weights[theirs] for theirs, ours in EXPECTED[source].items()}
    assert same(convert_state_dict(weights, source), expected)


@pytest.mark.parametrize(("layout", "variant"), [case for case in CASES if case != ("detrex", "single scale")])
def test_every_variant_of_every_source_converts_whole(layout, variant):
    source, to_theirs = FOREIGN[layout]
    ours = detector(variant, NAME="learned").state_dict()
    theirs = to_theirs(ours)
    assert detect_source(theirs) == source
    assert detect_source(ours) is None
    converted = convert_state_dict(theirs, source)
    assert converted.keys() == ours.keys()
    assert same(converted, ours)
    report = load_weights(detector(variant, seed=1, NAME="learned"), theirs)
    assert report.source == source
    assert not report.is_partial


def test_heads_of_equal_values_stay_apart_where_the_decoder_refines():
    """Its boxes' heads are known to the decoder, so each layer has its own, whatever their values."""
    model = detector("refinement")
    model.class_embed[1].load_state_dict(model.class_embed[0].state_dict())
    model.bbox_embed[1].load_state_dict(model.bbox_embed[0].state_dict())
    assert same(convert_state_dict(to_official(model.state_dict()), "deformable_detr"), model.state_dict())


def test_a_file_that_holds_shared_heads_once_is_complete():
    """Without refinement one pair, under the first number; with it one class head, and boxes' heads under the decoder's names."""
    model = detector("multi-scale")
    first = {name: t for name, t in to_transformers(model.state_dict()).items() if "_embed.1." not in name}
    assert same(convert_state_dict(first, "hf_deformable_detr"), model.state_dict())

    model = detector("refinement")
    model.class_embed[1].load_state_dict(model.class_embed[0].state_dict())
    theirs = to_transformers(model.state_dict())
    kept = {name: t for name, t in theirs.items() if not name.startswith(("bbox_embed.", "class_embed.1."))}
    assert len(kept) < len(theirs)
    assert same(convert_state_dict(kept, "hf_deformable_detr"), model.state_dict())


def test_a_head_that_other_sources_lack_is_missing():
    theirs = {name: t for name, t in to_official(detector("refinement").state_dict()).items() if name != "class_embed.1.weight"}
    assert load_weights(detector("refinement", seed=1), theirs).missing == ["class_embed.1.weight"]


def test_names_of_two_sources_are_refused():
    official, hf = (FOREIGN[layout][1](detector().state_dict()) for layout in ("official", "transformers 5"))
    mixed = {**official, **hf}
    with pytest.raises(WeightsError, match="the weights mix the tensor names of deformable_detr and hf_deformable_detr"):
        detect_source(mixed)
    with pytest.raises(WeightsError, match="the given weights: the weights mix"):
        read_weights(mixed)


def test_one_head_with_two_values_is_refused():
    theirs = to_official(detector("refinement").state_dict())
    theirs["transformer.decoder.bbox_embed.1.layers.0.bias"] = torch.ones(8)
    with pytest.raises(WeightsError, match=r"bbox_embed\.1\.layers\.0\.bias and transformer\.decoder\.bbox_embed\.1.* differ"):
        convert_state_dict(theirs, "deformable_detr")


def test_names_of_no_table_are_reported():
    theirs = {**to_official(detector().state_dict()), "label_enc.weight": torch.ones(2)}
    report = load_weights(detector(seed=1), theirs)
    assert report.unexpected == ["label_enc.weight"]
    assert report.is_partial


# Classes and queries


def test_class_rows_of_every_layer_are_picked_by_name_and_proposals_keep_their_object_row():
    """cat, dog, tree -> tree, ship, cat: rows 2, fresh, 0 of each layer; of the proposals' head, whose row 0 is no class, row 0."""
    first, second = detector("two stages"), detector("two stages", seed=1)
    fresh = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    report = load_weights(second, checkpoint_of(first), ("tree", "ship", "cat"))
    for layer in (0, 1):
        old, new = first.class_embed[layer].weight, second.class_embed[layer].weight
        assert torch.equal(new, torch.stack((old[2], fresh[f"class_embed.{layer}.weight"][1], old[0])))
    for part in ("weight", "bias"):
        old, new = (getattr(model.queries.class_embed, part) for model in (first, second))
        assert torch.equal(new, torch.cat((old[:1], fresh[f"queries.class_embed.{part}"][1:])))
    assert torch.equal(first.queries.bbox_embed.layers[0].weight, second.queries.bbox_embed.layers[0].weight)
    assert "2 of 3 classes found by name" in str(report)


def test_proposals_have_an_object_row_where_no_class_is_known():
    first, second = detector("two stages"), detector("two stages", num_classes=5, seed=1)
    report = load_weights(second, first.state_dict())
    assert torch.equal(second.queries.class_embed.weight[0], first.queries.class_embed.weight[0])
    assert set(report.remade) == {f"class_embed.{layer}.{part}" for layer in (0, 1) for part in ("weight", "bias")}


def test_proposals_of_the_same_classes_load_whole():
    first, second = detector("two stages"), detector("two stages", seed=1)
    load_weights(second, checkpoint_of(first), NAMES)
    assert same(first.state_dict(), second.state_dict())


def test_heads_of_91_rows_are_coco_by_category_id_and_detrex_s_80_by_order():
    official = detector("two stages", num_classes=91)
    assert read_weights(to_official(official.state_dict())).classes == COCO_ROWS
    model = detector("two stages", num_classes=80, seed=1)
    report = load_weights(model, to_official(official.state_dict()), COCO_CLASSES.names)
    assert torch.equal(model.class_embed[1].weight, official.class_embed[1].weight[list(COCO_CLASSES.ids)])
    assert torch.equal(model.queries.class_embed.weight[0], official.queries.class_embed.weight[0])
    assert not report.is_partial
    assert read_weights(to_detrex(model.state_dict())).classes == COCO_CLASSES
    assert read_weights(to_official(model.state_dict())).classes is None


def test_a_folder_of_hugging_face_tells_as_many_classes_as_rows(tmp_path):
    weights = {name: tensor.contiguous() for name, tensor in to_transformers(detector().state_dict()).items()}
    unshared = {name: tensor for name, tensor in weights.items() if "_embed.1." not in name}
    safetensors.torch.save_file(unshared, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"id2label": {"0": "N/A", "1": "dog", "2": "tree"}}', encoding="utf-8")
    assert read_weights(tmp_path).classes.names == ("unused_0", "dog", "tree")


def test_another_number_of_queries_starts_anew_in_training_and_is_refused_in_evaluation(tmp_path):
    first = detector(NUM_OBJECT_QUERIES=7)
    torch.save(to_official(first.state_dict()), tmp_path / "official.pth")
    cfg, classes = config(), Classes((0, 1, 2), NAMES)
    cfg.MODEL.WEIGHTS = str(tmp_path / "official.pth")
    model = detector(seed=1)
    fresh = model.queries.query_embed.weight.clone()
    load_initial_weights(cfg, model, classes)
    assert torch.equal(model.queries.query_embed.weight, fresh)
    assert torch.equal(model.queries.reference_points.weight, first.queries.reference_points.weight)
    with pytest.raises(WeightsError, match=r"only part of the config's model.*1 re-initialised \(queries\.query_embed\.weight\)"):
        load_initial_weights(cfg, model, classes, for_evaluation=True)
    narrow = {**first.state_dict(), "queries.reference_points.weight": torch.ones(2, 4)}
    torch.save(narrow, tmp_path / "official.pth")
    with pytest.raises(WeightsError, match=r"has different shapes from the config's model: queries\.reference_points\.weight"):
        load_initial_weights(cfg, model, classes)


# PEG


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_zero_peg_beside_converted_weights_changes_no_bit(variant, train):
    theirs = to_official(detector(variant).state_dict())
    converted, with_peg = (
        detector(variant, seed=1),
        build_detector(config(variant, NAME="sine_offset+peg", PEG=CfgNode({"ZERO_INIT": True}))),
    )
    assert not load_weights(converted, theirs).is_partial
    assert {name.split(".")[1] for name in load_weights(with_peg, theirs).missing} == {"pegs"}
    batch = converted.preprocess([torch.rand(3, 40, 100) * 255, torch.rand(3, 64, 30) * 255])
    first, second = (model.train(train)(batch.images, batch.padding_mask) for model in (converted, with_peg))
    assert (first.logits == second.logits).all()
    assert (first.boxes == second.boxes).all()
    if variant == "two stages":
        assert (first.proposals.logits == second.proposals.logits).all()
        assert (first.proposals.boxes == second.proposals.boxes).all()
