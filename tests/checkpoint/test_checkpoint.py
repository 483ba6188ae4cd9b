# SPDX-License-Identifier: Apache-2.0
"""Weights: what is read and what is refused, other projects' names, what fits a model, files that are whole or not there."""

import argparse
import json
import os
import pickle
import re
from urllib.error import URLError

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from fvcore.common.config import CfgNode
from torch import nn
from torch.optim.swa_utils import AveragedModel

from cpvt_det.builders import build_detector
from cpvt_det.checkpoint import convert_state_dict, load_backbone_weights, load_weights, read_weights
from cpvt_det.checkpoint.convert import detect_source
from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of, write_checkpoint
from cpvt_det.common.class_names import COCO_CLASSES, COCO_ROWS
from cpvt_det.common.errors import UnknownNameError, WeightsError
from cpvt_det.common.files import atomic_file
from cpvt_det.config import get_cfg
from cpvt_det.models import ResNetBackbone

NAMES = ("cat", "dog", "tree")


def detector(num_classes=3, seed=0, **changes):
    """A small one; ``changes`` are keys of ``MODEL.DETR``, ``POSITION``, ``PEG``, ``PRE_NORM`` and ``CLASSIFICATION``."""
    cfg = get_cfg()
    cfg.MODEL.NUM_CLASSES = num_classes
    cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.STAGES = "resnet18", (2,)
    cfg.MODEL.POSITION.NAME = changes.pop("POSITION", "sine")
    cfg.MODEL.POSITION.PEG, cfg.MODEL.DETECTOR.PRE_NORM = changes.pop("PEG", None), changes.pop("PRE_NORM", None)
    cfg.MODEL.DETECTOR.DECODER_POSITION = "same"
    cfg.MODEL.CRITERION.CLASSIFICATION.NAME = changes.pop("CLASSIFICATION", "softmax")
    small = {"HIDDEN_DIM": 8, "NHEADS": 2, "DIM_FEEDFORWARD": 8, "ENC_LAYERS": 1, "DEC_LAYERS": 2, "NUM_OBJECT_QUERIES": 4}
    for key, value in {**small, **changes}.items():
        cfg.MODEL.DETR[key] = value
    torch.manual_seed(seed)
    return build_detector(cfg)


def checkpoint_of(model, names=NAMES):
    return {"model": model.state_dict(), "cpvt_det": {"classes": {"ids": list(range(len(names))), "names": list(names)}}}


