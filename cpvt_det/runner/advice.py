# SPDX-License-Identifier: Apache-2.0
"""Warnings before the first iteration of a run whose settings are valid but unlikely to work well."""

import logging
from collections.abc import Sequence

from fvcore.common.config import CfgNode

from cpvt_det.data.coco import ImageRecord
from cpvt_det.solver.schedule import TrainingSchedule

logger = logging.getLogger("cpvt_det")
FROM_SCRATCH = 300_000
"""Typical number of iterations for training a DETR from random weights: 500 epochs of COCO with batch size 64 are 920,000, 50 with
batch size 32 are 185,000."""
FEW = 30_000


def log_advice(cfg: CfgNode, schedule: TrainingSchedule, records: Sequence[ImageRecord]) -> None:
    """Warn of a run from random weights that is far too short, and of images with nearly as many objects as there are queries.

    Args:
        cfg: config of the run.
        schedule: schedule of the run.
        records: training images of the run.
    """
    if not cfg.MODEL.WEIGHTS and schedule.max_iter < FEW:
        logger.warning(
            "%d iterations (%s) from random weights; a DETR needs about %d on photographs, fewer on simple images. Set "
            "MODEL.WEIGHTS to start from trained weights",
            schedule.max_iter,
            f"{len(records)} images x epochs / batch of {cfg.SOLVER.IMS_PER_BATCH}",
            FROM_SCRATCH,
        )
    queries = cfg.MODEL.DETR.NUM_OBJECT_QUERIES
    most = max((len(record.labels) for record in records), default=0)
    if queries / 2 < most <= queries:  # above that, the check of the data reports an error
        logger.warning(
            "An image has %d objects, more than half of the %d queries; raise MODEL.DETR.NUM_OBJECT_QUERIES",
            most,
            queries,
        )
