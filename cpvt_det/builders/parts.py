# SPDX-License-Identifier: Apache-2.0
"""``MODEL`` -> parts of models: backbone, position encodings, classification; and the options that a part takes."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det import defaults
from cpvt_det.builders.unused import CLASSIFICATION_KEYS, backbone_position, keyword_of
from cpvt_det.config import flat_items, get_cfg
from cpvt_det.errors import ConfigError, UnknownNameError, config_errors
from cpvt_det.losses import CLASSIFICATION_REGISTRY
from cpvt_det.losses.classification import Classification
from cpvt_det.models import (
    BACKBONE_REGISTRY,
)
from cpvt_det.position import POSITION_REGISTRY, PositionEncoding, build_position
from cpvt_det.registry import PartRegistry


def build_backbone(cfg: CfgNode) -> nn.Module:
    """The backbone of ``MODEL.BACKBONE``, with random weights.

    Raises:
        UnknownNameError: an unknown name, or a key of the user's own that the backbone does not take.
        ConfigError: a transformer whose patches are larger than images will be.
    """
    name = cfg.MODEL.BACKBONE.NAME
    facts, options = {"checkpointing": cfg.MODEL.CHECKPOINTING}, options_of(cfg, "BACKBONE", BACKBONE_REGISTRY, name)
    if "position" in options:
        require_patches(cfg)
        position = backbone_position(cfg)
        own = part_options(cfg.MODEL.BACKBONE.POSITION, get_cfg().MODEL.BACKBONE.POSITION, POSITION_REGISTRY, position)
        options["position"] = functools.partial(build_position, position, **own)
    return BACKBONE_REGISTRY.build(name, facts, options)


def require_patches(cfg: CfgNode) -> None:
    """Refuse sizes of images below a transformer's patch; 0 means no resize. Other backbones take any.

    Raises:
        ConfigError: such a size.
    """
    name = cfg.MODEL.BACKBONE.NAME
    if name not in BACKBONE_REGISTRY or "position" not in BACKBONE_REGISTRY.parameters(name):
        return
    patch, sizes = cfg.MODEL.BACKBONE.PATCH_SIZE, dict(flat_items(cfg.INPUT, "INPUT."))
    for key in ("MIN_SIZE_TRAIN", "MAX_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TEST", "CLASSIFY.SIZE", "CLASSIFY.TEST_SIZE"):
        value = sizes.get(f"INPUT.{key}", ())
        small = [side for side in (value if isinstance(value, (list, tuple)) else [value]) if 0 < side < patch]
        if small:
            raise ConfigError(
                f"INPUT.{key} makes images of {small[0]} pixels, smaller than a patch of {patch}: use larger images, or set "
                "MODEL.BACKBONE.PATCH_SIZE"
            )


def pixel_statistics(cfg: CfgNode, backbone: nn.Module) -> dict[str, Sequence[float]]:
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
    options = options_of(cfg, "POSITION", POSITION_REGISTRY, name)
    return build_position(name, channels, num_levels, num_layers, num_heads, **options)


def options_of(cfg: CfgNode, node: str, registry: PartRegistry, name: str, keys: Iterable[str] | None = None) -> dict[str, Any]:
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


def own_options(cfg: CfgNode, node: str) -> dict[str, Any]:
    """The keys of a node of ``MODEL`` that are not in our defaults, as keywords: options of a user's own part."""
    defaults = get_cfg().MODEL[node]
    return {key.lower(): value for key, value in cfg.MODEL[node].items() if key not in defaults}


def build_decoder_position(cfg: CfgNode, channels: int) -> PositionEncoding | str | None:
    """What the keys of DETR's decoder get: sines, ``"same"`` as the encoder's, or ``None`` for nothing.

    Raises:
        UnknownNameError: another ``MODEL.POSITION.DECODER``.
    """
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
        ConfigError: a number of classes below 1: it is not known yet; or a number that the classification does not take.
    """
    criterion, num_classes = cfg.MODEL.CRITERION, count_classes(cfg)
    name = criterion.CLASSIFICATION
    options = options_of(cfg, "CRITERION", CLASSIFICATION_REGISTRY, name, CLASSIFICATION_KEYS)
    with config_errors("MODEL.CRITERION"):
        return CLASSIFICATION_REGISTRY.build(name, {"num_classes": num_classes}, options)


def count_classes(cfg: CfgNode) -> int:
    """``MODEL.NUM_CLASSES``, K.

    Raises:
        ConfigError: a number below 1: it is not known yet.
    """
    if cfg.MODEL.NUM_CLASSES < 1:
        raise ConfigError(
            f"MODEL.NUM_CLASSES is {cfg.MODEL.NUM_CLASSES}; set it to the number of classes; only training and evaluation read it "
            "from data"
        )
    return cfg.MODEL.NUM_CLASSES