def same(first, second):
    """Whether two state dicts have the same names and, bit for bit, values."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def to_facebook(state_dict):
    """Our names -> those of facebookresearch/detr."""
    pairs = ((r"^backbone\.body\.", "backbone.0.body."), (r"^position\.", "backbone.1."))
    return rename(state_dict, pairs)


def to_transformers(state_dict, new=True):
    """Our names -> those of DetrForObjectDetection over a timm backbone, in transformers 5 or 4."""
    layer = r"^(transformer\.(?:en|de)coder\.layers\.\d+)"
    position = "model.position_embedding" if new else "model.backbone.position_embedding"
    pairs = (
        (r"^backbone\.body\.", "model.backbone.model." if new else "model.backbone.conv_encoder.model."),
        (r"^position\.row_embed", position + ".row_embeddings"),
        (r"^position\.col_embed", position + ".column_embeddings"),
        (r"^query_embed", "model.query_position_embeddings"),
        (r"^input_proj", "model.input_projection"),
        (r"^class_embed", "class_labels_classifier"),
        (r"^bbox_embed", "bbox_predictor"),
        (layer + r"\.norm1", r"\1.self_attn_layer_norm"),
        (r"^(transformer\.encoder\.layers\.\d+)\.norm2", r"\1.final_layer_norm"),
        (r"^(transformer\.decoder\.layers\.\d+)\.norm2", r"\1.encoder_attn_layer_norm"),
        (layer + r"\.norm3", r"\1.final_layer_norm"),
        (layer + r"\.multihead_attn", r"\1.encoder_attn"),
        (layer + r"(.*)\.out_proj", r"\1\2.o_proj" if new else r"\1\2.out_proj"),
        (layer + r"\.linear(\d)", r"\1.mlp.fc\2" if new else r"\1.fc\2"),
        (r"^transformer\.decoder\.norm", "model.decoder.layernorm"),
        (r"^transformer\.", "model."),
    )
    split = {}
    for name, tensor in rename(state_dict, pairs).items():
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
    "facebook": to_facebook,
    "transformers 5": to_transformers,
    "transformers 4": lambda state_dict: to_transformers(state_dict, new=False),
}


# Reading files


@pytest.mark.parametrize("suffix", [".pth", ".bin", ".safetensors"])
def test_what_was_written_is_read(tmp_path, suffix):
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2])}
    write_checkpoint(weights, tmp_path / f"x{suffix}")
    assert same(read_checkpoint(tmp_path / f"x{suffix}"), weights)


def test_official_checkpoints_load_with_their_arguments_and_numpy_values(tmp_path):
    args = argparse.Namespace(lr=1e-4, backbone="resnet50", dilation=False)
    values = {
        "array": np.arange(6.0).reshape(2, 3),
        "number": np.float64(0.5),
        "counts": np.array([1, 2]),
        "flag": np.bool_(True),
    }
    torch.save({"model": {"a": torch.ones(2)}, "args": args, "epoch": 3, **values}, tmp_path / "official.pth")
    read = read_checkpoint(tmp_path / "official.pth")
    assert read["args"] == args
    assert {name: value.tolist() for name, value in values.items()} == {name: read[name].tolist() for name in values}


def test_numpy_values_pickled_before_numpy_2_load(tmp_path):
    torch.save({"array": np.arange(3.0), "number": np.float32(0.5)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    content = (tmp_path / "old.pth").read_bytes()
    assert b"numpy._core" in content
    (tmp_path / "old.pth").write_bytes(content.replace(b"numpy._core", b"numpy.core"))
    read = read_checkpoint(tmp_path / "old.pth")
    assert read["array"].tolist() == [0, 1, 2]
    assert read["number"] == 0.5


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_foreign_code_is_refused_and_not_run(tmp_path, zipped):
    path = tmp_path / "bad.pth"
    torch.save({"model": {"a": torch.ones(1)}, "x": Payload(tmp_path / "ran")}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError, match=r"bad\.pth: refused, because it contains a Python object \(\w+\.mkdir\)"):
        read_checkpoint(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["bad.pkl", "bad.pth"])
def test_plain_pickles_are_refused_and_not_run(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran"), protocol=2))
    with pytest.raises(WeightsError, match=re.escape(name)):
        read_checkpoint(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", ["empty", "garbage", "truncated", "folder"])
def test_damaged_files_are_named_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"damaged{suffix}"
    write_checkpoint({"a": torch.ones(1000)}, path)
    whole = path.read_bytes()
    path.unlink()
    if content == "folder":
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "garbage": b"no checkpoint at all" * 9, "truncated": whole[: len(whole) // 2]}[content])
    with pytest.raises(WeightsError, match=re.escape(str(path))) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(WeightsError, match=r"no weights file .*absent\.pth"):
        read_checkpoint(tmp_path / "absent.pth")


def test_weights_are_found_in_every_usual_layout():
    weights = {"a": torch.ones(1), "b": torch.zeros(2)}
    wrapped = {f"module.{name}": tensor for name, tensor in weights.items()}
    for checkpoint in (weights, {"model": weights}, {"state_dict": weights, "epoch": 1}, {"model": wrapped}, wrapped):
        assert same(state_dict_of(checkpoint), weights)
    averaged = {"n_averaged": torch.tensor(3), **wrapped}
    compiled = {"model": {"module._orig_mod.a": weights["a"], "module.b": weights["b"]}}
    sharded = {"_fsdp_wrapped_module.a": weights["a"], "_fsdp_wrapped_module._checkpoint_wrapped_module.b": weights["b"]}
    for checkpoint in (averaged, compiled, sharded):
        assert same(state_dict_of(checkpoint), weights)
    lightning = {f"model._orig_mod.{name}": tensor for name, tensor in weights.items()} | {"criterion.empty_weight": torch.ones(3)}
    assert same(state_dict_of({"state_dict": lightning, "pytorch-lightning_version": "2.5.0"}), weights)
    assert len(state_dict_of({"state_dict": lightning})) == 3
    assert list(state_dict_of({"state_dict": {"a": weights["a"]}, "pytorch-lightning_version": "2.5.0"})) == ["a"]
    assert list(state_dict_of({"module.a": torch.ones(1), "b": torch.ones(1)})) == ["module.a", "b"]


@pytest.mark.parametrize(
    "checkpoint", [torch.ones(2), [1], {}, {"model": {}}, {"epoch": 1}, {"model": {"a": 1}}, {1: torch.ones(1)}]
)
def test_what_holds_no_weights_is_refused(checkpoint):
    with pytest.raises(WeightsError, match=r"x\.pth contains"):
        state_dict_of(checkpoint, "x.pth")


# Writing files


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.pth"
    write_checkpoint({"a": torch.ones(1)}, path)
    before = path.read_bytes()
    with pytest.raises(OSError, match="full"):
        write_half(path)
    with pytest.raises(AttributeError):
        write_checkpoint({"a": lambda: None}, path)  # does not pickle
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["x.pth", "x.pth.sha256"]


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    with atomic_file(tmp_path / "x") as file:
        file.write(b"all of it")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x").read_bytes() == b"all of it"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o666 & ~umask()


def write_half(path):
    with atomic_file(path) as file:
        file.write(b"half")
        raise OSError("full")


def umask():
    current = os.umask(0)
    os.umask(current)
    return current


# Names of other projects


@pytest.mark.parametrize("position", ["sine", "learned"])
@pytest.mark.parametrize("layout", FOREIGN)
def test_foreign_names_convert_to_ours_and_are_detected(layout, position):
    ours = detector(num_classes=91, POSITION=position).state_dict()
    theirs = FOREIGN[layout](ours)
    source = "facebook_detr" if layout == "facebook" else "hf_detr"
    assert detect_source(theirs) == source
    assert detect_source(ours) is None
    assert same(dict(sorted(convert_state_dict(theirs, source).items())), dict(sorted(ours.items())))
    assert convert_state_dict(theirs, source)["class_embed.weight"].shape[0] == 92


def test_pre_norm_weights_of_the_official_repository_convert():
    ours = detector(PRE_NORM=True).state_dict()
    assert "transformer.encoder.norm.weight" in ours
    assert same(convert_state_dict(to_facebook(ours), "facebook_detr"), ours)


def test_counters_and_classifiers_are_dropped():
    theirs = to_facebook(detector().state_dict())
    extra = {"backbone.0.body.bn1.num_batches_tracked": torch.tensor(1), "backbone.0.body.fc.weight": torch.ones(2, 2)}
    assert same(convert_state_dict({**theirs, **extra}, "facebook_detr"), convert_state_dict(theirs, "facebook_detr"))


def test_conversion_needs_all_three_projections():
    theirs = to_transformers(detector().state_dict())
    del theirs["model.encoder.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(
        WeightsError,
        match=r"layers\.0\.self_attn\.in_proj_weight needs q_proj, k_proj and v_proj, but the weights contain only q, v",
    ):
        convert_state_dict(theirs, "hf_detr")


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("transformer.decoder.layers.0.sa_qcontent_proj.weight", "Conditional DETR"),
        ("model.decoder.layers.0.self_attn.q_content_proj.weight", "Conditional DETR"),  # transformers 5
        ("transformer.decoder.layers.0.attentions.0.query_content_proj.weight", "Conditional DETR"),  # detrex
        ("transformer.decoder.ref_anchor_head.layers.0.weight", "DAB-DETR"),
        ("transformer.adapt_pos2d.0.weight", "Anchor DETR"),
        ("transformer.enc_out_class_embed.0.weight", "LW-DETR or RF-DETR"),
        ("transformer.encoder.fusion_layers.0.gamma_v", "Grounding DINO"),
    ],
)
def test_weights_of_other_architectures_are_refused_by_name(name, architecture):
    """The names are those of their public code; around them stand names that theirs and DETR's have in common."""
    weights = {**to_facebook(detector().state_dict()), name: torch.ones(1)}
    said = (
        f"the given weights: weights of {architecture} (recognised by the tensor {name}) are not supported; give weights of DETR, "
    )
    with pytest.raises(WeightsError, match=re.escape(said)):
        load_weights(detector(), weights)


