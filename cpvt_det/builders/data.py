# SPDX-License-Identifier: Apache-2.0
"""``DATASETS``, ``INPUT``, ``DATALOADER`` and ``TEST`` -> data sets, loaders, evaluator."""

from collections.abc import Sequence

import torch
from fvcore.common.config import CfgNode

from cpvt_det import distributed
from cpvt_det.builders.detector import build_device, build_postprocessor
from cpvt_det.data.catalog import DatasetFiles, find_datasets
from cpvt_det.data.coco import Classes, CocoDataset, ImageRecord
from cpvt_det.data.loader import MappedDataset, TrainBatches, TrainLoader, evaluation_loader
from cpvt_det.data.mapper import Mapper, evaluation_transform, train_transform
from cpvt_det.data.validation.check import CheckedData, check_data
from cpvt_det.data.validation.issues import EXAMPLES, POLICIES, require_no_errors
from cpvt_det.errors import ConfigError, DataError, UnknownNameError, config_errors, first_line
from cpvt_det.evaluation.coco import BACKENDS, CocoEvaluator


def check_datasets(
    cfg: CfgNode, splits: Sequence[str] = ("TRAIN", "TEST"), decode: bool = False, examples: float = EXAMPLES
) -> CheckedData:
    """Read and check the data sets of a config, and compare their classes with ``MODEL.NUM_CLASSES``, which is set.

    Args:
        cfg: the config.
        splits: which of ``DATASETS.TRAIN`` and ``DATASETS.TEST``.
        decode, examples: as in :func:`cpvt_det.data.validation.check.check_data`.

    Returns:
        The data sets without what has faults, and the faults, whatever ``DATASETS.ON_BAD`` is.

    Raises:
        ConfigError: names that cannot be looked up, or an unknown policy.
    """
    if cfg.DATASETS.ON_BAD not in POLICIES:
        raise UnknownNameError("DATASETS.ON_BAD", cfg.DATASETS.ON_BAD, POLICIES)
    train, tests = ([] if split not in splits else _find(cfg, split) for split in ("TRAIN", "TEST"))
    data = check_data(train, tests, cfg.MODEL.DETR.NUM_OBJECT_QUERIES, decode, examples)
    for dataset in (data.train + data.tests)[:1]:
        try:
            set_classes(cfg, dataset.classes)
        except ConfigError as error:
            data.issues[-1].add_error("classes", str(error))
    return data


def load_splits(cfg: CfgNode) -> tuple[list[CocoDataset], list[CocoDataset]]:
    """Read and check training and test sets, and set ``MODEL.NUM_CLASSES``.

    Returns:
        The training sets, and the test sets; the latter may be none.

    Raises:
        BadInputError: data that cannot be read; faults that ``DATASETS.ON_BAD`` does not drop; classes that differ between sets or
            from the config's number; settings of the evaluation.
    """
    _require_names(cfg, "TRAIN")
    return _load(cfg, ("TRAIN", "TEST"))


def load_tests(cfg: CfgNode) -> list[CocoDataset]:
    """Read and check the test sets alone, and set ``MODEL.NUM_CLASSES``; errors as in :func:`load_splits`."""
    _require_names(cfg, "TEST")
    return _load(cfg, ("TEST",))[1]


def _load(cfg: CfgNode, splits: Sequence[str]) -> tuple[list[CocoDataset], list[CocoDataset]]:
    data = check_datasets(cfg, splits)
    try:
        require_no_errors(data.issues, cfg.DATASETS.ON_BAD)
    except DataError as error:
        if distributed.rank() == 0:
            raise
        raise DataError(first_line(error)) from error  # once is enough for the list
    check_evaluation(cfg)
    return data.train, data.tests


def _find(cfg: CfgNode, split: str) -> list[DatasetFiles]:
    names = cfg.DATASETS[split]
    if isinstance(names, str):
        _require_names(cfg, split)
    return find_datasets(names, cfg.DATASETS.REGISTER)


def _require_names(cfg: CfgNode, split: str) -> None:
    names = cfg.DATASETS[split]
    if isinstance(names, str) or not names:
        raise ConfigError(f"DATASETS.{split} should list data sets, as in DATASETS.{split} \"('coco_2017_train',)\"; got {names!r}")


