# SPDX-License-Identifier: Apache-2.0
"""``MODEL`` -> detector, criterion, post-processing, device."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det import defaults, distributed
from cpvt_det.builders.unused import CLASSIFICATION_KEYS, UNUSED_BY, backbone_position, keyword_of, refuse_unused
from cpvt_det.config import flat_items, get_cfg, key_names
from cpvt_det.errors import ConfigError, UnknownNameError, config_errors
from cpvt_det.inference import ClassScores, PostProcessor
from cpvt_det.losses import CLASSIFICATION_REGISTRY, LOSS_REGISTRY, HungarianMatcher, OneToManyMatcher, SetCriterion
from cpvt_det.losses.classification import Classification
from cpvt_det.models import (
    BACKBONE_REGISTRY,
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
from cpvt_det.position import POSITION_REGISTRY, PositionEncoding, build_position
from cpvt_det.registry import PartRegistry

OF_PROPOSALS = ("proposals", "mixed")
"""The query sources that start from the encoder's proposals."""
OF_ONE_STAGE = ("learned", "anchors")
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
    *(f"TEST.{key}" for key in ("DETECTIONS_PER_IMAGE", "EVALUATOR", "PICTURE_THRESHOLD")),
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
        return detector(**arguments)


def detector_arguments(cfg: CfgNode, backbone: nn.Module | None = None) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of the detector of a config and its keyword arguments.

    Args:
        cfg: the config.
        backbone: backbone to use instead of the config's.

    Raises:
        ConfigError: a detector that cannot be built from the config.
    """
    name = cfg.MODEL.META_ARCHITECTURE
    detector, arguments = DETECTOR_REGISTRY.find(name).detector, DETECTOR_REGISTRY.with_options(name, _own_options(cfg, "DETECTOR"))
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
        "decoder_position": _decoder_position(cfg, detr.HIDDEN_DIM),
    }


@register_detector("CPVTDeformableDetr", DeformableDETR, unused=["MODEL.DETR.PRE_NORM", "MODEL.POSITION.DECODER", *OF_CLASSIFIERS])
def _deformable_detr_arguments(cfg: CfgNode, backbone: nn.Module | None) -> dict[str, Any]:
    deformable, source = cfg.MODEL.DEFORMABLE, cfg.MODEL.QUERIES.NAME
    if source in (*OF_ONE_STAGE, *OF_PROPOSALS) and (source in OF_PROPOSALS) != deformable.TWO_STAGE:
        leave = "leave the name empty: TWO_STAGE chooses between 'learned' and 'proposals'"
        way_out = {"mixed": "set it to True", "anchors": "set it to False"}.get(source, leave)
        raise ConfigError(f"MODEL.QUERIES.NAME is {source!r}, but MODEL.DEFORMABLE.TWO_STAGE is {deformable.TWO_STAGE}; {way_out}")
    if deformable.MIXED_SUPERVISION and build_classification(cfg).prior_probability is None:
        raise ConfigError("MODEL.DEFORMABLE.MIXED_SUPERVISION matches by sigmoids: set MODEL.CRITERION.CLASSIFICATION to focal")
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
    num_classes, backbone = _num_classes(cfg), backbone or build_backbone(cfg)
    return {
        "backbone": backbone,
        "num_classes": num_classes,
        "pool": cfg.MODEL.CLASSIFIER.POOL,
        **_pixel_statistics(cfg, backbone),
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
        **_pixel_statistics(cfg, backbone),
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
    source, two_stage = cfg.MODEL.QUERIES.NAME, facts["needs_references"] and cfg.MODEL.DEFORMABLE.TWO_STAGE
    if (source in OF_PROPOSALS or (two_stage and not source)) and classification.prior_probability is None:
        key = f"MODEL.QUERIES.NAME {source!r}" if source else "MODEL.DEFORMABLE.TWO_STAGE"
        raise ConfigError(f"{key} ranks proposals by a sigmoid: set MODEL.CRITERION.CLASSIFICATION to focal")
    if source:
        arguments["queries"] = QUERY_REGISTRY.build(source, facts, _query_options(cfg))
    return arguments


def _query_options(cfg: CfgNode) -> dict[str, Any]:
    """The keys of ``MODEL.QUERIES`` that its source takes; those of denoising as a module."""
    node = cfg.MODEL.QUERIES
    options = _options(cfg, "QUERIES", QUERY_REGISTRY, node.NAME)
    if "denoising" in options:
        arguments = (cfg.MODEL.DETR.HIDDEN_DIM, cfg.MODEL.NUM_CLASSES, node.DENOISING, node.LABEL_NOISE, node.BOX_NOISE)
        options["denoising"] = ContrastiveDenoising(*arguments) if node.DENOISING else None
    return options


def build_backbone(cfg: CfgNode) -> nn.Module:
    """The backbone of ``MODEL.BACKBONE``, with random weights.

    Raises:
        UnknownNameError: an unknown name, or a key of the user's own that the backbone does not take.
        ConfigError: a transformer whose patches are larger than images will be.
    """
    name = cfg.MODEL.BACKBONE.NAME
    facts, options = {"checkpointing": cfg.MODEL.CHECKPOINTING}, _options(cfg, "BACKBONE", BACKBONE_REGISTRY, name)
    if "position" in options:
        _require_patches(cfg)
        position = backbone_position(cfg)
        own = part_options(cfg.MODEL.BACKBONE.POSITION, get_cfg().MODEL.BACKBONE.POSITION, POSITION_REGISTRY, position)
        options["position"] = functools.partial(build_position, position, **own)
    return BACKBONE_REGISTRY.build(name, facts, options)


def _require_patches(cfg: CfgNode) -> None:
    """Refuse sizes of images below that of a patch; 0 means no resize."""
    patch, sizes = cfg.MODEL.BACKBONE.PATCH_SIZE, dict(flat_items(cfg.INPUT, "INPUT."))
    for key in ("MIN_SIZE_TRAIN", "MAX_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TEST", "CLASSIFY.SIZE", "CLASSIFY.TEST_SIZE"):
        value = sizes.get(f"INPUT.{key}", ())
        small = [side for side in (value if isinstance(value, (list, tuple)) else [value]) if 0 < side < patch]
        if small:
            raise ConfigError(
                f"INPUT.{key} makes images of {small[0]} pixels, smaller than a patch of {patch}: use larger images, or set "
                "MODEL.BACKBONE.PATCH_SIZE"
            )


def _pixel_statistics(cfg: CfgNode, backbone: nn.Module) -> dict[str, Sequence[float]]:
    """``MODEL.PIXEL_MEAN`` and ``PIXEL_STD``, or where both have their defaults, those that the backbone knows, if any."""
    given = {"pixel_mean": cfg.MODEL.PIXEL_MEAN, "pixel_std": cfg.MODEL.PIXEL_STD}
    are_defaults = (list(given["pixel_mean"]), list(given["pixel_std"])) == (list(defaults.PIXEL_MEAN), list(defaults.PIXEL_STD))
    return {name: getattr(backbone, name, value) if are_defaults else value for name, value in given.items()}


def build_encoder_position(
    cfg: CfgNode, channels: int, num_levels: int, num_layers: int, num_heads: int = defaults.HEADS
) -> PositionEncoding:
    """The encoding of ``MODEL.POSITION.NAME``, with the other keys of the node that it accepts.

    Raises:
        UnknownNameError: an unknown name, or a key of the user's own that the encoding does not take.
    """
    name = cfg.MODEL.POSITION.NAME
    options = _options(cfg, "POSITION", POSITION_REGISTRY, name)
    return build_position(name, channels, num_levels, num_layers, num_heads, **options)


def _options(cfg: CfgNode, node: str, registry: PartRegistry, name: str, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """The keys of a node of ``MODEL`` that a part takes, as keywords; of our keys only ``keys``, by default all."""
    return part_options(cfg.MODEL[node], get_cfg().MODEL[node], registry, name, keys)


def part_options(
    values: CfgNode, defaults: CfgNode, registry: PartRegistry, name: str, keys: Iterable[str] | None = None
) -> dict[str, Any]:
    """The keys of a part's node that it takes, as keywords, and those that are not in our defaults.

    Args:
        values: the node.
        defaults: the node in the default config.
        registry: registry of the part.
        name: name of the part.
        keys: those of our keys that may apply; ``None``: all.
    """
    taken = registry.parameters(name)
    known = {keyword_of(key): values[key] for key in keys or values if keyword_of(key) in taken}
    return known | {key.lower(): value for key, value in values.items() if key not in defaults}


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
        same = node.NAME in ("sine", "sine+peg")
        return "same" if same else build_position("sine", channels, temperature=node.TEMPERATURE)
    return None if node.DECODER == "none" else "same"


def build_classification(cfg: CfgNode) -> Classification:
    """Softmax, focal, or a kind that the user has registered, for ``MODEL.NUM_CLASSES`` classes.

    Raises:
        ConfigError: a number of classes below 1: it is not known yet.
    """
    criterion, num_classes = cfg.MODEL.CRITERION, _num_classes(cfg)
    name = criterion.CLASSIFICATION
    options = _options(cfg, "CRITERION", CLASSIFICATION_REGISTRY, name, CLASSIFICATION_KEYS)
    return CLASSIFICATION_REGISTRY.build(name, {"num_classes": num_classes}, options)


def _num_classes(cfg: CfgNode) -> int:
    if cfg.MODEL.NUM_CLASSES < 1:
        raise ConfigError(
            f"MODEL.NUM_CLASSES is {cfg.MODEL.NUM_CLASSES}; set it to the number of classes; only training and evaluation read it "
            "from data"
        )
    return cfg.MODEL.NUM_CLASSES


def build_criterion(cfg: CfgNode) -> SetCriterion:
    """The criterion of ``MODEL.CRITERION``: matcher and losses."""
    node = cfg.MODEL.CRITERION
    matcher = HungarianMatcher(build_classification(cfg), node.CLASS_COST, node.L1_COST, node.GIOU_COST)
    for entry in node.LOSSES:
        kinds = [type(part) for part in entry] if isinstance(entry, (list, tuple)) else []
        if kinds[:2] not in ([str, float], [str, int]) or kinds[2:] not in ([], [dict]):
            raise ConfigError(
                "MODEL.CRITERION.LOSSES must contain entries [name of a loss, weight] or [name, weight, {option: value}], "
                f"got {entry!r}"
            )
    losses = {name: (weight, LOSS_REGISTRY.with_options(name, *options)) for name, weight, *options in node.LOSSES}
    weights = (node.CLASS_WEIGHT, node.L1_WEIGHT, node.GIOU_WEIGHT)
    with config_errors("MODEL.CRITERION"):
        many = OneToManyMatcher(node.MANY_MATCHES, node.MANY_THRESHOLD), node.MANY_CLASS_WEIGHT
        return SetCriterion(matcher, *weights, node.PROPOSAL_MATCHES, losses, node.HYBRID_MATCHES, *many)


def build_postprocessor(cfg: CfgNode) -> PostProcessor:
    """Predictions -> detections, at most ``TEST.DETECTIONS_PER_IMAGE``.

    Raises:
        ConfigError: a classifier, or no detection.
    """
    if is_classifier(cfg):
        raise ConfigError(f"MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE!r} is no detector; set TASK to classification")
    with config_errors("TEST.DETECTIONS_PER_IMAGE"):
        return PostProcessor(build_classification(cfg), cfg.TEST.DETECTIONS_PER_IMAGE)


def build_decoder(cfg: CfgNode) -> PostProcessor | ClassScores:
    """What decodes the answers of a model: :func:`build_postprocessor`, or for a classifier its scores."""
    return ClassScores() if is_classifier(cfg) else build_postprocessor(cfg)


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