# Loading


def test_own_checkpoints_load_whole(tmp_path):
    first, second = detector(), detector(seed=1)
    torch.save(checkpoint_of(first), tmp_path / "x.pth")
    report = load_weights(second, tmp_path / "x.pth", NAMES)
    assert same(first.state_dict(), second.state_dict())
    assert not report.is_partial
    assert len(report.loaded) == len(first.state_dict())
    assert str(report) == f"{len(report.loaded)} tensors loaded"
    assert report.table() == "every tensor loaded"


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, AveragedModel, lambda model: nn.ModuleDict({"model": model})])
def test_weights_of_a_wrapped_model_load_whole(wrap):
    """And its backbone is compiled too; nothing runs, so nothing is compiled."""
    first, second = detector(), detector(seed=1)
    own = first.state_dict()
    first.backbone = torch.compile(first.backbone)
    wrapped = wrap(first).state_dict()
    assert own.keys().isdisjoint(wrapped) and any("backbone._orig_mod." in name for name in wrapped)
    assert not load_weights(second, wrapped).is_partial
    assert same(second.state_dict(), own)


@pytest.mark.parametrize("layout", FOREIGN)
def test_foreign_weights_load_without_a_word_about_their_source(layout):
    first, second = detector(), detector(seed=1)
    report = load_weights(second, FOREIGN[layout](first.state_dict()))
    assert same(first.state_dict(), second.state_dict())
    assert not report.is_partial
    assert "converted from" in str(report)


