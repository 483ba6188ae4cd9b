# SPDX-License-Identifier: Apache-2.0
"""Build the data, loaders and loss of a classifier's run from ``INPUT.CLASSIFY`` and ``MODEL.CLASSIFIER``."""

from collections.abc import Sequence

import torch
from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det.builders.data import load_checked, load_for_tests, load_for_training, require_rgb
from cpvt_det.builders.datasets import check_class_datasets
from cpvt_det.builders.detector import is_classifier
from cpvt_det.common.errors import ConfigError, config_errors
from cpvt_det.data.classify import ClassMapper, central_transform, crop_transform
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.loader import MappedDataset, SampleLoader
from cpvt_det.data.records import ImageRecord
from cpvt_det.losses.soft_labels import ClassCriterion
from cpvt_det.solver.classify import BatchMixing, ClassTrainingModel, Teacher


def load_class_splits(cfg: CfgNode) -> tuple[list[CocoDataset], list[CocoDataset]]:
    """The training and test sets of images with one class each, as in :func:`cpvt_det.builders.load_splits`.

    Raises:
        BadInputError: as for ``load_splits``; a model that is not a classifier.
    """
    _check_settings(cfg)
    return load_checked(cfg, ("TRAIN", "TEST"), check_class_datasets)


def load_class_tests(cfg: CfgNode) -> list[CocoDataset]:
    """The test sets alone; errors as in :func:`load_class_splits`."""
    _check_settings(cfg)
    _, tests = load_checked(cfg, ("TEST",), check_class_datasets)
    return tests


def build_class_train_loader(cfg: CfgNode, records: Sequence[ImageRecord], seed: int) -> SampleLoader:
    """A loader of augmented batches, each with this process's share of ``SOLVER.IMS_PER_BATCH``.

    Raises:
        ConfigError: a batch size that is not divisible by the number of processes, or invalid settings of ``INPUT.CLASSIFY``.
    """
    node = cfg.INPUT.CLASSIFY
    require_rgb(cfg)
    with config_errors("INPUT.CLASSIFY, SOLVER or DATALOADER"):
        flip, colour = cfg.INPUT.RANDOM_FLIP == "horizontal", [round(value) for value in cfg.MODEL.PIXEL_MEAN]
        transform = crop_transform(
            node.SIZE, tuple(node.SCALE), tuple(node.RATIO), flip, tuple(node.RANDAUGMENT), node.ERASE, colour
        )
        dataset = MappedDataset(records, ClassMapper(transform, with_targets=True), seed, patience=cfg.DATALOADER.PATIENCE)
        return load_for_training(cfg, dataset, seed, repeats=node.REPEATS)


def build_class_mapper(cfg: CfgNode) -> ClassMapper:
    """The mapper that resizes and crops an image to the test size, in evaluation and prediction.

    Raises:
        ConfigError: a size or a ratio out of range, or a channel order other than RGB.
    """
    node = cfg.INPUT.CLASSIFY
    require_rgb(cfg)
    with config_errors("INPUT.CLASSIFY"):
        return ClassMapper(central_transform(node.TEST_SIZE, node.CROP_RATIO), with_targets=False)


def build_class_test_loader(cfg: CfgNode, records: Sequence[ImageRecord]) -> torch.utils.data.DataLoader:
    """A loader that reads every record once, at the test size; the records are divided among the processes."""
    return load_for_tests(cfg, records, build_class_mapper(cfg))


def build_class_training_model(cfg: CfgNode, classifier: nn.Module, teacher: Teacher | None) -> ClassTrainingModel:
    """A classifier with the loss of ``MODEL.CLASSIFIER``, the Mixup and CutMix of ``INPUT.CLASSIFY``, and a teacher.

    Raises:
        ConfigError: values of these keys that cannot be used.
    """
    node, given = cfg.MODEL.CLASSIFIER, cfg.INPUT.CLASSIFY
    if node.TEACHER_WEIGHTS and not node.TEACHER.startswith("timm/"):
        raise ConfigError(f"MODEL.CLASSIFIER.TEACHER_WEIGHTS is {node.TEACHER_WEIGHTS!r}, but the teacher is not a timm network")
    with config_errors("MODEL.CLASSIFIER.SMOOTHING"):
        criterion = ClassCriterion(node.SMOOTHING)
    with config_errors("INPUT.CLASSIFY"):
        mixing = BatchMixing(cfg.MODEL.NUM_CLASSES, given.MIXUP, given.CUTMIX)
    return ClassTrainingModel(classifier, criterion, mixing, teacher)


def _check_settings(cfg: CfgNode) -> None:
    """Before data are read and training starts, refuse settings with which evaluation would fail."""
    if not is_classifier(cfg):
        name = cfg.MODEL.META_ARCHITECTURE
        raise ConfigError(
            f"TASK is {cfg.TASK!r}, but MODEL.META_ARCHITECTURE {name!r} is not a classifier; set it to CPVTClassifier"
        )
    build_class_mapper(cfg)
