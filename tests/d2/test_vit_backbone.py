# SPDX-License-Identifier: Apache-2.0
"""detectron2's RetinaNet and Mask R-CNN on our vision transformers, by YAML."""

import pytest
import torch
from conftest import ROOT

from cpvt_det.common.errors import ConfigError, WeightsError

pytestmark = pytest.mark.detectron2
SMALL = ["MODEL.BACKBONE.EMBED_DIM", 16, "MODEL.BACKBONE.DEPTH", 2, "MODEL.BACKBONE.NUM_HEADS", 2, "MODEL.FPN.OUT_CHANNELS", 32]


def load(name, *words):
    """A config of ``configs/plug`` with our keys, small."""
    from detectron2.config import get_cfg

    from cpvt_det import d2  # registers the backbones

    d2.setup_environment()
    cfg = get_cfg()
    cfg.merge_from_file(str(ROOT / "configs" / "plug" / name))
    cfg.merge_from_list([*SMALL, *words])
    return cfg


@pytest.mark.parametrize("name", ["retinanet_cpvt_tiny_shapes.yaml", "mask_rcnn_cpvt_tiny_shapes.yaml"])
def test_detectron2_s_own_models_train_and_detect_on_it(name):
    from detectron2.modeling import build_model
    from detectron2.structures import BitMasks, Boxes, Instances
    from detectron2.utils.events import EventStorage

    torch.manual_seed(0)
    model = build_model(load(name))
    assert list(model.backbone.output_shape()) == [f"p{n}" for n in (range(3, 8) if "retina" in name else range(2, 7))]
    truth = Instances((90, 70), gt_boxes=Boxes(torch.tensor([[6.0, 4.0, 30.0, 24.0]])), gt_classes=torch.tensor([2]))
    truth.gt_masks = BitMasks(torch.ones(1, 90, 70, dtype=torch.bool))
    empty = Instances((60, 100), gt_boxes=Boxes(torch.zeros(0, 4)), gt_classes=torch.zeros(0, dtype=torch.int64))
    empty.gt_masks = BitMasks(torch.zeros(0, 60, 100, dtype=torch.bool))
    images = [torch.rand(3, 90, 70) * 255, torch.rand(3, 60, 100) * 255]
    batch = [{"image": image, "instances": one} for image, one in zip(images, (truth, empty), strict=True)]
    with EventStorage():
        losses = model.train()(batch)
    sum(losses.values()).backward()
    unused = {key for key, weight in model.backbone.trunk.named_parameters() if weight.grad is None}
    assert unused == set() and model.backbone.trunk.position.pegs["0"][0].conv.weight.grad.any()
    with torch.no_grad():
        (found,) = model.eval()([{"image": images[0], "height": 180, "width": 140}])
    assert found["instances"].image_size == (180, 140)


@pytest.mark.parametrize("words", [[], ["MODEL.BACKBONE.NUM_TOKENS", 0, "MODEL.BACKBONE.POSITION.NAME", "table"]])
def test_an_image_s_maps_are_the_same_alone_and_in_a_batch(words):
    """As detectron2's own RetinaNet pads them: images of no multiple of a patch, and a black one."""
    from detectron2.modeling import build_model

    torch.manual_seed(0)
    model = build_model(load("retinanet_cpvt_tiny_shapes.yaml", *words)).double().eval()
    for name, weights in model.backbone.trunk.named_parameters():
        if name.startswith("position"):
            torch.nn.init.normal_(weights, std=0.5)
    images = [torch.rand(3, *size) * 255 for size in ((96, 61), (64, 128), (33, 40))] + [torch.zeros(3, 50, 70)]
    with torch.no_grad():
        together = model.backbone(model.preprocess_image([{"image": image} for image in images]).tensor)
        for number, image in enumerate(images):
            alone = model.backbone(model.preprocess_image([{"image": image}]).tensor)
            for name, found in together.items():
                height, width = (-(-side // model.backbone.output_shape()[name].stride) for side in image.shape[1:])
                own = alone[name][0, :, :height, :width]
                assert (found[number, :, :height, :width] - own).abs().max() < 1e-10, name
                assert not found[number, :, height:].any() and not found[number, :, :, width:].any()


def test_borders_of_zeros_are_padding_and_zeros_inside_are_not():
    from cpvt_det.d2.backbones import zero_borders

    images = torch.zeros(3, 3, 4, 6)
    images[0, 1, 2, 3] = 1.0
    images[1, :, 3, 5] = -1.0
    mask = zero_borders(images)
    assert not mask[0, :3, :4].any() and mask[0, 3:].all() and mask[0, :, 4:].all()
    assert not mask[1:].any()


def test_maps_have_the_shapes_that_they_declare():
    from detectron2.modeling import build_backbone

    backbone = build_backbone(load("retinanet_cpvt_tiny_shapes.yaml")).eval()
    with torch.no_grad():
        maps = backbone(torch.rand(1, 3, 72, 104))
    for name, shape in backbone.output_shape().items():
        assert maps[name].shape == (1, 32, -(-72 // shape.stride), -(-104 // shape.stride))


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["MODEL.BACKBONE.STAGES", (3, 5)], ConfigError, r"needs consecutive stages, such as .*, got \(3, 5\)"),
        (["MODEL.BACKBONE.STAGES", (-1, 0)], ConfigError, "first stride must be a power of 2"),
        (["MODEL.BACKBONE.POSITION.NAME", "pge"], ConfigError, "unknown position encoding 'pge'"),
        (["MODEL.BACKBONE.WEIGHTS", "nowhere.pth"], WeightsError, "is a file of weights, got 'nowhere.pth'"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, error, message):
    from detectron2.modeling import build_backbone

    with pytest.raises(error, match=message):
        build_backbone(load("retinanet_cpvt_tiny_shapes.yaml", *words))
