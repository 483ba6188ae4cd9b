# SPDX-License-Identifier: Apache-2.0
"""Object detection: read COCO-style data sets, predict boxes, measure AP."""

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cpvt_det import builders
from cpvt_det.common.files import write_json
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.records import Records
from cpvt_det.data.validation.check import CheckedData
from cpvt_det.data.validation.issues import EXAMPLES
from cpvt_det.training.tasks.task import TASK_REGISTRY, Results, Task, place_of

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from cpvt_det.common.structures import Detections, Sample
    from cpvt_det.data.loader import SampleLoader
    from cpvt_det.evaluation.answers import PostProcessor
    from cpvt_det.evaluation.coco import CocoEvaluator
    from cpvt_det.evaluation.tiles import Tiling

logger = logging.getLogger("cpvt_det")
DETECTIONS = "coco_instances_results.json"


@TASK_REGISTRY.register_as("detection")
class DetectionTask(Task):
    """Object detection: records with boxes, a set loss, COCO's metrics."""

    main_figure = "bbox/AP"
    figures = ("AP", "AP50", "AP75", "APs", "APm", "APl")

    def check_data(self, decode: bool = False, examples: float = EXAMPLES) -> CheckedData:
        """Training and test sets with their faults, as :func:`cpvt_det.builders.check_datasets`."""
        return builders.check_datasets(self.cfg, decode=decode, examples=examples)

    def load_splits(self) -> tuple[list[CocoDataset], list[CocoDataset]]:
        """Training sets and test sets, as :func:`cpvt_det.builders.load_splits`."""
        return builders.load_splits(self.cfg)

    def load_tests(self) -> list[CocoDataset]:
        """Test sets, as :func:`cpvt_det.builders.load_tests`."""
        return builders.load_tests(self.cfg)

    def build_train_loader(self, records: Records, seed: int) -> "SampleLoader":
        """Batches for training, as :func:`cpvt_det.builders.build_train_loader`."""
        return builders.build_train_loader(self.cfg, records, seed)

    def build_test_loader(self, dataset: CocoDataset) -> "DataLoader":
        """Every image of a test set once, as :func:`cpvt_det.builders.build_test_loader`."""
        return builders.build_test_loader(self.cfg, dataset.records)

    def set_test_size(self, size: int) -> None:
        """Resize test images to this short side; the limit of the long side changes in proportion."""
        node = self.cfg.INPUT
        if node.MIN_SIZE_TEST > 0:
            node.MAX_SIZE_TEST = round(node.MAX_SIZE_TEST * size / node.MIN_SIZE_TEST)
        node.MIN_SIZE_TEST = size

    def build_training_model(self, detector: "nn.Module") -> "nn.Module":
        """The detector with its set loss, as :func:`cpvt_det.builders.build_training_model`."""
        return builders.build_training_model(self.cfg, detector)

    def build_evaluator(self, dataset: CocoDataset) -> "CocoEvaluator":
        from cpvt_det.evaluation.matches import COUNTED

        evaluator = builders.build_evaluator(dataset)
        if self.cfg.TEST.REPORT:  # otherwise it is not needed once its figures are known
            self.evaluators[dataset.name] = evaluator
        if evaluator.max_detections is None:
            logger.info(
                "%s: an image has more than %d objects of a class, so all detections count, not only the best %d per class and "
                "image as on COCO; AR100 keeps that limit",
                dataset.name,
                COUNTED,
                COUNTED,
            )
        return evaluator

    @cached_property
    def postprocessor(self) -> "PostProcessor":
        """The step that turns predictions into detections."""
        return builders.build_postprocessor(self.cfg)

    @cached_property
    def tiling(self) -> "Tiling | None":
        """The rule for cutting images into tiles; ``None`` if they are not cut."""
        return builders.build_tiling(self.cfg)

    def infer(self, detector: "nn.Module", samples: "Sequence[Sample]") -> "list[Detections]":
        from cpvt_det.common import distributed
        from cpvt_det.evaluation.answers import detect
        from cpvt_det.evaluation.tiles import detect_tiles

        if self.tiling is None:
            return detect(detector, self.postprocessor, samples)
        share = max(1, self.cfg.TEST.IMS_PER_BATCH // distributed.world_size())
        prepare = builders.build_test_mapper(self.cfg).prepare
        return detect_tiles(detector, self.postprocessor, samples, prepare, self.tiling, share)

    def format_results(self, results: Results) -> str:
        from cpvt_det.evaluation.coco import format_table

        return format_table(results)

    def write_outputs(self, evaluator: "CocoEvaluator", folder: Path) -> None:
        """Write all detections of a test set, in COCO's format."""
        write_json(evaluator.coco_results(), folder / DETECTIONS)

    def show_results(self, detector: "nn.Module", datasets: Sequence[CocoDataset], results: Results, output: Path) -> None:
        from cpvt_det.common import distributed
        from cpvt_det.visualize.report import write_report

        if distributed.rank() != 0:
            return
        self._draw_pictures(detector, datasets[0], output / "pictures" / "detections.png")
        test = self.cfg.TEST
        for dataset in datasets if test.REPORT else ():
            matches = self.evaluators[dataset.name].matches()
            figures = results if len(datasets) == 1 else results[dataset.name]
            folder = place_of(dataset, datasets, output / "report")
            write_report(dataset, matches, figures, folder, test.PICTURE_THRESHOLD, test.PICTURES)
            logger.info("Report: %s", folder / "report.md")
            _warn_of_low(matches.scores.tolist(), test.PICTURE_THRESHOLD, f"on {dataset.name}")

    def _draw_pictures(self, detector: "nn.Module", dataset: CocoDataset, path: Path) -> None:
        """Draw detections on ``TEST.PICTURES`` images, spread over the data set, next to their ground truth."""
        from cpvt_det.data.images import read_image
        from cpvt_det.evaluation.answers import evaluation_mode
        from cpvt_det.visualize.pictures import Compared, save_comparisons
        from cpvt_det.visualize.report import truth_of

        count = min(self.cfg.TEST.PICTURES, len(dataset.records))
        if count < 1:
            return
        compared, threshold, mapper = [], self.cfg.TEST.PICTURE_THRESHOLD, builders.build_test_mapper(self.cfg)
        with evaluation_mode(detector):
            for number in range(count):
                record = dataset.records[number * len(dataset.records) // count]
                (found,) = self.infer(detector, [mapper(record)])
                compared.append(Compared(read_image(record.file_name), truth_of(record), found))
        save_comparisons(compared, dataset.classes.names, threshold, path)
        logger.info("Pictures: %s", path)
        scores = [score for one in compared for score in one.detections.scores.tolist()]
        _warn_of_low(scores, threshold, "in these pictures, which show the best few instead")


def _warn_of_low(scores: Sequence[float], threshold: float, where: str) -> None:
    """Warn if no score passes the threshold."""
    if scores and max(scores) < threshold:
        logger.warning(
            "No detection has a score of %.3g (TEST.PICTURE_THRESHOLD) or more %s; the best score is %.3g",
            threshold,
            where,
            max(scores),
        )
