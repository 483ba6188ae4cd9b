# SPDX-License-Identifier: Apache-2.0
"""Build a detector or a classifier from ``MODEL``, and the object that decodes its outputs."""

from collections.abc import Callable, Sequence
from typing import Any

from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det import models
from cpvt_det.builders.parts import (
    build_backbone,
    build_classification,
    build_encoder_position,
    count_classes,
    pixel_statistics,
    require_larger_images,
)
from cpvt_det.common import defaults
from cpvt_det.common.errors import ConfigError, UnknownNameError, config_errors
from cpvt_det.common.registry import PartRegistry, options_of
from cpvt_det.evaluation.answers import ClassScores, PostProcessor
from cpvt_det.fast import accelerate
from cpvt_det.losses import CLASSIFICATION_REGISTRY
from cpvt_det.models.deformable_detr import DeformableDecoder
from cpvt_det.models.denoising import ContrastiveDenoising
from cpvt_det.models.encoder import Encoder
from cpvt_det.models.real_time_detr import NormedNeck
from cpvt_det.position import POSITION_REGISTRY, build_position

OF_PROPOSALS = ("proposals", "mixed")
"""The query sources that start from the encoder's proposals."""
OF_ONE_STAGE = ("learned", "anchors")
SIGMOIDS = "set MODEL.CRITERION.CLASSIFICATION.NAME to focal or another one that uses sigmoids (varifocal, mal, ia_bce)"
DETECTOR_REGISTRY = PartRegistry("DETECTOR", "MODEL.META_ARCHITECTURE", frozenset({"cfg", "backbone"}))
"""``MODEL.META_ARCHITECTURE`` -> a function that takes a config and a backbone (or ``None`` for the config's own) and returns the
keyword arguments of the detector's constructor. Its other keywords are options, which are keys of ``MODEL.DETECTOR``; see
:func:`register_detector`."""
PART_REGISTRIES = {
    "DETECTOR": DETECTOR_REGISTRY,
    "BACKBONE": models.BACKBONE_REGISTRY,
    "NECK": models.NECK_REGISTRY,
    "POSITION": POSITION_REGISTRY,
    "BACKBONE.POSITION": POSITION_REGISTRY,
    "QUERIES": models.QUERY_REGISTRY,
    "CRITERION.CLASSIFICATION": CLASSIFICATION_REGISTRY,
}
"""Node of ``MODEL`` -> registry of the parts whose options the node takes."""


def register_detector(name: str, detector: type[models.ImageModel]) -> Callable:
    """Register a detector's class together with the decorated function, which reads the arguments of the class from the config.

    Args:
        name: value of ``MODEL.META_ARCHITECTURE``; with detectron2, it is also the name of a meta-architecture there.
        detector: subclass of :class:`cpvt_det.models.Detector`, or of :class:`cpvt_det.models.Classifier`.
    """

    def register(arguments: Callable[..., dict[str, Any]]) -> Callable:
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
    arguments = DETECTOR_REGISTRY.with_options(name, options_of(cfg.MODEL.DETECTOR))
    with config_errors("MODEL"):
        return DETECTOR_REGISTRY.find(name).detector, arguments(cfg, backbone)


@register_detector("CPVTDetr", models.DETR)
def _detr_arguments(
    cfg: CfgNode, backbone: nn.Module | None, *, pre_norm: bool = False, decoder_position: str = "sine"
) -> dict[str, Any]:
    """DETR.

    Args:
        pre_norm: whether norms come before attention and feed-forward network instead of after them.
        decoder_position: encoding of the keys in the decoder: sine, same (as in the encoder) or none.
    """
    stages, encoding = cfg.MODEL.BACKBONE.STAGES, cfg.MODEL.POSITION
    if len(stages) != 1:
        raise ConfigError(f"CPVTDetr uses one feature map, so MODEL.BACKBONE.STAGES must have one stage, got {list(stages)}")
    arguments = {
        **shared_arguments(cfg, backbone, num_levels=1),
        "transformer": models.Transformer(**transformer_arguments(cfg), pre_norm=pre_norm),
    }
    if decoder_position not in ("sine", "same", "none"):
        raise UnknownNameError("MODEL.DETECTOR.DECODER_POSITION", decoder_position, ("sine", "same", "none"))
    arguments["decoder_position"] = None if decoder_position == "none" else "same"
    if decoder_position == "sine" and encoding.NAME not in ("sine", "sine+peg"):  # these two share the encoder's map
        temperature = {"temperature": encoding.TEMPERATURE} if encoding.get("TEMPERATURE") else {}
        arguments["decoder_position"] = build_position("sine", cfg.MODEL.DETR.HIDDEN_DIM, **temperature)
    return arguments


