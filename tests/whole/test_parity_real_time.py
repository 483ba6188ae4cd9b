# SPDX-License-Identifier: Apache-2.0
"""Our RT-DETRv2 and D-FINE against those of transformers, on maps that are not square: predictions, losses, gradients, files.

transformers has no padding here, so images are of one size; that padding changes nothing is in ``test_real_time_detr.py``. Both
get the same noise for denoising. Ours is matched by scores alone here, without overlaps in the cost, as there; boxes do not look
forward twice. D-FINE's loss of transformers 5.20 pairs a layer's distributions with the boxes of the one before: so its functions
are called layer by layer. Its boxes are bounded in its loss, ours in the decoder; its thirds of sampling units, float32 there, are
exact here.
"""

from dataclasses import dataclass, field

import pytest
import torch
from fvcore.common.config import CfgNode

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.checkpoint import convert_state_dict, load_weights
from cpvt_det.common.structures import Targets
from cpvt_det.config import get_cfg
from cpvt_det.losses.classification import focal_cost, pick_classes
from cpvt_det.losses.overlap_classification import OverlapClassification
from cpvt_det.models.denoising import ContrastiveDenoising

transformers = pytest.importorskip("transformers")
from transformers.loss.loss_d_fine import DFineLoss  # noqa: E402
from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss  # noqa: E402
from transformers.models.d_fine import modeling_d_fine  # noqa: E402
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2  # noqa: E402

CLASSES, QUERIES, CANVAS, IMAGES, OBJECTS, PAIRS = 5, 12, (96, 160), 2, 3, 6
WIDTH = 16
TOLERANCE = 1e-10


@dataclass
class Variant:
    """What a model is made of."""

    backbone: str
    theirs: dict  # of their backbone
    channels: int = 64
    layers: int = 3
    expansion: float = 1.0
    depth: int = 3
    points: tuple[int, ...] = ()
    wide: int = 0  # channels of the encoder, if others
    stages: tuple[int, ...] = (3, 4, 5)
    options: dict = field(default_factory=dict)

    @property
    def is_dfine(self) -> bool:
        return bool(self.points)


def resnet(layer_type: str, depths: list[int], expansion: int) -> dict:
    sizes = [expansion * WIDTH * 2**n for n in range(4)]
    return {"layer_type": layer_type, "depths": depths, "hidden_sizes": sizes, "embedding_size": WIDTH, "out_indices": [2, 3, 4]}


def hgnet(stem, inputs, middle, blocks, layers, learns_affine) -> dict:
    return {
        "stem_channels": stem,
        "stage_in_channels": [row[0] for row in inputs],
        "stage_mid_channels": middle,
        "stage_out_channels": [row[1] for row in inputs],
        "stage_num_blocks": blocks,
        "stage_numb_of_layers": layers,
        "stage_downsample": [False, True, True, True],
        "stage_light_block": [False, False, True, True],
        "stage_kernel_size": [3, 3, 5, 5],
        "use_learnable_affine_block": learns_affine,
        "hidden_sizes": [row[1] for row in inputs],
    }


B0 = hgnet([3, 16, 16], [(16, 64), (64, 256), (256, 512), (512, 1024)], [16, 32, 64, 128], [1, 1, 2, 1], [3, 3, 3, 3], True)
B2 = hgnet([3, 24, 32], [(32, 96), (96, 384), (384, 768), (768, 1536)], [32, 64, 128, 256], [1, 1, 3, 1], [4, 4, 4, 4], True)
VARIANTS = {
    "RT-DETRv2-R18": Variant("resnet18d", resnet("basic", [2, 2, 2, 2], 1), expansion=0.5),
    "RT-DETRv2-R50": Variant("resnet50d", resnet("bottleneck", [3, 4, 6, 3], 4), wide=96, layers=2),
    "D-FINE-N": Variant("timm/hgnetv2_b0", B0, 64, 3, 0.34, 2, (6, 6), stages=(4, 5)),
    "D-FINE-S": Variant("timm/hgnetv2_b0", B0, 64, 3, 0.5, 1, (3, 6, 3)),
    "D-FINE-M": Variant("timm/hgnetv2_b2", B2, 64, 4, 1.0, 2, (3, 6, 3), wide=80),
}
LOSSES = {"loss_class": "vfl", "loss_l1": "bbox", "loss_giou": "giou"}


