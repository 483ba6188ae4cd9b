# SPDX-License-Identifier: Apache-2.0
"""Config -> objects. The only file of the core that reads a config; every class takes plain arguments."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry
from torch import nn

from cpvt_det import distributed
from cpvt_det.checkpoint import load_weights
from cpvt_det.checkpoint.load import load_backbone_weights
from cpvt_det.config import get_cfg
from cpvt_det.data.catalog import find_datasets
from cpvt_det.data.coco import Classes, CocoDataset, ImageRecord, load_coco, require_same_classes
from cpvt_det.data.loader import MappedDataset, TrainBatches, TrainLoader, evaluation_loader
from cpvt_det.data.mapper import Mapper, evaluation_transform, train_transform
from cpvt_det.errors import BadInputError, ConfigError, UnknownNameError, WeightsError, first_line
from cpvt_det.evaluation.coco import CocoEvaluator
from cpvt_det.layers.position import PositionEncoding, build_position, position_options
from cpvt_det.losses import HungarianMatcher, SetCriterion, make_classification
from cpvt_det.losses.classification import Classification
from cpvt_det.models import DETR, ResNetBackbone, Transformer
from cpvt_det.postprocess import PostProcessor
from cpvt_det.solver.ema import AveragedModel, make_ema
from cpvt_det.solver.optimizer import make_optimizer, parameter_groups
from cpvt_det.solver.schedule import LearningRate, Length, length_in_epochs
from cpvt_det.solver.step import StepOptions, TrainStep

logger = logging.getLogger("cpvt_det")
AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

DETECTOR_REGISTRY = Registry("DETECTOR")
"""``MODEL.META_ARCHITECTURE`` -> a function from a config (and, for backbones from elsewhere, the backbone) to the detector's
constructor and its arguments."""


def build_detector(cfg: CfgNode) -> nn.Module:
    """Build the detector of a config, with random weights.

    Returns:
        A module: ``detector(images (B, 3, H, W), padding_mask (B, H, W)) -> Predictions``.

    Raises:
        ConfigError: what the config asks for cannot be built.
    """
    detector, arguments = detector_arguments(cfg)
    with config_errors("MODEL"):
        return detector(**arguments)


def detector_arguments(cfg: CfgNode, backbone: nn.Module | None = None) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of the detector of a config and its keyword arguments.

    Args:
        cfg: the config.
        backbone: one to use instead of the config's.

    Raises:
        ConfigError: what the config asks for cannot be built.
    """
    name = cfg.MODEL.META_ARCHITECTURE
    known = [known for known, _ in DETECTOR_REGISTRY]
    if name not in known:
        raise UnknownNameError("MODEL.META_ARCHITECTURE", name, known)
    with config_errors("MODEL"):
        return DETECTOR_REGISTRY.get(name)(cfg, backbone)


def _detr(cfg: CfgNode, backbone: nn.Module | None) -> tuple[type[nn.Module], dict[str, Any]]:
    detr = cfg.MODEL.DETR
    channels, classification = detr.HIDDEN_DIM, build_classification(cfg)
    return DETR, {
        "backbone": backbone or build_backbone(cfg),
        "position": build_encoder_position(cfg, channels, num_levels=1, num_layers=detr.ENC_LAYERS),
        "transformer": Transformer(
            encoder_layers=detr.ENC_LAYERS,
            decoder_layers=detr.DEC_LAYERS,
            channels=channels,
            num_heads=detr.NHEADS,
            ffn_channels=detr.DIM_FEEDFORWARD,
            dropout=detr.DROPOUT,
            pre_norm=detr.PRE_NORM,
        ),
        "channels": channels,
        "num_queries": detr.NUM_OBJECT_QUERIES,
        "num_logits": classification.num_logits,
        "prior_probability": classification.prior_probability,
        "decoder_position": _decoder_position(cfg, channels),
        "pixel_mean": cfg.MODEL.PIXEL_MEAN,
        "pixel_std": cfg.MODEL.PIXEL_STD,
    }


DETECTOR_REGISTRY._do_register("CPVTDetr", _detr)


def build_backbone(cfg: CfgNode) -> ResNetBackbone:
    """The ResNet of ``MODEL.BACKBONE``, with random weights."""
    backbone = cfg.MODEL.BACKBONE
    return ResNetBackbone(
        backbone.NAME,
        norm=backbone.NORM,
        stages=[backbone.STAGE],
        dilation=backbone.DC5,
        freeze_at=backbone.FREEZE_AT,
        mask_padding=backbone.MASK_PADDING,
    )


