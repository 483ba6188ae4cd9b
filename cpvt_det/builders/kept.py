# SPDX-License-Identifier: Apache-2.0
"""Configs that a run or a model folder kept, beside those that a user types."""

from collections.abc import Sequence
from pathlib import Path

from fvcore.common.config import CfgNode

from cpvt_det import config


def load_cfg(config_file: str, overrides: Sequence[str] = ()) -> CfgNode:
    """:func:`cpvt_det.config.load_cfg`, and :func:`forgive_kept_file`."""
    cfg = config.load_cfg(config_file, overrides)
    forgive_kept_file(cfg, config_file, overrides)
    return cfg


def forgive_kept_file(cfg: CfgNode, config_file: str, overrides: Sequence[str]) -> None:
    """:func:`cpvt_det.builders.unused.forgive_kept` for the config of a run or of a model folder; a typed config is left alone."""
    path = config.find_config(config_file) if config_file else Path()
    if path.name == "config.yaml" and any(path.with_name(name).is_file() for name in ("log.txt", "model.safetensors")):
        from cpvt_det.builders.unused import forgive_kept  # and with it torch, which checking data does not need

        forgive_kept(cfg, config_file, overrides)