def test_weights_take_the_dtype_of_the_model():
    half = {name: tensor.half() for name, tensor in detector().state_dict().items()}
    model = detector(seed=1)
    load_weights(model, half)
    assert model.query_embed.weight.dtype == torch.float32
    assert torch.equal(model.query_embed.weight, half["query_embed.weight"].float())


def test_class_rows_are_picked_by_name():
    """cat, dog, tree -> tree, ship, cat: rows 2, fresh, 0; the fourth, no object, stays last."""
    first, second = detector(), detector(seed=1)
    fresh = second.class_embed.weight.clone()
    report = load_weights(second, checkpoint_of(first), ("tree", "ship", "cat"))
    old, new = first.class_embed.weight, second.class_embed.weight
    assert torch.equal(new, torch.stack((old[2], fresh[1], old[0], old[3])))
    assert torch.equal(second.class_embed.bias[[0, 2, 3]], first.class_embed.bias[[2, 0, 3]])
    assert report.rows_by_name == {"tree": 2, "ship": None, "cat": 0}
    assert report.is_partial
    assert "2 of 3 classes found by name" in str(report)
    assert "class ship" in report.table()


def test_a_change_of_order_is_not_a_partial_load():
    first, second = detector(), detector(seed=1, num_classes=2)
    report = load_weights(second, checkpoint_of(first), ("dog", "cat"))
    assert torch.equal(second.class_embed.weight, first.class_embed.weight[[1, 0, 3]])
    assert not report.is_partial


def test_sigmoid_heads_have_no_background_row():
    first, second = detector(CLASSIFICATION="focal"), detector(seed=1, CLASSIFICATION="focal")
    load_weights(second, checkpoint_of(first), ("tree", "dog", "cat"))
    assert torch.equal(second.class_embed.weight, first.class_embed.weight[[2, 1, 0]])


@pytest.mark.parametrize("names", [NAMES, ("tree", "dog", "cat")])
def test_softmax_and_sigmoid_heads_do_not_mix(names):
    model = detector(seed=1, CLASSIFICATION="focal")
    fresh = model.class_embed.weight.clone()
    report = load_weights(model, checkpoint_of(detector()), names)
    assert torch.equal(model.class_embed.weight, fresh)
    assert set(report.remade) == {"class_embed.weight", "class_embed.bias"}
    assert set(report.rows_by_name.values()) <= {None}