def hf_detector(variant: Variant) -> torch.nn.Module:
    """A small one with weights drawn wide: as initialised it hardly looks at the image."""
    levels, wide = len(variant.stages), variant.wide or variant.channels
    indices = [stage - 1 for stage in variant.stages]
    if variant.is_dfine:
        backbone = transformers.HGNetV2Config(**variant.theirs, out_indices=indices)
        widths = [variant.theirs["stage_out_channels"][index - 1] for index in indices]
    else:
        backbone = transformers.RTDetrResNetConfig(**variant.theirs)
        widths = variant.theirs["hidden_sizes"][1:]
    common = {
        "backbone_config": backbone,
        "num_labels": CLASSES,
        "encoder_in_channels": widths,
        "encoder_hidden_dim": wide,
        "encode_proj_layers": [levels - 1],
        "feat_strides": [2**stage for stage in variant.stages],
        "encoder_ffn_dim": 72,
        "encoder_attention_heads": 4,
        "hidden_expansion": variant.expansion,
        "d_model": variant.channels,
        "decoder_in_channels": [wide] * levels,
        "num_feature_levels": levels,
        "decoder_layers": variant.layers,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "num_queries": QUERIES,
        "num_denoising": PAIRS,
    }
    torch.manual_seed(0)
    if variant.is_dfine:
        extra = {"decoder_n_points": list(variant.points), "depth_mult": variant.depth / 3}
        model = transformers.DFineForObjectDetection(transformers.DFineConfig(**common, **extra))
    else:
        model = transformers.RTDetrV2ForObjectDetection(transformers.RTDetrV2Config(**common, decoder_n_levels=levels))
    draw_weights(model)
    model = model.requires_grad_(True).double()
    for part in model.modules():
        if hasattr(part, "num_points_scale"):  # thirds of float32
            part.num_points_scale.copy_(
                torch.cat([torch.full((count,), 1 / count, dtype=torch.float64) for count in part.num_points_list])
            )
    return model


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if name.endswith(("reg_scale", "up", "points_scale", "num_batches_tracked")):
            continue
        if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith(("weight", "scale"))):
            tensor.uniform_(0.5, 1.0)
        elif name.endswith("sampling_offsets.bias"):
            tensor.add_(torch.randn_like(tensor) / 4)
        elif tensor.ndim == 1:
            tensor.uniform_(-0.2, 0.2)
        elif tensor.ndim == 2:
            tensor.normal_(0, 1 if "embed.weight" in name and "class" not in name else tensor.shape[1] ** -0.5)


def our_config(variant: Variant, position: str = "sine_grid"):
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.NUM_CLASSES, cfg.MODEL.POSITION.NAME = "CPVTRealTimeDetr", CLASSES, position
    backbone = cfg.MODEL.BACKBONE
    backbone.NAME, backbone.STAGES, backbone.FREEZE_AT = variant.backbone, variant.stages, 0
    backbone.NORM = "FrozenBN"
    if not variant.is_dfine:
        backbone.WIDTH = WIDTH
    detr, queries = cfg.MODEL.DETR, cfg.MODEL.QUERIES
    detr.HIDDEN_DIM, detr.NHEADS, detr.DIM_FEEDFORWARD, detr.DROPOUT = variant.channels, 4, 48, 0.0
    detr.ENC_LAYERS, detr.DEC_LAYERS, detr.NUM_OBJECT_QUERIES = 1, variant.layers, QUERIES
    options = {"ENCODER_CHANNELS": variant.wide, "ENCODER_FEEDFORWARD": 72, "EXPANSION": variant.expansion, "DEPTH": variant.depth}
    queries.NAME, queries.CLASS_PROPOSALS, queries.TOKEN_CONTENT, queries.REFINED_POSITIONS = "mixed", True, True, True
    queries.POSITION_SINES, queries.DENOISING = False, PAIRS
    cfg.MODEL.CRITERION.CLASSIFICATION.NAME, cfg.MODEL.CRITERION.CLASS_COST = "varifocal", 2.0
    if variant.is_dfine:
        options |= {"FUSION": "elan", "BINS": 32, "POINTS": variant.points}
        cfg.MODEL.CRITERION.LOSSES = [["fgl", 0.15], ["ddf", 1.5]]
    cfg.MODEL.DETECTOR.update(options)
    return cfg


