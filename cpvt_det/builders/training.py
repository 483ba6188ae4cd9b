# SPDX-License-Identifier: Apache-2.0
"""Build the model that training calls, and the schedule, optimiser, moving average and training step of ``SOLVER``."""

import logging
import math

import torch
from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det.builders.parts import build_criterion
from cpvt_det.builders.trained import load_teacher
from cpvt_det.common import distributed
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError, UnknownNameError, config_errors
from cpvt_det.config import flat_items
from cpvt_det.losses import TrainingModel
from cpvt_det.losses.class_training import BatchMixing, ClassCriterion, ClassTrainingModel
from cpvt_det.solver.optimizer import LRSchedule, MovingAverage, TrainingSchedule, parameter_groups
from cpvt_det.solver.step import StepOptions, TrainStep

logger = logging.getLogger("cpvt_det")
AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def build_schedule(cfg: CfgNode, num_images: int) -> TrainingSchedule:
    """The schedule of a run in iterations, computed from epochs if ``SOLVER.EPOCHS`` is above 0, otherwise from ``MAX_ITER`` and
    ``STEPS``.

    Args:
        cfg: config of the run.
        num_images: number of training images.
    """
    solver, test = cfg.SOLVER, cfg.TEST
    batch, eval_period = solver.IMS_PER_BATCH, test.EVAL_PERIOD
    if not solver.EPOCHS > 0:  # also for NaN, which is refused later
        epochs = solver.MAX_ITER * batch / num_images
        arithmetic = f"SOLVER.MAX_ITER = {solver.MAX_ITER} iterations of {batch} images / {num_images} images = {epochs:.1f} epochs"
        return TrainingSchedule(solver.MAX_ITER, tuple(solver.STEPS), solver.WARMUP_ITERS, eval_period, arithmetic)
    unused = [f"SOLVER.{key} {solver[key]}" for key in ("MAX_ITER", "STEPS", "WARMUP_ITERS") if solver[key]]
    if unused and distributed.rank() == 0:
        logger.info("SOLVER.EPOCHS %g sets the length; these keys are not used: %s", solver.EPOCHS, ", ".join(unused))

    def iterations(epochs: float) -> int:
        return max(1, round(epochs * num_images / batch))

    max_iter, steps = iterations(solver.EPOCHS), tuple(iterations(epoch) for epoch in solver.STEP_EPOCHS)
    arithmetic = f"{solver.EPOCHS:g} epochs x {num_images} images / {batch} images per iteration = {max_iter} iterations"
    arithmetic += "".join(f"; epoch {epoch:g} = iteration {step}" for epoch, step in zip(solver.STEP_EPOCHS, steps, strict=True))
    warmup = iterations(solver.WARMUP_EPOCHS) if solver.WARMUP_EPOCHS > 0 else 0
    if test.EVAL_EPOCHS > 0:  # rounded up: otherwise the last one would come just before the evaluation at the end
        eval_period = math.ceil(test.EVAL_EPOCHS * num_images / batch - 1e-6)
    return TrainingSchedule(max_iter, steps, warmup, eval_period, arithmetic)


