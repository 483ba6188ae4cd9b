# SPDX-License-Identifier: Apache-2.0
"""Vision transformers of timm as backbones: equal to timm's own, and an image's features whatever it is batched with."""

import functools

import pytest
import torch
from test_models import alone_and_together, build, draw_images, small_cfg, unlike_initial

from cpvt_det.builders import build_backbone, build_detector
from cpvt_det.checkpoint.load import load_backbone_weights
from cpvt_det.common.errors import ConfigError, UnknownNameError, WeightsError
from cpvt_det.common.structures import PaddedBatch
from cpvt_det.models.backbones.timm_transformer import TimmTransformer

timm = pytest.importorskip("timm")

PLAIN = "vit_pwee_patch16_reg1_gap_256"  # parallel layers, a register and no class token
NAMES = [
    PLAIN,
    "vit_tiny_patch16_224",  # a table with an entry for the class token
    "deit3_small_patch16_224",  # one without
    "vit_small_patch14_reg4_dinov2",  # patches of 14 pixels, registers
    "vit_tiny_patch16_dinov3_qkvb",  # rotary positions relative to the image, no table
    "eva02_tiny_patch14_224",  # rotary positions and a table
    "vit_small_patch16_rope_mixed_ape_224",  # rotary positions of each layer and head, and a table
    "vit_xsmall_patch16_clip_224",  # a norm before the layers
]
SIZES = [(96, 64), (37, 89), (64, 45)]


@functools.lru_cache(1)  # in float64 the largest have 0.2 GB
def transformer(name, **options):
    """With layers that count: some networks begin with scales of 1e-5."""
    torch.manual_seed(0)
    backbone = unlike_initial(TimmTransformer(name, **options)).double().eval()
    for key, parameter in backbone.named_parameters():
        if "gamma" in key:
            torch.nn.init.ones_(parameter)
    return backbone


def images_of(sizes=SIZES, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in sizes]


def features(backbone, images, divisor=1):
    batch = PaddedBatch.from_images(images, divisor)
    with torch.no_grad():
        (map_,) = backbone(batch.images, batch.padding_mask)
    return map_


