# SPDX-License-Identifier: Apache-2.0
"""TNT as a backbone: timm's numbers, the articles' sizes, an image alone and in any batch, weights of timm and of the authors."""

import itertools
import re

import pytest
import timm
import torch
from tiny import random_config
from torch import nn

from cpvt_det.builders import build_backbone, build_detector
from cpvt_det.checkpoint import convert_state_dict, load_backbone_weights
from cpvt_det.checkpoint.convert import detect_source
from cpvt_det.common.errors import ConfigError, WeightsError
from cpvt_det.common.structures import PaddedBatch
from cpvt_det.models.backbones.vit_weights import convert_tnt

TNT = {"NAME": "tnt_small", "STAGES": (4,), "NORM": "FrozenBN", "FREEZE_AT": 2}
SMALL = {**TNT, "EMBED_DIM": 64, "DEPTH": 2, "NUM_HEADS": 2}
SIZES = [(48, 80), (37, 50), (96, 33)]
NAMES = {"tnt_small": "tnt_s", "tnt_base": "tnt_b", "tnt_small_legacy": "tnt_s_legacy"}


def config(**more):
    return random_config(**{f"MODEL__BACKBONE__{key}": value for key, value in more.items()})


def make(**more):
    """A small backbone whose weights are large enough to show what they do."""
    torch.manual_seed(0)
    backbone = build_backbone(config(**{**SMALL, **more})).double().eval()
    for name, parameter in backbone.named_parameters():
        if name.startswith(("special", "position", "pixel_table")) or ".squeeze." in name:
            nn.init.normal_(parameter, std=0.5)
    return backbone


def theirs(name="tnt_small", depth=2):
    torch.manual_seed(0)
    model = timm.create_model(f"{NAMES[name]}_patch16_224", depth=depth, img_size=48, num_classes=7).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def draw(sizes=SIZES):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("tnt_small", 23_768_584),
        ("tnt_base", 65_428_680),
        ("tnt_small_legacy", 23_755_336),
        ("tnt_base_legacy", 65_406_600),
        ("tnt_small_se", 24_668_296),
        ("tnt_base_se", 67_911_240),
    ],
)
def test_parameters_are_those_of_the_article(name, number):
    """With a head of 1000 classes: of the first three timm's numbers, of the others sums by hand."""
    with torch.device("meta"):
        backbone = build_backbone(config(**{**TNT, "NAME": name}))
    assert sum(parameter.numel() for parameter in backbone.parameters()) + 1000 * (backbone.channels[0] + 1) == number


@pytest.mark.parametrize("name", NAMES)
def test_features_and_gradients_are_timm_s_with_its_weights(name):
    """Two layers; the largest has one, of 50 MB."""
    depth = 1 if name == "tnt_base" else 2
    model = theirs(name, depth)
    ours = build_backbone(config(**{**TNT, "NAME": name, "DEPTH": depth, "POSITION__GRID": (3, 3)})).double()
    state = {key.removeprefix("backbone."): value for key, value in convert_tnt(model.state_dict()).items()}
    ours.load_state_dict({key: value for key, value in state.items() if not key.startswith("class_embed")})
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1)).double()
    expected = model.forward_features(images)
    special, patches, _ = ours.tokens(images, torch.zeros(2, 48, 48, dtype=torch.bool))
    found = torch.cat((special, patches), dim=1)
    assert (found - expected).abs().max() < 1e-12
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    gradients = {key.removeprefix("backbone."): value for key, value in convert_tnt(gradients).items()}
    assert gradients.keys() == {key for key, _ in ours.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[key]).abs().max() < 1e-10, key


@pytest.mark.parametrize(
    ("name", "encoding", "tokens"),
    [
        *itertools.product(
            ("tnt_small", "tnt_small_legacy", "tnt_small_se"),
            ("table", "sine", "peg_plain", "table+peg_plain", "relative", "rope", "rope_mixed", "none"),
            (1,),
        ),
        ("tnt_small", "table", 2),
        ("tnt_small_se", "peg_plain", 2),
        ("tnt_small_se", "relative", 0),
    ],
)
def test_an_image_s_tokens_are_its_own(name, encoding, tokens):
    """Any size, alone and in a batch of three shapes, on canvases of multiples of a patch and on none."""
    backbone = make(NAME=name, POSITION__NAME=encoding, NUM_TOKENS=tokens)
    batch = PaddedBatch.from_images(draw(), 32)
    with torch.no_grad():
        special, patches, mask = backbone.tokens(batch.images, batch.padding_mask)
        for number, image in enumerate(draw()):
            for divisor in (16, 1):
                alone = PaddedBatch.from_images([image], divisor)
                own, own_patches, _ = backbone.tokens(alone.images, alone.padding_mask)
                assert (own_patches[0] - patches[number][~mask[number]]).abs().max() < 1e-10
                assert not tokens or (own[0] - special[number]).abs().max() < 1e-10


def test_squeeze_weights_channels_by_their_mean_over_tokens():
    """y + y tanh(W2 relu(W1 LN(mean y))), by hand; the mean is over what is not padded."""
    layer = make(NAME="tnt_small_se").encoder.layers[0].outer
    networks, x = (layer.linear1, layer.linear2), torch.randn(2, 5, 64).double()
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    y = super(type(layer), layer).feed_forward(*networks, x)
    norm, first, _, second, _ = layer.squeeze
    for image, valid in enumerate((5, 3)):
        mean = norm(y[image, :valid].mean(0))
        gate = torch.tanh(second.weight @ torch.relu(first.weight @ mean + first.bias) + second.bias)
        assert (layer.feed_forward(*networks, x, mask)[image] - (y[image] + y[image] * gate)).abs().max() < 1e-12
        assert gate.abs().max() > 0.1


