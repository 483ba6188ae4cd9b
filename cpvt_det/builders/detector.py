# SPDX-License-Identifier: Apache-2.0
"""``MODEL`` -> detector or classifier."""

from collections.abc import Callable, Sequence
from typing import Any

from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det.builders.parts import (
    build_backbone,
    build_classification,
    build_decoder_position,
    build_encoder_position,
    count_classes,
    options_of,
    own_options,
    pixel_statistics,
)
from cpvt_det.builders.unused import UNUSED_BY, refuse_unused
from cpvt_det.config import get_cfg, key_names
from cpvt_det.errors import ConfigError, config_errors
from cpvt_det.fast import accelerate
from cpvt_det.models import (
    DETR,
    NECK_REGISTRY,
    QUERY_REGISTRY,
    Classifier,
    DeformableDETR,
    DeformableTransformer,
    ImageModel,
    Transformer,
)
from cpvt_det.models.denoising import ContrastiveDenoising
from cpvt_det.registry import PartRegistry

OF_PROPOSALS = ("proposals", "mixed")
"""The query sources that start from the encoder's proposals."""
OF_ONE_STAGE = ("learned", "anchors")
SIGMOIDS = "set MODEL.CRITERION.CLASSIFICATION to focal, or to another one with sigmoids (varifocal, mal, ia_bce)"
DETECTOR_REGISTRY = PartRegistry("DETECTOR", "MODEL.META_ARCHITECTURE", frozenset({"cfg", "backbone"}))
"""``MODEL.META_ARCHITECTURE`` -> a function from a config and a backbone (or ``None``, for the config's own) to the keyword
arguments of the detector's constructor; further keywords are options, keys of ``MODEL.DETECTOR``. See :func:`register_detector`."""


def _keys(*groups: str) -> list[str]:
    """Full names of all keys in groups of the config."""
    return [name for name in key_names(get_cfg()) if name.startswith(tuple(f"{group}." for group in groups))]


OF_CLASSIFIERS = _keys("MODEL.CLASSIFIER", "INPUT.CLASSIFY")
OF_DETECTORS = [
    *_keys(
        *("MODEL.NECK", "MODEL.POSITION", "MODEL.DETR", "MODEL.DEFORMABLE", "MODEL.QUERIES", "MODEL.CRITERION"),
        *("INPUT.RESIZE_CROP", "TEST.TILES"),
    ),
    *(f"INPUT.{side}_SIZE_{split}" for side in ("MIN", "MAX") for split in ("TRAIN", "TEST")),
    *(f"DATALOADER.{key}" for key in ("ASPECT_RATIO_GROUPING", "FILTER_EMPTY_ANNOTATIONS")),
    *(f"TEST.{key}" for key in ("DETECTIONS_PER_IMAGE", "NMS", "EVALUATOR", "PICTURE_THRESHOLD")),
    "SOLVER.POINTS_LR_MULTIPLIER",
]
"""Keys that only classifiers, or only detectors, take."""


def register_detector(name: str, detector: type[ImageModel], unused: Sequence[str] | None = None) -> Callable:
    """Register a detector's class, with the decorated function, which reads the config for it.

    Args:
        name: value of ``MODEL.META_ARCHITECTURE``; with detectron2 also the name of a meta architecture.
        detector: subclass of :class:`cpvt_det.models.Detector`, or of :class:`cpvt_det.models.Classifier`.
        unused: full names of keys that this detector does not take, as in ``MODEL.DETR.PRE_NORM``; refused where they differ from
            their defaults. ``None``: those of the registered detector that it is a subclass of.
    """

    def register(arguments: Callable[[CfgNode, nn.Module | None], dict[str, Any]]) -> Callable:
        arguments.detector = detector
        parents = [other for other, made in DETECTOR_REGISTRY if issubclass(detector, made.detector) and other in UNUSED_BY]
        if unused is not None or parents:
            UNUSED_BY[name] = UNUSED_BY[parents[-1]] if unused is None else unused
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
        return accelerate(detector(**arguments))


