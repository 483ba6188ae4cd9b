# SPDX-License-Identifier: Apache-2.0
"""Build parts of models from ``MODEL``: backbone, position encodings, classification, criterion; and find their device.

The config node of a part contains its ``NAME`` and the options of its constructor. The registry refuses all other keys.
"""

import functools
import logging
import os
from collections.abc import Sequence

import torch
from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det.common import defaults, distributed
from cpvt_det.common.errors import ConfigError, config_errors
from cpvt_det.common.registry import options_of
from cpvt_det.config import flat_items, get_cfg
from cpvt_det.losses import CLASSIFICATION_REGISTRY, LOSS_REGISTRY, HungarianMatcher, SetCriterion
from cpvt_det.losses.classification import Classification
from cpvt_det.models import BACKBONE_REGISTRY
from cpvt_det.models.backbones.vit import OWN_POSITIONS
from cpvt_det.position import PositionEncoding, build_position

logger = logging.getLogger("cpvt_det")


def build_backbone(cfg: CfgNode) -> nn.Module:
    """The backbone of ``MODEL.BACKBONE``, with random weights.

    Raises:
        UnknownNameError: an unknown name, or an option that the backbone does not take.
        ConfigError: a transformer whose patches are larger than the images, or an encoding for a backbone that accepts none.
    """
    name, node = cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE
    taken, shared = BACKBONE_REGISTRY.parameters(name), get_cfg().MODEL.BACKBONE
    options = {key: value for key, value in options_of(node).items() if key in taken or key.upper() not in shared}
    ignored = [key for key in shared if key.lower() not in (*taken, "name", "weights", "position") and node[key] != shared[key]]
    if "position" not in taken and (node.POSITION.NAME or options_of(node.POSITION)):
        raise ConfigError(
            f"MODEL.BACKBONE.POSITION: the backbone {name!r} does not accept a position encoding; set that of the detector, "
            "MODEL.POSITION"
        )
    if ignored and distributed.rank() == 0:  # base configs set them for our ResNets
        listed = ", ".join(f"{key} {node[key]!r}" for key in ignored)
        logger.warning("The backbone %r does not use these keys of MODEL.BACKBONE, so they are ignored: %s", name, listed)
    if "sine_scrambled" in node.POSITION.NAME:
        raise ConfigError(
            "MODEL.BACKBONE.POSITION.NAME: sine_scrambled is only for hybrid encoders; use sine_grid, which is correct"
        )
    if "position" in taken:
        require_patches(cfg)
        options["position"] = functools.partial(build_position, backbone_position(cfg), **options_of(node.POSITION))
    return BACKBONE_REGISTRY.build(name, {"checkpointing": cfg.MODEL.CHECKPOINTING}, options)


def backbone_position(cfg: CfgNode) -> str:
    """The encoding of a transformer backbone: ``MODEL.BACKBONE.POSITION.NAME``, or its default; empty for other backbones."""
    return cfg.MODEL.BACKBONE.POSITION.NAME or OWN_POSITIONS.get(cfg.MODEL.BACKBONE.NAME, "")


def require_patches(cfg: CfgNode) -> None:
    """Refuse image sizes below a transformer's patch size, except 0, which means no resize. Other backbones take any size.

    Raises:
        ConfigError: such a size.
    """
    name = cfg.MODEL.BACKBONE.NAME
    if name not in BACKBONE_REGISTRY or "position" not in BACKBONE_REGISTRY.parameters(name):
        return
    patch = cfg.MODEL.BACKBONE.get("PATCH_SIZE") or 16
    require_larger_images(cfg, patch, f"a patch ({patch} pixels)", "MODEL.BACKBONE.PATCH_SIZE")


def require_larger_images(cfg: CfgNode, least: int, what: str, key_of_it: str) -> None:
    """Refuse image sizes below ``least`` pixels. That is the side length of ``what``, and the config key ``key_of_it`` sets it.

    Raises:
        ConfigError: such a size.
    """
    sizes = dict(flat_items(cfg.INPUT, "INPUT."))
    for key in ("MIN_SIZE_TRAIN", "MAX_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TEST", "CLASSIFY.SIZE", "CLASSIFY.TEST_SIZE"):
        value = sizes.get(f"INPUT.{key}", ())
        small = [side for side in (value if isinstance(value, (list, tuple)) else [value]) if 0 < side < least]
        if small:
            raise ConfigError(
                f"INPUT.{key} allows images of {small[0]} pixels, which is smaller than {what}: use larger images, or change "
                f"{key_of_it}"
            )


