# SPDX-License-Identifier: Apache-2.0
"""Build the criterion, post-processing and device of a model from ``MODEL``."""

import os

import torch
from fvcore.common.config import CfgNode

from cpvt_det.builders.detector import is_classifier
from cpvt_det.builders.parts import build_classification
from cpvt_det.common import distributed
from cpvt_det.common.errors import ConfigError, config_errors
from cpvt_det.evaluation.answers import ClassScores, PostProcessor
from cpvt_det.losses import LOSS_REGISTRY, HungarianMatcher, OneToManyMatcher, SetCriterion


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
    weights = (node.CLASS_WEIGHT, node.L1_WEIGHT, node.GIOU_WEIGHT)
    with config_errors("MODEL.CRITERION"):
        many = OneToManyMatcher(node.MANY_MATCHES, node.MANY_THRESHOLD), node.MANY_CLASS_WEIGHT
        return SetCriterion(matcher, *weights, node.PROPOSAL_MATCHES, losses, node.HYBRID_MATCHES, *many)


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


def build_decoder(cfg: CfgNode) -> PostProcessor | ClassScores:
    """Build the object that decodes a model's outputs: :class:`ClassScores` for a classifier, otherwise the result of
    :func:`build_postprocessor`."""
    return ClassScores() if is_classifier(cfg) else build_postprocessor(cfg)


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
