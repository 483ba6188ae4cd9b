# SPDX-License-Identifier: Apache-2.0
"""Image classification: read images with one class each, predict the scores of all classes, measure top-1."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fvcore.common.config import CfgNode

from cpvt_det import builders
from cpvt_det.common.errors import ConfigError, config_errors
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.records import Records
from cpvt_det.data.validation.check import CheckedData
from cpvt_det.data.validation.issues import EXAMPLES
from cpvt_det.training.tasks.task import TASK_REGISTRY, Results, Task, place_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from cpvt_det.common.structures import Sample
    from cpvt_det.data.loader import SampleLoader
    from cpvt_det.evaluation.top_k import ClassEvaluator

logger = logging.getLogger("cpvt_det")
ANSWERS, CONFUSION = "classes.json", "confusion.csv"


@TASK_REGISTRY.register_as("classification")
class ClassificationTask(Task):
    """Image classification: records with one class each, a cross-entropy loss, accuracies."""

    main_figure = "classes/top1"
    figures = ("top1", "top1_class_mean", "top5")

    def __init__(self, cfg: CfgNode):
        super().__init__(cfg)
        self._classes = None  # of the training sets, once they are loaded

    def check_data(self, decode: bool = False, examples: float = EXAMPLES) -> CheckedData:
        """Training and test sets with their faults, as from :func:`cpvt_det.builders.check_class_datasets`."""
        return builders.check_class_datasets(self.cfg, decode=decode, examples=examples)

    def load_splits(self) -> tuple[list[CocoDataset], list[CocoDataset]]:
        """Training sets and test sets of images with one class each.

        Raises:
            BadInputError: as for :func:`cpvt_det.builders.load_splits`; a model that is not a classifier.
        """
        train, tests = self._load("TRAIN", "TEST")
        self._classes = train[0].classes
        return train, tests

    def load_tests(self) -> list[CocoDataset]:
        """The test sets alone; errors as in :meth:`load_splits`."""
        return self._load("TEST")[1]

    def _load(self, *splits: str) -> tuple[list[CocoDataset], list[CocoDataset]]:
        """Load data sets, but first refuse settings with which evaluation would fail."""
        if not builders.is_classifier(self.cfg):
            name = self.cfg.MODEL.META_ARCHITECTURE
            raise ConfigError(
                f"TASK is {self.cfg.TASK!r}, but MODEL.META_ARCHITECTURE {name!r} is not a classifier; set it to CPVTClassifier"
            )
        if self.cfg.TEST.TILES.SIZE:
            raise ConfigError("TEST.TILES is for detectors; a classifier classifies whole images")
        builders.build_class_mapper(self.cfg)
        return builders.load_checked(self.cfg, splits, builders.check_class_datasets)

    def build_train_loader(self, records: Records, seed: int) -> "SampleLoader":
        """A loader of augmented batches, each with this process's share of ``SOLVER.IMS_PER_BATCH``.

        Raises:
            ConfigError: a batch size that is not divisible by the number of processes, or invalid settings of ``INPUT.CLASSIFY``.
        """
        from cpvt_det.data.loader import MappedDataset
        from cpvt_det.data.mapper import ClassMapper, crop_transform

        cfg, node = self.cfg, self.cfg.INPUT.CLASSIFY
        builders.require_rgb(cfg)
        with config_errors("INPUT.CLASSIFY, SOLVER or DATALOADER"):
            flip, colour = cfg.INPUT.RANDOM_FLIP == "horizontal", [round(value) for value in cfg.MODEL.PIXEL_MEAN]
            transform = crop_transform(
                node.SIZE, tuple(node.SCALE), tuple(node.RATIO), flip, tuple(node.RANDAUGMENT), node.ERASE, colour
            )
            dataset = MappedDataset(records, ClassMapper(transform, with_targets=True), seed, patience=cfg.DATALOADER.PATIENCE)
            return builders.load_for_training(cfg, dataset, seed, repeats=node.REPEATS)

    def build_test_loader(self, dataset: CocoDataset) -> "DataLoader":
        """Every image of a test set once, at the test size."""
        return builders.load_for_tests(self.cfg, dataset.records, builders.build_class_mapper(self.cfg))

    def set_test_size(self, size: int) -> None:
        """Set the side of the test images' crop. The size to which images are resized before the crop changes in proportion."""
        self.cfg.INPUT.CLASSIFY.TEST_SIZE = size

    def build_training_model(self, detector: "nn.Module") -> "nn.Module":
        """The classifier with its loss, as :func:`cpvt_det.builders.build_class_training_model`."""
        return builders.build_class_training_model(self.cfg, detector, self._classes)

    def build_evaluator(self, dataset: CocoDataset) -> "ClassEvaluator":
        from cpvt_det.evaluation.top_k import ClassEvaluator

        self.evaluators[dataset.name] = evaluator = ClassEvaluator(dataset.records, dataset.classes.names)
        return evaluator

    def infer(self, detector: "nn.Module", samples: "Sequence[Sample]") -> "list[Tensor]":
        from cpvt_det.evaluation.answers import classify

        return classify(detector, samples)

    def format_results(self, results: Results) -> str:
        from cpvt_det.evaluation.top_k import format_accuracies

        return format_accuracies(results)

    def write_outputs(self, evaluator: "ClassEvaluator", folder: Path) -> None:
        """Write the classes with the highest scores for every image of a test set, and the confusion matrix."""
        from cpvt_det.common.files import write_json
        from cpvt_det.evaluation.top_k import write_confusion

        write_json(evaluator.answers(), folder / ANSWERS)
        write_confusion(evaluator.confusion(), evaluator.names, folder / CONFUSION)

    def show_results(self, detector: "nn.Module", datasets: Sequence[CocoDataset], results: Results, output: Path) -> None:
        from cpvt_det.common import distributed
        from cpvt_det.visualize.report import draw_answers, write_class_report

        if distributed.rank() != 0:
            return
        for number, dataset in enumerate(datasets):
            evaluator = self.evaluators[dataset.name]
            if number == 0 and self.cfg.TEST.PICTURES > 0:
                draw_answers(evaluator.answers(), self.cfg.TEST.PICTURES, output / "pictures" / "classes.png")
                logger.info("Pictures: %s", output / "pictures" / "classes.png")
            if self.cfg.TEST.REPORT:
                folder = place_of(dataset, datasets, output / "report")
                figures = results if len(datasets) == 1 else results[dataset.name]
                write_class_report(evaluator.confusion(), dataset.classes.names, figures, folder)
                logger.info("Report: %s", folder / "report.md")