def pair(name: str, position: str = "sine_grid"):
    """Theirs, and ours with the same weights."""
    if VARIANTS[name].is_dfine:
        pytest.importorskip("timm")
    theirs, ours = hf_detector(VARIANTS[name]), build_detector(our_config(VARIANTS[name], position))
    report = load_weights(ours, theirs.state_dict())
    assert report.source == ("hf_d_fine" if VARIANTS[name].is_dfine else "hf_rt_detr")
    assert not report.is_partial, report.table()
    return theirs, ours.double()


def batch_of(canvas=CANVAS):
    generator = torch.Generator().manual_seed(1)
    images = 4 * torch.rand(IMAGES, 3, *canvas, generator=generator, dtype=torch.float64) - 2
    sizes = 0.1 + 0.4 * torch.rand(IMAGES, OBJECTS, 2, generator=generator, dtype=torch.float64)
    centers = sizes / 2 + torch.rand(IMAGES, OBJECTS, 2, generator=generator, dtype=torch.float64) * (1 - sizes)
    labels = torch.randint(CLASSES, (IMAGES, OBJECTS), generator=generator)
    return images, [Targets(*one) for one in zip(labels, torch.cat((centers, sizes), -1), strict=True)]


def with_same_noise(monkeypatch, module, targets) -> None:
    """The same random boxes and labels for both."""
    noise = ContrastiveDenoising(1, CLASSES, PAIRS).draw_noise(targets, torch.float64)
    monkeypatch.setattr(ContrastiveDenoising, "draw_noise", lambda self, targets, dtype: tuple(part.clone() for part in noise))
    groups, count = PAIRS // OBJECTS, noise[1][0].numel()

    def theirs(targets, num_classes, num_queries, class_embed, **_):
        mask = torch.zeros(count + num_queries, count + num_queries, dtype=torch.float64)
        mask[count:, :count] = -torch.inf
        group = torch.arange(count) // (2 * OBJECTS)
        mask[:count, :count] = mask[:count, :count].masked_fill(group[:, None] != group, -torch.inf)
        positive = torch.cat([torch.arange(OBJECTS) + 2 * OBJECTS * number for number in range(groups)])
        meta = {"dn_positive_idx": [positive] * IMAGES, "dn_num_group": groups, "dn_num_split": [count, num_queries]}
        return class_embed(noise[1].flatten(1)), module.inverse_sigmoid(noise[2].flatten(1, 3)), mask, meta

    monkeypatch.setattr(module, "get_contrastive_denoising_training_group", theirs)


def hf_outputs(model, images, labels=None):
    labels = labels and [{"class_labels": target.labels, "boxes": target.boxes_cxcywh} for target in labels]
    return model.model(images, labels=labels), labels


def assert_near(actual, expected, what, tolerance=TOLERANCE):
    """Close, and with ``pytest -s`` the table of docs/parity.md."""
    print(f"| {what} | {(actual - expected).abs().max().item():.1e} | {expected.abs().max().item():.3g} |")
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_layer_predicts_what_transformers_predicts(name, monkeypatch):
    theirs, ours = pair(name)
    images, targets = batch_of()
    with_same_noise(monkeypatch, modeling_d_fine if VARIANTS[name].is_dfine else modeling_rt_detr_v2, targets)
    mask = torch.zeros(IMAGES, *CANVAS, dtype=torch.bool)
    with torch.no_grad():
        expected, _ = hf_outputs(theirs.train(), images, targets)
        predictions = ours.train()(images, mask, targets)
        answer, answered = theirs.eval()(images), ours.eval()(images, mask)
    ranked = expected.enc_outputs_class.amax(-1).sort(1, descending=True).values
    assert (ranked[:, :QUERIES] - ranked[:, 1 : QUERIES + 1]).min() > 1e-6, "a rounding could change which tokens are chosen"
    assert expected.intermediate_logits.std() > 0.1
    assert_near(predictions.proposals.logits[0], expected.enc_topk_logits, f"{name} | proposals' logits")
    assert_near(predictions.proposals.boxes[0], expected.enc_topk_bboxes, f"{name} | proposals' boxes")
    count = predictions.denoising.logits.shape[2]
    for part, queries in (("denoising", slice(None, count)), ("queries", slice(count, None))):
        found = predictions.denoising if part == "denoising" else predictions
        assert_near(found.logits, expected.intermediate_logits.transpose(0, 1)[:, :, queries], f"{name} | {part}, logits")
        boxes = expected.intermediate_reference_points.transpose(0, 1)[:, :, queries]
        assert_near(found.boxes, boxes.clamp(0, 1), f"{name} | {part}, boxes")
        if VARIANTS[name].is_dfine:
            sides = expected.intermediate_predicted_corners.transpose(0, 1)[:, :, queries]
            assert_near(found.distributions.logits.flatten(-2), sides, f"{name} | {part}, distributions")
    assert_near(answered.logits[-1], answer.logits, f"{name} | answer, logits")
    assert_near(answered.boxes[-1], answer.pred_boxes.clamp(0, 1), f"{name} | answer, boxes")


