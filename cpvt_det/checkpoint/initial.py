# SPDX-License-Identifier: Apache-2.0
"""Initial weights of a run: ``MODEL.WEIGHTS`` or ``MODEL.BACKBONE.WEIGHTS``."""

import logging
import re

from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det.checkpoint.files import not_finite, sha256_of
from cpvt_det.checkpoint.load import WeightsReport, load_backbone_weights, load_weights
from cpvt_det.checkpoint.weights import CLASS_HEAD, DENOISING_LABELS, PROPOSALS_HEAD, read_weights
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import WeightsError
from cpvt_det.common.structures import Thresholds
from cpvt_det.models import BACKBONE_REGISTRY

QUERIES = re.compile(r"(^|\.)(query|refpoint)_embed\.weight$")
logger = logging.getLogger("cpvt_det")


def load_initial_weights(
    cfg: CfgNode, detector: nn.Module, classes: Classes, for_evaluation: bool = False, allow_partial: bool = False
) -> Thresholds | None:
    """Load ``MODEL.WEIGHTS`` or, if it is empty, ``MODEL.BACKBONE.WEIGHTS``, and log which tensors were loaded.

    Args:
        cfg: config of the run.
        detector: model that is changed in place.
        classes: classes that the detector's labels stand for.
        for_evaluation: whether every weight of the model must be loaded.
        allow_partial: whether a part of the model may keep its random weights even in evaluation.

    Returns:
        The score thresholds stored with ``MODEL.WEIGHTS``; ``None`` if there are none.

    Raises:
        WeightsError: weights that cannot be read, belong to a different backbone, or differ from the model in shape (only class
            heads and queries may differ). In training, weights with a NaN or an infinity are refused too. In evaluation, it is also
            an error if no weights are given, or if they cover only a part of the model.
    """
    backbone = cfg.MODEL.BACKBONE
    if cfg.MODEL.WEIGHTS:
        weights = read_weights(cfg.MODEL.WEIGHTS)
        expected = "" if for_evaluation else cfg.MODEL.WEIGHTS_SHA256
        if expected and expected != sha256_of(weights.path):
            raise WeightsError(
                f"{cfg.MODEL.WEIGHTS} does not have the SHA-256 in MODEL.WEIGHTS_SHA256, {expected}; give the file that does, or "
                "leave the key out"
            )
        report = load_weights(detector, weights, classes.names)
        logger.info("%s: %s\n%s", cfg.MODEL.WEIGHTS, report, report.table())
        require_shapes(report, cfg.MODEL.WEIGHTS)
        _require_backbone(report, cfg, detector)
        broken = "" if for_evaluation else not_finite(detector.state_dict())  # an evaluation refuses them itself
        if broken:
            raise WeightsError(
                f"{cfg.MODEL.WEIGHTS} contains numbers that are not finite, in {broken}; training cannot start from it, so give "
                "other weights"
            )
        if for_evaluation and report.is_partial and not allow_partial:
            raise WeightsError(
                f"{cfg.MODEL.WEIGHTS} fits only part of the config's model, but evaluation needs all of it: {report}; set the "
                "MODEL keys to the values that it was trained with, or leave the rest random with --allow-partial"
            )
        return report.thresholds
    if for_evaluation:
        raise WeightsError("evaluation needs weights: set MODEL.WEIGHTS to a checkpoint, or use --resume for the run in OUTPUT_DIR")
    if backbone.WEIGHTS:
        load_backbone_weights(detector.backbone, backbone.WEIGHTS, backbone.NAME)
        logger.info("Backbone weights: %s", backbone.WEIGHTS)
    elif _starts_frozen(cfg):
        logger.warning(
            "The backbone starts from random weights, and with MODEL.BACKBONE.NORM FrozenBN or FREEZE_AT > 0 part of it is never "
            "trained; set MODEL.BACKBONE.WEIGHTS or, to train from scratch, set NORM to BN and FREEZE_AT to 0"
        )
    return None


def _starts_frozen(cfg: CfgNode) -> bool:
    """Whether the backbone's options freeze some of its initial weights or statistics."""
    freezing = {"NORM": cfg.MODEL.BACKBONE.NORM == "FrozenBN", "FREEZE_AT": cfg.MODEL.BACKBONE.FREEZE_AT > 0}
    taken = BACKBONE_REGISTRY.parameters(cfg.MODEL.BACKBONE.NAME) if cfg.MODEL.BACKBONE.NAME in BACKBONE_REGISTRY else {"freeze_at"}
    return any(value and key.lower() in taken for key, value in freezing.items())


def _require_backbone(report: WeightsReport, cfg: CfgNode, detector: nn.Module) -> None:
    """Refuse weights of another backbone, even if a few of their names fit by chance."""
    own = [name for name in detector.state_dict() if name.startswith("backbone.")]
    missing, unexpected = (
        [name for name in names if name.startswith("backbone.")] for names in (report.missing, report.unexpected)
    )
    if unexpected and 2 * len(missing) > len(own):
        source = f", under the names of {report.source}" if report.source else ""
        raise WeightsError(
            f"{cfg.MODEL.WEIGHTS} has a different backbone from MODEL.BACKBONE.NAME {cfg.MODEL.BACKBONE.NAME}{source}: it lacks "
            f"{len(missing)} of {len(own)} tensors, such as {missing[0]}, and has {len(unexpected)} others, such as {unexpected[0]}"
        )


def require_shapes(report: WeightsReport, origin: str) -> None:
    """Refuse weights whose shapes differ from the model's. Only class heads and queries may differ.

    Args:
        report: report of loading the weights.
        origin: name of the weights in the error message.

    Raises:
        WeightsError: a tensor whose shape differs; the message names the first one.
    """
    may_differ = (CLASS_HEAD, PROPOSALS_HEAD, DENOISING_LABELS, QUERIES)
    for name, shapes in report.remade.items():
        if not any(pattern.search(name) for pattern in may_differ):
            raise WeightsError(
                f"{origin} has different shapes from the config's model: {name} is {shapes}; set the MODEL keys to the values that "
                "it was trained with"
                + (", including MODEL.BACKBONE.POSITION.GRID" if name.startswith("backbone.position.") else "")
            )
