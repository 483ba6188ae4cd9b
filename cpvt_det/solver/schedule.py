# SPDX-License-Identifier: Apache-2.0
"""Epochs -> iterations, and the learning rate of every iteration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fvcore.common.param_scheduler import CosineParamScheduler, MultiStepParamScheduler, ParamScheduler

from cpvt_det.errors import UnknownNameError

SCHEDULES = ("step", "cosine")


@dataclass(frozen=True)
class Length:
    """How long a run is, in iterations; ``arithmetic`` says how it came about."""

    max_iter: int
    steps: tuple[int, ...]
    warmup: int
    eval_period: int
    arithmetic: str


def length_in_epochs(
    num_images: int,
    batch_size: int,
    epochs: float,
    step_epochs: Sequence[float] = (),
    warmup_epochs: float = 0.0,
    eval_epochs: float = 0.0,
    eval_period: int = 0,
) -> Length:
    """Turn epochs into iterations of a data set.

    Args:
        num_images: of the training data.
        batch_size: images an iteration, over all processes and accumulated parts.
        epochs, step_epochs, warmup_epochs: of the whole run, of each step of the learning rate, of the warm-up.
        eval_epochs: between evaluations; 0 leaves ``eval_period``.
        eval_period: iterations between evaluations; 0 for none before the end.
    """

    def iterations(of: float) -> int:
        return max(1, round(of * num_images / batch_size))

    max_iter, steps = iterations(epochs), tuple(iterations(step) for step in step_epochs)
    arithmetic = f"{epochs:g} epochs x {num_images} images / {batch_size} images an iteration = {max_iter} iterations" + "".join(
        f"; epoch {epoch:g} = iteration {step}" for epoch, step in zip(step_epochs, steps, strict=True)
    )
    warmup = iterations(warmup_epochs) if warmup_epochs > 0 else 0
    if eval_epochs > 0:  # rounded up, or the last of them would come just before the end's
        eval_period = math.ceil(eval_epochs * num_images / batch_size - 1e-6)
    return Length(max_iter, steps, warmup, eval_period, arithmetic)


class LearningRate:
    """The factor on every group's learning rate, a function of the iteration alone.

    Args:
        length: of the run.
        schedule: ``step`` (times ``gamma`` at each step) or ``cosine`` (to 0 at the end).
        gamma: factor of a step.

    Raises:
        UnknownNameError: another schedule.
        ValueError: no iterations, or steps that do not rise. Steps beyond the end are never reached.
    """

    def __init__(self, length: Length, schedule: str = "step", gamma: float = 0.1):
        if length.max_iter < 1:
            raise ValueError("SOLVER.EPOCHS or SOLVER.MAX_ITER must be above 0: there is nothing to train")
        self.length = length
        self._scheduler = _scheduler(length, schedule, gamma)

    def factor(self, iteration: int) -> float:
        """The factor at an iteration, counted from 0."""
        warmup = min(1.0, (iteration + 1) / (self.length.warmup + 1))
        return warmup * float(self._scheduler(min(iteration, self.length.max_iter - 1) / self.length.max_iter))


def _scheduler(length: Length, schedule: str, gamma: float) -> ParamScheduler:
    if schedule == "cosine":
        return CosineParamScheduler(1.0, 0.0)
    if schedule != "step":
        raise UnknownNameError("SOLVER.SCHEDULE", schedule, SCHEDULES)
    steps = length.steps
    if any(late <= early for early, late in zip((0, *steps), steps, strict=False)):
        raise ValueError(f"steps of the learning rate must rise, got iterations {list(steps)}")
    steps = tuple(step for step in steps if step < length.max_iter)
    if not steps:
        return CosineParamScheduler(1.0, 1.0)
    return MultiStepParamScheduler([gamma**power for power in range(len(steps) + 1)], length.max_iter, milestones=steps)
