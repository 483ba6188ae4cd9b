# SPDX-License-Identifier: Apache-2.0
"""detectron2's COCOEvaluator on the ground truth and with the figures of the core."""

from typing import Any

from detectron2.evaluation import COCOEvaluator

from cpvt_det import build
from cpvt_det.data.coco import CocoDataset
from cpvt_det.evaluation.coco import format_table, write_detections


class CleanCOCOEvaluator(COCOEvaluator):
    """``COCOEvaluator`` that leaves out the boxes that training leaves out, and scores no detections as AP 0.

    Gathering, files and the call are detectron2's, the figures those of the built-in runner.

    Args:
        cfg: the run's config.
        dataset: registered in detectron2 under its name.
        output_dir: for ``coco_instances_results.json``.
    """

    def __init__(self, cfg: Any, dataset: CocoDataset, output_dir: str):
        super().__init__(dataset.name, tasks=("bbox",), output_dir=output_dir, use_fast_impl=False)
        self._cfg = cfg
        self._dataset = dataset

    def _eval_predictions(self, predictions: list[dict], img_ids: Any = None) -> None:
        evaluator = build.build_evaluator(self._cfg, self._dataset)
        ids = self._dataset.classes.ids
        results = [{**found, "category_id": ids[found["category_id"]]} for image in predictions for found in image["instances"]]
        evaluator.merge({"image_ids": [image["image_id"] for image in predictions], "results": results})
        self._results.update(evaluator.evaluate())
        write_detections(evaluator.coco_results(), f"{self._output_dir}/coco_instances_results.json")
        self._logger.info("Evaluation on %s:\n%s", self._dataset.name, format_table(self._results))
