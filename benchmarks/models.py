# SPDX-License-Identifier: Apache-2.0
"""DETR, Deformable-DETR and DINO: ours, the official ones, those of transformers and detrex, with the same weights and calls.

Three settings of transformers 5 are changed. It freezes its whole ResNet instead of the first stages, and its dropout of attention
and activations is 0 by default; here both are as in the others. Its DETR with auxiliary losses feeds every decoder layer with the
normed output of the previous one, so there the outputs of the layers are taken with hooks.
"""

import argparse
import contextlib
import copy
import functools
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from benchmarks.foreign_models import EPSILON, Case, Foreign, build_detrex, build_dino, without_cuda
from benchmarks.peers import official_deformable_detr, official_detr
from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.checkpoint import convert_state_dict
from cpvt_det.common.structures import PaddedBatch, Targets
from cpvt_det.config import load_cfg
from cpvt_det.losses.criterion import SetCriterion
from cpvt_det.models.detector import Detector

CONFIGS = Path(__file__).resolve().parent.parent / "configs/coco"


@dataclass(frozen=True)
class Origin:
    """A published detector.

    Args:
        peer: name of its checkout on the command line.
        source: names of its weights, a key of ``CONVERSIONS``.
        config: file below ``configs/coco``, without the name of the encoding.
        sine: name of its encoding in those of our configs.
        feed_forward: inner channels of feed-forward networks / channels.
        shares_heads: whether it has one pair of heads for all decoder layers; ours has a pair for each.
    """

    peer: str
    source: str
    config: str
    sine: str
    feed_forward: int = 8
    shares_heads: bool = False


ORIGINS = {
    "DETR": Origin("detr", "facebook_detr", "detr_r50_{}_50ep", "sine"),
    "Deformable-DETR": Origin("deformable_detr", "deformable_detr", "deformable_detr_r50_{}_50ep", "sine_offset", feed_forward=4),
    "DINO": Origin("dino", "dino", "dino_r50_4scale_{}_12ep", "official", shares_heads=True),
    "detrex DINO": Origin("detrex", "detrex_deformable_detr", "dino_r50_4scale_{}_12ep", "sine_offset"),
}
DETREX_DINO = "dino/configs/dino-resnet/dino_r50_4scale_12ep.py"
NOISE = ("label_noise", "box_noise", "dn_label_noise_ratio", "dn_box_noise_scale", "label_noise_ratio", "box_noise_scale")
"""Attributes of denoising, in our code, in DINO's and in detrex's."""
HF_RESNET: dict[str, Any] = {"downsample_in_bottleneck": False}
"""What differs in the official ResNet from the defaults of transformers' config."""
DRAWN_WIDE = re.compile(r"(attention_weights|reference_points|class_embed(\.\d+)?|bbox_embed\.(\d+\.)?layers\.2)\.weight$")


@dataclass(frozen=True)
class Recipe:
    """The sizes that all share; the rest is the official recipe, but the class loss has weight 1, as in transformers.

    Args:
        detector: key of ``ORIGINS``.
        channels: model width C.
        layers: number of encoder layers, and of decoder layers.
        queries: number of queries Q.
        classes: number of classes K; DETR has one logit more.
        two_stage: True: box refinement, and queries from the encoder's proposals.
        dropout: probability of dropout in a timed training step.
        width_of: detector whose feed-forward networks these are as wide as; empty for its own.
    """

    detector: str = "Deformable-DETR"
    channels: int = 256
    layers: int = 6
    queries: int = 300
    classes: int = 91
    two_stage: bool = False
    dropout: float = 0.1
    width_of: str = ""

    @property
    def origin(self) -> Origin:
        return ORIGINS[self.detector]

    @property
    def ffn_channels(self) -> int:
        return self.channels * ORIGINS[self.width_of or self.detector].feed_forward

    @property
    def is_dino(self) -> bool:
        return self.detector.endswith("DINO")


@dataclass(frozen=True)
class Model:
    """One implementation.

    Args:
        module: the model; its user sets training or evaluation mode.
        predict: function that returns (B, Q, K) logits and (B, Q, 4) boxes of the last layer.
        learn: function that returns these, and the total loss of all layers, matched and weighted.
    """

    module: nn.Module
    predict: Callable[[PaddedBatch], tuple[Tensor, Tensor]]
    learn: Callable[[PaddedBatch, Sequence[Targets]], tuple[Tensor, Tensor, Tensor]]