def pixel_statistics(cfg: CfgNode, backbone: nn.Module) -> dict[str, Sequence[float]]:
    """``MODEL.PIXEL_MEAN`` and ``PIXEL_STD``. If both have their default values and the backbone has values of its own, the
    backbone's are returned."""
    given = {"pixel_mean": cfg.MODEL.PIXEL_MEAN, "pixel_std": cfg.MODEL.PIXEL_STD}
    are_defaults = (list(given["pixel_mean"]), list(given["pixel_std"])) == (list(defaults.PIXEL_MEAN), list(defaults.PIXEL_STD))
    return {name: getattr(backbone, name, value) if are_defaults else value for name, value in given.items()}


def build_encoder_position(
    cfg: CfgNode, channels: int, num_levels: int, num_layers: int, num_heads: int = defaults.HEADS, ffn_channels: int = 0
) -> PositionEncoding:
    """The encoding of ``MODEL.POSITION``. ``ffn_channels`` is the width of the encoder's feed-forward networks; 0 means
    ``MODEL.DETR.DIM_FEEDFORWARD``.

    Raises:
        UnknownNameError: an unknown name, or an option that the encoding does not take.
    """
    node = cfg.MODEL.POSITION
    facts = (channels, num_levels, num_layers, num_heads, ffn_channels or cfg.MODEL.DETR.DIM_FEEDFORWARD)
    return build_position(node.NAME, *facts, **options_of(node))


def build_classification(cfg: CfgNode) -> Classification:
    """Build the classification of ``MODEL.CRITERION.CLASSIFICATION``, for ``MODEL.NUM_CLASSES`` classes.

    Raises:
        UnknownNameError: an unknown name, or an option that the classification does not take.
        ConfigError: a number of classes below 1 (not known yet), or a number that the classification does not accept.
    """
    node, num_classes = cfg.MODEL.CRITERION.CLASSIFICATION, count_classes(cfg)
    with config_errors("MODEL.CRITERION.CLASSIFICATION"):
        return CLASSIFICATION_REGISTRY.build(node.NAME, {"num_classes": num_classes}, options_of(node))


def count_classes(cfg: CfgNode) -> int:
    """``MODEL.NUM_CLASSES``, K.

    Raises:
        ConfigError: a number below 1, which means that it is not known yet.
    """
    if cfg.MODEL.NUM_CLASSES < 1:
        raise ConfigError(
            f"MODEL.NUM_CLASSES is {cfg.MODEL.NUM_CLASSES}; set it to the number of classes, which only training and evaluation "
            "can read from the data"
        )
    return cfg.MODEL.NUM_CLASSES


def build_criterion(cfg: CfgNode) -> SetCriterion:
    """The criterion of ``MODEL.CRITERION``: matcher and losses.

    Raises:
        ConfigError: a malformed entry of ``LOSSES``, or values that cannot be used.
        UnknownNameError: an unknown loss or option.
    """
    node = cfg.MODEL.CRITERION
    matcher = HungarianMatcher(build_classification(cfg), node.CLASS_COST, node.L1_COST, node.GIOU_COST)
    for entry in node.LOSSES:
        kinds = [type(part) for part in entry] if isinstance(entry, (list, tuple)) else []
        if kinds[:2] not in ([str, float], [str, int]) or kinds[2:] not in ([], [dict]):
            raise ConfigError(
                "MODEL.CRITERION.LOSSES must contain entries of the form [name of a loss, weight] or [name, weight, {option: "
                "value}], "
                f"got {entry!r}"
            )
    losses = {name: (weight, LOSS_REGISTRY.with_options(name, *options)) for name, weight, *options in node.LOSSES}
    if len(losses) < len(node.LOSSES):
        raise ConfigError(f"MODEL.CRITERION.LOSSES contains a loss twice: {[name for name, *_ in node.LOSSES]}")
    weights = (node.CLASS_WEIGHT, node.L1_WEIGHT, node.GIOU_WEIGHT)
    with config_errors("MODEL.CRITERION"):
        return SetCriterion(matcher, *weights, node.PROPOSAL_MATCHES, losses, node.HYBRID_MATCHES)


def build_device(cfg: CfgNode) -> torch.device:
    """The device of ``MODEL.DEVICE``; if there are several GPUs, the one that this process uses.

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