def build_encoder_position(cfg: CfgNode, channels: int, num_levels: int, num_layers: int) -> PositionEncoding:
    """The encoding of ``MODEL.POSITION.NAME``, with those of the node's other keys that it takes.

    Raises:
        UnknownNameError: an unknown name, or a key of the user's own that the encoding does not take.
    """
    node = cfg.MODEL.POSITION
    defaults = get_cfg().MODEL.POSITION
    known = {key: value for key, value in node.items() if key not in ("NAME", "DECODER")}
    with contextlib.suppress(KeyError):  # an unknown name: build_position says it
        taken = position_options(node.NAME)
        known = {key: value for key, value in known.items() if key.lower() in taken or key not in defaults}
    options = {key.lower(): value for key, value in known.items()}
    return build_position(node.NAME, channels, num_levels, num_layers, **options)


def _decoder_position(cfg: CfgNode, channels: int) -> PositionEncoding | str | None:
    node = cfg.MODEL.POSITION
    if node.DECODER not in ("sine", "same", "none"):
        raise UnknownNameError("MODEL.POSITION.DECODER", node.DECODER, ("sine", "same", "none"))
    if node.DECODER == "sine":
        # The encoder's map, where it is the same one, is not computed twice.
        return "same" if node.NAME in ("sine", "sine+peg") else build_position("sine", channels)
    return None if node.DECODER == "none" else "same"


def build_classification(cfg: CfgNode) -> Classification:
    """Softmax or focal, for ``MODEL.NUM_CLASSES`` classes.

    Raises:
        ConfigError: a number of classes that is not known yet.
    """
    criterion, num_classes = cfg.MODEL.CRITERION, cfg.MODEL.NUM_CLASSES
    if num_classes < 1:
        raise ConfigError(
            f"MODEL.NUM_CLASSES is {num_classes}; training and evaluation read it from the data, elsewhere set it to the number "
            "of classes"
        )
    options = {
        "softmax": {"background_weight": criterion.BACKGROUND_WEIGHT},
        "focal": {"alpha": criterion.FOCAL_ALPHA, "gamma": criterion.FOCAL_GAMMA},
    }
    return make_classification(criterion.CLASSIFICATION, num_classes, **options.get(criterion.CLASSIFICATION, {}))


def build_criterion(cfg: CfgNode) -> SetCriterion:
    """The set loss of ``MODEL.CRITERION``."""
    node = cfg.MODEL.CRITERION
    matcher = HungarianMatcher(build_classification(cfg), node.CLASS_COST, node.L1_COST, node.GIOU_COST)
    return SetCriterion(matcher, node.CLASS_WEIGHT, node.L1_WEIGHT, node.GIOU_WEIGHT)


def build_postprocessor(cfg: CfgNode) -> PostProcessor:
    """Predictions -> detections, at most ``TEST.DETECTIONS_PER_IMAGE``."""
    return PostProcessor(build_classification(cfg), cfg.TEST.DETECTIONS_PER_IMAGE)


def build_device(cfg: CfgNode) -> torch.device:
    """``MODEL.DEVICE``; of several GPUs the one of this process.

    Raises:
        ConfigError: a device that is not there.
    """
    name = cfg.MODEL.DEVICE
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with config_errors("MODEL.DEVICE"):
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"MODEL.DEVICE is {name}, but torch sees no CUDA GPU; use cpu or auto, or --num-gpus 0")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", distributed.rank() % torch.cuda.device_count())))
    return device


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
    return train, test


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
            _as_sizes(node.MIN_SIZE_TRAIN),
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


def build_length(cfg: CfgNode, num_images: int) -> Length:
    """The run's iterations: from the epochs where ``SOLVER.EPOCHS`` is above 0, else as ``MAX_ITER`` and ``STEPS`` say."""
    solver, test = cfg.SOLVER, cfg.TEST
    if solver.EPOCHS > 0:
        epochs = (solver.EPOCHS, solver.STEP_EPOCHS, solver.WARMUP_EPOCHS, test.EVAL_EPOCHS)
        return length_in_epochs(num_images, solver.IMS_PER_BATCH, *epochs, eval_period=test.EVAL_PERIOD)
    said = f"SOLVER.MAX_ITER = {solver.MAX_ITER} iterations of {solver.IMS_PER_BATCH} images"
    epochs = solver.MAX_ITER * solver.IMS_PER_BATCH / num_images
    arithmetic = f"{said} / {num_images} images = {epochs:.1f} epochs"
    return Length(solver.MAX_ITER, tuple(solver.STEPS), solver.WARMUP_ITERS, test.EVAL_PERIOD, arithmetic)


def build_optimizer(cfg: CfgNode, detector: nn.Module) -> torch.optim.Optimizer:
    """AdamW with the groups of ``SOLVER``."""
    solver = cfg.SOLVER
    rates = (solver.BASE_LR, solver.BACKBONE_LR, solver.WEIGHT_DECAY, solver.WEIGHT_DECAY_NORM, solver.WEIGHT_DECAY_PEG)
    with config_errors("SOLVER"):
        return make_optimizer(parameter_groups(detector, *rates))