def by_scores_alone(self, logits, labels, overlaps):
    return focal_cost(pick_classes(logits, labels).sigmoid_())


def total_of_rt_detr(config, made, labels):
    total, losses, _ = RTDetrForObjectDetectionLoss(
        made["logits"],
        labels,
        "cpu",
        made["boxes"],
        config,
        made["all_logits"],
        made["all_boxes"],
        enc_topk_logits=made["enc_logits"],
        enc_topk_bboxes=made["enc_boxes"],
        denoising_meta_values=made["meta"],
    )
    last, sums = config.decoder_layers - 1, {}
    for key, value in losses.items():
        name, kind, number = key.removeprefix("loss_").split("_")[0], *[*key.split("_")[2:], "", ""][:2]
        group = "denoising_" if kind == "dn" else "proposal_" if kind == "aux" and int(number) == last else ""
        ours = next(mine for mine, other in LOSSES.items() if other == name).replace("loss_", f"loss_{group}")
        sums[ours] = sums.get(ours, 0) + value
    return total, sums


def total_of_dfine(config, output, labels):
    """The losses of transformers, layer by layer: first the boxes that all layers start from, then each with its distributions."""
    criterion, sums = DFineLoss(config).double(), {}
    (split, _), groups = output.denoising_meta_values["dn_num_split"], output.denoising_meta_values["dn_num_group"]
    known = criterion.get_cdn_matched_indices(output.denoising_meta_values, labels)
    counted = sum(len(label["boxes"]) for label in labels)
    weights = {"vfl": 1.0, "bbox": 5.0, "giou": 2.0, "fgl": 0.15, "ddf": 1.5}
    mine = {"vfl": "class", "bbox": "l1", "giou": "giou", "fgl": "fgl", "ddf": "ddf"}

    def add(group, outputs, indices, count):
        names = ("vfl", "boxes", "local") if "pred_corners" in outputs else ("vfl", "boxes")
        for name in names:
            for key, value in criterion.get_loss(name, outputs, labels, indices, count).items():
                key = key.removeprefix("loss_")
                sums[f"loss_{group}{mine[key]}"] = sums.get(f"loss_{group}{mine[key]}", 0) + weights[key] * value

    for group, chosen in (("denoising_", slice(None, split)), ("", slice(split, None))):
        logits, boxes = output.intermediate_logits[:, :, chosen], output.intermediate_reference_points[:, :, chosen].clamp(0, 1)
        corners, starts = output.intermediate_predicted_corners[:, :, chosen], output.initial_reference_points[:, :, chosen]
        for layer in range(logits.shape[1]):
            outputs = {"logits": logits[:, layer], "pred_boxes": boxes[:, layer]}
            if layer:
                outputs |= {"pred_corners": corners[:, layer - 1], "ref_points": starts[:, layer - 1]}
                outputs |= {"teacher_corners": corners[:, -1], "teacher_logits": logits[:, -1].detach()}
            add(group, outputs, known if group else criterion.matcher(outputs, labels), counted * (groups if group else 1))
    proposed = {"logits": output.enc_topk_logits, "pred_boxes": output.enc_topk_bboxes.clamp(0, 1)}
    add("proposal_", proposed, criterion.matcher(proposed, labels), counted)
    return sum(sums.values()), sums


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_are_those_of_transformers(name, monkeypatch):
    variant = VARIANTS[name]
    theirs, ours = pair(name)
    images, targets = batch_of()
    with_same_noise(monkeypatch, modeling_d_fine if variant.is_dfine else modeling_rt_detr_v2, targets)
    monkeypatch.setattr(OverlapClassification, "cost", by_scores_alone)
    output, labels = hf_outputs(theirs.train(), images, targets)
    if variant.is_dfine:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # of its weights of bins
            torch.set_default_dtype(torch.float64)  # of its roots of counts
            try:
                total, expected = total_of_dfine(theirs.config, output, labels)
            finally:
                torch.set_default_dtype(torch.float32)
    else:
        logits, boxes = output.intermediate_logits, output.intermediate_reference_points
        made = {"logits": logits[:, -1], "boxes": boxes[:, -1], "all_logits": logits, "all_boxes": boxes}
        made |= {"enc_logits": output.enc_topk_logits, "enc_boxes": output.enc_topk_bboxes, "meta": output.denoising_meta_values}
        total, expected = total_of_rt_detr(theirs.config, made, labels)
    total.backward()

    losses = build_criterion(our_config(variant))(
        ours.train()(images, torch.zeros(IMAGES, *CANVAS).bool(), targets), targets
    ).losses
    assert losses.keys() == expected.keys()
    for loss, value in losses.items():
        assert_near(value, expected[loss], f"{name} | {loss}")
    sum(losses.values()).backward()
    source = "hf_d_fine" if variant.is_dfine else "hf_rt_detr"
    named = theirs.named_parameters(remove_duplicate=False)
    gradients = convert_state_dict({key: p.grad for key, p in named if p.grad is not None}, source)
    trained = {key: p.grad for key, p in ours.named_parameters() if p.requires_grad}
    assert trained.keys() <= gradients.keys() and None not in trained.values()
    scale = torch.stack([gradient.norm() for gradient in trained.values()]).norm().item()
    for key, gradient in trained.items():
        torch.testing.assert_close(gradient, gradients[key], rtol=0, atol=1e-11 * scale, msg=lambda text, key=key: f"{key}: {text}")
    print(f"| {name} | any gradient | {max((trained[key] - gradients[key]).abs().max() for key in trained):.1e} | {scale:.3g} |")


