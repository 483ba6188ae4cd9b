# SPDX-License-Identifier: Apache-2.0
"""Build the data, augmentations, loaders and evaluator of a run from ``INPUT``, ``DATALOADER`` and ``TEST``."""

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from fvcore.common.config import CfgNode

from cpvt_det.builders.datasets import check_datasets, require_names
from cpvt_det.builders.detector import build_postprocessor
from cpvt_det.builders.parts import build_device
from cpvt_det.common import distributed
from cpvt_det.common.errors import ConfigError, DataError, UnknownNameError, config_errors, first_line
from cpvt_det.data.augmentation import AUGMENTATION_REGISTRY, GROUPS, AugmentationStep, Scene, as_scene, augmentation_errors
from cpvt_det.data.cache import KeptLook
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.loader import MappedDataset, SampleLoader, TrainBatches, evaluation_loader
from cpvt_det.data.mapper import ClassMapper, Mapper, RandomShortSide, central_transform, other_generators_seeded, train_transform
from cpvt_det.data.records import ImageRecord, Records, join
from cpvt_det.data.shards import open_shards, split_at_shards
from cpvt_det.data.validation.check import CheckedData, look_at_images
from cpvt_det.data.validation.issues import Looked, require_no_errors
from cpvt_det.evaluation.coco import CocoEvaluator
from cpvt_det.evaluation.tiles import Tiling

logger = logging.getLogger("cpvt_det")
KEY = "INPUT.AUGMENTATIONS"


def load_splits(cfg: CfgNode) -> tuple[list[CocoDataset], list[CocoDataset]]:
    """Read and check the training and test sets, and set ``MODEL.NUM_CLASSES``.

    Returns:
        The training sets and the test sets; there may be no test set.

    Raises:
        BadInputError: data that cannot be read; faults that ``DATASETS.ON_BAD`` does not drop; classes that differ between sets, or
            whose number differs from the config's; settings of augmentation or evaluation that cannot be used.
    """
    train, tests = load_checked(cfg, ("TRAIN", "TEST"), check_datasets)
    check_evaluation(cfg)
    check_augmentations(cfg, join([dataset.records for dataset in train]))
    return train, tests


def load_tests(cfg: CfgNode) -> list[CocoDataset]:
    """Read and check the test sets alone, and set ``MODEL.NUM_CLASSES``; errors as in :func:`load_splits`."""
    _, tests = load_checked(cfg, ("TEST",), check_datasets)
    check_evaluation(cfg)
    return tests


def load_checked(
    cfg: CfgNode, splits: Sequence[str], check: Callable[..., CheckedData]
) -> tuple[list[CocoDataset], list[CocoDataset]]:
    """Load data sets with a function like :func:`cpvt_det.builders.check_datasets`, in a run of one or several processes.

    Returns:
        The training sets and the test sets; only the first of ``splits`` must have a data set.

    Raises:
        BadInputError: data that cannot be read; faults that ``DATASETS.ON_BAD`` does not drop.
    """
    require_names(cfg, splits[0])
    data = check(cfg, splits, look=partial(_look_together, cfg))
    try:
        require_no_errors(data.issues, cfg.DATASETS.ON_BAD)
    except DataError as error:
        if distributed.rank() == 0:
            raise
        raise DataError(first_line(error)) from error  # process 0 shows the whole list
    return data.train, data.tests


