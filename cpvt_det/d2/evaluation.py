# SPDX-License-Identifier: Apache-2.0
"""The core's evaluator behind detectron2's interface.

detectron2's own ``COCOEvaluator`` takes our models too; but it keeps ground truth that training leaves out, which nothing can
match, and gives NaN, not 0, where nothing is detected.
"""

from typing import Any

from detectron2.evaluation import DatasetEvaluator

from cpvt_det import builders, distributed
from cpvt_det.data.coco import CocoDataset
from cpvt_det.evaluation.coco import format_table, write_detections
from cpvt_det.runner.evaluate import DETECTIONS, gather_detections
from cpvt_det.runner.setup import logger
from cpvt_det.structures import Detections


class CleanCOCOEvaluator(DatasetEvaluator):
    """Figures and files of the built-in runner, from detectron2's inputs and outputs.

    Args:
        cfg: the run's config.
        dataset: the images that the loader goes through.
        folder: for ``coco_instances_results.json``.
    """

    def __init__(self, cfg: Any, dataset: CocoDataset, folder: str):
        self._cfg, self._dataset, self._folder = cfg, dataset, folder
        self.reset()

    def reset(self) -> None:
        """Forget what was processed."""
        self._evaluator = builders.build_evaluator(self._cfg, self._dataset)

    def process(self, inputs: list[dict], outputs: list[dict]) -> None:
        """Take the instances of a batch.

        Raises:
            ValueError: non-finite or impossible detections, with the image's id.
        """
        for sample, output in zip(inputs, outputs, strict=True):
            found = output["instances"]
            self._evaluator.add(sample["image_id"], Detections(found.pred_boxes.tensor, found.scores, found.pred_classes))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Gather from all processes; the results in the first, nothing in others."""
        gather_detections(self._evaluator)
        if distributed.rank() != 0:
            return {}
        results = self._evaluator.evaluate()
        write_detections(self._evaluator.coco_results(), f"{self._folder}/{DETECTIONS}")
        logger.info("Evaluation on %s:\n%s", self._dataset.name, format_table(results))
        return results
