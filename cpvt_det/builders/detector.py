# SPDX-License-Identifier: Apache-2.0
"""``MODEL`` -> detector, criterion, post-processing, device."""

import os
from collections.abc import Callable
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det import distributed
from cpvt_det.config import get_cfg
from cpvt_det.errors import ConfigError, UnknownNameError, config_errors
from cpvt_det.losses import CLASSIFICATION_REGISTRY, HungarianMatcher, SetCriterion
from cpvt_det.losses.classification import Classification
from cpvt_det.models import (
    BACKBONE_REGISTRY,
    DETR,
    NECK_REGISTRY,
    QUERY_REGISTRY,
    DeformableDETR,
    DeformableTransformer,
    Detector,
    Transformer,
)
from cpvt_det.position import POSITION_REGISTRY, PositionEncoding, build_position
from cpvt_det.postprocess import PostProcessor
from cpvt_det.registry import PartRegistry

DETECTOR_REGISTRY = PartRegistry("DETECTOR", "MODEL.META_ARCHITECTURE")
"""``MODEL.META_ARCHITECTURE`` -> a function from a config and a backbone (or ``None``, for the config's own) to the keyword
arguments of the detector's constructor; see :func:`register_detector`."""


def register_detector(name: str, detector: type[Detector]) -> Callable:
    """Register a detector's class, with the decorated function, which reads the config for it.

    Args:
        name: value of ``MODEL.META_ARCHITECTURE``; with detectron2 also the name of a meta architecture.
        detector: subclass of :class:`cpvt_det.models.Detector`.
    """

    def register(arguments: Callable[[CfgNode, nn.Module | None], dict[str, Any]]) -> Callable:
        arguments.detector = detector
        return DETECTOR_REGISTRY.register_as(name)(arguments)

    return register


def build_detector(cfg: CfgNode) -> nn.Module:
    """Build the detector of a config, with random weights.

    Returns:
        A module: ``detector(images (B, 3, H, W), padding_mask (B, H, W)) -> Predictions``.

    Raises:
        ConfigError: a detector that cannot be built from the config.
    """
    detector, arguments = detector_arguments(cfg)
    with config_errors("MODEL"):
        return detector(**arguments)