@pytest.mark.parametrize(("classification", "rows"), [("softmax", 92), ("focal", 91)])
def test_official_heads_are_coco_by_category_id(classification, rows):
    official = detector(num_classes=91, CLASSIFICATION=classification)
    assert len(official.class_embed.weight) == rows
    model = detector(num_classes=80, seed=1, CLASSIFICATION=classification)
    report = load_weights(model, to_facebook(official.state_dict()), COCO_CLASSES.names)
    expected = [*COCO_CLASSES.ids, 91] if classification == "softmax" else list(COCO_CLASSES.ids)
    assert torch.equal(model.class_embed.weight, official.class_embed.weight[expected])
    assert not report.is_partial
    assert report.rows_by_name["toothbrush"] == 90


def test_without_names_a_head_of_another_shape_is_made_anew():
    model = detector(num_classes=5, seed=1)
    fresh = model.class_embed.weight.clone()
    report = load_weights(model, detector().state_dict())
    assert torch.equal(model.class_embed.weight, fresh)
    assert report.remade == {
        "class_embed.weight": "(4, 8) in the weights, (6, 8) in the model",
        "class_embed.bias": "(4,) in the weights, (6,) in the model",
    }
    assert report.is_partial


def test_classes_that_share_no_name_leave_the_head_fresh():
    model = detector(seed=1)
    fresh = model.class_embed.weight.clone()
    report = load_weights(model, checkpoint_of(detector()), ("a", "b", "c"))
    assert torch.equal(model.class_embed.weight, fresh)
    assert set(report.remade) == {"class_embed.weight", "class_embed.bias"}


