# SPDX-License-Identifier: Apache-2.0
"""A checkpoint -> the detector that was trained, by the config that travels in it."""

from collections.abc import Sequence
from pathlib import Path

from fvcore.common.config import CfgNode

from cpvt_det.build.detector import build_detector
from cpvt_det.checkpoint.load import load_weights
from cpvt_det.checkpoint.weights import read_weights
from cpvt_det.config import get_cfg, load_cfg, merge_checked, merge_overrides
from cpvt_det.data.coco import Classes
from cpvt_det.errors import ConfigError, WeightsError
from cpvt_det.models import Detector


def load_trained(
    weights: str | Path, config_file: str = "", overrides: Sequence[str] = ()
) -> tuple[CfgNode, Detector, Classes | None]:
    """Build a detector as it was trained, with its weights, in evaluation, on the CPU.

    Args:
        weights: as in :func:`cpvt_det.checkpoint.read_weights`.
        config_file: instead of the config in the checkpoint; needed where it has none.
        overrides: KEY VALUE words over the config.

    Returns:
        The config, the detector, and what its labels mean, as far as the checkpoint tells.

    Raises:
        WeightsError: a file that cannot be read, that tells no config, or that does not fit it in all parts.
        ConfigError: a config that cannot be used.
    """
    read = read_weights(weights)
    if not config_file and read.config is None:
        raise WeightsError(f"{weights} is no checkpoint of a cpvt_det run: it tells no config; --config-file names one")
    cfg = load_cfg(config_file) if config_file else _parse(read.config, str(weights))
    merge_overrides(cfg, overrides)
    if read.classes is not None:
        if cfg.MODEL.NUM_CLASSES not in (0, len(read.classes)):
            raise ConfigError(f"MODEL.NUM_CLASSES is {cfg.MODEL.NUM_CLASSES}, but {weights} has {len(read.classes)} classes")
        cfg.MODEL.NUM_CLASSES = len(read.classes)
    detector = build_detector(cfg).eval()
    report = load_weights(detector, read)
    if report.is_partial:
        raise WeightsError(f"{weights} fits the config's model in part only: {report}; name the config it was trained with")
    return cfg, detector, read.classes


def _parse(text: str, origin: str) -> CfgNode:
    """The config of a checkpoint over the defaults; keys of detectron2's own, which its runner writes too, are left out."""
    cfg = get_cfg()
    try:
        stored = CfgNode(CfgNode.load_cfg(text))
    except Exception as error:  # what YAML raises has no common base
        raise WeightsError(f"{origin}: the config in it cannot be read; name one with --config-file") from error
    merge_checked(cfg, _known(stored, cfg), origin)
    return cfg


def _known(stored: CfgNode, cfg: CfgNode) -> CfgNode:
    kept = CfgNode()
    for key, value in stored.items():
        if key in cfg and isinstance(value, CfgNode) and isinstance(cfg[key], CfgNode):
            kept[key] = _known(value, cfg[key])
        elif key in cfg or cfg.is_new_allowed():
            kept[key] = value
    return kept
