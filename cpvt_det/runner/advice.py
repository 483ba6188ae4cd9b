# SPDX-License-Identifier: Apache-2.0
"""What a run should be told before its first iteration, though nothing is wrong with it."""

import logging
from collections.abc import Sequence

from fvcore.common.config import CfgNode

from cpvt_det.data.coco import ImageRecord
from cpvt_det.solver.schedule import Length

logger = logging.getLogger("cpvt_det")
FROM_SCRATCH = 300_000
"""Iterations that transformers of detectors are trained for from random weights: 500 epochs of COCO at batch 64 are 920,000, 50 at
batch 32 are 185,000."""
FEW = 30_000


def log_advice(cfg: CfgNode, length: Length, records: Sequence[ImageRecord]) -> None:
    """Warn of a training that is far too short from random weights, and of images with nearly as many objects as queries.

    Args:
        cfg: the run's config.
        length: of the run.
        records: its training images.
    """
    if not cfg.MODEL.WEIGHTS and length.max_iter < FEW:
        logger.warning(
            "%d iterations (%s) from random weights; a DETR needs about %d on photographs, fewer on simple images. MODEL.WEIGHTS "
            "starts from trained ones",
            length.max_iter,
            f"{len(records)} images x epochs / batch of {cfg.SOLVER.IMS_PER_BATCH}",
            FROM_SCRATCH,
        )
    queries = cfg.MODEL.DETR.NUM_OBJECT_QUERIES
    most = max((len(record.labels) for record in records), default=0)
    if queries / 2 < most <= queries:  # of more, the check of the data tells
        logger.warning(
            "An image has %d objects, more than half of the %d queries; raise MODEL.DETR.NUM_OBJECT_QUERIES",
            most,
            queries,
        )
