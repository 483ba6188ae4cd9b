# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that tells its config and its classes -> a detector to use."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det.builders.datasets import set_classes
from cpvt_det.builders.detector import build_detector, build_device
from cpvt_det.checkpoint.initial import require_shapes
from cpvt_det.checkpoint.load import load_weights
from cpvt_det.checkpoint.weights import Weights, read_weights
from cpvt_det.config import get_cfg, load_cfg, merge_checked, merge_overrides, parse_config
from cpvt_det.data.coco import Classes
from cpvt_det.errors import UnknownNameError, WeightsError


@dataclass
class Trained:
    """A detector with its trained weights.

    Attributes:
        cfg: that it was built from.
        detector: in evaluation mode, on its device.
        classes: what its labels mean.
    """

    cfg: CfgNode
    detector: nn.Module
    classes: Classes


def load_trained(
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    config_file: str = "",
    overrides: Sequence[str] = (),
) -> Trained:
    """Build the detector of a checkpoint, which is enough by itself.

    Args:
        path: a checkpoint of a run, a model folder, or with ``config_file`` any weights that ``MODEL.WEIGHTS`` takes.
        device: a CUDA GPU where there is one, else the CPU, whatever it was trained on.
        config_file: in place of the checkpoint's own.
        overrides: KEY VALUE words that change the config.

    Raises:
        WeightsError: weights that cannot be read, tell no config or no classes, or are not all of the model.
        ConfigError: keys that cannot be used, or a device that is not there.
    """
    weights = read_weights(path)
    cfg = load_cfg(config_file) if config_file else _config_of(weights)
    merge_overrides(cfg, overrides)
    cfg.MODEL.DEVICE = "auto" if device is None else str(device)
    if weights.classes is None:
        raise WeightsError(f"{path} does not tell its classes; a classes.json beside it, in a model folder, does (docs/use.md)")
    set_classes(cfg, weights.classes, str(path))
    target = build_device(cfg)
    cfg.MODEL.DEVICE = "auto"  # where the config is used next is another machine perhaps
    detector = build_detector(cfg)
    report = load_weights(detector, weights, weights.classes.names)
    require_shapes(report, str(path))
    if report.is_partial:
        raise WeightsError(f"{path} fits the config's model in part only: {report}; set the keys of MODEL that it was trained with")
    return Trained(cfg, detector.to(target).eval(), weights.classes)


def _config_of(weights: Weights) -> CfgNode:
    if weights.config is None:
        kind = "names no config" if weights.source is None else f"is of another project ({weights.source}) and names no config"
        raise WeightsError(
            f"{weights.origin} {kind}; give the one it fits with --config-file, as in --config-file coco/detr_r50_sine_50ep.yaml"
        )
    cfg, source = get_cfg(), f"the config in {weights.origin}"
    told = parse_config(weights.config, source)
    for group in set(told) - {"MODEL", "INPUT"}:  # another version's keys of training, say: no answer depends on them
        _keep_known(told, group, cfg)
    try:
        merge_checked(cfg, told, source)
    except UnknownNameError as error:
        raise WeightsError(
            f"{error}; it may be of another version, or of detectron2, whose DefaultPredictor takes it; --config-file replaces it"
        ) from error
    return cfg


def _keep_known(told: CfgNode, key: str, known: CfgNode) -> None:
    if key not in known:
        del told[key]
    elif isinstance(told[key], CfgNode) and isinstance(known[key], CfgNode):
        for part in list(told[key]):
            _keep_known(told[key], part, known[key])