def build_ema(cfg: CfgNode, detector: nn.Module) -> AveragedModel | None:
    """The moving average of ``SOLVER.EMA``, where it is on."""
    with config_errors("SOLVER.EMA"):
        return make_ema(detector, cfg.SOLVER.EMA.DECAY) if cfg.SOLVER.EMA.ENABLED else None


def build_step(
    cfg: CfgNode,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    length: Length,
    seed: int,
    ema: AveragedModel | None = None,
) -> TrainStep:
    """The training step of ``SOLVER``.

    Args:
        cfg: the config.
        model: a :class:`TrainingModel`, or DDP around one.
        optimizer: of :func:`build_optimizer`.
        length: of :func:`build_length`.
        seed: of the run.
        ema: of :func:`build_ema`.

    Raises:
        ConfigError: settings that cannot be had.
    """
    solver, clip = cfg.SOLVER, cfg.SOLVER.CLIP_GRADIENTS
    if clip.ENABLED and clip.CLIP_TYPE != "full_model":
        raise ConfigError(
            f"SOLVER.CLIP_GRADIENTS.CLIP_TYPE is {clip.CLIP_TYPE!r}; gradients are clipped by their norm in the full_model"
        )
    if solver.AMP.DTYPE not in AMP_DTYPES:
        raise UnknownNameError("SOLVER.AMP.DTYPE", solver.AMP.DTYPE, AMP_DTYPES)
    if solver.ACCUMULATE < 1:
        raise ConfigError(f"SOLVER.ACCUMULATE must be at least 1, got {solver.ACCUMULATE}")
    options = StepOptions(
        clip_norm=clip.CLIP_VALUE if clip.ENABLED else None,
        accumulate=solver.ACCUMULATE,
        amp_dtype=AMP_DTYPES[solver.AMP.DTYPE] if solver.AMP.ENABLED else None,
    )
    with config_errors("SOLVER"):
        learning_rate = LearningRate(length, solver.SCHEDULE, solver.GAMMA)
    return TrainStep(model, optimizer, learning_rate, options, seed, ema)


def load_initial_weights(cfg: CfgNode, detector: nn.Module, classes: Classes, for_evaluation: bool = False) -> None:
    """Load ``MODEL.WEIGHTS``, or else ``MODEL.BACKBONE.WEIGHTS``, and log what became of them.

    Raises:
        WeightsError: weights that cannot be had; in evaluation also none, or weights that fit in part.
    """
    backbone = cfg.MODEL.BACKBONE
    if cfg.MODEL.WEIGHTS:
        report = load_weights(detector, cfg.MODEL.WEIGHTS, classes.names)
        logger.info("%s: %s", cfg.MODEL.WEIGHTS, report)
        if for_evaluation and report.is_partial:
            raise WeightsError(f"{cfg.MODEL.WEIGHTS} fits the config's model in part only, evaluation needs all of it: {report}")
    elif for_evaluation:
        raise WeightsError("evaluation needs weights: set MODEL.WEIGHTS to a checkpoint, or --resume the run in OUTPUT_DIR")
    elif backbone.WEIGHTS:
        load_backbone_weights(detector.backbone, backbone.WEIGHTS, backbone.NAME)
        logger.info("Backbone weights: %s", backbone.WEIGHTS)
    elif backbone.NORM == "FrozenBN" or backbone.FREEZE_AT > 0:
        logger.warning(
            "The backbone starts from random weights, and MODEL.BACKBONE.NORM FrozenBN or FREEZE_AT > 0 keeps part of it so; "
            "set MODEL.BACKBONE.WEIGHTS, or NORM BN and FREEZE_AT 0 to train from scratch"
        )


def build_evaluator(cfg: CfgNode, dataset: CocoDataset) -> CocoEvaluator:
    """The evaluator of ``TEST.EVALUATOR``."""
    classes = dataset.classes
    truth = dataset.ground_truth
    return CocoEvaluator(truth, classes.ids, classes.names, cfg.TEST.EVALUATOR, cfg.TEST.DETECTIONS_PER_IMAGE)


def _as_sizes(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _require_rgb(cfg: CfgNode) -> None:
    if cfg.INPUT.FORMAT != "RGB":
        raise ConfigError(f"INPUT.FORMAT is {cfg.INPUT.FORMAT!r}; our loader reads RGB, the order of torchvision's weights")
    if cfg.INPUT.RANDOM_FLIP not in ("horizontal", "none"):
        raise UnknownNameError("INPUT.RANDOM_FLIP", cfg.INPUT.RANDOM_FLIP, ("horizontal", "none"))


@contextlib.contextmanager
def config_errors(where: str) -> Iterator[None]:
    """What a constructor refuses is a fault of the config that chose its arguments."""
    try:
        yield
    except BadInputError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{where}: {first_line(error)}") from error
