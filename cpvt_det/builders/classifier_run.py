# SPDX-License-Identifier: Apache-2.0
"""Build the data, loaders and loss of a classifier's run from ``INPUT.CLASSIFY`` and ``MODEL.CLASSIFIER``."""

from collections.abc import Sequence

import torch
from fvcore.common.config import CfgNode

from cpvt_det.builders.data import load_checked, require_rgb
from cpvt_det.builders.datasets import check_class_datasets, require_names
from cpvt_det.builders.detector import is_classifier
from cpvt_det.builders.outputs import build_device
from cpvt_det.common import distributed
from cpvt_det.common.errors import ConfigError, config_errors
from cpvt_det.data.classify import ClassMapper, central_transform, crop_transform
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.loader import MappedDataset, SampleLoader, TrainBatches, evaluation_loader
from cpvt_det.data.records import ImageRecord
from cpvt_det.losses.soft_labels import ClassCriterion
from cpvt_det.solver.classify import BatchMixing


def load_class_splits(cfg: CfgNode) -> tuple[list[CocoDataset], list[CocoDataset]]:
    """The training and test sets of images with one class each, as in :func:`cpvt_det.builders.load_splits`.

    Raises:
        BadInputError: as for ``load_splits``; a model that is not a classifier.
    """
    _check_settings(cfg)
    require_names(cfg, "TRAIN")
    data = load_checked(cfg, ("TRAIN", "TEST"), check_class_datasets)
    return data.train, data.tests


def load_class_tests(cfg: CfgNode) -> list[CocoDataset]:
    """The test sets alone; errors as in :func:`load_class_splits`."""
    _check_settings(cfg)
    require_names(cfg, "TEST")
    return load_checked(cfg, ("TEST",), check_class_datasets).tests


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
        batches = TrainBatches(
            len(records),
            cfg.SOLVER.IMS_PER_BATCH,
            seed,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            repeats=node.REPEATS,
        )
        return SampleLoader(dataset, batches, cfg.DATALOADER.NUM_WORKERS, pin_memory=build_device(cfg).type == "cuda")


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
    dataset = MappedDataset(records, build_class_mapper(cfg), patience=cfg.DATALOADER.PATIENCE)
    world_size = distributed.world_size()
    share = max(1, cfg.TEST.IMS_PER_BATCH // world_size)
    return evaluation_loader(dataset, share, cfg.DATALOADER.NUM_WORKERS, distributed.rank(), world_size)


def build_class_criterion(cfg: CfgNode) -> ClassCriterion:
    """The loss of ``MODEL.CLASSIFIER``."""
    node = cfg.MODEL.CLASSIFIER
    if node.TEACHER_WEIGHTS and not node.TEACHER.startswith("timm/"):
        raise ConfigError(f"MODEL.CLASSIFIER.TEACHER_WEIGHTS is {node.TEACHER_WEIGHTS!r}, but the teacher is not a timm network")
    with config_errors("MODEL.CLASSIFIER.SMOOTHING"):
        return ClassCriterion(cfg.MODEL.CLASSIFIER.SMOOTHING)


def build_mixing(cfg: CfgNode) -> BatchMixing:
    """Mixup and CutMix of ``INPUT.CLASSIFY``."""
    with config_errors("INPUT.CLASSIFY"):
        return BatchMixing(cfg.MODEL.NUM_CLASSES, cfg.INPUT.CLASSIFY.MIXUP, cfg.INPUT.CLASSIFY.CUTMIX)


def _check_settings(cfg: CfgNode) -> None:
    """Before data are read and training starts, refuse settings with which evaluation would fail."""
    if not is_classifier(cfg):
        name = cfg.MODEL.META_ARCHITECTURE
        raise ConfigError(
            f"TASK is {cfg.TASK!r}, but MODEL.META_ARCHITECTURE {name!r} is not a classifier; set it to CPVTClassifier"
        )
    build_class_mapper(cfg)
