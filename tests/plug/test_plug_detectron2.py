# SPDX-License-Identifier: Apache-2.0
"""PEG in detectron2's own models: found inside a detector, by YAML alone, on named maps."""

import pytest
import torch
from plug_matrix.checks import plugged, recorded
from plug_matrix.examples import EXAMPLES
from torch import nn

from cpvt_det.common.errors import ConfigError
from cpvt_det.plug import PlugError, add_peg, peg_report, remove_peg

pytestmark = pytest.mark.detectron2

BY_NAME = {example.name: example for example in EXAMPLES}


@pytest.fixture
def cfg():
    """A small RetinaNet on ResNet-18 with FPN, and our keys."""
    from detectron2.config import get_cfg

    from cpvt_det.d2 import add_peg_config

    cfg = get_cfg()
    add_peg_config(cfg)
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.META_ARCHITECTURE = "RetinaNet"
    cfg.MODEL.BACKBONE.NAME = "build_retinanet_resnet_fpn_backbone"
    cfg.MODEL.RESNETS.DEPTH = 18
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.FPN.IN_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.FPN.OUT_CHANNELS = 32
    cfg.MODEL.RETINANET.NUM_CONVS = 1
    cfg.MODEL.RETINANET.NUM_CLASSES = 3
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32], [64], [128], [256], [512]]
    cfg.MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS = [[1.0]]
    return cfg


def build(cfg):
    from detectron2.modeling import build_model

    torch.manual_seed(0)
    return build_model(cfg).eval()


def with_peg(cfg, **keys):
    cfg = cfg.clone()
    cfg.MODEL.PEG.BACKBONE, cfg.MODEL.BACKBONE.NAME = cfg.MODEL.BACKBONE.NAME, "build_peg_backbone"
    for key, value in keys.items():
        cfg.MODEL.PEG[key] = value
    return cfg


def test_peg_backbone_by_yaml_has_the_same_outputs_and_only_more_keys(cfg):
    model, bare = build(with_peg(cfg, IN_FEATURES=["p3", "p7"])), build(cfg)
    model.load_state_dict(bare.state_dict(), strict=False)
    gained = set(model.state_dict()) - set(bare.state_dict())
    assert {key.rsplit(".", 2)[0] for key in gained if key.endswith("conv.weight")} == {"backbone.peg.p3", "backbone.peg.p7"}
    assert set(bare.state_dict()) < set(model.state_dict()) and all(key.startswith("backbone.peg.") for key in gained)
    image = [{"image": torch.arange(3.0 * 90 * 130).reshape(3, 90, 130) % 255}]
    with torch.no_grad(), recorded(model) as calls:
        ours, theirs = (one(image)[0]["instances"] for one in (model, bare))
    assert [call[2] for call in calls] == [(12, 20), (1, 2)]  # padded to 96 x 160
    assert len(ours) > 0 and torch.equal(ours.pred_boxes.tensor, theirs.pred_boxes.tensor)
    assert torch.equal(ours.scores, theirs.scores)


def test_peg_backbone_takes_all_maps_by_default_and_any_backbone(cfg):
    cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
    cfg.MODEL.RETINANET.IN_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32], [64], [128]]
    cfg.MODEL.RESNETS.STEM_OUT_CHANNELS = 64
    from detectron2.modeling import build_backbone

    backbone = build_backbone(with_peg(cfg, NORM="GN", KERNEL_SIZE=5, ZERO_INIT=False))
    assert {name: tuple(peg.conv.weight.shape) for name, peg in backbone.peg.items()} == {
        "res3": (128, 1, 5, 5),
        "res4": (256, 1, 5, 5),
        "res5": (512, 1, 5, 5),
    }
    assert "none" in peg_report(backbone)  # no scale
    bare = remove_peg(backbone)
    assert not any("peg" in key for key in bare.state_dict())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"IN_FEATURES": ["p9"]}, "no layer 'p9'.*p3, p4, p5, p6, p7"),
        ({"BACKBONE": "build_peg_backbone"}, "MODEL.PEG.BACKBONE must be another backbone"),
        ({"BACKBONE": "build_pge"}, "got 'build_pge'"),
        ({"KERNEL_SIZE": 4}, "MODEL.PEG: kernel_size must be odd"),
        ({"NORM": "LN"}, "unknown norm 'LN'"),
    ],
)
def test_peg_backbone_refuses(cfg, keys, message):
    with pytest.raises((ConfigError, PlugError), match=message):
        build(with_peg(cfg, **keys))


def test_fpn_is_found_inside_a_detector(cfg):
    model = build(cfg)
    add_peg(model, after=["p3", "p4"])
    assert list(model.backbone.peg) == ["p3", "p4"]
    with pytest.raises(PlugError, match="already has a PEG"):
        add_peg(model, after="p5")


def test_vit_is_found_inside_a_feature_pyramid_and_runs_without_its_table():
    from detectron2.modeling.backbone.vit import SimpleFeaturePyramid

    example = BY_NAME["detectron2 ViT"]
    model = SimpleFeaturePyramid(example.model(), "last_feat", 32, [1.0], norm="LN").eval()
    table = model.net.pos_embed
    add_peg(model, position="replace")
    assert "net.pos_embed" not in model.state_dict() and "net.blocks.0.peg.conv.weight" in model.state_dict()
    for size in example.sizes:
        assert example.run(model, size)[0].shape[-2:] == (size[0] // 16, size[1] // 16)
    assert remove_peg(model).net.pos_embed is table
    model.net.pos_embed = None
    with pytest.raises(PlugError, match="nothing to replace"):
        add_peg(model, position="replace")


@pytest.mark.parametrize("name", ["detectron2 ViT", "detectron2 Swin", "detectron2 MViTv2"])
def test_replaced_table_is_a_table_of_zeros(name):
    example = BY_NAME[name]
    model, zero = example.model(), example.model()
    nn.init.zeros_(zero.absolute_pos_embed if hasattr(zero, "absolute_pos_embed") else zero.pos_embed)
    add_peg(model, position="replace", **example.options)
    for size in example.sizes:
        pairs = zip(example.run(model, size), example.run(zero, size), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_top_level_of_a_pyramid_sees_the_peg_only_where_it_is_chosen():
    """p4 is pooled from p3 before the PEG; it has its own, or none."""
    example = BY_NAME["detectron2 FPN"]
    bare = example.run(example.model(), example.sizes[0])
    only_p3 = add_peg(example.model(), after="p3")
    nn.init.ones_(only_p3.peg["p3"].scale)
    assert [torch.equal(a, b) for a, b in zip(bare, example.run(only_p3, example.sizes[0]), strict=True)] == [True, False, True]
    both = plugged(example)
    assert [torch.equal(a, b) for a, b in zip(bare, example.run(both, example.sizes[0]), strict=True)] == [False, True, False]


def test_lazy_config_takes_it_as_a_call():
    from detectron2.config import LazyCall, instantiate
    from detectron2.modeling.backbone.vit import ViT

    vit = LazyCall(ViT)(img_size=64, embed_dim=32, depth=2, num_heads=2)
    model = instantiate(LazyCall(add_peg)(model=vit, after=[1], position="replace"))
    assert "blocks.1.peg.conv.weight" in model.state_dict() and "pos_embed" not in model.state_dict()