def detector_arguments(cfg: CfgNode, backbone: nn.Module | None = None) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of the detector of a config and its keyword arguments.

    Args:
        cfg: the config.
        backbone: backbone to use instead of the config's.

    Raises:
        ConfigError: a detector that cannot be built from the config.
    """
    arguments = DETECTOR_REGISTRY.find(cfg.MODEL.META_ARCHITECTURE)
    with config_errors("MODEL"):
        return arguments.detector, arguments(cfg, backbone)


@register_detector("CPVTDetr", DETR)
def _detr_arguments(cfg: CfgNode, backbone: nn.Module | None) -> dict[str, Any]:
    detr, stages = cfg.MODEL.DETR, cfg.MODEL.BACKBONE.STAGES
    if len(stages) != 1:
        raise ConfigError(f"CPVTDetr uses one feature map, so MODEL.BACKBONE.STAGES must have one stage, got {list(stages)}")
    if cfg.MODEL.DEFORMABLE.TWO_STAGE or cfg.MODEL.DEFORMABLE.BOX_REFINEMENT:
        raise ConfigError(
            "MODEL.DEFORMABLE is for CPVTDeformableDetr: set MODEL.META_ARCHITECTURE, or TWO_STAGE and BOX_REFINEMENT False"
        )
    return {
        **shared_arguments(cfg, backbone, num_levels=1),
        "transformer": Transformer(**transformer_arguments(cfg), pre_norm=detr.PRE_NORM),
        "decoder_position": _decoder_position(cfg, detr.HIDDEN_DIM),
    }


@register_detector("CPVTDeformableDetr", DeformableDETR)
def _deformable_detr_arguments(cfg: CfgNode, backbone: nn.Module | None) -> dict[str, Any]:
    detr, deformable = cfg.MODEL.DETR, cfg.MODEL.DEFORMABLE
    if detr.PRE_NORM:
        raise ConfigError("MODEL.DETR.PRE_NORM is for CPVTDetr; Deformable-DETR's norms stand after the residuals")
    if cfg.MODEL.POSITION.DECODER != get_cfg().MODEL.POSITION.DECODER:
        raise ConfigError(
            "MODEL.POSITION.DECODER is for CPVTDetr; Deformable-DETR's decoder has no keys that a position is added to"
        )
    if deformable.TWO_STAGE and cfg.MODEL.CRITERION.CLASSIFICATION == "softmax":
        raise ConfigError("MODEL.DEFORMABLE.TWO_STAGE ranks proposals by a sigmoid: set MODEL.CRITERION.CLASSIFICATION focal")
    return {
        **shared_arguments(cfg, backbone, deformable.NUM_LEVELS),
        "transformer": DeformableTransformer(
            **transformer_arguments(cfg),
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


def transformer_arguments(cfg: CfgNode) -> dict[str, Any]:
    """``MODEL.DETR`` as the keywords that both transformers share."""
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


def shared_arguments(cfg: CfgNode, backbone: nn.Module | None, num_levels: int) -> dict[str, Any]:
    """The keywords that the constructors of all detectors share, with the backbone; neck and queries are built only if
    ``MODEL.NECK.NAME`` and ``MODEL.QUERIES.NAME`` are set."""
    detr, classification = cfg.MODEL.DETR, build_classification(cfg)
    backbone = backbone or build_backbone(cfg)
    arguments = {
        "backbone": backbone,
        "position": build_encoder_position(cfg, detr.HIDDEN_DIM, num_levels, detr.ENC_LAYERS),
        "channels": detr.HIDDEN_DIM,
        "num_queries": detr.NUM_OBJECT_QUERIES,
        "num_logits": classification.num_logits,
        "prior_probability": classification.prior_probability,
        "pixel_mean": cfg.MODEL.PIXEL_MEAN,
        "pixel_std": cfg.MODEL.PIXEL_STD,
        "frozen": cfg.MODEL.FREEZE,
    }
    facts = {
        **arguments,
        "map_channels": backbone.channels,
        "map_strides": backbone.strides,
        "num_levels": num_levels,
        "mask_padding": cfg.MODEL.BACKBONE.MASK_PADDING,
        "nms_threshold": cfg.MODEL.DEFORMABLE.PROPOSAL_NMS,
        "needs_references": DETECTOR_REGISTRY.find(cfg.MODEL.META_ARCHITECTURE).detector.needs_references,
    }
    if cfg.MODEL.NECK.NAME:
        arguments["neck"] = NECK_REGISTRY.build(cfg.MODEL.NECK.NAME, facts, _own_options(cfg, "NECK"))
    if cfg.MODEL.QUERIES.NAME:
        arguments["queries"] = QUERY_REGISTRY.build(cfg.MODEL.QUERIES.NAME, facts, _own_options(cfg, "QUERIES"))
    return arguments


def build_backbone(cfg: CfgNode) -> nn.Module:
    """The backbone of ``MODEL.BACKBONE``, with random weights.

    Raises:
        UnknownNameError: an unknown name, or a key of the user's own that the backbone does not take.
    """
    node = cfg.MODEL.BACKBONE
    taken = BACKBONE_REGISTRY.parameters(node.NAME)
    known = {key.lower(): value for key, value in node.items() if key.lower() in taken}
    return BACKBONE_REGISTRY.build(
        node.NAME, {"checkpointing": cfg.MODEL.CHECKPOINTING, "dilation": node.DC5}, known | _own_options(cfg, "BACKBONE")
    )


def build_encoder_position(cfg: CfgNode, channels: int, num_levels: int, num_layers: int) -> PositionEncoding:
    """The encoding of ``MODEL.POSITION.NAME``, with the other keys of the node that it accepts.

    Raises:
        UnknownNameError: an unknown name, or a key of the user's own that the encoding does not take.
    """
    node, taken = cfg.MODEL.POSITION, POSITION_REGISTRY.parameters(cfg.MODEL.POSITION.NAME)
    known = {key.lower(): value for key, value in node.items() if key.lower() in taken}
    return build_position(node.NAME, channels, num_levels, num_layers, **known | _own_options(cfg, "POSITION"))


def _own_options(cfg: CfgNode, node: str) -> dict[str, Any]:
    """The keys of a node of ``MODEL`` that are not in our defaults, as keywords: options of a user's own part."""
    defaults = get_cfg().MODEL[node]
    return {key.lower(): value for key, value in cfg.MODEL[node].items() if key not in defaults}


