# SPDX-License-Identifier: Apache-2.0
"""Read and check the data sets of ``DATASETS``.

This module does not import torch, because the import would take longer than everything else that ``cpvt-det check-data`` does.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.data.catalog import DatasetFiles, find_datasets
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.records import Records, join
from cpvt_det.data.validation.check import CheckedData, LookAtImages, check_data, check_image_classes, look_at_images
from cpvt_det.data.validation.issues import EXAMPLES, POLICIES

logger = logging.getLogger("cpvt_det")
TOO_MANY = "images with more boxes than queries, so that some boxes cannot be learned"
TOO_FEW = "images with more boxes than detections, so that some boxes cannot be found"


def check_datasets(
    cfg: CfgNode,
    splits: Sequence[str] = ("TRAIN", "TEST"),
    decode: bool = False,
    examples: float = EXAMPLES,
    look: LookAtImages = look_at_images,
) -> CheckedData:
    """Read and check the data sets of a config, compare their classes with ``MODEL.NUM_CLASSES``, and set this key.

    Args:
        cfg: the config.
        splits: splits to read: ``TRAIN`` for ``DATASETS.TRAIN``, ``TEST`` for ``DATASETS.TEST``, or both.
        decode, examples, look: as in :func:`cpvt_det.data.validation.check.check_data`.

    Returns:
        The data sets without their faulty parts, and the faults, regardless of ``DATASETS.ON_BAD``.

    Raises:
        ConfigError: names that cannot be looked up, or an unknown ``DATASETS.ON_BAD``.
    """
    if cfg.DATASETS.ON_BAD not in POLICIES:
        raise UnknownNameError("DATASETS.ON_BAD", cfg.DATASETS.ON_BAD, POLICIES)
    files: dict[str, list[DatasetFiles]] = {"TRAIN": [], "TEST": []}
    for split in splits:
        if isinstance(cfg.DATASETS[split], str):
            require_names(cfg, split)
        files[split] = find_datasets(cfg.DATASETS[split], cfg.DATASETS.REGISTER)
    cache = Path(cfg.DATASETS.CACHE) if cfg.DATASETS.CACHE else None
    data = check_data(files["TRAIN"], files["TEST"], decode, examples, look, cache)
    for dataset in {dataset.name: dataset for dataset in data.train + data.tests}.values():
        _note_many_boxes(dataset, cfg, dataset in data.train)
    for dataset in (data.train + data.tests)[:1]:
        try:
            set_classes(cfg, dataset.classes)
        except ConfigError as error:
            data.issues[-1].add_error("classes", str(error))
    return data


def check_class_datasets(cfg: CfgNode, *args: Any, **options: Any) -> CheckedData:
    """:func:`check_datasets` for images with one class each; arguments, result and errors are the same."""
    return check_image_classes(check_datasets(cfg, *args, **options))


def log_data(datasets: Iterable[CocoDataset]) -> None:
    """Log a line per data set, and a warning if some of its boxes cannot be learned or found."""
    queries = "MODEL.DETR.NUM_OBJECT_QUERIES"
    for dataset in datasets:
        logger.info(dataset.describe())
        for kind, keys in ((TOO_MANY, queries), (TOO_FEW, f"TEST.DETECTIONS_PER_IMAGE, and {queries} if it is lower")):
            if found := dataset.issues.infos.get(kind):
                logger.warning("%s: %s: %d; raise %s", dataset.name, kind, found.count, keys)


def _note_many_boxes(dataset: CocoDataset, cfg: CfgNode, is_trained: bool) -> None:
    """Add a note to the data set's issues for each image with more boxes than can be learned or found."""
    num_queries, num_detections = cfg.MODEL.DETR.NUM_OBJECT_QUERIES, cfg.TEST.DETECTIONS_PER_IMAGE
    counts = dataset.records.num_boxes
    for index in (counts > min(num_queries, num_detections)).nonzero()[0].tolist():
        image_id, path = int(dataset.records.image_ids[index]), dataset.records.path(index)
        where = f"image {image_id}: {path} has {counts[index]} boxes, but there are only {num_queries} queries"
        if is_trained and counts[index] > num_queries:
            dataset.issues.add_info(TOO_MANY, where)
        else:
            dataset.issues.add_info(TOO_FEW, f"{where} and {num_detections} detections")


def require_names(cfg: CfgNode, split: str) -> None:
    """Refuse ``DATASETS.TRAIN`` or ``DATASETS.TEST``, depending on ``split``, if it is not a list of names.

    Raises:
        ConfigError: an empty list, or text instead of a list.
    """
    names = cfg.DATASETS[split]
    if isinstance(names, str) or not names:
        raise ConfigError(
            f"DATASETS.{split} must list the names of data sets, as in DATASETS.{split} coco_2017_train; got {names!r}"
        )


def set_classes(cfg: CfgNode, classes: Classes, source: str = "the data") -> None:
    """Set ``MODEL.NUM_CLASSES`` from the data, or from weights.

    Raises:
        ConfigError: the config already has a different number.
    """
    if cfg.MODEL.NUM_CLASSES not in (0, len(classes)):
        raise ConfigError(
            f"MODEL.NUM_CLASSES is {cfg.MODEL.NUM_CLASSES}, but {source} has {len(classes)} classes "
            f"({', '.join(classes.names[:5])}{', ...' if len(classes) > 5 else ''}); set it to 0 to use these"
        )
    cfg.MODEL.NUM_CLASSES = len(classes)


def training_records(cfg: CfgNode, datasets: list[CocoDataset]) -> Records:
    """The images to train on; ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` leaves out images without objects."""
    if not cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
        return join([dataset.records for dataset in datasets])
    return join([dataset.records.select(dataset.records.num_boxes > 0) for dataset in datasets])