@register_detector("CPVTDeformableDetr", models.DeformableDETR)
def _deformable_detr_arguments(
    cfg: CfgNode,
    backbone: nn.Module | None,
    *,
    num_levels: int = defaults.LEVELS,
    enc_points: int = defaults.POINTS,
    dec_points: int = defaults.POINTS,
    box_refinement: bool = False,
    two_stage: bool = False,
    look_forward_twice: bool = False,
    final_norm: bool = False,
    eval_layers: int = 0,
    implementation: str = "auto",
) -> dict[str, Any]:
    """Deformable-DETR and its extensions.

    Args:
        num_levels: number of feature levels: the maps of BACKBONE.STAGES, then coarser levels made from the last map.
        enc_points, dec_points: sampling points per head and level, in the encoder and the decoder respectively.
        box_refinement: whether every decoder layer corrects the boxes of the previous layer.
        two_stage: whether queries come from the encoder's best proposals; needs box_refinement.
        look_forward_twice: whether a layer's loss also trains the previous layer's boxes (DINO); needs box_refinement.
        final_norm: whether there is one norm, shared by all decoder layers, before their heads (DINO).
        eval_layers: number of decoder layers, from the first, that run in evaluation and prediction; 0 for all.
        implementation: kernel of deformable attention: auto, numba, triton, eager, export or grid_sample.
    """
    source = cfg.MODEL.QUERIES.NAME
    if source in (*OF_ONE_STAGE, *OF_PROPOSALS) and (source in OF_PROPOSALS) != two_stage:
        others = OF_ONE_STAGE if source in OF_PROPOSALS else OF_PROPOSALS
        way_out = f"set TWO_STAGE to {not two_stage}, or NAME to one of {', '.join(others)}"
        raise ConfigError(f"MODEL.QUERIES.NAME is {source!r}, but MODEL.DETECTOR.TWO_STAGE is {two_stage}; {way_out}")
    if look_forward_twice and not box_refinement:
        raise ConfigError("MODEL.DETECTOR.LOOK_FORWARD_TWICE needs box refinement: set MODEL.DETECTOR.BOX_REFINEMENT to True")
    return {
        **shared_arguments(cfg, backbone, num_levels, "proposals" if two_stage else "learned", box_refinement),
        "transformer": models.DeformableTransformer(
            **transformer_arguments(cfg),
            num_levels=num_levels,
            encoder_points=enc_points,
            decoder_points=dec_points,
            implementation=implementation,
            look_forward_twice=look_forward_twice,
            final_norm=final_norm,
            eval_layers=eval_layers,
        ),
        "num_levels": num_levels,
        "box_refinement": box_refinement,
        "two_stage": two_stage,
        "mask_padding": cfg.MODEL.BACKBONE.MASK_PADDING,
    }