def build_optimizer(cfg: CfgNode, detector: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW, which updates all parameters in one pass, with the learning rates and weight decays of ``SOLVER``.

    Raises:
        ConfigError: entries of ``LR_MULTIPLIERS`` that are not pairs, or values that cannot be used.
    """
    solver = cfg.SOLVER
    rates = (solver.BASE_LR, solver.BACKBONE_LR, solver.WEIGHT_DECAY, solver.POINTS_LR_MULTIPLIER)
    factors = solver.LR_MULTIPLIERS
    for entry in factors:
        kinds = [type(part) for part in entry] if isinstance(entry, (list, tuple)) else []
        if kinds not in ([str, float], [str, int]) or entry[1] < 0:
            raise ConfigError(
                "SOLVER.LR_MULTIPLIERS must contain pairs [part, factor] with factors of at least 0, such as "
                "['backbone.body.layer2', 0.5]; "
                f"got {entry!r}"
            )
    decays = (solver.WEIGHT_DECAY_NORM, solver.WEIGHT_DECAY_BIAS, solver.WEIGHT_DECAY_EMBED)
    with config_errors("SOLVER"):
        return torch.optim.AdamW(parameter_groups(detector, *rates, *decays, factors, solver.LAYER_DECAY), fused=True)


def build_ema(cfg: CfgNode, detector: nn.Module) -> MovingAverage | None:
    """The moving average of ``SOLVER.EMA``; ``None`` if it is not enabled."""
    with config_errors("SOLVER.EMA"):
        return MovingAverage(detector, cfg.SOLVER.EMA.DECAY) if cfg.SOLVER.EMA.ENABLED else None


def build_training_model(cfg: CfgNode, detector: nn.Module) -> TrainingModel:
    """A detector with the set loss of ``MODEL.CRITERION``; errors as for :func:`cpvt_det.builders.build_criterion`."""
    return TrainingModel(detector, build_criterion(cfg))


def build_class_training_model(cfg: CfgNode, classifier: nn.Module, classes: Classes) -> ClassTrainingModel:
    """A classifier with its loss, Mixup and CutMix, and the teacher of ``MODEL.CLASSIFIER.TEACHER``.

    Args:
        cfg: config of the run.
        classifier: model to train.
        classes: classes of the training data.

    Raises:
        ConfigError: values of ``MODEL.CLASSIFIER`` or ``INPUT.CLASSIFY`` that cannot be used.
        WeightsError: a teacher that cannot be loaded, or whose classes differ.
    """
    node, given = cfg.MODEL.CLASSIFIER, cfg.INPUT.CLASSIFY
    teacher = load_teacher(cfg, classes) if node.TEACHER else None
    if node.TEACHER_WEIGHTS and not node.TEACHER.startswith("timm/"):
        raise ConfigError(f"MODEL.CLASSIFIER.TEACHER_WEIGHTS is {node.TEACHER_WEIGHTS!r}, but the teacher is not a timm network")
    with config_errors("MODEL.CLASSIFIER.SMOOTHING"):
        criterion = ClassCriterion(node.SMOOTHING)
    with config_errors("INPUT.CLASSIFY"):
        mixing = BatchMixing(cfg.MODEL.NUM_CLASSES, given.MIXUP, given.CUTMIX)
    return ClassTrainingModel(classifier, criterion, mixing, teacher)


def build_step(
    cfg: CfgNode,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: TrainingSchedule,
    seed: int,
    ema: MovingAverage | None = None,
) -> TrainStep:
    """The training step of ``SOLVER``.

    Args:
        cfg: config of the run.
        model: training model, such as :class:`cpvt_det.losses.TrainingModel`, or DDP around one.
        optimizer: result of :func:`build_optimizer`.
        schedule: result of :func:`build_schedule`.
        seed: seed of the run.
        ema: result of :func:`build_ema`.

    Raises:
        ConfigError: a value of ``SOLVER`` that cannot be used.
    """
    solver = cfg.SOLVER
    for key, value in flat_items(solver, "SOLVER."):
        if isinstance(value, float) and not math.isfinite(value):  # a NaN would pass every comparison with a bound
            raise ConfigError(f"{key} must be a finite number, got {value}")
    if solver.CLIP_NORM < 0:
        raise ConfigError(f"SOLVER.CLIP_NORM must be at least 0 (0 for no clipping), got {solver.CLIP_NORM}")
    if solver.AMP.DTYPE not in AMP_DTYPES:
        raise UnknownNameError("SOLVER.AMP.DTYPE", solver.AMP.DTYPE, AMP_DTYPES)
    for key in ("ACCUMULATE", "CHECKPOINT_PERIOD", "CHECKPOINT_KEEP", "LOG_PERIOD", "MAX_BAD_STEPS"):
        if solver[key] < 1:
            raise ConfigError(f"SOLVER.{key} must be at least 1, got {solver[key]}")
    if solver.CHECKPOINT_MINUTES <= 0:
        raise ConfigError(f"SOLVER.CHECKPOINT_MINUTES must be above 0, got {solver.CHECKPOINT_MINUTES:g}")
    options = StepOptions(
        clip_norm=solver.CLIP_NORM or None,
        accumulate=solver.ACCUMULATE,
        amp_dtype=AMP_DTYPES[solver.AMP.DTYPE] if solver.AMP.ENABLED else None,
        max_bad_steps=solver.MAX_BAD_STEPS,
    )
    with config_errors("SOLVER"):
        learning_rate = LRSchedule(schedule, solver.SCHEDULE, solver.GAMMA, solver.COSINE_END)
    return TrainStep(model, optimizer, learning_rate, options, seed, ema)