def _look_together(cfg: CfgNode, records: Records, decode: bool, examples: float) -> Looked:
    """Have each process look at a part of the images, unless an earlier run looked at all of them and nothing has changed since."""
    shards = split_at_shards(f"{records.root}/")[0]
    with contextlib.suppress(DataError, OSError):  # look_at_images reports them, with the images
        if shards:
            open_shards(shards)  # reads the index of tar files here, so that data workers forked later share it
    rank, world_size, number = distributed.rank(), distributed.world_size(), len(records)
    kept = KeptLook(records, cfg.DATASETS.CACHE) if rank == 0 else None
    if (looked := distributed.broadcast_object(kept and kept.load())) is not None:
        return looked
    part = range(number * rank // world_size, number * (rank + 1) // world_size)
    looked, *others = distributed.gather_objects(look_at_images(records, decode, examples, part))
    for other in others:
        looked.add(other)
    if kept:
        kept.save(looked)
    return looked


def build_train_loader(cfg: CfgNode, records: Records, seed: int) -> SampleLoader:
    """A loader of augmented batches, each with this process's share of ``SOLVER.IMS_PER_BATCH``.

    Raises:
        ConfigError: a batch size that is not divisible by the number of processes, or impossible image sizes.
    """
    node, loader = cfg.INPUT, cfg.DATALOADER
    require_rgb(cfg)
    with config_errors("INPUT, SOLVER or DATALOADER"):
        crop = node.RESIZE_CROP
        transform = train_transform(
            node.MIN_SIZE_TRAIN,
            node.MAX_SIZE_TRAIN,
            flip=node.RANDOM_FLIP == "horizontal",
            crop_sizes=crop.SIZES if crop.ENABLED else (),
            crop_range=tuple(crop.RANGE),
        )
        steps = build_augmentations(cfg)
        mapper = Mapper(transform, True, steps, records)
        closing = closing_epoch(cfg, steps, len(records)), mapper.without_mixing()
        dataset = MappedDataset(records, mapper, seed, closing, loader.PATIENCE)
        height, width = records.sizes.T
        return load_for_training(cfg, dataset, seed, wide=width > height if loader.ASPECT_RATIO_GROUPING else None)


def load_for_training(cfg: CfgNode, dataset: MappedDataset, seed: int, **grouping: Any) -> SampleLoader:
    """A loader of batches, each with this process's share of ``SOLVER.IMS_PER_BATCH``.

    Args:
        cfg: config of the run.
        dataset: images to train on.
        seed: seed of the run.
        grouping: ``wide`` or ``repeats``, as in :class:`cpvt_det.data.loader.TrainBatches`.

    Raises:
        ValueError: a batch size that is not divisible by the number of processes.
    """
    rank, world_size = distributed.rank(), distributed.world_size()
    batches = TrainBatches(len(dataset), cfg.SOLVER.IMS_PER_BATCH, seed, rank=rank, world_size=world_size, **grouping)
    return SampleLoader(dataset, batches, cfg.DATALOADER.NUM_WORKERS, pin_memory=build_device(cfg).type == "cuda")


def build_test_mapper(cfg: CfgNode) -> Mapper:
    """The mapper that resizes an image to the test size, in evaluation and prediction.

    Raises:
        ConfigError: a channel order other than RGB.
    """
    require_rgb(cfg)
    transform = RandomShortSide([cfg.INPUT.MIN_SIZE_TEST], cfg.INPUT.MAX_SIZE_TEST)
    return Mapper(transform, with_targets=False, with_pixels=build_tiling(cfg) is not None)


def build_class_mapper(cfg: CfgNode) -> ClassMapper:
    """The mapper of a classifier, which resizes and crops an image to the test size, in evaluation and prediction.

    Raises:
        ConfigError: a size or a ratio out of range, or a channel order other than RGB.
    """
    node = cfg.INPUT.CLASSIFY
    require_rgb(cfg)
    with config_errors("INPUT.CLASSIFY"):
        return ClassMapper(central_transform(node.TEST_SIZE, node.CROP_RATIO), with_targets=False)


def build_tiling(cfg: CfgNode) -> Tiling | None:
    """The tiling of images in evaluation and prediction, from ``TEST.TILES``; ``None`` if images are not cut."""
    tiles = cfg.TEST.TILES
    with config_errors("TEST.TILES"):
        return Tiling(tiles.SIZE, tiles.OVERLAP, tiles.MERGE, tiles.WHOLE) if tiles.SIZE else None


def build_test_loader(cfg: CfgNode, records: Sequence[ImageRecord]) -> torch.utils.data.DataLoader:
    """A loader that reads every record once, at the test size; the records are divided among the processes."""
    with config_errors("INPUT or TEST"):
        return load_for_tests(cfg, records, build_test_mapper(cfg))


def load_for_tests(cfg: CfgNode, records: Sequence[ImageRecord], mapper: Mapper | ClassMapper) -> torch.utils.data.DataLoader:
    """:func:`build_test_loader` with a given mapper."""
    dataset = MappedDataset(records, mapper, patience=cfg.DATALOADER.PATIENCE)
    world_size = distributed.world_size()
    share = max(1, cfg.TEST.IMS_PER_BATCH // world_size)
    return evaluation_loader(dataset, share, cfg.DATALOADER.NUM_WORKERS, distributed.rank(), world_size)


def check_evaluation(cfg: CfgNode) -> None:
    """Before training starts, refuse evaluation settings that cannot be used.

    Raises:
        ConfigError: an unknown evaluator, a number of detections below 1, impossible tiles, or a threshold that cannot be a score.
    """
    build_postprocessor(cfg)
    build_tiling(cfg)
    threshold = cfg.TEST.PICTURE_THRESHOLD
    if threshold is not None and not (type(threshold) in (int, float) and 0 <= threshold <= 1):
        raise ConfigError(
            f"TEST.PICTURE_THRESHOLD must be a score from 0 to 1, or None for the score with the best F1, got {threshold!r}"
        )


def build_evaluator(dataset: CocoDataset) -> CocoEvaluator:
    """The evaluator of a test set."""
    return CocoEvaluator(dataset.records, dataset.classes)


def require_rgb(cfg: CfgNode) -> None:
    """Refuse a channel order other than RGB, and an unknown flip.

    Raises:
        ConfigError: a channel order other than RGB, or an unknown flip.
    """
    if cfg.INPUT.FORMAT != "RGB":
        raise ConfigError(
            f"INPUT.FORMAT is {cfg.INPUT.FORMAT!r}, but the data loader reads only RGB, the channel order of torchvision's weights"
        )
    if cfg.INPUT.RANDOM_FLIP not in ("horizontal", "none"):
        raise UnknownNameError("INPUT.RANDOM_FLIP", cfg.INPUT.RANDOM_FLIP, ("horizontal", "none"))


def build_augmentations(cfg: CfgNode) -> list[AugmentationStep]:
    """Build the steps of ``INPUT.AUGMENTATIONS``, in the same order.

    Raises:
        ConfigError: an entry that is not a name or [name, options]; options that the augmentation does not take or cannot use;
            ``INPUT.MIN_VISIBLE`` outside [0, 1].
        UnknownNameError: an unknown augmentation or option.
    """
    min_visible = cfg.INPUT.MIN_VISIBLE
    if not 0 <= min_visible <= 1:
        raise ConfigError(f"INPUT.MIN_VISIBLE must be a fraction from 0 to 1, got {min_visible}")
    return [_build(entry, min_visible) for entry in cfg.INPUT.AUGMENTATIONS]


def closing_epoch(cfg: CfgNode, steps: Sequence[AugmentationStep], num_images: int) -> float:
    """The first epoch, counted from 0, in which images are no longer mixed; infinity if ``INPUT.CLOSE_EPOCHS`` is 0.

    Raises:
        ConfigError: a negative number of epochs, or a number above 0 although no augmentation mixes images.
    """
    last, solver = cfg.INPUT.CLOSE_EPOCHS, cfg.SOLVER
    if last < 0:
        raise ConfigError(f"INPUT.CLOSE_EPOCHS must be at least 0, got {last}")
    if last and not any(step.mixes for step in steps):
        raise ConfigError(
            f"INPUT.CLOSE_EPOCHS is {last}, but no augmentation of {KEY} mixes images; set it to 0, or add one that does"
        )
    epochs = solver.EPOCHS if solver.EPOCHS > 0 else solver.MAX_ITER * solver.IMS_PER_BATCH / max(1, num_images)
    return math.floor(epochs - last) if last else math.inf


def check_augmentations(cfg: CfgNode, records: Records) -> None:
    """Try the augmentations, each with probability 1, on a black image as large as the narrowest training image, once with boxes
    and once without.

    Each augmentation is tried twice: once after all augmentations that precede it, and once after only the preceding ones that are
    applied to every image. Afterwards, the random number generators continue as if nothing had been drawn.

    Raises:
        ConfigError: as for :func:`build_augmentations` and :func:`closing_epoch`; an augmentation that fails.
    """
    entries = cfg.INPUT.AUGMENTATIONS
    if closing_epoch(cfg, build_augmentations(cfg), len(records)) <= 0 and distributed.rank() == 0:
        logger.warning("INPUT.CLOSE_EPOCHS %g covers the whole run, so no images are mixed", cfg.INPUT.CLOSE_EPOCHS)
    if not entries or not records:
        return
    record = records[int(records.sizes.min(axis=1).argmin())]
    image = torch.zeros(3, record.height, record.width, dtype=torch.uint8)
    with torch.random.fork_rng(devices=[]), other_generators_seeded():
        for end in (None, 0):
            most = least = as_scene(image, record.boxes_xyxy[:end], torch.from_numpy(record.labels[:end]))
            for entry in entries:
                most, after = _try(entry, most, cfg.INPUT.MIN_VISIBLE), _try(entry, least, cfg.INPUT.MIN_VISIBLE)
                least = after if _is_sure(entry) else least


def _is_sure(entry: Any) -> bool:
    """Whether an entry is applied to every image, because it has no probability p or because p is 1. ``RandomChoice`` always is:
    its p has a different meaning."""
    name, options = _name_and_options(entry)
    parameter = inspect.signature(AUGMENTATION_REGISTRY.find(name)).parameters.get("p")
    return name == "RandomChoice" or parameter is None or options.get("p", parameter.default) == 1


def _try(entry: Any, scene: Scene, min_visible: float) -> Scene:
    """Apply an entry to a scene, with probability 1."""
    name, options = _name_and_options(entry)
    if name in GROUPS:
        found = scene
        for part in _parts(entry):
            found = _try(part, scene if name == "RandomChoice" else found, min_visible)
        return found
    sure = {"p": 1} if "p" in AUGMENTATION_REGISTRY.parameters(name) else {}
    step = _build([name, {**options, **sure}], min_visible)
    with augmentation_errors(name, scene, "a black image"):
        return step(*scene, lambda: scene) if step.mixes else step(*scene)


def _build(entry: Any, min_visible: float, in_group: str = "") -> AugmentationStep:
    name, options = _name_and_options(entry)
    if name in GROUPS:
        parts = [_build(part, min_visible, in_group=name) for part in _parts(entry)]
        options = {**options, "transforms": parts}
    chance = options.get("p")
    if chance is not None and name != "RandomChoice" and not (type(chance) in (int, float) and 0 <= chance <= 1):
        raise ConfigError(f"{KEY}: p of {name!r} must be a probability from 0 to 1, got {chance!r}")
    with config_errors(f"{KEY}: {name!r}"):
        builder = AUGMENTATION_REGISTRY.with_options(name, options)
        takes_it = "min_visible" in inspect.signature(builder).parameters
        augment = builder(min_visible=min_visible) if takes_it else builder()
    step = AugmentationStep(name, augment, min_visible)
    if step.mixes and in_group:
        raise ConfigError(
            f"{KEY}: {name!r} mixes images, so it cannot be inside {in_group!r}; put it directly into {KEY}, with its own p"
        )
    return step


def _parts(entry: Any) -> list[Any]:
    """The entries of a group."""
    name, options = _name_and_options(entry)
    parts = options.get("transforms")
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ConfigError(f"{KEY}: {name!r} needs transforms, a list in the same form as {KEY}, got {parts!r}")
    return list(parts)


def _name_and_options(entry: Any) -> tuple[str, dict[str, Any]]:
    name, options = entry if isinstance(entry, (list, tuple)) and len(entry) == 2 else (entry, {})
    if not isinstance(name, str) or not isinstance(options, dict):
        raise ConfigError(f"{KEY} must contain names and [name, {{option: value}}] pairs, got {entry!r}")
    return name, options