@register_detector("CPVTRealTimeDetr", models.RealTimeDETR)
def _real_time_arguments(
    cfg: CfgNode,
    backbone: nn.Module | None,
    *,
    encoder_channels: int = 0,
    encoder_feedforward: int = 0,
    fusion: str = "csp",
    expansion: float = 1.0,
    depth: int = 3,
    norm: str = "BN",
    points: Sequence[int] = (defaults.POINTS,),
    look_forward_twice: bool = False,
    bins: int = 0,
    bin_scale: float = 4.0,
    eval_layers: int = 0,
    implementation: str = "auto",
) -> dict[str, Any]:
    """RT-DETR and D-FINE: a hybrid encoder with DETR.ENC_LAYERS attention layers, and refined proposals.

    Args:
        encoder_channels: channels of the encoder; 0 means as many as in the decoder, DETR.HIDDEN_DIM.
        encoder_feedforward: inner channels of the encoder's feed-forward networks; 0 means DETR.DIM_FEEDFORWARD.
        fusion: kind of convolutions across levels: csp (RT-DETR) or elan (D-FINE).
        expansion: inner width of these convolutions, as a fraction of the encoder's channels.
        depth: number of blocks in each CSP layer.
        norm: kind of norms in neck and encoder, over valid cells only: BN, SyncBN, GN or none.
        points: sampling points per head in the decoder: one number for all levels, or one per level, such as (3, 6, 3) in D-FINE.
        look_forward_twice: whether a layer's loss also trains the previous layer's boxes; only without bins.
        bins: number of bins for the distance that a side of a box moves (32 in D-FINE); 0 refines boxes without bins.
        bin_scale: the sides of a box move in units of the box's size divided by this number (8 in D-FINE-X); trained weights
            contain their own number.
        eval_layers: number of decoder layers, from the first, that run in evaluation and prediction; 0 for all.
        implementation: kernel of deformable attention: auto, numba, triton, eager, export or grid_sample.
    """
    if bins and look_forward_twice:
        raise ConfigError("MODEL.DETECTOR.LOOK_FORWARD_TWICE needs box refinement, which BINS replaces; with BINS, set it to False")
    backbone, detr = backbone or build_backbone(cfg), cfg.MODEL.DETR
    coarsest = max(backbone.strides)
    require_larger_images(cfg, coarsest, f"a cell of the coarsest feature map ({coarsest} pixels)", "MODEL.BACKBONE.STAGES")
    num_levels, width = len(backbone.strides), encoder_channels or detr.HIDDEN_DIM
    if len(points) not in (1, num_levels):
        raise ConfigError(
            f"MODEL.DETECTOR.POINTS is {list(points)}, but the backbone has {num_levels} feature maps; give a single number, or "
            "one per map"
        )
    ffn_channels = encoder_feedforward or detr.DIM_FEEDFORWARD
    attention = (detr.ENC_LAYERS, width, detr.NHEADS, ffn_channels, detr.DROPOUT, False, cfg.MODEL.CHECKPOINTING)
    encoder = Encoder(*attention, activation="gelu")
    layer = [detr.DEC_LAYERS, detr.HIDDEN_DIM, detr.NHEADS, detr.DIM_FEEDFORWARD, detr.DROPOUT, num_levels]
    layer += [points[0] if len(points) == 1 else tuple(points), implementation]
    if bins:
        decoder = models.DistributionDecoder(*layer, num_bins=bins, scale=bin_scale, eval_layers=eval_layers)
    else:
        decoder = DeformableDecoder(*layer, look_forward_twice=look_forward_twice, eval_layers=eval_layers)
    hybrid = models.HybridEncoder(num_levels, width, detr.HIDDEN_DIM, encoder, fusion, expansion, depth, norm)
    return {
        "neck": NormedNeck(backbone.channels, backbone.strides, width, norm),
        **shared_arguments(cfg, backbone, num_levels, "mixed", refines=True, encoder=(width, 1, ffn_channels)),
        "transformer": models.HybridTransformer(hybrid, decoder),
    }


@register_detector("CPVTClassifier", models.Classifier)
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
    return issubclass(DETECTOR_REGISTRY.find(cfg.MODEL.META_ARCHITECTURE).detector, models.Classifier)


def transformer_arguments(cfg: CfgNode) -> dict[str, Any]:
    """The keywords that both transformers share, from ``MODEL.DETR``."""
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