def our_model(
    recipe: Recipe, device: str = "cpu", position: str = "", mask_padding: bool = True, checkpointing: bool = False
) -> Model:
    """Our model, from its config, with drawn weights for which attention depends on the image more than at initialisation.

    Args:
        recipe: sizes of the model.
        device: device of the model.
        position: encoding, a value of ``MODEL.POSITION.NAME``; empty for the official one.
        mask_padding: value of ``MODEL.BACKBONE.MASK_PADDING``; ``False`` computes the same as the other implementations.
        checkpointing: value of ``MODEL.CHECKPOINTING``.
    """
    keys = {
        "NUM_CLASSES": recipe.classes,
        "CHECKPOINTING": checkpointing,
        "BACKBONE.MASK_PADDING": mask_padding,
        "DETR.HIDDEN_DIM": recipe.channels,
        "DETR.DIM_FEEDFORWARD": recipe.ffn_channels,
        "DETR.ENC_LAYERS": recipe.layers,
        "DETR.DEC_LAYERS": recipe.layers,
        "DETR.NUM_OBJECT_QUERIES": recipe.queries,
        **({"DETECTOR.BOX_REFINEMENT": True, "DETECTOR.TWO_STAGE": True} if recipe.two_stage else {}),
        "CRITERION.CLASS_WEIGHT": 1.0,
    }
    overrides = [text for key, value in keys.items() for text in (f"MODEL.{key}", str(value))]
    config = f"{recipe.origin.config.format(position or recipe.origin.sine)}.yaml"
    cfg = load_cfg(str(CONFIGS / config), overrides)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        detector, criterion = build_detector(cfg), build_criterion(cfg)
        draw_weights(detector)
        if recipe.origin.shares_heads:
            share_heads(detector, recipe.layers)
    return as_model(detector.to(device), criterion)


