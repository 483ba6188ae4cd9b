# SPDX-License-Identifier: Apache-2.0
"""Our Deformable-DETR against the one of transformers: predictions, proposals, matchings, losses and gradients.

Of ours one thing differs on purpose: padded tokens are no proposals. Theirs are, with the logit of a zero token, count as
negatives and can be chosen. So with two stages losses and gradients are compared on images of one size, and predictions of a
padded batch with weights that rank a zero token last, which is asserted.

Four things of transformers 5 are set or added from outside. Its sines of proposals are float32 in float64 models too. With
refinement its layers share the class head, which the official code's do not; they get heads of their own here. It freezes all
of its own ResNet where it means the first stages. Its loss leaves proposals out, so its criterion is called on them here.
"""

import copy
import os
from dataclasses import dataclass

import pytest
import torch

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.checkpoint import convert_state_dict, load_weights
from cpvt_det.common.structures import PaddedBatch, Predictions, Targets, level_padding_mask
from cpvt_det.config import get_cfg
from cpvt_det.losses.matcher import Matches, PaddedTargets
from cpvt_det.models.queries import PADDED_LOGIT

transformers = pytest.importorskip("transformers")
from transformers.loss import loss_deformable_detr as hf_losses  # noqa: E402
from transformers.models.deformable_detr import modeling_deformable_detr as hf_modeling  # noqa: E402

CLASSES, CHANNELS, QUERIES, LAYERS = 5, 64, 12, 3
PADDED = [(100, 192), (128, 70), (40, 150)]  # on a canvas of 128 x 192: not square, padded below, at the right, and both
SAME = [(128, 192)] * 3
OBJECTS = [3, 0, 2]
NAMES = {"loss_class": "loss_ce", "loss_l1": "loss_bbox", "loss_giou": "loss_giou"}
FIRST_STAGES = ("backbone.body.conv1.", "backbone.body.bn1.", "backbone.body.layer1.")  # frozen in ours

WIDTH = 64 if os.environ.get("TEST_THREADS") else 16
"""Channels of a ResNet's stem: all for the record of ``benchmarks/parity.py``, which sets the variable; they need 0.6 GB."""
WIDTHS = [WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH]
BACKBONES = {
    "resnet10": {"layer_type": "basic", "depths": [1, 1, 1, 1], "hidden_sizes": WIDTHS},
    "resnet50": {"layer_type": "bottleneck", "depths": [3, 4, 6, 3], "hidden_sizes": [4 * channels for channels in WIDTHS]},
}


@dataclass
class Variant:
    """What a model is made of."""

    backbone: str = "resnet10"
    position: str = "sine"
    levels: int = 4
    refine: bool = False
    two_stage: bool = False


VARIANTS = {
    "single scale": Variant(levels=1),
    "multi-scale": Variant(),
    "multi-scale, learned": Variant(position="learned"),
    "multi-scale, resnet50": Variant(backbone="resnet50"),
    "refinement": Variant(refine=True),
    "two stages": Variant(refine=True, two_stage=True),
}
FLOAT64 = (torch.float64, 1e-10)
FLOAT32 = (torch.float32, 1e-5)
PREDICTED = [(name, *FLOAT64) for name in VARIANTS] + [(name, *FLOAT32) for name in VARIANTS if "resnet50" not in name]
TRAINED = ["single scale", "multi-scale", "refinement", "two stages"]


def hf_detector(variant: Variant) -> torch.nn.Module:
    """A small one with weights drawn wide: as initialised it hardly looks at the image."""
    stages = ["stage2", "stage3", "stage4"] if variant.levels > 1 else ["stage4"]
    resnet = transformers.ResNetConfig(
        embedding_size=WIDTH, downsample_in_bottleneck=False, out_features=stages, **BACKBONES[variant.backbone]
    )
    config = transformers.DeformableDetrConfig(
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
        position_embedding_type=variant.position,
        num_feature_levels=variant.levels,
        with_box_refine=variant.refine,
        two_stage=variant.two_stage,
        two_stage_num_proposals=QUERIES,
        class_cost=2,
        auxiliary_loss=True,
    )
    torch.manual_seed(0)
    model = transformers.DeformableDetrForObjectDetection(config)
    if variant.refine:
        model.class_embed = torch.nn.ModuleList(copy.deepcopy(head) for head in model.class_embed)
        model.model.decoder.class_embed = model.class_embed if variant.two_stage else None
    draw_weights(model)
    return model.requires_grad_(True)


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
            tensor.uniform_(0.5, 1.0)
        elif name.endswith("sampling_offsets.bias"):
            tensor.add_(torch.randn_like(tensor) / 4)
        elif tensor.ndim == 1:
            tensor.uniform_(-0.2, 0.2)
        elif tensor.ndim == 2:
            tensor.normal_(0, 1 if "embedding" in name or name.endswith("level_embed") else tensor.shape[1] ** -0.5)
    if model.config.two_stage:
        zero_token = model.model.enc_output_norm(model.model.enc_output.bias)
        model.class_embed[-1].weight[0] -= zero_token / CHANNELS**0.5


