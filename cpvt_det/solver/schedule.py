# SPDX-License-Identifier: Apache-2.0
"""The schedule of a run, which turns an iteration into a learning rate."""

from dataclasses import dataclass

from fvcore.common.param_scheduler import CosineParamScheduler, MultiStepParamScheduler, ParamScheduler

from cpvt_det.common.errors import UnknownNameError

SCHEDULES = ("step", "cosine")


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