def test_other_shapes_and_layers_are_reported():
    model = detector(NUM_OBJECT_QUERIES=7, ENC_LAYERS=2, DEC_LAYERS=1, POSITION="sine+peg", seed=1)
    report = load_weights(model, detector().state_dict())
    assert report.remade == {"query_embed.weight": "(4, 8) in the weights, (7, 8) in the model"}
    assert {name.split(".layers.")[0] for name in report.unexpected} == {"transformer.decoder"}
    assert {name.split(".layers.")[0] for name in report.missing if "pegs" not in name} == {"transformer.encoder"}
    assert {name for name in report.missing if "pegs" in name} == {
        f"position.pegs.0.0.{part}" for part in ("conv.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
    }
    assert report.is_partial
    for part in ("1 re-initialised (query_embed.weight)", "missing (", "unexpected ("):
        assert part in str(report)
    assert "transformer.decoder.layers.*.linear1.weight" in report.table()


def test_a_zero_peg_beside_sine_leaves_loaded_weights_their_outputs():
    first, second = detector().eval(), detector(POSITION="sine+peg", PEG=CfgNode({"ZERO_INIT": True}), seed=1).eval()
    load_weights(second, first.state_dict())
    images, mask = torch.randn(1, 3, 32, 64), torch.zeros(1, 32, 64, dtype=torch.bool)
    assert torch.equal(first(images, mask).logits, second(images, mask).logits)


def test_weights_with_nothing_in_common_are_refused_and_change_nothing():
    model = detector()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = r"query_embed.weight of shape \(9, 9\) in the weights, query_embed.weight of shape \(\d+, \d+\) in the model"
    cases = (
        ({"a": torch.ones(1)}, r"a of shape \(1,\) in"),
        ({"query_embed.weight": torch.ones(9, 9)}, other),
        (torchvision.models.resnet18().state_dict(), ""),
    )
    for weights, example in cases:
        with pytest.raises(WeightsError, match=rf"the given weights has no tensor that fits the model \({example}"):
            load_weights(model, weights)
    assert same(before, model.state_dict())


def test_double_class_names_are_refused():
    with pytest.raises(ValueError, match="class names must differ, got cat, cat, dog"):
        load_weights(detector(), checkpoint_of(detector()), ("cat", "cat", "dog"))


def test_classes_that_do_not_go_with_the_head_are_refused():
    with pytest.raises(WeightsError, match="a class head with 4 rows does not match 2 class ids and 2 names"):
        load_weights(detector(), checkpoint_of(detector(), ("cat", "dog")))


# Folders of Hugging Face


def hf_folder(folder, model, labels, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in to_transformers(model.state_dict()).items()}
    if file.endswith("safetensors"):
        safetensors.torch.save_file(weights, folder / file)
    else:
        torch.save(weights, folder / file)
    if labels is not None:
        (folder / "config.json").write_text(json.dumps({"id2label": labels}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_hugging_face_tells_its_classes(tmp_path, file):
    first, second = detector(), detector(seed=1, num_classes=2)
    folder = hf_folder(tmp_path / "hub", first, {"0": "N/A", "1": "dog", "2": "tree"}, file)
    assert read_weights(folder).classes.names == ("unused_0", "dog", "tree")
    load_weights(second, folder, ("tree", "dog"))
    assert torch.equal(second.class_embed.weight, first.class_embed.weight[[2, 1, 3]])


@pytest.mark.parametrize(
    "labels", [None, {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, {"0": "a"}, {"0": "a", "1": "a", "2": "b"}, {"x": 1}]
)
def test_labels_that_tell_nothing_are_no_classes(tmp_path, labels):
    assert read_weights(hf_folder(tmp_path / "hub", detector(), labels)).classes is None


def test_a_folder_without_weights_says_what_it_lacks(tmp_path):
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor pytorch_model\.bin nor model_best\.pth"):
        read_weights(tmp_path)


# Backbones


@pytest.mark.parametrize("last_stage", [3, 5])
@pytest.mark.parametrize("norm", ["FrozenBN", "BN"])
def test_a_classifier_s_file_fills_the_backbone(tmp_path, norm, last_stage):
    classifier = torchvision.models.resnet18()
    torch.save(classifier.state_dict(), tmp_path / "resnet18.pth")
    backbone = ResNetBackbone("resnet18", norm=norm, stages=[last_stage])
    load_backbone_weights(backbone, str(tmp_path / "resnet18.pth"), "resnet18")
    for name, tensor in backbone.body.state_dict().items():
        assert torch.equal(tensor, classifier.state_dict()[name]), name


def test_weights_of_another_network_are_refused(tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "resnet18.pth")
    for name, norm in (("resnet34", "FrozenBN"), ("resnet50", "FrozenBN"), ("resnet18", "GN")):
        with pytest.raises(WeightsError, match=rf"resnet18\.pth does not fit {name}: "):
            load_backbone_weights(ResNetBackbone(name, norm=norm), str(tmp_path / "resnet18.pth"), name)
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"only the network has conv1\.weight"):
        load_backbone_weights(ResNetBackbone("resnet18"), str(tmp_path / "other.pth"), "resnet18")


def test_unknown_backbone_weights_list_the_known():
    with pytest.raises(
        UnknownNameError, match=r"unknown backbone weights .* 'IMAGENET'.*known: DEFAULT, IMAGENET1K_V1, IMAGENET1K_V2"
    ):
        load_backbone_weights(ResNetBackbone("resnet50"), "IMAGENET", "resnet50")


def test_named_weights_come_from_torchvision_checked_and_without_code(monkeypatch):
    state_dict, asked = torchvision.models.resnet18().state_dict(), {}

    def fetch(url, **options):
        asked.update(options, url=url)
        return state_dict

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
    backbone = ResNetBackbone("resnet18")
    load_backbone_weights(backbone, "DEFAULT", "resnet18")
    assert torch.equal(backbone.body.conv1.weight, state_dict["conv1.weight"])
    assert asked["url"] == torchvision.models.ResNet18_Weights.DEFAULT.url
    assert asked["check_hash"]
    assert asked["weights_only"]


@pytest.mark.parametrize("error", [URLError("no route"), RuntimeError("invalid hash value"), ConnectionResetError("reset")])
def test_a_failing_download_is_one_line_with_the_way_out(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    with pytest.raises(
        WeightsError, match=r"cannot download .*no network\? give a local file in MODEL\.BACKBONE\.WEIGHTS"
    ) as caught:
        load_backbone_weights(ResNetBackbone("resnet18"), "IMAGENET1K_V1", "resnet18")
    assert "\n" not in str(caught.value)


# COCO's categories


def test_coco_has_80_categories_of_90_ids():
    names = torchvision.models.detection.FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    assert len(COCO_CLASSES) == 80
    for row, name in enumerate(COCO_ROWS.names):
        assert name == (f"unused_{row}" if names[row] in ("__background__", "N/A") else names[row])
