# SPDX-License-Identifier: Apache-2.0
"""Parameter groups for AdamW, the schedule of the learning rate, and the moving average of the weights."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fvcore.common.param_scheduler import CosineParamScheduler, MultiStepParamScheduler, ParamScheduler
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from cpvt_det.common.errors import UnknownNameError
from cpvt_det.models.image_model import belongs_to_part, require_parts

POINTS = re.compile(r"(^|\.)(sampling_offsets|reference_points)\.")
NORM_MODULES = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
SCHEDULES = ("step", "cosine")


def parameter_groups(
    model: nn.Module,
    lr: float,
    backbone_lr: float,
    weight_decay: float,
    points_lr_multiplier: float = 0.1,
    norm_weight_decay: float | None = None,
    bias_weight_decay: float | None = None,
    embed_weight_decay: float | None = None,
    lr_multipliers: Sequence[tuple[str, float]] = (),
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Put trainable parameters into groups that each have one learning rate and weight decay. The backbone and the sampling points
    can have their own learning rates, and norms, biases and embeddings can have their own weight decays.

    Args:
        model: a detector.
        lr: learning rate of all parameters outside ``model.backbone``.
        backbone_lr: learning rate of the parameters in ``model.backbone``.
        weight_decay: weight decay of all parameters, as in DETR, unless one of the next three applies.
        points_lr_multiplier: factor by which the learning rate is multiplied for Deformable-DETR's sampling offsets and reference
            points.
        norm_weight_decay: weight decay of norms, including norms in a PEG; ``None`` for no separate decay.
        bias_weight_decay: weight decay of biases, including the biases of norms; ``None`` for no separate decay.
        embed_weight_decay: weight decay of embeddings, which are queries, tokens, tables, and everything else that is neither a
            weight nor a bias; ``None`` for no separate decay.
        lr_multipliers: pairs (part, learning rate factor), with parts as in
            :func:`cpvt_det.models.image_model.belongs_to_part`; factors of nested parts are multiplied.
        layer_decay: factor by which the learning rate of a backbone parameter is multiplied once for each layer after it (arXiv
            2106.08254, appendix). A value other than 1 needs a backbone with ``layers_above``.

    Returns:
        Groups for ``torch.optim``, with ``params``, ``lr`` and ``weight_decay``.

    Raises:
        UnknownNameError: a factor is given for a part that the model does not have.
        ValueError: the layer decay is not above 0, or it is not 1 and the backbone has no ``layers_above``.
    """
    if layer_decay <= 0:
        raise ValueError(f"the decay per layer must be above 0, got {layer_decay}")
    if layer_decay != 1 and not hasattr(model.backbone, "layers_above"):
        raise ValueError(f"LAYER_DECAY is {layer_decay}, but the backbone does not define its layers; leave it at 1")
    require_parts(model, [part for part, _ in lr_multipliers], "learning rate")
    norm_decay = weight_decay if norm_weight_decay is None else norm_weight_decay
    norms = [module for module in model.modules() if isinstance(module, NORM_MODULES)]
    of_norms = {id(parameter) for module in norms for parameter in module.parameters()}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = backbone_lr if name.startswith("backbone.") else lr
            if layer_decay != 1 and name.startswith("backbone."):
                rate *= layer_decay ** model.backbone.layers_above(name.removeprefix("backbone."))
            rate = rate * points_lr_multiplier if POINTS.search(name) else rate
            rate *= math.prod(factor for part, factor in lr_multipliers if belongs_to_part(name, part))
            decay = norm_decay if id(parameter) in of_norms else weight_decay
            if name.endswith("bias"):
                decay = decay if bias_weight_decay is None else bias_weight_decay
            elif id(parameter) in embeddings or not name.endswith("weight"):
                decay = decay if embed_weight_decay is None else embed_weight_decay
            groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


