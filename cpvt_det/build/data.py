# SPDX-License-Identifier: Apache-2.0
"""``DATASETS``, ``INPUT``, ``DATALOADER`` and ``TEST`` -> data sets, loaders, evaluator."""

import torch
from fvcore.common.config import CfgNode

from cpvt_det import distributed
from cpvt_det.build.detector import build_device, build_postprocessor
from cpvt_det.data.catalog import find_datasets
from cpvt_det.data.coco import Classes, CocoDataset, ImageRecord, load_coco, require_same_classes
from cpvt_det.data.loader import MappedDataset, TrainBatches, TrainLoader, evaluation_loader
from cpvt_det.data.mapper import Mapper, evaluation_transform, train_transform
from cpvt_det.errors import ConfigError, UnknownNameError, config_errors
from cpvt_det.evaluation.coco import BACKENDS, CocoEvaluator


def load_datasets(cfg: CfgNode, split: str) -> list[CocoDataset]:
    """Read the data sets of ``DATASETS.TRAIN`` or ``DATASETS.TEST``.

    Args:
        cfg: the config.
        split: ``TRAIN`` or ``TEST``.

    Raises:
        BadInputError: no data set, an unknown one, or one that cannot be read.
    """
    names = cfg.DATASETS[split]
    if isinstance(names, str) or not names:
        raise ConfigError(f"DATASETS.{split} should list data sets, as in DATASETS.{split} \"('coco_2017_train',)\"; got {names!r}")
    return [load_coco(files) for files in find_datasets(names, cfg.DATASETS.REGISTER)]


def load_splits(cfg: CfgNode) -> tuple[list[CocoDataset], list[CocoDataset]]:
    """Read training and test sets, compare their classes, and set ``MODEL.NUM_CLASSES``.

    Returns:
        The training sets, and the test sets; the latter may be none.

    Raises:
        BadInputError: data that cannot be read, or classes that differ between sets or from the config's number.
    """
    train = load_datasets(cfg, "TRAIN")
    test = load_datasets(cfg, "TEST") if cfg.DATASETS.TEST else []
    for other in train[1:] + test:
        require_same_classes(train[0].classes, other.classes, f"data sets {train[0].name} and {other.name}")
    set_classes(cfg, train[0].classes)
    check_evaluation(cfg)
    return train, test


def load_tests(cfg: CfgNode) -> list[CocoDataset]:
    """Read the test sets alone, compare their classes, and set ``MODEL.NUM_CLASSES``; errors as in :func:`load_splits`."""
    tests = load_datasets(cfg, "TEST")
    for other in tests[1:]:
        require_same_classes(tests[0].classes, other.classes, f"data sets {tests[0].name} and {other.name}")
    set_classes(cfg, tests[0].classes)
    check_evaluation(cfg)
    return tests


def set_classes(cfg: CfgNode, classes: Classes) -> None:
    """Set ``MODEL.NUM_CLASSES`` from the data.

    Raises:
        ConfigError: the config names another number.
    """
    if cfg.MODEL.NUM_CLASSES not in (0, len(classes)):
        raise ConfigError(
            f"MODEL.NUM_CLASSES is {cfg.MODEL.NUM_CLASSES}, but the data has {len(classes)} classes "
            f"({', '.join(classes.names[:5])}{', ...' if len(classes) > 5 else ''}); leave it at 0 to take the data's"
        )
    cfg.MODEL.NUM_CLASSES = len(classes)


def training_records(cfg: CfgNode, datasets: list[CocoDataset]) -> list[ImageRecord]:
    """The images to train on; without those without objects under ``DATALOADER.FILTER_EMPTY_ANNOTATIONS``.

    Raises:
        ConfigError: no object in any image.
    """
    records = [record for dataset in datasets for record in dataset.records]
    filled = [record for record in records if len(record.labels)]
    if not filled:
        raise ConfigError(f"{', '.join(d.name for d in datasets)}: no image has an object to learn; is it the right JSON?")
    return filled if cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS else records


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


def build_test_loader(cfg: CfgNode, records: list[ImageRecord]) -> torch.utils.data.DataLoader:
    """Every record once, at the test size, over all processes."""
    _require_rgb(cfg)
    with config_errors("INPUT or TEST"):
        transform = evaluation_transform(cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
        dataset = MappedDataset(records, Mapper(transform, with_targets=False))
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