def detector_arguments(cfg: CfgNode, backbone: nn.Module | None = None) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of the detector of a config and its keyword arguments.

    Args:
        cfg: the config.
        backbone: backbone to use instead of the config's.

    Raises:
        ConfigError: a detector that cannot be built from the config.
    """
    name = cfg.MODEL.META_ARCHITECTURE
    detector, arguments = DETECTOR_REGISTRY.find(name).detector, DETECTOR_REGISTRY.with_options(name, own_options(cfg, "DETECTOR"))
    with config_errors("MODEL"):
        made = detector, arguments(cfg, backbone)
    refuse_unused(cfg)  # last, so that a misspelt name is reported as such
    return made


@register_detector(
    "CPVTDetr",
    DETR,
    unused=[
        *(f"MODEL.DEFORMABLE.{key}" for key in get_cfg().MODEL.DEFORMABLE if key != "PROPOSAL_NMS"),  # the query source's
        "MODEL.POSITION.SHARE_LEVELS",
        "SOLVER.POINTS_LR_MULTIPLIER",
        *OF_CLASSIFIERS,
    ],
)
def _detr_arguments(cfg: CfgNode, backbone: nn.Module | None) -> dict[str, Any]:
    detr, stages = cfg.MODEL.DETR, cfg.MODEL.BACKBONE.STAGES
    if len(stages) != 1:
        raise ConfigError(f"CPVTDetr uses one feature map, so MODEL.BACKBONE.STAGES must have one stage, got {list(stages)}")
    return {
        **shared_arguments(cfg, backbone, num_levels=1),
        "transformer": Transformer(**transformer_arguments(cfg), pre_norm=detr.PRE_NORM),
        "decoder_position": build_decoder_position(cfg, detr.HIDDEN_DIM),
    }


@register_detector("CPVTDeformableDetr", DeformableDETR, unused=["MODEL.DETR.PRE_NORM", "MODEL.POSITION.DECODER", *OF_CLASSIFIERS])
def _deformable_detr_arguments(cfg: CfgNode, backbone: nn.Module | None) -> dict[str, Any]:
    deformable, source = cfg.MODEL.DEFORMABLE, cfg.MODEL.QUERIES.NAME
    if source in (*OF_ONE_STAGE, *OF_PROPOSALS) and (source in OF_PROPOSALS) != deformable.TWO_STAGE:
        others = OF_ONE_STAGE if source in OF_PROPOSALS else OF_PROPOSALS
        way_out = f"set it to {not deformable.TWO_STAGE}, or the name to one of {', '.join(others)}"
        raise ConfigError(f"MODEL.QUERIES.NAME is {source!r}, but MODEL.DEFORMABLE.TWO_STAGE is {deformable.TWO_STAGE}; {way_out}")
    if deformable.MIXED_SUPERVISION and build_classification(cfg).prior_probability is None:
        raise ConfigError(f"MODEL.DEFORMABLE.MIXED_SUPERVISION matches by sigmoids: {SIGMOIDS}")
    return {
        **shared_arguments(cfg, backbone, deformable.NUM_LEVELS),
        "transformer": DeformableTransformer(
            **transformer_arguments(cfg),
            num_levels=deformable.NUM_LEVELS,
            encoder_points=deformable.ENC_POINTS,
            decoder_points=deformable.DEC_POINTS,
            implementation=deformable.IMPLEMENTATION,
            look_forward_twice=deformable.LOOK_FORWARD_TWICE,
            final_norm=deformable.FINAL_NORM,
            mixed_supervision=deformable.MIXED_SUPERVISION,
        ),
        "num_levels": deformable.NUM_LEVELS,
        "box_refinement": deformable.BOX_REFINEMENT,
        "two_stage": deformable.TWO_STAGE,
        "proposal_nms": deformable.PROPOSAL_NMS,
        "mask_padding": cfg.MODEL.BACKBONE.MASK_PADDING,
    }


@register_detector("CPVTClassifier", Classifier, unused=OF_DETECTORS)
def _classifier_arguments(cfg: CfgNode, backbone: nn.Module | None) -> dict[str, Any]:
    num_classes, backbone = count_classes(cfg), backbone or build_backbone(cfg)
    return {
        "backbone": backbone,
        "num_classes": num_classes,
        "pool": cfg.MODEL.CLASSIFIER.POOL,
        **pixel_statistics(cfg, backbone),
        "frozen": cfg.MODEL.FREEZE,
    }


def is_classifier(cfg: CfgNode) -> bool:
    """Whether ``MODEL.META_ARCHITECTURE`` is a classifier.

    Raises:
        UnknownNameError: a name that is not registered.
    """
    return issubclass(DETECTOR_REGISTRY.find(cfg.MODEL.META_ARCHITECTURE).detector, Classifier)


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
        "position": build_encoder_position(cfg, detr.HIDDEN_DIM, num_levels, detr.ENC_LAYERS, detr.NHEADS),
        "channels": detr.HIDDEN_DIM,
        "num_queries": detr.NUM_OBJECT_QUERIES,
        "num_logits": classification.num_logits,
        "prior_probability": classification.prior_probability,
        **pixel_statistics(cfg, backbone),
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
        arguments["neck"] = NECK_REGISTRY.build(cfg.MODEL.NECK.NAME, facts, own_options(cfg, "NECK"))
    source, two_stage = cfg.MODEL.QUERIES.NAME, facts["needs_references"] and cfg.MODEL.DEFORMABLE.TWO_STAGE
    if (source in OF_PROPOSALS or (two_stage and not source)) and classification.prior_probability is None:
        key = f"MODEL.QUERIES.NAME {source!r}" if source else "MODEL.DEFORMABLE.TWO_STAGE"
        raise ConfigError(f"{key} ranks proposals by a sigmoid: {SIGMOIDS}")
    if source:
        arguments["queries"] = QUERY_REGISTRY.build(source, facts, _query_options(cfg))
    return arguments


def _query_options(cfg: CfgNode) -> dict[str, Any]:
    """The keys of ``MODEL.QUERIES`` that its source takes; those of denoising as a module."""
    node = cfg.MODEL.QUERIES
    options = options_of(cfg, "QUERIES", QUERY_REGISTRY, node.NAME)
    if "denoising" in options:
        arguments = (cfg.MODEL.DETR.HIDDEN_DIM, cfg.MODEL.NUM_CLASSES, node.DENOISING, node.LABEL_NOISE, node.BOX_NOISE)
        options["denoising"] = ContrastiveDenoising(*arguments) if node.DENOISING else None
    return options
