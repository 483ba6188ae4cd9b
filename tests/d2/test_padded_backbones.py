# SPDX-License-Identifier: Apache-2.0
"""Backbones of detectron2 with the padding kept out of them: features of an image are the same alone and in any batch."""

import copy

import pytest
import torch

from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import PaddedBatch
from cpvt_det.models import DETR

pytestmark = pytest.mark.detectron2


def make_body(kind, norm="FrozenBN"):
    from detectron2.modeling.backbone.fpn import FPN
    from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, ResNet

    torch.manual_seed(0)
    first = BasicBlock(8, 8, stride=1, norm=norm)
    stages = [[first], *([BasicBlock(w, 2 * w, stride=2, norm=norm)] for w in (8, 16, 32))]
    names = ["res2", "res3", "res4", "res5"]
    body = ResNet(BasicStem(out_channels=8, norm=norm), stages, out_features=names)
    for module in body.modules():  # statistics as after training: zeros stay no zeros
        if hasattr(module, "running_mean") and norm == "FrozenBN":
            module.running_mean.uniform_(-0.5, 0.5)
            module.bias.uniform_(-0.5, 0.5)
    return FPN(body, names[1:], 12) if kind == "FPN" else body


def masked(body, stages, is_masked=True):
    from cpvt_det.d2 import Detectron2Backbone

    return Detectron2Backbone(body, stages, mask_padding=is_masked).double().eval()


def differences(backbone):
    """Largest difference of each map, alone and in a batch with a larger image, relative to its largest number."""
    torch.manual_seed(1)
    images = [torch.randn(3, 70, 50, dtype=torch.float64), torch.randn(3, 96, 170, dtype=torch.float64)]
    maps = []
    with torch.no_grad():
        for some in (images, images[:1]):
            batch = PaddedBatch.from_images(some, backbone.size_divisibility)
            maps.append(backbone(batch.images, batch.padding_mask))
    found = []
    for stride, together, alone in zip(backbone.strides, *maps, strict=True):
        height, width = -(-70 // stride), -(-50 // stride)
        first, second = together[0, :, :height, :width], alone[0, :, :height, :width]
        found.append(float((first - second).abs().max() / second.abs().max()))
    return found


@pytest.mark.parametrize("kind", ["ResNet", "FPN"])
def test_features_are_the_same_alone_and_in_a_padded_batch(kind):
    body = make_body(kind)
    plain = masked(copy.deepcopy(body), (3, 4, 5), is_masked=False)
    exact = masked(body, (3, 4, 5))
    assert max(differences(exact)) < 1e-12
    assert min(differences(plain)) > 1e-3
    assert list(exact.state_dict()) == list(plain.state_dict())
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    nothing = torch.zeros(2, 64, 96, dtype=torch.bool)
    for map_, other in zip(exact(images, nothing), plain(images, nothing), strict=True):
        assert torch.equal(map_, other)


def test_the_pooling_of_the_stem_needs_a_module_of_its_own(monkeypatch):
    from cpvt_det.d2 import backbones
    from cpvt_det.models.backbones.masking import InexactError

    monkeypatch.setattr(backbones, "BasicStem", ())
    with pytest.raises(InexactError, match="changes with the padding"):
        masked(make_body("ResNet"), (5,))


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        ("BN", r"in training, the statistics of the norm stem\.conv1\.norm include the padding; set its norm to FrozenBN"),
        ("GN", r"its map of stride 32 changes with the padding; .*norm \(GroupNorm\) uses all cells"),
    ],
)
def test_norms_over_the_map_are_refused(norm, message):
    from cpvt_det.models.backbones.masking import InexactError

    body = make_body("ResNet", norm if norm == "BN" else lambda channels: torch.nn.GroupNorm(4, channels))
    with pytest.raises(InexactError, match=message):
        masked(body, (5,))


def test_the_detector_of_a_config_gives_the_same_answer_in_any_batch():
    from detectron2.modeling import build_model
    from tiny import SMALL_WORDS

    from cpvt_det.d2.config import load_cfg

    words = [*SMALL_WORDS, "MODEL.BACKBONE.NAME", "build_resnet_backbone", "MODEL.BACKBONE.STAGES", "[4]", "MODEL.NUM_CLASSES", 3]
    words += ["MODEL.BACKBONE.NORM", "FrozenBN", "MODEL.BACKBONE.WIDTH", 64, "MODEL.RESNETS.DEPTH", 18]
    words += ["MODEL.RESNETS.RES2_OUT_CHANNELS", 64, "MODEL.RESNETS.NORM", "FrozenBN"]
    detector = build_model(load_cfg("", [str(word) for word in words])).double().eval()
    images, answers = [torch.rand(3, 50, 40) * 255, torch.rand(3, 60, 100) * 255], []
    with torch.no_grad():
        for some in (images, images[:1]):
            batch = detector.preprocess(some)
            answers.append(DETR.forward(detector, batch.images.double(), batch.padding_mask).boxes[-1, 0])
    torch.testing.assert_close(*answers, rtol=0, atol=1e-10)
    with pytest.raises(
        ConfigError, match=r"build_resnet_backbone of detectron2 cannot keep the padding out .*MASK_PADDING (to )?False"
    ):
        build_model(load_cfg("", [*map(str, words), "MODEL.RESNETS.NORM", "BN"]))