def _decoder_position(cfg: CfgNode, channels: int) -> PositionEncoding | str | None:
    node = cfg.MODEL.POSITION
    if node.DECODER not in ("sine", "same", "none"):
        raise UnknownNameError("MODEL.POSITION.DECODER", node.DECODER, ("sine", "same", "none"))
    if node.DECODER == "sine":
        # If the encoder has the same map, it is not computed twice.
        return "same" if node.NAME in ("sine", "sine+peg") else build_position("sine", channels)
    return None if node.DECODER == "none" else "same"


def build_classification(cfg: CfgNode) -> Classification:
    """Softmax, focal, or a kind that the user has registered, for ``MODEL.NUM_CLASSES`` classes.

    Raises:
        ConfigError: a number of classes below 1: it is not known yet.
    """
    criterion, num_classes = cfg.MODEL.CRITERION, cfg.MODEL.NUM_CLASSES
    if num_classes < 1:
        raise ConfigError(
            f"MODEL.NUM_CLASSES is {num_classes}; set it to the number of classes; only training and evaluation read it from data"
        )
    known = {
        "background_weight": criterion.BACKGROUND_WEIGHT,
        "alpha": criterion.FOCAL_ALPHA,
        "gamma": criterion.FOCAL_GAMMA,
    }
    taken = CLASSIFICATION_REGISTRY.parameters(criterion.CLASSIFICATION)
    options = {name: value for name, value in known.items() if name in taken} | _own_options(cfg, "CRITERION")
    return CLASSIFICATION_REGISTRY.build(criterion.CLASSIFICATION, {"num_classes": num_classes}, options)


def build_criterion(cfg: CfgNode) -> SetCriterion:
    """The criterion of ``MODEL.CRITERION``: matcher and losses."""
    node = cfg.MODEL.CRITERION
    matcher = HungarianMatcher(build_classification(cfg), node.CLASS_COST, node.L1_COST, node.GIOU_COST)
    for entry in node.LOSSES:
        kinds = [type(part) for part in entry] if isinstance(entry, (list, tuple)) else []
        if kinds not in ([str, float], [str, int]):
            raise ConfigError(f"MODEL.CRITERION.LOSSES must contain pairs [name of a loss, weight], got {entry!r}")
    weights = (node.CLASS_WEIGHT, node.L1_WEIGHT, node.GIOU_WEIGHT)
    with config_errors("MODEL.CRITERION"):
        return SetCriterion(matcher, *weights, node.PROPOSAL_MATCHES, losses=dict(node.LOSSES))


def build_postprocessor(cfg: CfgNode) -> PostProcessor:
    """Predictions -> detections, at most ``TEST.DETECTIONS_PER_IMAGE``."""
    with config_errors("TEST.DETECTIONS_PER_IMAGE"):
        return PostProcessor(build_classification(cfg), cfg.TEST.DETECTIONS_PER_IMAGE)


def build_device(cfg: CfgNode) -> torch.device:
    """``MODEL.DEVICE``; with several GPUs, the GPU of this process.

    Raises:
        ConfigError: a device that does not exist.
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