def test_recomputing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        backbone = build_backbone(config(**SMALL, DROP_PATH=0.5, POSITION__NAME="rope_mixed+peg_plain"))
        backbone.encoder.checkpointing = checkpointing
        torch.manual_seed(3)
        batch = PaddedBatch.from_images([image.float() for image in draw()], 32)
        backbone.train()(batch.images, batch.padding_mask)[0].square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in backbone.named_parameters()})
    assert all(gradient.any() for gradient in gradients[0].values())
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_a_detector_takes_the_statistics_of_its_weights():
    detector = build_detector(config(**SMALL))
    assert detector.pixel_mean.flatten().tolist() == detector.pixel_std.flatten().tolist() == [127.5] * 3
    assert build_detector(random_config(MODEL__BACKBONE__NAME="resnet10")).pixel_mean[0].item() == pytest.approx(123.675)


# Weights

TO_AUTHORS = (
    (r"^patch_pos$", "outer_pos"),
    (r"^pixel_embed", "patch_embed"),
    (r"norm([12])_proj", r"proj_norm\1"),
    (r"norm_mlp_in", "inner_norm2"),
    (r"norm_in", "inner_norm1"),
    (r"(attn|mlp)_in", r"inner_\1"),
    (r"norm_out", "outer_norm1"),
    (r"norm_mlp", "outer_norm2"),
    (r"attn_out", "outer_attn"),
    (r"\.mlp\.", ".outer_mlp."),
)


def as_authors(state):
    """timm's tensors as huawei-noah/Efficient-AI-Backbones has them."""
    found = {"outer_tokens": torch.zeros(1, 9, state["cls_token"].shape[-1]).double()}
    for name, tensor in state.items():
        for pattern, replacement in TO_AUTHORS:
            name = re.sub(pattern, replacement, name)
        if name == "pixel_pos":
            name, tensor = "inner_pos", tensor.flatten(2).transpose(1, 2)
        found[name] = tensor
    return found


@pytest.mark.parametrize("source", ["timm", "authors"])
def test_a_file_of_tnt_is_a_backbone_s_weights(source, tmp_path):
    model = theirs().eval()
    state = model.state_dict() if source == "timm" else as_authors(model.state_dict())
    assert detect_source(state) == "tnt"
    assert convert_state_dict(state, "tnt")["class_embed.weight"].shape == (7, 384)
    torch.save({"state_dict": state} if source == "authors" else state, tmp_path / "w.pth")
    backbone = build_backbone(config(**TNT, DEPTH=2, POSITION__GRID=(3, 3))).double().eval()
    load_backbone_weights(backbone, str(tmp_path / "w.pth"), "tnt_small")
    images = torch.randn(1, 3, 48, 48).double()
    with torch.no_grad():
        special, patches, _ = backbone.tokens(images, torch.zeros(1, 48, 48, dtype=torch.bool))
        assert (torch.cat((special, patches), 1) - model.forward_features(images)).abs().max() < 1e-12


def test_the_authors_squeeze_is_ours(tmp_path):
    """timm has none: norm, linear, ReLU, linear, tanh of their ``SE``, as ``se_layer.fc`` of each layer."""
    state, shapes = as_authors(theirs().state_dict()), {"0": [(384,), (384,)], "1": [(96, 384), (96,)], "3": [(384, 96), (384,)]}
    squeezes = {
        f"blocks.{layer}.se_layer.fc.{part}.{kind}": torch.randn(shape).double()
        for layer in range(2)
        for part, both in shapes.items()
        for kind, shape in zip(("weight", "bias"), both, strict=True)
    }
    torch.save(state | squeezes, tmp_path / "w.pth")
    backbone = build_backbone(config(**{**TNT, "NAME": "tnt_small_se", "DEPTH": 2, "POSITION__GRID": (3, 3)})).double()
    load_backbone_weights(backbone, str(tmp_path / "w.pth"), "tnt_small_se")
    own = backbone.state_dict()
    for name, tensor in squeezes.items():
        assert torch.equal(own[name.replace("blocks", "encoder.layers").replace("se_layer.fc", "outer.squeeze")], tensor), name


def test_weights_of_another_form_are_refused(tmp_path):
    torch.save(theirs("tnt_small_legacy").state_dict(), tmp_path / "w.pth")
    backbone = build_backbone(config(**TNT, DEPTH=2, POSITION__GRID=(3, 3)))
    with pytest.raises(WeightsError, match=r"does not fit the backbone: .*project.norm"):
        load_backbone_weights(backbone, str(tmp_path / "w.pth"), "tnt_small")
    broken = {name: tensor for name, tensor in theirs().state_dict().items() if name != "pixel_pos"}
    with pytest.raises(WeightsError, match="not weights of TNT: they have no pixel_pos"):
        convert_tnt(broken)


def test_patches_smaller_than_a_pixel_token_are_refused():
    with pytest.raises(ConfigError, match="patches of a TNT need sides of at least 4 pixels, got 2"):
        build_detector(config(**{**SMALL, "PATCH_SIZE": 2, "STAGES": (1,)}))