@pytest.mark.parametrize("name", NAMES)
def test_an_image_has_the_same_features_alone_and_in_a_batch(name):
    backbone, images = transformer(name), images_of()
    stride = backbone.strides[0]
    together = features(backbone, images, divisor=32)
    for index, image in enumerate(images):
        alone = features(backbone, [image])[0]
        assert alone.shape[1:] == tuple(-(-side // stride) for side in image.shape[1:])
        torch.testing.assert_close(together[index, :, : alone.shape[1], : alone.shape[2]], alone, rtol=0, atol=1e-10)
    assert float(together.std()) > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_features_are_those_of_timm_s_own_network(name):
    """On a grid that is neither square nor the table's; timm computes interpolated tables and rotations in float32."""
    backbone = transformer(name)
    stride = backbone.strides[0]
    (image,) = images_of([(3 * stride, 5 * stride)])
    with torch.no_grad():
        (expected,) = backbone.body.forward_intermediates(image[None], indices=1, norm=True, intermediates_only=True)
    torch.testing.assert_close(features(backbone, [image]), expected, rtol=0, atol=2e-6)


def test_on_the_table_s_own_grid_features_are_equal_to_the_last_digits():
    backbone, (image,) = transformer("vit_tiny_patch16_224"), images_of([(224, 224)])
    with torch.no_grad():
        (expected,) = backbone.body.forward_intermediates(image[None], indices=1, norm=True, intermediates_only=True)
    torch.testing.assert_close(features(backbone, [image]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [PLAIN, "vit_tiny_patch16_dinov3_qkvb"])
def test_without_the_mask_features_depend_on_the_batch(name):
    backbone, images = transformer(name, mask_padding=False), images_of()
    together, alone = features(backbone, images), features(backbone, images[1:2])
    assert float((together[1:2, :, : alone.shape[2], : alone.shape[3]] - alone).abs().max()) > 1e-3


def test_an_image_without_valid_cells_leaves_the_others_alone():
    backbone, (image,) = transformer("eva02_tiny_patch14_224"), images_of(SIZES[:1])
    images, mask = torch.stack((image, torch.zeros_like(image))), torch.zeros(2, *image.shape[1:], dtype=torch.bool)
    mask[1] = True
    with torch.no_grad():
        (map_,) = backbone(images, mask)
    torch.testing.assert_close(map_[:1], features(backbone, [image]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("keys", [{}, {"META_ARCHITECTURE": "CPVTDeformableDetr", "NECK__NAME": "simple_pyramid"}])
def test_detectors_take_them(keys):
    model = build(BACKBONE__NAME=f"timm/{PLAIN}", BACKBONE__STAGES=(4,), **keys).double().eval()
    assert alone_and_together(unlike_initial(model), draw_images()) < 1e-10


def test_checkpointing_gives_the_same_gradients():
    name, gradients = "vit_tiny_patch16_dinov3_qkvb", []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        backbone = TimmTransformer(name, checkpointing=checkpointing).double().train()
        batch = PaddedBatch.from_images(images_of(SIZES[:2]))
        (map_,) = backbone(batch.images, batch.padding_mask)
        map_.square().mean().backward()
        gradients.append([parameter.grad for parameter in backbone.parameters()])
    assert all(gradient is not None for gradient in gradients[0])  # of no unused head
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_all_or_nothing_is_frozen():
    frozen, trained = TimmTransformer(PLAIN, freeze_at=4).train(), TimmTransformer(PLAIN, freeze_at=3).train()
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert not frozen.body.training
    assert all(parameter.requires_grad for parameter in trained.parameters())
    assert trained.body.training


def test_rates_fall_layer_by_layer():
    backbone = transformer("vit_tiny_patch16_224")
    found = {name: backbone.layers_above(name) for name, _ in backbone.named_parameters()}
    assert found["body.norm.weight"] == 0
    assert found["body.blocks.11.norm1.weight"] == 1
    assert found["body.blocks.0.norm1.weight"] == 12
    assert found["body.patch_embed.proj.weight"] == found["body.cls_token"] == 13


def test_weights_of_a_classifier_s_file(tmp_path):
    torch.manual_seed(1)
    classifier = unlike_initial(timm.create_model(PLAIN)).eval()
    torch.save(classifier.state_dict(), tmp_path / "weights.pth")
    backbone = build_backbone(small_cfg(BACKBONE__NAME=f"timm/{PLAIN}", BACKBONE__STAGES=(4,))).eval()
    load_backbone_weights(backbone, str(tmp_path / "weights.pth"), PLAIN)
    image = torch.randn(1, 3, 256, 256)
    with torch.no_grad():
        (expected,) = classifier.forward_intermediates(image, indices=1, intermediates_only=True)
        (found,) = backbone(image, torch.zeros(1, 256, 256, dtype=torch.bool))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    torch.save({**classifier.state_dict(), "reg_token": torch.zeros(1, 2, 8)}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"does not fit timm/vit_pwee.*reg_token is \(1, 2, 8\)"):
        load_backbone_weights(backbone, str(tmp_path / "other.pth"), PLAIN)


@pytest.mark.parametrize(
    ("name", "keys", "error", "message"),
    [
        (PLAIN, {"BACKBONE__STAGES": (5,)}, ConfigError, r"has one map, of stride 16: its stages are \(4,\), got \(5,\)"),
        ("vit_small_patch14_dinov2", {"BACKBONE__STAGES": (3,)}, ConfigError, r"one map, of stride 14: its stages are \(4,\)"),
        ("vit_tiny_r_s16_p8_224", {}, ConfigError, r"has a stem that does not keep the padding out: HybridEmbed"),
        (PLAIN, {"BACKBONE__FREEZE_AT": -1}, ConfigError, "freeze_at must be at least 0"),
        ("vit_pwee_patch16", {}, UnknownNameError, "unknown network of timm 'vit_pwee_patch16'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, keys, error, message):
    with pytest.raises(error, match=message):
        build_detector(small_cfg(**{"BACKBONE__NAME": f"timm/{name}", "BACKBONE__STAGES": (4,), **keys}))


def test_rotary_positions_are_not_exported():
    backbone = TimmTransformer("vit_tiny_patch16_dinov3_qkvb").eval()
    example = (torch.zeros(2, 3, 64, 96), torch.zeros(2, 64, 96, dtype=torch.bool))
    with pytest.raises(
        Exception, match="cannot be exported: timm computes its rotary positions only for grids that are known in advance"
    ):
        torch.export.export(backbone, example)


def test_a_table_is_exported_for_any_padding():
    backbone, images = transformer(PLAIN), images_of(SIZES[:2])
    batch, other = PaddedBatch.from_images(images), PaddedBatch.from_images([images[1], images[0]])
    program = torch.export.export(backbone, (batch.images, batch.padding_mask)).module()
    torch.testing.assert_close(program(other.images, other.padding_mask)[0], features(backbone, images[::-1]), rtol=0, atol=1e-10)
