# SPDX-License-Identifier: Apache-2.0
"""The weights that a run starts from: ``MODEL.WEIGHTS``, or ``MODEL.BACKBONE.WEIGHTS``."""

import logging

from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det.builders.unused import inapplicable_keys
from cpvt_det.checkpoint.files import not_finite
from cpvt_det.checkpoint.load import WeightsReport, load_backbone_weights, load_weights
from cpvt_det.checkpoint.weights import CLASS_HEAD
from cpvt_det.data.coco import Classes
from cpvt_det.errors import WeightsError

logger = logging.getLogger("cpvt_det")


def load_initial_weights(
    cfg: CfgNode, detector: nn.Module, classes: Classes, for_evaluation: bool = False, allow_partial: bool = False
) -> None:
    """Load ``MODEL.WEIGHTS``, or else ``MODEL.BACKBONE.WEIGHTS``, and log what became of them.

    Args:
        cfg: the config.
        detector: changed in place.
        classes: what its labels mean.
        for_evaluation: the model has to be what the weights are.
        allow_partial: but not all of it.

    Raises:
        WeightsError: weights that cannot be had, or are of another shape but for classes and queries; in training also those that
            are not finite; in evaluation also none, or weights that fit in part.
    """
    backbone = cfg.MODEL.BACKBONE
    if cfg.MODEL.WEIGHTS:
        report = load_weights(detector, cfg.MODEL.WEIGHTS, classes.names)
        logger.info("%s: %s\n%s", cfg.MODEL.WEIGHTS, report, report.table())
        require_shapes(report, cfg.MODEL.WEIGHTS)
        spoilt = "" if for_evaluation else not_finite(detector.state_dict())  # an evaluation refuses them itself
        if spoilt:
            raise WeightsError(f"{cfg.MODEL.WEIGHTS} holds numbers that are not finite, in {spoilt}; training would take no step")
        if for_evaluation and report.is_partial and not allow_partial:
            raise WeightsError(
                f"{cfg.MODEL.WEIGHTS} fits the config's model in part only, evaluation needs all of it: {report}; "
                "--allow-partial evaluates it with the rest random"
            )
    elif for_evaluation:
        raise WeightsError("evaluation needs weights: set MODEL.WEIGHTS to a checkpoint, or --resume the run in OUTPUT_DIR")
    elif backbone.WEIGHTS:
        load_backbone_weights(detector.backbone, backbone.WEIGHTS, backbone.NAME)
        logger.info("Backbone weights: %s", backbone.WEIGHTS)
    elif _starts_frozen(cfg):
        logger.warning(
            "The backbone starts from random weights, and MODEL.BACKBONE.NORM FrozenBN or FREEZE_AT > 0 keeps part of it so; "
            "set MODEL.BACKBONE.WEIGHTS, or NORM BN and FREEZE_AT 0 to train from scratch"
        )


def _starts_frozen(cfg: CfgNode) -> bool:
    """Whether the backbone keeps weights or statistics that it starts with, by keys that it takes."""
    freezing = {"NORM": cfg.MODEL.BACKBONE.NORM == "FrozenBN", "FREEZE_AT": cfg.MODEL.BACKBONE.FREEZE_AT > 0}
    unused = inapplicable_keys(cfg)
    return any(value and f"MODEL.BACKBONE.{key}" not in unused for key, value in freezing.items())


def require_shapes(report: WeightsReport, origin: str) -> None:
    """Refuse weights that are not those of the model but for its classes and queries.

    Args:
        report: of loading them.
        origin: what the message calls them.

    Raises:
        WeightsError: with the first tensor of another shape.
    """
    for name, shapes in report.remade.items():
        if not CLASS_HEAD.search(name) and not name.endswith("query_embed.weight"):
            raise WeightsError(
                f"{origin} is of another shape than the config's model: {name} is {shapes}; "
                "set the keys of MODEL that it was trained with"
            )
