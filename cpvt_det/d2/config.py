# SPDX-License-Identifier: Apache-2.0
"""Our keys in detectron2's config."""

import functools
from collections.abc import Sequence

from detectron2.config import CfgNode, get_cfg
from fvcore.common.config import CfgNode as CoreCfgNode

from cpvt_det import config as core
from cpvt_det.builders import PART_REGISTRIES, build_device
from cpvt_det.common.errors import ConfigError


def add_cpvt_det_config(cfg: CfgNode) -> None:
    """Copy all defaults of :func:`cpvt_det.config.get_cfg`, and ``MODEL.PEG``, into a detectron2 config; its other keys do not
    change.

    ``MODEL.DEVICE`` becomes ``cuda`` or ``cpu`` instead of ``auto``, which detectron2 would pass to torch.
    """
    add_keys(cfg, with_known=True)
    cfg.MODEL.DEVICE = build_device(cfg).type


def add_peg_config(cfg: CfgNode) -> None:
    """Add the node ``MODEL.PEG``, which only ``MODEL.BACKBONE.NAME: build_peg_backbone`` reads."""
    cfg.MODEL.PEG = CfgNode()
    cfg.MODEL.PEG.BACKBONE = "build_resnet_fpn_backbone"  # backbone that gets the PEGs
    cfg.MODEL.PEG.IN_FEATURES = []  # names of the maps that get a PEG; empty: all maps
    cfg.MODEL.PEG.KERNEL_SIZE = 3  # kernel size of the convolution
    cfg.MODEL.PEG.NORM = "BN"  # norm after the convolution: BN, SyncBN, GN or none
    cfg.MODEL.PEG.ZERO_INIT = True  # True: start as the identity, so that pretrained weights give the same outputs at first


def load_cfg(config_file: str, overrides: Sequence[str] = ()) -> CfgNode:
    """:func:`cpvt_det.config.load_cfg` with detectron2's keys in addition to ours. Unlike detectron2's own function, it runs no
    code from the file.

    Raises:
        ConfigError: as in :func:`cpvt_det.config.load_cfg`.
    """
    cfg = get_cfg()
    add_cpvt_det_config(cfg)
    if config_file:
        core.merge_checked(cfg, core.read_config(config_file), config_file)
    core.merge_overrides(cfg, overrides)
    if cfg.MODEL.DEVICE == "auto":
        cfg.MODEL.DEVICE = build_device(cfg).type
    return cfg


def refuse_ignored(cfg: CfgNode) -> None:
    """Refuse settings of detectron2's own trainer, loader and evaluation, which our runner does not read.

    Raises:
        ConfigError: such a setting; the message names the first one.
    """
    changed, ours = without_untouched(cfg), core.get_cfg()
    for group in ("SOLVER", "INPUT", "DATALOADER", "TEST"):
        if ignored := sorted(set(changed[group]) - set(ours[group])):
            raise ConfigError(
                f"{group}.{ignored[0]} is a key of detectron2's own trainer and loader, which this runner does not use; remove it"
            )


def without_untouched(cfg: CfgNode) -> CfgNode:
    """The config with only our keys and those of detectron2's keys that were changed. A run saves this, so that the built-in
    runner can read it too."""
    default = get_cfg()
    add_cpvt_det_config(default)
    return _kept(cfg, default, core.get_cfg())


def _kept(cfg: CfgNode, default: dict, ours: dict) -> CfgNode:
    kept = CfgNode()
    for key, value in cfg.items():
        if isinstance(value, CfgNode):
            value = _kept(value, default.get(key, {}), ours.get(key, {}))
        is_changed = len(value) > 0 if isinstance(value, CfgNode) else key not in default or value != default[key]
        if key in ours or is_changed:
            kept[key] = value
    return kept


def add_keys(cfg: CfgNode, with_known: bool) -> None:
    """Add our keys and ``MODEL.PEG``; keys that the config has already are only set ``with_known``.

    The options of our parts are added too, with ``None`` for "the default", because detectron2's KEY VALUE words can only set
    existing keys.
    """
    _add(core.get_cfg(), cfg, with_known)
    add_peg_config(cfg)
    parts = [(node, registry, name) for node, registry in PART_REGISTRIES.items() for name in registry.names]
    options = [(node, option) for node, registry, name in parts for option in registry.parameters(name)]
    for node, option in [*options, ("QUERIES", "label_noise"), ("QUERIES", "box_noise")]:
        functools.reduce(getattr, node.split("."), cfg.MODEL).setdefault(option.upper(), None)


def _add(source: CoreCfgNode, target: CfgNode, with_known: bool) -> None:
    for key, value in source.items():
        if isinstance(value, CoreCfgNode):
            if key not in target:
                target[key] = CfgNode()
            if value.is_new_allowed():
                target[key].set_new_allowed(True)  # also detectron2's own BACKBONE, which holds our keys too
            _add(value, target[key], with_known)
        elif with_known or key not in target:
            target[key] = value