@pytest.mark.parametrize("name", ["RT-DETRv2-R18", "D-FINE-N"])
def test_files_of_transformers_load_with_every_name_and_their_classes(name, tmp_path):
    theirs = hf_detector(VARIANTS[name])
    theirs.config.id2label = dict(enumerate(("cat", "dog", "tree", "ship", "car")))
    theirs.save_pretrained(tmp_path)
    ours = build_detector(our_config(VARIANTS[name]))
    report = load_weights(ours, tmp_path, ("dog", "cat", "tree", "ship", "car"))
    assert not report.is_partial, report.table()
    assert report.rows_by_name == {"dog": 1, "cat": 0, "tree": 2, "ship": 3, "car": 4}
    torch.testing.assert_close(ours.class_embed[1].weight[0], theirs.class_embed[1].weight[1].float())


def test_scrambled_sines_are_the_right_ones_on_a_square_and_others_elsewhere():
    theirs, ours = pair("RT-DETRv2-R18")
    _, scrambled = pair("RT-DETRv2-R18", "sine_scrambled")
    _, zero = pair_with_peg()
    for canvas, same in (((96, 96), True), ((96, 160), False)):
        images, mask = batch_of(canvas)[0], torch.zeros(IMAGES, *canvas, dtype=torch.bool)
        with torch.no_grad():
            expected = theirs.eval()(images)
            answers = [model.eval()(images, mask) for model in (ours, scrambled, zero)]
        assert_near(answers[0].boxes[-1], expected.pred_boxes, f"{canvas} | boxes")
        assert torch.equal(answers[0].boxes, answers[2].boxes), "a zero-initialised PEG changes no bit"
        assert ((answers[1].boxes - answers[0].boxes).abs().max() < 1e-12) == same


def pair_with_peg():
    theirs, cfg = hf_detector(VARIANTS["RT-DETRv2-R18"]), our_config(VARIANTS["RT-DETRv2-R18"], "sine_grid+peg")
    cfg.MODEL.POSITION.PEG = CfgNode({"ZERO_INIT": True})
    ours = build_detector(cfg)
    report = load_weights(ours, theirs.state_dict())
    assert all(name.startswith("position.pegs.") for name in report.missing) and not report.unexpected
    return theirs, ours.double()
