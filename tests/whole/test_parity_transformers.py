# SPDX-License-Identifier: Apache-2.0
"""Our DETR against the one of transformers, an independent implementation: predictions, losses and gradients.

Three things of transformers 5.23 are worked around, not compared. With ``auxiliary_loss`` its decoder feeds every layer the
*normed* output of the one before and norms the last one twice, so the layers' outputs are taken with hooks. It freezes all of
its own ResNet where it means the first stages, so gradients are switched on here. Its criterion keeps the weight of "no object"
in the default dtype.
"""

import contextlib
import os

import pytest
import torch

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.checkpoint import convert_state_dict, load_weights
from cpvt_det.common.structures import PaddedBatch, Predictions, Targets
from cpvt_det.config import get_cfg
from cpvt_det.losses.matcher import PaddedTargets

transformers = pytest.importorskip("transformers")
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss  # noqa: E402

CLASSES, CHANNELS, QUERIES, LAYERS = 5, 32, 12, 3
WIDTH = 64 if os.environ.get("TEST_THREADS") else 16
"""Channels of a ResNet's stem: all for the record of ``benchmarks/parity.py``, which sets the variable; they need 0.7 GB."""
WIDTHS = [WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH]
BACKBONES = {
    "resnet18": {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": WIDTHS},
    "resnet50": {"layer_type": "bottleneck", "depths": [3, 4, 6, 3], "hidden_sizes": [4 * channels for channels in WIDTHS]},
}
SIZES = [(70, 128), (96, 45), (33, 90)]  # on a canvas of 96 x 128: not square, padded below, at the right, and both
OBJECTS = [3, 0, 2]
CASES = [("resnet18", "sine"), ("resnet18", "learned"), ("resnet50", "sine")]
FIRST_STAGES = ("backbone.body.conv1.", "backbone.body.bn1.", "backbone.body.layer1.")  # frozen in ours


def hf_detector(backbone: str, position: str) -> torch.nn.Module:
    """A small one whose statistics, norms, biases and matrices are drawn wide: as initialised it hardly looks at the image."""
    resnet = transformers.ResNetConfig(
        embedding_size=WIDTH, downsample_in_bottleneck=False, out_features=["stage4"], **BACKBONES[backbone]
    )
    config = transformers.DetrConfig(
        backbone_config=resnet,
        num_labels=CLASSES,
        d_model=CHANNELS,
        num_queries=QUERIES,
        encoder_layers=2,
        decoder_layers=LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        dropout=0.0,
        position_embedding_type=position,
    )
    torch.manual_seed(0)
    model = transformers.DetrForObjectDetection(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
                tensor.uniform_(0.5, 1.0)
            elif tensor.ndim == 1:
                tensor.uniform_(-0.2, 0.2)
            elif tensor.ndim == 2:
                tensor.normal_(0, 1 if "embedding" in name else tensor.shape[1] ** -0.5)
    return model


def our_config(backbone: str, position: str):
    cfg = get_cfg()
    cfg.MODEL.NUM_CLASSES = CLASSES
    cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.WIDTH, cfg.MODEL.BACKBONE.MASK_PADDING = backbone, WIDTH, False
    cfg.MODEL.POSITION.NAME, cfg.MODEL.DETECTOR.DECODER_POSITION = position, "same"
    detr = cfg.MODEL.DETR
    detr.HIDDEN_DIM, detr.NHEADS, detr.DIM_FEEDFORWARD, detr.DROPOUT = CHANNELS, 4, 48, 0.0
    detr.ENC_LAYERS, detr.DEC_LAYERS, detr.NUM_OBJECT_QUERIES = 2, LAYERS, QUERIES
    return cfg


def pair(backbone: str, position: str, dtype: torch.dtype):
    """Theirs, and ours with the same weights."""
    theirs, ours = hf_detector(backbone, position), build_detector(our_config(backbone, position))
    report = load_weights(ours, theirs.state_dict())
    assert report.source == "hf_detr"
    assert not report.is_partial, str(report)
    return theirs.to(dtype).train(), ours.to(dtype).train()  # dropout is 0; in training nothing else differs


def batch_of(dtype: torch.dtype) -> tuple[PaddedBatch, list[Targets]]:
    generator = torch.Generator().manual_seed(1)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    targets = []
    for count in OBJECTS:
        size = 0.1 + 0.4 * uniform(count, 2)
        boxes = torch.cat((size / 2 + uniform(count, 2) * (1 - size), size), 1)
        targets.append(Targets(torch.randint(CLASSES, (count,), generator=generator), boxes.to(dtype)))
    return PaddedBatch.from_images([4 * uniform(3, *size).to(dtype) - 2 for size in SIZES]), targets


def hf_predictions(model: torch.nn.Module, batch: PaddedBatch) -> Predictions:
    """Of every decoder layer; its mask is True where pixels are valid."""
    outputs = []
    hooks = [layer.register_forward_hook(lambda _, __, out: outputs.append(out)) for layer in model.model.decoder.layers]
    output = model(batch.images, pixel_mask=~batch.padding_mask)
    for hook in hooks:
        hook.remove()
    decoded = model.model.decoder.layernorm(torch.stack(outputs))
    predictions = Predictions(model.class_labels_classifier(decoded), model.bbox_predictor(decoded).sigmoid())
    torch.testing.assert_close(predictions.logits[-1], output.logits, rtol=0, atol=0)
    torch.testing.assert_close(predictions.boxes[-1], output.pred_boxes, rtol=0, atol=0)
    return predictions


def hf_loss(model, predictions: Predictions, targets: list[Targets]):
    """The weighted total, and name -> unweighted loss, auxiliary ones under ``_<layer>``."""
    model.config.auxiliary_loss = True
    labels = [{"class_labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
    last = (predictions.logits[-1], labels, "cpu", predictions.boxes[-1])
    with default_dtype(predictions.logits.dtype):
        total, losses, _ = ForObjectDetectionLoss(*last, model.config, predictions.logits, predictions.boxes)
    model.config.auxiliary_loss = False
    return total, losses


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_near(actual, expected, tolerance, what):
    """Close, and with ``pytest -s`` the table of docs/parity.md."""
    print(f"| {what} | {(actual - expected).abs().max().item():.1e} | {expected.abs().max().item():.3g} |")
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize(("backbone", "position"), CASES)
def test_every_layer_predicts_what_transformers_predicts(backbone, position, dtype, tolerance):
    theirs, ours = pair(backbone, position, dtype)
    batch, _ = batch_of(dtype)
    with torch.no_grad():
        expected, predictions = hf_predictions(theirs, batch), ours(batch.images, batch.padding_mask)
    assert predictions.logits.shape == (LAYERS, len(SIZES), QUERIES, CLASSES + 1)
    assert expected.logits.std() > 0.5
    assert expected.boxes.std(2).min() > 1e-4, "queries that all answer the same would prove little"
    case = f"{backbone}, {position}, {str(dtype).removeprefix('torch.')}"
    assert_near(predictions.logits, expected.logits, tolerance, f"{case} | logits")
    assert_near(predictions.boxes, expected.boxes, tolerance, f"{case} | boxes")


@pytest.mark.parametrize(("backbone", "position"), CASES[:2])
def test_losses_and_gradients_are_those_of_transformers(backbone, position):
    theirs, ours = pair(backbone, position, torch.float64)
    theirs.requires_grad_(True)
    batch, targets = batch_of(torch.float64)
    total, expected = hf_loss(theirs, hf_predictions(theirs, batch), targets)
    total.backward()

    criterion = build_criterion(our_config(backbone, position))
    predictions = ours(batch.images, batch.padding_mask)
    losses = criterion(predictions, targets).losses
    case = f"{backbone}, {position}, float64"
    assert_near(sum(losses.values()), total, 1e-10, f"{case} | total loss")
    sum(losses.values()).backward()

    padded = PaddedTargets.from_targets(targets, torch.float64)
    (matches,), normalizers = criterion.matcher((predictions, padded)), criterion.normalizers(targets, QUERIES)
    by_layer = criterion.losses_by_layer(predictions, padded, matches, normalizers)
    for name, their_name in {"loss_class": "loss_ce", "loss_l1": "loss_bbox", "loss_giou": "loss_giou"}.items():
        suffixes = [*(f"_{layer}" for layer in range(LAYERS - 1)), ""]
        assert_near(by_layer[name], torch.stack([expected[their_name + suffix] for suffix in suffixes]), 1e-10, f"{case} | {name}")

    gradients = convert_state_dict({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, "hf_detr")
    trained = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert gradients.keys() - trained.keys() == {name for name in gradients if name.startswith(FIRST_STAGES)}
    scale = torch.stack([gradient.norm() for gradient in trained.values()]).norm().item()
    for name, gradient in trained.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12 * scale)
    norms = [torch.stack([of[name].norm() for name in trained]).norm() for of in (trained, gradients)]
    assert_near(*norms, 1e-12 * scale, f"{case} | gradient norm")


def test_mask_polarity_matters_to_the_comparison():
    theirs, ours = pair("resnet18", "sine", torch.float64)
    batch, _ = batch_of(torch.float64)
    with torch.no_grad():
        wrong = PaddedBatch(batch.images, torch.zeros_like(batch.padding_mask), batch.image_sizes)
        difference = hf_predictions(theirs, wrong).logits - ours(batch.images, batch.padding_mask).logits
    assert difference.abs().max() > 0.1
