# SPDX-License-Identifier: Apache-2.0
"""Feedback on a run: warnings before it, and the commands to use after it."""

import logging
import shlex
from pathlib import Path

from fvcore.common.config import CfgNode

from cpvt_det import builders
from cpvt_det.checkpoint.checkpointer import BEST, RunState
from cpvt_det.checkpoint.resume import FINAL
from cpvt_det.common import distributed
from cpvt_det.common.registry import import_words
from cpvt_det.data.records import Records
from cpvt_det.solver.schedule import TrainingSchedule

logger = logging.getLogger("cpvt_det")
FEW = {"random weights": 30_000, "a pretrained backbone": 1_000}
"""Start of a run -> number of iterations below which the log calls the run short for photographs (docs/small_data.md)."""


def log_advice(cfg: CfgNode, schedule: TrainingSchedule, records: Records) -> None:
    """Log a note if a detector's run is short for photographs, and warn about images with nearly as many objects as queries.

    Args:
        cfg: config of the run.
        schedule: schedule of the run.
        records: training images of the run.
    """
    if builders.is_classifier(cfg):
        return
    start = "a pretrained backbone" if cfg.MODEL.BACKBONE.WEIGHTS else "random weights"
    if not cfg.MODEL.WEIGHTS and schedule.max_iter < FEW[start]:
        logger.info(
            "%d iterations (%s) from %s: enough for simple images, few for photographs. For those train longer, or set "
            "MODEL.BACKBONE.WEIGHTS or MODEL.WEIGHTS to start from trained weights",
            schedule.max_iter,
            f"{len(records)} images x epochs / batch of {cfg.SOLVER.IMS_PER_BATCH}",
            start,
        )
    queries = cfg.MODEL.DETR.NUM_OBJECT_QUERIES
    most = int(records.num_boxes.max(initial=0))
    if queries / 2 < most <= queries:  # above that, the check of the data reports an error
        logger.warning(
            "An image has %d objects, more than half of the %d queries; raise MODEL.DETR.NUM_OBJECT_QUERIES", most, queries
        )


def log_next_steps(cfg: CfgNode, state: RunState, output: Path) -> None:
    """Log the best checkpoint of a finished run, its iteration, and the commands to use next.

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
    longer = f"SOLVER.EPOCHS {2 * cfg.SOLVER.EPOCHS:g}" if cfg.SOLVER.EPOCHS > 0 else f"SOLVER.MAX_ITER {2 * cfg.SOLVER.MAX_ITER}"
    if 0 < cfg.SOLVER.EARLY_STOPPING <= best.waited:
        longer += " SOLVER.EARLY_STOPPING 0"
    config, report, best_file = (shlex.quote(str(path)) for path in (output / "config.yaml", output / "eval", weights))
    own, processes = import_words(), distributed.world_size()
    gpus = f" --num-gpus {processes}" if processes > 1 else ""  # the batch is divided among them
    commands = [
        f"cpvt-det predict{own} {best_file} --input IMAGES --output found",
        f"cpvt-det eval{own} {best_file} --config-file {config} --report OUTPUT_DIR {report}",
        f"cpvt-det train{own}{gpus} --config-file {config} --resume {longer}",
    ]
    logger.info("%s: %s. Next: predict, report, train longer:\n  %s", which, weights, "\n  ".join(commands))
