# SPDX-License-Identifier: Apache-2.0
"""DeiT and CPVT as classifiers: counts of the articles, and the configs of ImageNet."""

import pytest
import torch

from cpvt_det.builders import build_detector
from cpvt_det.checkpoint import load_backbone_weights
from cpvt_det.config import load_cfg
from cpvt_det.evaluation.answers import ClassScores
from cpvt_det.export.check import compare
from cpvt_det.export.program import Canvas, ExportModule, prepare, trace

COUNTS = {
    "deit_tiny": 5_717_416,
    "deit_small": 22_050_664,
    "deit_base": 86_567_656,
    "cpvt_tiny": 5_681_512,
    "cpvt_small": 21_978_856,
    "cpvt_base": 86_424_040,
    "cpvt_gap_tiny": 5_681_320,
    "cpvt_gap_small": 21_978_472,
    "cpvt_gap_base": 86_423_272,
    "tnt_small": 23_768_584,
    "tnt_base": 65_428_680,
}
"""144 d^2 + 2125 d + 1000 for DeiT of width d; without the table 197 d less; 10 d for a PEG; d less without a class token. TNT:
timm's."""


def imagenet(name, *words, num_classes=1000):
    cfg = load_cfg(f"imagenet/{name}.yaml", [*words, "MODEL.DEVICE", "cpu"])
    cfg.MODEL.NUM_CLASSES = num_classes
    return build_detector(cfg)


def test_weights_in_half_precision_are_refused_by_name():
    model = imagenet("cpvt_tiny", num_classes=3).bfloat16().eval()
    batch = model.preprocess([torch.zeros(3, 32, 32)])
    with pytest.raises(TypeError, match=r"the weights of this Classifier are torch\.bfloat16"):
        model(batch.images, batch.padding_mask)


@pytest.mark.parametrize("name", COUNTS)
def test_the_parameters_are_those_of_the_articles(name):
    with torch.device("meta"):
        model = imagenet(name)
        assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]
        five = imagenet(name, "MODEL.BACKBONE.POSITION.POSITIONS", "[0, 1, 2, 3, 4]") if "cpvt" in name else model
    width = model.class_embed.in_features
    more = 4 * 10 * width if "cpvt" in name else 0
    assert sum(parameter.numel() for parameter in five.parameters()) == COUNTS[name] + more


SMALL = ("MODEL.BACKBONE.EMBED_DIM", "32", "MODEL.BACKBONE.DEPTH", "2", "MODEL.BACKBONE.NUM_HEADS", "2")


def test_the_mean_beside_a_class_token_is_that_of_the_patches():
    model = imagenet("cpvt_tiny", *SMALL, "MODEL.CLASSIFIER.POOL", "mean", num_classes=5).double().eval()
    batch = model.preprocess([torch.rand(3, *size).double() * 255 for size in ((48, 80), (37, 50))])
    _, patches, mask = model.backbone.tokens(batch.images, batch.padding_mask)
    means = torch.stack([own[~padded].mean(0) for own, padded in zip(patches, mask, strict=True)])
    logits = model(batch.images, batch.padding_mask).logits
    torch.testing.assert_close(logits, model.class_embed(means)[None], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cpvt_tiny", SMALL),
        ("tnt_small", ["MODEL.BACKBONE.DEPTH", "1"]),
        ("resnet10", ["MODEL.BACKBONE.WIDTH", "32"]),
        ("timm/resnet10t", []),
    ],
)
def test_a_trained_classifier_is_a_detector_s_backbone(name, words, tmp_path):
    """Its checkpoint, as a run writes it: the heads are left out, every tensor of the backbone is used."""
    torch.manual_seed(0)
    words = [*words, "MODEL.BACKBONE.NAME", name, "MODEL.BACKBONE.STAGES", "(4,)", "MODEL.DEVICE", "cpu"]
    model = build_detector(load_cfg("quickstart/classifier.yaml", [*words, "MODEL.NUM_CLASSES", "5"]))
    torch.save({"model": model.state_dict(), "cpvt_det": {"config": ""}}, tmp_path / "classifier.pth")
    backbone = build_detector(load_cfg("", [*words, "MODEL.NUM_CLASSES", "3"])).backbone
    load_backbone_weights(backbone, str(tmp_path / "classifier.pth"), name)
    own, found = backbone.state_dict(), model.backbone.state_dict()
    found = {name: tensor for name, tensor in found.items() if name in own or not name.endswith("num_batches_tracked")}
    assert own.keys() == found.keys() and all(torch.equal(own[name], found[name]) for name in own)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cpvt_tiny", []),
        ("cpvt_gap_tiny", []),
        ("deit_tiny", []),
        ("deit_tiny", ["MODEL.BACKBONE.NUM_TOKENS", "2"]),
        ("tnt_small", ["MODEL.BACKBONE.DEPTH", "2"]),
        ("tnt_small", ["MODEL.BACKBONE.NAME", "tnt_small_se", "MODEL.BACKBONE.DEPTH", "2", "MODEL.BACKBONE.NUM_TOKENS", "0"]),
    ],
)
def test_an_image_of_any_shape_has_the_same_scores_in_any_batch(name, words):
    torch.manual_seed(0)
    model = imagenet(name, *words, num_classes=5).double().eval()
    images = [torch.rand(3, *size).double() * 255 for size in ((48, 80), (37, 50), (96, 33))]
    together = model.preprocess(images)
    found = model(together.images, together.padding_mask).scores()
    for one, image in zip(found, images, strict=True):
        batch = model.preprocess([image])
        torch.testing.assert_close(model(batch.images, batch.padding_mask).scores()[0], one, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["deit_tiny", "tnt_small"])
def test_a_traced_classifier_has_the_model_s_scores_at_other_sizes(name):
    """One layer; a batch and a canvas that it was not traced at."""
    torch.manual_seed(0)
    model = imagenet(name, "MODEL.BACKBONE.DEPTH", "1", num_classes=5).eval()
    run = trace(ExportModule(prepare(model), ClassScores()), Canvas(2, 48, 64)).module()
    assert compare(model, ClassScores(), run, Canvas(3, 80, 32)) < 1e-5
