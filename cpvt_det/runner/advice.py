# SPDX-License-Identifier: Apache-2.0
"""Advice around a run: warnings before one whose settings are valid but unlikely to work well, and the commands that follow it."""

import logging
import shlex
from pathlib import Path

from fvcore.common.config import CfgNode

from cpvt_det import builders, distributed
from cpvt_det.checkpoint.checkpointer import BEST, RunState
from cpvt_det.checkpoint.resume import FINAL
from cpvt_det.data.records import Records
from cpvt_det.registry import import_words
from cpvt_det.solver.schedule import TrainingSchedule

logger = logging.getLogger("cpvt_det")
TYPICAL = {"random weights": "about 300000", "a pretrained backbone": "2000 or more"}
"""What a run starts from -> iterations that a DETR needs on photographs. From random weights 500 epochs of COCO with batch size 64
are 920,000, 50 with batch size 32 are 185,000; on some hundred images from a pretrained backbone: docs/small_data.md."""
FEW = {"random weights": 30_000, "a pretrained backbone": 1_000}
"""What a run starts from -> iterations below which a warning is due."""


def log_advice(cfg: CfgNode, schedule: TrainingSchedule, records: Records) -> None:
    """Warn of a detector's run that is far too short for what it starts from, and of images with nearly as many objects as queries.

    Args:
        cfg: config of the run.
        schedule: schedule of the run.
        records: training images of the run.
    """
    if builders.is_classifier(cfg):
        return
    start = "a pretrained backbone" if cfg.MODEL.BACKBONE.WEIGHTS else "random weights"
    if not cfg.MODEL.WEIGHTS and schedule.max_iter < FEW[start]:
        logger.warning(
            "%d iterations (%s) from %s; a DETR needs %s on photographs, fewer on simple images. Train longer, or set "
            "MODEL.WEIGHTS to start from trained weights",
            schedule.max_iter,
            f"{len(records)} images x epochs / batch of {cfg.SOLVER.IMS_PER_BATCH}",
            start,
            TYPICAL[start],
        )
    queries = cfg.MODEL.DETR.NUM_OBJECT_QUERIES
    most = int(records.num_boxes.max(initial=0))
    if queries / 2 < most <= queries:  # above that, the check of the data reports an error
        logger.warning(
            "An image has %d objects, more than half of the %d queries; raise MODEL.DETR.NUM_OBJECT_QUERIES",
            most,
            queries,
        )


def log_next_steps(cfg: CfgNode, state: RunState, output: Path) -> None:
    """Log the best checkpoint of a finished run, its iteration, and the commands that come next.

    Args:
        cfg: config of the run.
        state: state of the run, with its best evaluation.
        output: ``OUTPUT_DIR``.
    """
    best = state.best
    if best.figure is None:
        weights, which = output / f"{FINAL}.pth", "Final checkpoint (nothing was evaluated)"
    else:
        weights, which = output / f"{BEST}.pth", f"Best checkpoint, of iteration {best.iteration} ({best.name} {best.figure:.4g})"
    config = output / "config.yaml"
    longer = f"SOLVER.EPOCHS {2 * cfg.SOLVER.EPOCHS:g}" if cfg.SOLVER.EPOCHS > 0 else f"SOLVER.MAX_ITER {2 * cfg.SOLVER.MAX_ITER}"
    if 0 < cfg.SOLVER.EARLY_STOPPING <= best.waited:
        longer += " SOLVER.EARLY_STOPPING 0"
    own, processes = import_words(), distributed.world_size()
    gpus = f" --num-gpus {processes}" if processes > 1 else ""  # the batch is theirs together
    commands = [
        f"cpvt-det predict{own} {_quoted(weights)} --input IMAGES --output found",
        f"cpvt-det eval{own} {_quoted(weights)} --config-file {_quoted(config)} --report OUTPUT_DIR {_quoted(output / 'eval')}",
        f"cpvt-det train{own}{gpus} --config-file {_quoted(config)} --resume {longer}",
    ]
    logger.info("%s: %s. Next: predict, report, train longer:\n  %s", which, weights, "\n  ".join(commands))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
