# SPDX-License-Identifier: Apache-2.0
"""``MODEL`` -> detector, criterion, post-processing, device."""

import contextlib
import os
from typing import Any

import torch
from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry
from torch import nn

from cpvt_det import distributed
from cpvt_det.config import get_cfg
from cpvt_det.errors import ConfigError, UnknownNameError, config_errors
from cpvt_det.losses import HungarianMatcher, SetCriterion, make_classification
from cpvt_det.losses.classification import Classification
from cpvt_det.models import DETR, DeformableDETR, DeformableTransformer, ResNetBackbone, Transformer
from cpvt_det.position.registry import PositionEncoding, build_position, position_options
from cpvt_det.postprocess import PostProcessor

DETECTOR_REGISTRY = Registry("DETECTOR")
"""``MODEL.META_ARCHITECTURE`` -> a function from a config (and, for backbones from elsewhere, the backbone) to the detector's
constructor and its arguments."""


def build_detector(cfg: CfgNode) -> nn.Module:
    """Build the detector of a config, with random weights.

    Returns:
        A module: ``detector(images (B, 3, H, W), padding_mask (B, H, W)) -> Predictions``.

    Raises:
        ConfigError: what the config asks for cannot be built.
    """
    detector, arguments = detector_arguments(cfg)
    with config_errors("MODEL"):
        return detector(**arguments)