def shared_arguments(
    cfg: CfgNode,
    backbone: nn.Module | None,
    num_levels: int,
    source: str = "learned",
    refines: bool = False,
    encoder: tuple[int, int, int] | None = None,
) -> dict[str, Any]:
    """The keywords that the constructors of all detectors share.

    Args:
        cfg: the config.
        backbone: backbone to use instead of the config's.
        num_levels: feature levels of the encoder.
        source: query source if ``MODEL.QUERIES.NAME`` is empty.
        refines: whether decoder layers correct boxes, which some kinds of query positions follow.
        encoder: three numbers: channels of neck and encoder, number of levels that the encoding sees, and inner channels of the
            encoder's feed-forward networks. ``None`` for the decoder's channels, ``num_levels`` and DETR.DIM_FEEDFORWARD.

    Raises:
        ConfigError: a query source that needs something the detector lacks.
    """
    detr, classification = cfg.MODEL.DETR, build_classification(cfg)
    names = cfg.MODEL.POSITION.NAME.split("+")
    if "sine_scrambled" in names and (len(names) > 1 or encoder is None):
        raise ConfigError(
            "MODEL.POSITION.NAME: sine_scrambled reproduces, for comparison, what other code computes in hybrid encoders; use it "
            "alone and in CPVTRealTimeDetr, or use sine_grid, which is correct"
        )
    backbone = backbone or build_backbone(cfg)
    width, encoded_levels, ffn_channels = encoder or (detr.HIDDEN_DIM, num_levels, detr.DIM_FEEDFORWARD)
    arguments = {
        "backbone": backbone,
        "position": build_encoder_position(cfg, width, encoded_levels, detr.ENC_LAYERS, detr.NHEADS, ffn_channels),
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
        "needs_references": DETECTOR_REGISTRY.find(cfg.MODEL.META_ARCHITECTURE).detector.needs_references,
    }
    if options_of(cfg.MODEL.NECK) and not cfg.MODEL.NECK.NAME:
        raise ConfigError(f"MODEL.NECK has options ({', '.join(options_of(cfg.MODEL.NECK))}) but no name: set MODEL.NECK.NAME too")
    if cfg.MODEL.NECK.NAME:
        arguments["neck"] = models.NECK_REGISTRY.build(
            cfg.MODEL.NECK.NAME, {**facts, "channels": width}, options_of(cfg.MODEL.NECK)
        )
    source = cfg.MODEL.QUERIES.NAME or source
    if source in OF_PROPOSALS and classification.prior_probability is None:
        raise ConfigError(f"the query source {source!r} ranks proposals by sigmoid scores: {SIGMOIDS}")
    arguments["queries"] = models.QUERY_REGISTRY.build(source, facts, _query_options(cfg, source, refines))
    return arguments


def _query_options(cfg: CfgNode, source: str, refines: bool) -> dict[str, Any]:
    """The options of ``MODEL.QUERIES``, with the options for denoising replaced by the module that they describe.

    Raises:
        ConfigError: options for noise although there is no denoising, or positions that follow corrected boxes although no layer
            corrects boxes.
    """
    options = options_of(cfg.MODEL.QUERIES)
    for key in ("refined_positions", "scaled_positions"):
        if options.get(key) and not refines:
            raise ConfigError(f"MODEL.QUERIES.{key.upper()} needs box refinement: set MODEL.DETECTOR.BOX_REFINEMENT to True")
    if "denoising" in models.QUERY_REGISTRY.parameters(source) and options.keys() & {"denoising", "label_noise", "box_noise"}:
        noise = {key: options.pop(key) for key in ("label_noise", "box_noise") if key in options}
        pairs = options.pop("denoising", 0)
        if noise and not pairs:
            raise ConfigError(
                f"MODEL.QUERIES.{next(iter(noise)).upper()} has no effect without denoising: set MODEL.QUERIES.DENOISING to a "
                "number of pairs"
            )
        if pairs:
            options["denoising"] = ContrastiveDenoising(cfg.MODEL.DETR.HIDDEN_DIM, cfg.MODEL.NUM_CLASSES, pairs, **noise)
    return options


def build_postprocessor(cfg: CfgNode) -> PostProcessor:
    """Build the post-processing. It keeps at most ``TEST.DETECTIONS_PER_IMAGE`` detections, and suppresses duplicates among them by
    NMS with the threshold ``TEST.NMS``.

    Raises:
        ConfigError: a classifier, or a value of these keys that cannot be used.
    """
    if is_classifier(cfg):
        raise ConfigError(f"MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE!r} is not a detector; set TASK to classification")
    with config_errors("TEST.DETECTIONS_PER_IMAGE, TEST.NMS"):
        return PostProcessor(build_classification(cfg), cfg.TEST.DETECTIONS_PER_IMAGE, cfg.TEST.NMS)


def build_output_decoder(cfg: CfgNode) -> PostProcessor | ClassScores:
    """Build the object that decodes a model's outputs: :class:`ClassScores` for a classifier, otherwise the result of
    :func:`build_postprocessor`."""
    return ClassScores() if is_classifier(cfg) else build_postprocessor(cfg)