def our_config(variant: Variant):
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.NUM_CLASSES = "CPVTDeformableDetr", CLASSES
    cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.WIDTH, cfg.MODEL.BACKBONE.MASK_PADDING = variant.backbone, WIDTH, False
    cfg.MODEL.BACKBONE.STAGES = (3, 4, 5) if variant.levels > 1 else (5,)
    cfg.MODEL.POSITION.NAME = {"sine": "sine_offset"}.get(variant.position, variant.position)
    detr, deformable, criterion = cfg.MODEL.DETR, cfg.MODEL.DETECTOR, cfg.MODEL.CRITERION
    detr.HIDDEN_DIM, detr.NHEADS, detr.DIM_FEEDFORWARD, detr.DROPOUT = CHANNELS, 4, 48, 0.0
    detr.ENC_LAYERS, detr.DEC_LAYERS, detr.NUM_OBJECT_QUERIES = 2, LAYERS, QUERIES
    deformable.NUM_LEVELS, deformable.BOX_REFINEMENT, deformable.TWO_STAGE = variant.levels, variant.refine, variant.two_stage
    criterion.CLASSIFICATION.NAME, criterion.CLASS_COST = "focal", 2.0
    return cfg


def pair(variant: Variant, dtype: torch.dtype, monkeypatch):
    """Theirs, and ours with the same weights."""
    theirs, ours = hf_detector(variant), build_detector(our_config(variant))
    report = load_weights(ours, theirs.state_dict())
    assert report.source == "hf_deformable_detr"
    assert not report.is_partial, str(report)
    if dtype == torch.float64:
        monkeypatch.setattr(hf_modeling, "torch", DoubleTorch())
    return theirs.to(dtype).train(), ours.to(dtype).train()  # dropout is 0; in training nothing else differs


