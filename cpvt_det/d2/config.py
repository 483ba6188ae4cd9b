# SPDX-License-Identifier: Apache-2.0
"""Our keys in detectron2's config."""

from collections.abc import Sequence

import torch
from detectron2.config import CfgNode, get_cfg
from fvcore.common.config import CfgNode as CoreCfgNode

from cpvt_det import config as core
from cpvt_det.builders.unused import forgive_kept_file
from cpvt_det.d2.peg_backbone import add_peg_config
from cpvt_det.errors import ConfigError


def add_new_keys() -> None:
    """Add our keys to detectron2's defaults.

    Keys that detectron2 has keep its values, so that its own models stay as they are; our YAML states them
    (``configs/_detectron2.yaml``).
    """
    from detectron2.config.defaults import _C

    _add(core.get_cfg(), _C, with_known=False)


def add_cpvt_det_config(cfg: CfgNode) -> None:
    """Copy every default of :func:`cpvt_det.config.get_cfg` into a config of detectron2, with ``MODEL.PEG``; its other keys stay.

    ``MODEL.DEVICE`` becomes what ``auto`` means on this machine, since detectron2 hands it to torch as it is.
    """
    _add(core.get_cfg(), cfg, with_known=True)
    cfg.MODEL.DEVICE = _auto_device()


def load_cfg(config_file: str, overrides: Sequence[str] = ()) -> CfgNode:
    """:func:`cpvt_det.builders.load_cfg` with detectron2's keys beside ours; YAML stays safe, unlike in detectron2's own loading.

    Raises:
        ConfigError: as there.
    """
    cfg = get_cfg()
    add_cpvt_det_config(cfg)
    if config_file:
        core.merge_checked(cfg, core.read_config(config_file), config_file)
    core.merge_overrides(cfg, overrides)
    forgive_kept_file(cfg, config_file, overrides)
    if cfg.MODEL.DEVICE == "auto":
        cfg.MODEL.DEVICE = _auto_device()
    return cfg


def refuse_ignored(cfg: CfgNode) -> None:
    """Refuse settings of detectron2's own trainer, loader and evaluation, which our runner does not read.

    Raises:
        ConfigError: with the first of them.
    """
    changed, ours = without_untouched(cfg), core.get_cfg()
    for group in ("SOLVER", "INPUT", "DATALOADER", "TEST"):
        ignored = sorted(set(changed[group]) - set(ours[group]))
        if ignored:
            raise ConfigError(f"{group}.{ignored[0]} is for detectron2's own trainer and loader; this runner does not read it")


def without_untouched(cfg: CfgNode) -> CfgNode:
    """Our keys, and those of detectron2's that were changed: what a run writes down, so that the built-in runner reads it too."""
    default = get_cfg()
    add_cpvt_det_config(default)
    return _kept(cfg, default, core.get_cfg())


def _auto_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _kept(cfg: CfgNode, default: dict, ours: dict) -> CfgNode:
    kept = CfgNode()
    for key, value in cfg.items():
        if isinstance(value, CfgNode):
            value = _kept(value, default.get(key, {}), ours.get(key, {}))
            if not value and key not in ours:
                continue
        if key in ours or key not in default or (value if isinstance(value, CfgNode) else value != default[key]):
            kept[key] = value
    return kept


def _add(source: CoreCfgNode, target: CfgNode, with_known: bool) -> None:
    _copy(source, target, with_known)
    add_peg_config(target)


def _copy(source: CoreCfgNode, target: CfgNode, with_known: bool) -> None:
    for key, value in source.items():
        if isinstance(value, CoreCfgNode):
            if key not in target:
                target[key] = CfgNode(new_allowed=value.is_new_allowed())
            _copy(value, target[key], with_known)
        elif with_known or key not in target:
            target[key] = value