def as_model(detector: Detector, criterion: SetCriterion) -> Model:
    """One of our detectors, as benchmarks call it."""

    def predict(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        predictions = detector(batch.images, batch.padding_mask)
        return predictions.logits[-1], predictions.boxes[-1]

    def learn(batch: PaddedBatch, targets: Sequence[Targets]) -> tuple[Tensor, Tensor, Tensor]:
        predictions = detector(batch.images, batch.padding_mask, targets)
        total = sum(criterion(predictions, targets).losses.values())
        return predictions.logits[-1], predictions.boxes[-1], total

    return Model(detector, predict, learn)


@torch.no_grad()
def draw_weights(detector: nn.Module) -> None:
    """Draw statistics and norms that keep the size of the backbone's maps, and points, queries and boxes that differ."""
    for name, tensor in detector.state_dict().items():
        fan_in = tensor.shape[-1] ** -0.5 if tensor.ndim else 1.0
        if name.startswith("backbone.") and tensor.ndim == 1:
            low, high = (0.5, 1.0) if name.endswith(("weight", "running_var")) else (-0.2, 0.2)
            tensor.uniform_(low, high).mul_(0.3 if name.endswith("bn3.weight") else 1)
        elif name.endswith("sampling_offsets.weight"):
            tensor.normal_(0, 0.5 * fan_in)
        elif DRAWN_WIDE.search(name):
            tensor.normal_(0, fan_in)


@torch.no_grad()
def share_heads(detector: nn.Module, layers: int) -> None:
    """Give the heads of all decoder layers the values of the first one's."""
    for heads in (detector.class_embed, detector.bbox_embed):
        for layer in range(1, layers):
            heads[layer].load_state_dict(heads[0].state_dict())


def build_official(
    folder: Path, recipe: Recipe, device: str = "cpu", **arguments: Any
) -> tuple[types.SimpleNamespace, nn.Module, nn.Module]:
    """The official code of a checkout, its detector with random weights, and its criterion.

    Args:
        folder: checkout of facebookresearch/detr or fundamentalvision/Deformable-DETR.
        recipe: sizes of the model.
        device: device of the criterion.
        arguments: options of the official command line that differ from ours here.
    """
    deformable = recipe.detector == "Deformable-DETR"
    official = official_deformable_detr(folder) if deformable else official_detr(folder)
    words = {"dataset_file": "coco", "device": device, "masks": False, "frozen_weights": None, "aux_loss": True}
    words |= {"backbone": "resnet50", "lr_backbone": 2e-5, "dilation": False, "position_embedding": "sine", "num_feature_levels": 4}
    words |= {"hidden_dim": recipe.channels, "dim_feedforward": recipe.ffn_channels, "nheads": 8, "dropout": 0.1, "pre_norm": False}
    words |= {"enc_layers": recipe.layers, "dec_layers": recipe.layers, "enc_n_points": 4, "dec_n_points": 4}
    words |= {"num_queries": recipe.queries, "with_box_refine": recipe.two_stage, "two_stage": recipe.two_stage}
    words |= {"set_cost_class": 2 if deformable else 1, "set_cost_bbox": 5, "set_cost_giou": 2}
    words |= {"cls_loss_coef": 1, "bbox_loss_coef": 5, "giou_loss_coef": 2, "focal_alpha": 0.25, "eos_coef": 0.1}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The parameter 'pretrained'|Arguments other than a weight enum")
        module, criterion, _ = official.build(argparse.Namespace(**{**words, **arguments}))
    return official, module, criterion


def official_model(folder: Path, recipe: Recipe, device: str, state: Mapping[str, Tensor]) -> Model:
    """The model of the official code's checkout, with our weights ``state``."""
    build = build_official_dino if recipe.is_dino else build_official
    official, module, criterion = build(folder, recipe, device)
    give_weights(module, state, recipe.origin.source)
    module.to(device)

    def predict(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        output = module(official.NestedTensor(batch.images, batch.padding_mask))
        return output["pred_logits"], output["pred_boxes"]

    def learn(batch: PaddedBatch, targets: Sequence[Targets]) -> tuple[Tensor, Tensor, Tensor]:
        labels = [{"labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
        with without_cuda() if device == "cpu" else contextlib.nullcontext():
            output = module(official.NestedTensor(batch.images, batch.padding_mask), *([labels] if recipe.is_dino else []))
            losses = criterion(output, labels)
        total = sum(losses[name] * weight for name, weight in criterion.weight_dict.items() if name in losses)
        return output["pred_logits"], output["pred_boxes"], total

    return Model(module, predict, learn)


def build_official_dino(folder: Path, recipe: Recipe, device: str) -> tuple[Foreign, nn.Module, nn.Module]:
    """The same as :func:`build_official` of a checkout of IDEA-Research/DINO; numbers of boxes have our bound from 0 and 1."""
    words = {"num_classes": recipe.classes, "hidden_dim": recipe.channels, "dim_feedforward": recipe.ffn_channels}
    words |= {"enc_layers": recipe.layers, "dec_layers": recipe.layers, "num_queries": recipe.queries, "device": device}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        foreign = build_dino(folder, Case("dino", recipe.detector, "", "DINO_4scale.py"), **words)
    _set_bound(foreign)
    return foreign, foreign.module, foreign.criterion


def _set_bound(foreign: Foreign) -> None:
    """Give numbers of boxes our bound from 0 and 1."""
    for space in foreign.namespaces:
        if "inverse_sigmoid" in space:
            space["inverse_sigmoid"] = functools.partial(space["inverse_sigmoid"], eps=EPSILON)


def detrex_model(folder: Path, recipe: Recipe, device: str, state: Mapping[str, Tensor]) -> Model:
    """DINO of detrex's checkout, with our weights ``state``; it pads images itself, and in evaluation it does not mask the padding.

    Its first stage is frozen, as in the others.

    Raises:
        BadInputError: a model that cannot be built, for example because detectron2 is not installed.
    """
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case("detrex", recipe.detector, "", DETREX_DINO)
        foreign = build_detrex(folder, case, num_classes=recipe.classes, num_queries=recipe.queries)
    from detectron2.structures import Boxes, Instances

    _set_bound(foreign)
    module, outputs = foreign.module, []
    for parameter in module.backbone.res2.parameters():
        parameter.requires_grad_(False)
    module.criterion.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    give_weights(module, state, recipe.origin.source)
    module.device = device
    module.to(device)

    def predict(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        return foreign.predict(batch.images)

    def learn(batch: PaddedBatch, targets: Sequence[Targets]) -> tuple[Tensor, Tensor, Tensor]:
        inputs = []
        for image, (height, width), target in zip(batch.images, batch.image_sizes, targets, strict=True):
            corners = box_convert(target.boxes_cxcywh, "cxcywh", "xyxy") * target.boxes_cxcywh.new_tensor([width, height] * 2)
            objects = Instances((height, width), gt_classes=target.labels, gt_boxes=Boxes(corners))
            inputs.append({"image": image[:, :height, :width], "instances": objects})
        with without_cuda() if device == "cpu" else contextlib.nullcontext():
            losses = module(inputs)
        output = outputs.pop()
        total = sum(value for name, value in losses.items() if name in module.criterion.weight_dict)
        return output["pred_logits"], output["pred_boxes"], total

    return Model(module, predict, learn)


def hf_model(recipe: Recipe, device: str, state: Mapping[str, Tensor]) -> Model:
    """``DetrForObjectDetection`` or ``DeformableDetrForObjectDetection`` of transformers, with our weights ``state``; one stage."""
    import transformers

    deformable = recipe.detector == "Deformable-DETR"
    stages = ["stage2", "stage3", "stage4"] if deformable else ["stage4"]
    words = {
        "backbone_config": transformers.ResNetConfig(**HF_RESNET, out_features=stages),
        "num_labels": recipe.classes,
        "d_model": recipe.channels,
        "num_queries": recipe.queries,
        "encoder_layers": recipe.layers,
        "decoder_layers": recipe.layers,
        "encoder_ffn_dim": recipe.ffn_channels,
        "decoder_ffn_dim": recipe.ffn_channels,
    }
    with torch.random.fork_rng():
        if deformable:
            config = transformers.DeformableDetrConfig(**words, class_cost=2, auxiliary_loss=True)
            module = transformers.DeformableDetrForObjectDetection(config)
        else:
            module = transformers.DetrForObjectDetection(transformers.DetrConfig(**words))
    for name, parameter in module.model.backbone.named_parameters():
        parameter.requires_grad_(any(f".stages.{stage}." in name for stage in (1, 2, 3)))
    give_weights(module, state, "hf_deformable_detr" if deformable else "hf_detr")
    module.to(device)

    def predict(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        output = module(batch.images, pixel_mask=~batch.padding_mask)
        return output.logits, output.pred_boxes

    def learn(batch: PaddedBatch, targets: Sequence[Targets]) -> tuple[Tensor, Tensor, Tensor]:
        labels = [{"class_labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
        if not deformable:
            return _learn_hf_detr(module, batch, labels)
        output = module(batch.images, pixel_mask=~batch.padding_mask, labels=labels)
        return output.logits, output.pred_boxes, output.loss

    return Model(module, predict, learn)


def _learn_hf_detr(module: nn.Module, batch: PaddedBatch, labels: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The model's predictions, and its own loss over the outputs of all decoder layers."""
    decoded: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: decoded.append(out)) for layer in module.model.decoder.layers]
    try:
        module.model(batch.images, pixel_mask=~batch.padding_mask)
    finally:
        for hook in hooks:
            hook.remove()
    queries = module.model.decoder.layernorm(torch.stack(decoded))
    logits, boxes = module.class_labels_classifier(queries), module.bbox_predictor(queries).sigmoid()
    config = copy.copy(module.config)
    config.auxiliary_loss = True
    total, _, _ = module.loss_function(logits[-1], labels, batch.images.device, boxes[-1], config, logits, boxes)
    return logits[-1], boxes[-1], total


@torch.no_grad()
def give_weights(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Write our weights into a peer's module, by reversing the conversion from its names to ours.

    Numbered places are converted instead of values, so that each of our values finds the place that it would have come from.

    Args:
        module: changed in place.
        state: under our names; those that the peer does not have are left out.
        source: of the module's names, a key of ``cpvt_det.checkpoint.convert.CONVERSIONS``.

    Raises:
        KeyError: a weight of the peer that our model does not have.
    """
    own = module.state_dict()
    tensors = {tensor.data_ptr(): tensor for tensor in own.values()}  # a shared tensor once
    places, count = {}, 0
    for pointer, tensor in tensors.items():
        places[pointer] = torch.arange(count, count + tensor.numel()).view(tensor.shape)
        count += tensor.numel()
    values = torch.cat([tensor.flatten().float() for tensor in tensors.values()])
    for name, found in convert_state_dict({name: places[tensor.data_ptr()] for name, tensor in own.items()}, source).items():
        values[found.flatten()] = state[name].flatten()
    for pointer, tensor in tensors.items():
        tensor.copy_(values[places[pointer].flatten()].view(tensor.shape))


def set_dropout(module: nn.Module, probability: float) -> None:
    """Set dropout in all modules: those of dropout itself, and those that call the function."""
    for part in module.modules():
        names = ("p",) if isinstance(part, nn.Dropout) else ("dropout", "attention_dropout", "activation_dropout")
        for name in names:
            if isinstance(getattr(part, name, None), float | int):
                setattr(part, name, probability)


@contextlib.contextmanager
def without_chance(module: nn.Module, dropout: float) -> Iterator[None]:
    """No dropout and no noise of denoising in this block; after it, ``dropout`` and the earlier noise."""
    noise = [(part, name, vars(part)[name]) for part in module.modules() for name in NOISE if name in vars(part)]
    set_dropout(module, 0.0)
    for part, name, _ in noise:
        setattr(part, name, 0.0)
    try:
        yield
    finally:
        set_dropout(module, dropout)
        for part, name, value in noise:
            setattr(part, name, value)