def detector_arguments(cfg: CfgNode, backbone: nn.Module | None = None) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of the detector of a config and its keyword arguments.

    Args:
        cfg: the config.
        backbone: one to use instead of the config's.

    Raises:
        ConfigError: what the config asks for cannot be built.
    """
    name = cfg.MODEL.META_ARCHITECTURE
    known = [known for known, _ in DETECTOR_REGISTRY]
    if name not in known:
        raise UnknownNameError("MODEL.META_ARCHITECTURE", name, known)
    with config_errors("MODEL"):
        return DETECTOR_REGISTRY.get(name)(cfg, backbone)


def _detr(cfg: CfgNode, backbone: nn.Module | None) -> tuple[type[nn.Module], dict[str, Any]]:
    detr, stages = cfg.MODEL.DETR, cfg.MODEL.BACKBONE.STAGES
    if len(stages) != 1:
        raise ConfigError(f"CPVTDetr works on one map, MODEL.BACKBONE.STAGES is {list(stages)}")
    if cfg.MODEL.DEFORMABLE.TWO_STAGE or cfg.MODEL.DEFORMABLE.BOX_REFINEMENT:
        raise ConfigError(
            "MODEL.DEFORMABLE is for CPVTDeformableDetr: set MODEL.META_ARCHITECTURE, or TWO_STAGE and BOX_REFINEMENT False"
        )
    return DETR, {
        **_shared_arguments(cfg, backbone, num_levels=1),
        "transformer": Transformer(
            **_transformer_arguments(cfg),
            pre_norm=detr.PRE_NORM,
        ),
        "decoder_position": _decoder_position(cfg, detr.HIDDEN_DIM),
    }


def _deformable_detr(cfg: CfgNode, backbone: nn.Module | None) -> tuple[type[nn.Module], dict[str, Any]]:
    detr, deformable = cfg.MODEL.DETR, cfg.MODEL.DEFORMABLE
    if detr.PRE_NORM:
        raise ConfigError("MODEL.DETR.PRE_NORM is for CPVTDetr; Deformable-DETR's norms stand after the residuals")
    if cfg.MODEL.POSITION.DECODER != get_cfg().MODEL.POSITION.DECODER:
        raise ConfigError(
            "MODEL.POSITION.DECODER is for CPVTDetr; Deformable-DETR's decoder has no keys that a position is added to"
        )
    if deformable.TWO_STAGE and cfg.MODEL.CRITERION.CLASSIFICATION != "focal":
        raise ConfigError("MODEL.DEFORMABLE.TWO_STAGE ranks proposals by a sigmoid: set MODEL.CRITERION.CLASSIFICATION focal")
    return DeformableDETR, {
        **_shared_arguments(cfg, backbone, deformable.NUM_LEVELS),
        "transformer": DeformableTransformer(
            **_transformer_arguments(cfg),
            num_levels=deformable.NUM_LEVELS,
            encoder_points=deformable.ENC_POINTS,
            decoder_points=deformable.DEC_POINTS,
            implementation=deformable.IMPLEMENTATION,
        ),
        "num_levels": deformable.NUM_LEVELS,
        "box_refinement": deformable.BOX_REFINEMENT,
        "two_stage": deformable.TWO_STAGE,
        "proposal_nms": deformable.PROPOSAL_NMS,
        "mask_padding": cfg.MODEL.BACKBONE.MASK_PADDING,
    }


def _transformer_arguments(cfg: CfgNode) -> dict[str, Any]:
    detr = cfg.MODEL.DETR
    return {
        "encoder_layers": detr.ENC_LAYERS,
        "decoder_layers": detr.DEC_LAYERS,
        "channels": detr.HIDDEN_DIM,
        "num_heads": detr.NHEADS,
        "ffn_channels": detr.DIM_FEEDFORWARD,
        "dropout": detr.DROPOUT,
        "checkpointing": cfg.MODEL.CHECKPOINTING,
    }


def _shared_arguments(cfg: CfgNode, backbone: nn.Module | None, num_levels: int) -> dict[str, Any]:
    detr, classification = cfg.MODEL.DETR, build_classification(cfg)
    return {
        "backbone": backbone or build_backbone(cfg),
        "position": build_encoder_position(cfg, detr.HIDDEN_DIM, num_levels, detr.ENC_LAYERS),
        "channels": detr.HIDDEN_DIM,
        "num_queries": detr.NUM_OBJECT_QUERIES,
        "num_logits": classification.num_logits,
        "prior_probability": classification.prior_probability,
        "pixel_mean": cfg.MODEL.PIXEL_MEAN,
        "pixel_std": cfg.MODEL.PIXEL_STD,
        "frozen": cfg.MODEL.FREEZE,
    }


DETECTOR_REGISTRY._do_register("CPVTDetr", _detr)
DETECTOR_REGISTRY._do_register("CPVTDeformableDetr", _deformable_detr)


def build_backbone(cfg: CfgNode) -> ResNetBackbone:
    """The ResNet of ``MODEL.BACKBONE``, with random weights."""
    backbone = cfg.MODEL.BACKBONE
    return ResNetBackbone(
        backbone.NAME,
        norm=backbone.NORM,
        stages=backbone.STAGES,
        dilation=backbone.DC5,
        freeze_at=backbone.FREEZE_AT,
        mask_padding=backbone.MASK_PADDING,
        width=backbone.WIDTH,
        checkpointing=cfg.MODEL.CHECKPOINTING,
    )


def build_encoder_position(cfg: CfgNode, channels: int, num_levels: int, num_layers: int) -> PositionEncoding:
    """The encoding of ``MODEL.POSITION.NAME``, with those of the node's other keys that it takes.

    Raises:
        UnknownNameError: an unknown name, or a key of the user's own that the encoding does not take.
    """
    node = cfg.MODEL.POSITION
    defaults = get_cfg().MODEL.POSITION
    known = {key: value for key, value in node.items() if key not in ("NAME", "DECODER")}
    with contextlib.suppress(KeyError):  # an unknown name: build_position says it
        taken = position_options(node.NAME)
        known = {key: value for key, value in known.items() if key.lower() in taken or key not in defaults}
    options = {key.lower(): value for key, value in known.items()}
    return build_position(node.NAME, channels, num_levels, num_layers, **options)


def _decoder_position(cfg: CfgNode, channels: int) -> PositionEncoding | str | None:
    node = cfg.MODEL.POSITION
    if node.DECODER not in ("sine", "same", "none"):
        raise UnknownNameError("MODEL.POSITION.DECODER", node.DECODER, ("sine", "same", "none"))
    if node.DECODER == "sine":
        # The encoder's map, where it is the same one, is not computed twice.
        return "same" if node.NAME in ("sine", "sine+peg") else build_position("sine", channels)
    return None if node.DECODER == "none" else "same"


def build_classification(cfg: CfgNode) -> Classification:
    """Softmax or focal, for ``MODEL.NUM_CLASSES`` classes.

    Raises:
        ConfigError: a number of classes that is not known yet.
    """
    criterion, num_classes = cfg.MODEL.CRITERION, cfg.MODEL.NUM_CLASSES
    if num_classes < 1:
        raise ConfigError(
            f"MODEL.NUM_CLASSES is {num_classes}; training and evaluation read it from the data, elsewhere set it to the number "
            "of classes"
        )
    options = {
        "softmax": {"background_weight": criterion.BACKGROUND_WEIGHT},
        "focal": {"alpha": criterion.FOCAL_ALPHA, "gamma": criterion.FOCAL_GAMMA},
    }
    return make_classification(criterion.CLASSIFICATION, num_classes, **options.get(criterion.CLASSIFICATION, {}))


def build_criterion(cfg: CfgNode) -> SetCriterion:
    """The set loss of ``MODEL.CRITERION``."""
    node = cfg.MODEL.CRITERION
    matcher = HungarianMatcher(build_classification(cfg), node.CLASS_COST, node.L1_COST, node.GIOU_COST)
    with config_errors("MODEL.CRITERION"):
        return SetCriterion(matcher, node.CLASS_WEIGHT, node.L1_WEIGHT, node.GIOU_WEIGHT, node.PROPOSAL_MATCHES)


def build_postprocessor(cfg: CfgNode) -> PostProcessor:
    """Predictions -> detections, at most ``TEST.DETECTIONS_PER_IMAGE``."""
    with config_errors("TEST.DETECTIONS_PER_IMAGE"):
        return PostProcessor(build_classification(cfg), cfg.TEST.DETECTIONS_PER_IMAGE)


def build_device(cfg: CfgNode) -> torch.device:
    """``MODEL.DEVICE``; of several GPUs the one of this process.

    Raises:
        ConfigError: a device that is not there.
    """
    name = cfg.MODEL.DEVICE
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with config_errors("MODEL.DEVICE"):
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"MODEL.DEVICE is {name}, but torch sees no CUDA GPU; use cpu or auto, or --num-gpus 0")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", distributed.rank() % torch.cuda.device_count())))
    return device