class DoubleTorch:
    """The module torch, but that float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def batch_of(sizes, dtype: torch.dtype) -> tuple[PaddedBatch, list[Targets]]:
    generator = torch.Generator().manual_seed(1)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    targets = []
    for count in OBJECTS:
        size = 0.1 + 0.4 * uniform(count, 2)
        boxes = torch.cat((size / 2 + uniform(count, 2) * (1 - size), size), 1)
        targets.append(Targets(torch.randint(CLASSES, (count,), generator=generator), boxes.to(dtype)))
    return PaddedBatch.from_images([4 * uniform(3, *size).to(dtype) - 2 for size in sizes], 64), targets


def hf_predictions(model: torch.nn.Module, batch: PaddedBatch) -> Predictions:
    """Of every decoder layer, from what its model returns beside its answer."""
    output = model(batch.images, pixel_mask=~batch.padding_mask)
    decoded = output.intermediate_hidden_states.unbind(1)
    references = [output.init_reference_points, *output.intermediate_reference_points.unbind(1)]
    logits, boxes = [], []
    for head, box_head, queries, reference in zip(model.class_embed, model.bbox_embed, decoded, references, strict=False):
        correction = box_head(queries)
        start = hf_modeling.inverse_sigmoid(reference)
        boxes.append((correction + torch.nn.functional.pad(start, (0, 4 - start.shape[-1]))).sigmoid())
        logits.append(head(queries))
    predictions = Predictions(torch.stack(logits), torch.stack(boxes))
    torch.testing.assert_close(predictions.logits[-1], output.logits, rtol=0, atol=0)
    torch.testing.assert_close(predictions.boxes[-1], output.pred_boxes, rtol=0, atol=0)
    if output.enc_outputs_class is not None:
        predictions.proposals = Predictions(output.enc_outputs_class[None], output.enc_outputs_coord_logits.sigmoid()[None])
    return predictions


def hf_loss(model, predictions: Predictions, targets: list[Targets]):
    """The weighted total with that of the proposals, name -> unweighted loss (D,), the same of the proposals, and matched pairs."""
    labels = [{"class_labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
    last = (predictions.logits[-1], labels, "cpu", predictions.boxes[-1])
    total, losses, _ = hf_losses.DeformableDetrForObjectDetectionLoss(*last, model.config, predictions.logits, predictions.boxes)
    suffixes = [*(f"_{layer}" for layer in range(LAYERS - 1)), ""]
    by_layer = {ours: torch.stack([losses[name + suffix] for suffix in suffixes]) for ours, name in NAMES.items()}
    matcher = hf_losses.DeformableDetrHungarianMatcher(class_cost=2, bbox_cost=5, giou_cost=2)
    layers = zip(predictions.logits, predictions.boxes, strict=True)
    pairs = [matcher({"logits": logits, "pred_boxes": boxes}, labels) for logits, boxes in layers]
    matched = set()
    for layer, images in enumerate(pairs):
        for image, (queries, wanted) in enumerate(images):
            matched |= {(layer, image, *match) for match in zip(queries.tolist(), wanted.tolist(), strict=True)}
    proposed = {}
    if predictions.proposals is not None:
        objects = [{**label, "class_labels": torch.zeros_like(label["class_labels"])} for label in labels]
        criterion = hf_losses.DeformableDetrImageLoss(matcher, CLASSES, 0.25, ["labels", "boxes"])
        outputs = {"logits": predictions.proposals.logits[0], "pred_boxes": predictions.proposals.boxes[0]}
        proposed = {ours: criterion(outputs, objects)[name][None] for ours, name in NAMES.items()}
        total = total + proposed["loss_class"][0] + 5 * proposed["loss_l1"][0] + 2 * proposed["loss_giou"][0]
    return total, by_layer, proposed, matched


def our_losses_by_layer(criterion, predictions: Predictions, targets: list[Targets]):
    """Unweighted losses and matches of the decoder; of the proposals, where every object is of class 0, the losses."""
    padded = PaddedTargets.from_targets(targets, predictions.boxes.dtype)
    normalizers = criterion.normalizers(targets, QUERIES)
    (matches,) = criterion.matcher((predictions, padded))
    by_layer, proposed = criterion.losses_by_layer(predictions, padded, matches, normalizers), {}
    if predictions.proposals is not None:
        padded.labels.zero_()
        (matched,) = criterion.matcher((predictions.proposals, padded))
        proposed = criterion.losses_by_layer(predictions.proposals, padded, matched, normalizers)
    return by_layer, proposed, matches


def pairs_of(matches: Matches) -> set[tuple[int, ...]]:
    indices = (matches.layer, matches.image, matches.query, matches.target)
    return set(zip(*(index.tolist() for index in indices), strict=True))


def assert_near(actual, expected, tolerance, what):
    """Close, and with ``pytest -s`` the table of docs/parity.md."""
    print(f"| {what} | {(actual - expected).abs().max().item():.1e} | {expected.abs().max().item():.3g} |")
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def assert_no_near_ties(theirs, expected: Predictions, batch: PaddedBatch) -> None:
    """No rounding can change which proposals are chosen, or their order, and no padded one is among them."""
    strides = (8, 16, 32, 64)
    padded = torch.cat([level_padding_mask(batch.padding_mask, stride).flatten(1) for stride in strides], 1)
    ranked, order = expected.proposals.logits[0, ..., 0].sort(dim=1, descending=True)
    assert not padded.gather(1, order[:, :QUERIES]).any()
    assert (ranked[:, :QUERIES] - ranked[:, 1 : QUERIES + 1]).min() > 1e-4
    zero_token = theirs.class_embed[-1](theirs.model.enc_output_norm(theirs.model.enc_output.bias))[0]
    assert (ranked[:, QUERIES] - zero_token).min() > 0.1


@pytest.mark.parametrize(("name", "dtype", "tolerance"), PREDICTED, ids=[f"{name}, {dtype}" for name, dtype, _ in PREDICTED])
def test_every_layer_predicts_what_transformers_predicts(name, dtype, tolerance, monkeypatch):
    theirs, ours = pair(VARIANTS[name], dtype, monkeypatch)
    batch, _ = batch_of(PADDED, dtype)
    with torch.no_grad():
        expected, predictions = hf_predictions(theirs, batch), ours(batch.images, batch.padding_mask)
    assert predictions.logits.shape == (LAYERS, len(PADDED), QUERIES, CLASSES)
    assert expected.logits.std() > 0.5
    assert expected.boxes.std(2).min() > 1e-3, "queries that all answer the same would prove little"
    case = f"{name}, {str(dtype).removeprefix('torch.')}"
    if VARIANTS[name].two_stage:
        assert_no_near_ties(theirs, expected, batch)
        valid = predictions.proposals.logits[0, ..., 0] != PADDED_LOGIT
        assert 0 < valid.sum() < valid.numel()
        for what in ("logits", "boxes"):
            actual, wanted = (getattr(of.proposals, what)[0][valid] for of in (predictions, expected))
            assert_near(actual, wanted, tolerance, f"{case} | proposals' {what}")
    assert_near(predictions.logits, expected.logits, tolerance, f"{case} | logits")
    assert_near(predictions.boxes, expected.boxes, tolerance, f"{case} | boxes")


@pytest.mark.parametrize("name", TRAINED)
def test_losses_and_gradients_are_those_of_transformers(name, monkeypatch):
    variant = VARIANTS[name]
    theirs, ours = pair(variant, torch.float64, monkeypatch)
    batch, targets = batch_of(SAME if variant.two_stage else PADDED, torch.float64)
    total, expected, expected_proposed, expected_pairs = hf_loss(theirs, hf_predictions(theirs, batch), targets)
    total.backward()

    criterion = build_criterion(our_config(variant))
    predictions = ours(batch.images, batch.padding_mask)
    losses = criterion(predictions, targets).losses
    case = f"{name}, float64"
    assert_near(sum(losses.values()), total, 1e-10, f"{case} | total loss")
    sum(losses.values()).backward()
    by_layer, proposed, matches = our_losses_by_layer(criterion, predictions, targets)
    assert pairs_of(matches) == expected_pairs
    for loss in NAMES:
        assert_near(by_layer[loss], expected[loss], 1e-10, f"{case} | {loss}")
        if variant.two_stage:
            assert_near(proposed[loss], expected_proposed[loss], 1e-10, f"{case} | proposals' {loss}")

    gradients = hf_gradients(theirs)
    trained = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert gradients.keys() - trained.keys() == {name for name in gradients if name.startswith(FIRST_STAGES)}
    scale = torch.stack([gradient.norm() for gradient in trained.values()]).norm().item()
    for name, gradient in trained.items():
        torch.testing.assert_close(
            gradient, gradients[name], rtol=0, atol=1e-12 * scale, msg=lambda text, name=name: f"{name}: {text}"
        )
    norms = [torch.stack([of[name].norm() for name in trained]).norm() for of in (trained, gradients)]
    assert_near(*norms, 1e-12 * scale, f"{case} | gradient norm")


def hf_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Under our names; a shared parameter's under every name that it has."""
    named = model.named_parameters(remove_duplicate=False)
    return convert_state_dict({name: p.grad for name, p in named if p.grad is not None}, "hf_deformable_detr")


def test_files_of_transformers_load_though_they_leave_shared_tensors_out(tmp_path):
    """As it is, layers with refinement share the class head, and the file has it once; proposals have one of their own."""
    for name in ("multi-scale", "refinement", "two stages"):
        variant = VARIANTS[name]
        config = hf_detector(variant).config
        config.id2label = dict(enumerate(("cat", "dog", "tree", "ship", "car")))
        theirs = transformers.DeformableDetrForObjectDetection(config)
        theirs.save_pretrained(tmp_path / name)
        ours = build_detector(our_config(variant))
        assert not load_weights(ours, tmp_path / name, ("cat", "dog", "tree", "ship", "car")).is_partial
        for layer, head in enumerate(ours.class_embed):
            assert torch.equal(head.weight, theirs.class_embed[layer].weight)
        assert torch.equal(ours.bbox_embed[-1].layers[-1].weight, theirs.bbox_embed[len(ours.bbox_embed) - 1].layers[-1].weight)