@dataclass(frozen=True)
class TrainingSchedule:
    """The schedule of a run in iterations.

    Attributes:
        max_iter: length of the run.
        steps: iterations at which the learning rate falls.
        warmup: number of iterations in which the learning rate rises to its full value.
        eval_period: iterations between evaluations; 0 for none before the end.
        arithmetic: text for the log that shows how the length was computed.
    """

    max_iter: int
    steps: tuple[int, ...]
    warmup: int
    eval_period: int
    arithmetic: str


class LRSchedule:
    """The factor by which the learning rates of all groups are multiplied. It depends only on the iteration.

    Args:
        schedule: schedule of the run.
        kind: shape of the schedule, ``step`` (multiply by ``gamma`` at each step) or ``cosine`` (fall to ``end`` at the end).
        gamma: factor at each step.
        end: last factor of a cosine.

    Raises:
        UnknownNameError: an unknown kind.
        ValueError: there are no iterations, ``end`` is outside [0, 1] or is given for a schedule other than a cosine, or steps
            are not in increasing order. Steps after the end of the run are ignored.
    """

    def __init__(self, schedule: TrainingSchedule, kind: str = "step", gamma: float = 0.1, end: float = 0.0):
        if schedule.max_iter < 1:
            raise ValueError("there is nothing to train: SOLVER.EPOCHS or SOLVER.MAX_ITER must be above 0")
        if not 0 <= end <= 1:
            raise ValueError(f"COSINE_END must be from 0 to 1, got {end}")
        if kind not in SCHEDULES:
            raise UnknownNameError("SOLVER.SCHEDULE", kind, SCHEDULES)
        steps = schedule.steps if kind == "step" else ()
        if any(late <= early for early, late in zip((0, *steps), steps, strict=False)):
            raise ValueError(f"the steps of the learning rate must be in ascending order, got iterations {list(steps)}")
        if end and kind != "cosine":
            raise ValueError(f"COSINE_END is {end}, but the schedule {kind!r} is not a cosine; leave it at 0")
        self.schedule = schedule
        self._scheduler: ParamScheduler = CosineParamScheduler(1.0, end if kind == "cosine" else 1.0)
        steps = tuple(step for step in steps if step < schedule.max_iter)
        if steps:
            factors = [gamma**power for power in range(len(steps) + 1)]
            self._scheduler = MultiStepParamScheduler(factors, schedule.max_iter, milestones=steps)

    def factor(self, iteration: int) -> float:
        """The factor at an iteration, counted from 0."""
        warmup = min(1.0, (iteration + 1) / (self.schedule.warmup + 1))
        return warmup * float(self._scheduler(min(iteration, self.schedule.max_iter - 1) / self.schedule.max_iter))


class MovingAverage(AveragedModel):
    """An exponential moving average of parameters and buffers, which scores better in evaluation than the weights of the last step;
    ``.module`` is a model with the averages.

    Args:
        model: detector to average, not a wrapper around it.
        decay: share of the old average that each update keeps, in [0, 1].

    Raises:
        ValueError: a decay outside [0, 1].
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay <= 1:
            raise ValueError(f"the decay of a moving average must be between 0 and 1, got {decay}")
        super().__init__(model, use_buffers=True)
        self.decay = decay
        self.n_averaged = self.n_averaged.to(next(model.parameters()).device)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module, good: Tensor | None = None) -> None:
        """Move the average towards a model. The first update copies the model.

        Args:
            model: model with finite weights.
            good: () bool on the model's device. If it is False, the average does not change. The host does not wait for its
                value.
        """
        share = torch.where(self.n_averaged == 0, 1.0, 1.0 - self.decay)
        if good is not None:
            share = share * good
        pairs = list(zip(_tensors(self.module), _tensors(model), strict=True))
        averages, values = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
        change = torch._foreach_sub(values, averages)
        torch._foreach_mul_(change, share)
        torch._foreach_add_(averages, change)
        for average, value in pairs:
            if not average.is_floating_point():  # counters
                average.copy_(value)
        self.n_averaged += 1 if good is None else good


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