def set_classes(cfg: CfgNode, classes: Classes, source: str = "the data") -> None:
    """Set ``MODEL.NUM_CLASSES`` from the data, or from weights.

    Raises:
        ConfigError: the config names another number.
    """
    if cfg.MODEL.NUM_CLASSES not in (0, len(classes)):
        raise ConfigError(
            f"MODEL.NUM_CLASSES is {cfg.MODEL.NUM_CLASSES}, but {source} has {len(classes)} classes "
            f"({', '.join(classes.names[:5])}{', ...' if len(classes) > 5 else ''}); leave it at 0 to take these"
        )
    cfg.MODEL.NUM_CLASSES = len(classes)


def training_records(cfg: CfgNode, datasets: list[CocoDataset]) -> list[ImageRecord]:
    """The images to train on; without those without objects under ``DATALOADER.FILTER_EMPTY_ANNOTATIONS``."""
    records = [record for dataset in datasets for record in dataset.records]
    return [record for record in records if len(record.labels)] if cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS else records


def build_train_loader(cfg: CfgNode, records: list[ImageRecord], seed: int) -> TrainLoader:
    """Augmented batches of this process's share of ``SOLVER.IMS_PER_BATCH``.

    Raises:
        ConfigError: a batch that the processes do not divide, or sizes that make no sense.
    """
    node, loader = cfg.INPUT, cfg.DATALOADER
    _require_rgb(cfg)
    with config_errors("INPUT, SOLVER or DATALOADER"):
        crop = node.RESIZE_CROP
        transform = train_transform(
            node.MIN_SIZE_TRAIN,
            node.MAX_SIZE_TRAIN,
            flip=node.RANDOM_FLIP == "horizontal",
            crop_sizes=crop.SIZES if crop.ENABLED else (),
            crop_range=tuple(crop.RANGE),
        )
        dataset = MappedDataset(records, Mapper(transform, with_targets=True), seed)
        batches = TrainBatches(
            len(records),
            cfg.SOLVER.IMS_PER_BATCH,
            seed,
            wide=[record.width > record.height for record in records] if loader.ASPECT_RATIO_GROUPING else None,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        return TrainLoader(dataset, batches, loader.NUM_WORKERS, pin_memory=build_device(cfg).type == "cuda")


def build_test_mapper(cfg: CfgNode) -> Mapper:
    """What makes the test size of an image, in evaluation and after it.

    Raises:
        ConfigError: another order of channels than RGB.
    """
    _require_rgb(cfg)
    return Mapper(evaluation_transform(cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST), with_targets=False)


def build_test_loader(cfg: CfgNode, records: list[ImageRecord]) -> torch.utils.data.DataLoader:
    """Every record once, at the test size, over all processes."""
    with config_errors("INPUT or TEST"):
        dataset = MappedDataset(records, build_test_mapper(cfg))
        world_size = distributed.world_size()
        share = max(1, cfg.TEST.IMS_PER_BATCH // world_size)
        return evaluation_loader(dataset, share, cfg.DATALOADER.NUM_WORKERS, distributed.rank(), world_size)


def check_evaluation(cfg: CfgNode) -> None:
    """Refuse settings of the evaluation before the training that would come first.

    Raises:
        ConfigError: an unknown evaluator, or a number of detections below 1.
    """
    build_postprocessor(cfg)
    if cfg.TEST.EVALUATOR not in BACKENDS:
        raise UnknownNameError("evaluator (TEST.EVALUATOR)", cfg.TEST.EVALUATOR, BACKENDS)


def build_evaluator(cfg: CfgNode, dataset: CocoDataset) -> CocoEvaluator:
    """The evaluator of ``TEST.EVALUATOR``."""
    classes = dataset.classes
    truth = dataset.ground_truth
    return CocoEvaluator(truth, classes.ids, classes.names, cfg.TEST.EVALUATOR)


def _require_rgb(cfg: CfgNode) -> None:
    if cfg.INPUT.FORMAT != "RGB":
        raise ConfigError(f"INPUT.FORMAT is {cfg.INPUT.FORMAT!r}; our loader reads RGB, the order of torchvision's weights")
    if cfg.INPUT.RANDOM_FLIP not in ("horizontal", "none"):
        raise UnknownNameError("INPUT.RANDOM_FLIP", cfg.INPUT.RANDOM_FLIP, ("horizontal", "none"))
