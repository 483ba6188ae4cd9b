# SPDX-License-Identifier: Apache-2.0
"""Whether a run learns, in both runners: evaluations beside a constant answer, losses over time, best checkpoint."""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det import distributed
from cpvt_det.checkpoint.best import BestSoFar
from cpvt_det.checkpoint.checkpointer import RunCheckpointer, RunState
from cpvt_det.errors import ConfigError
from cpvt_det.runner.evaluate import measure
from cpvt_det.tasks.task import Results, Task, figure_of, flatten, require_figure

logger = logging.getLogger("cpvt_det")
FIRST_LOOK = 400
"""Iterations before the first look at the losses; the next looks are after 800, 1600, ..."""
MIDDLE, SHORTEST, APART = 0.45, 200, 0.1
"""One more look is after this share of a run, while the rate of a cosine is above its half, if that is this many iterations, and by
this share of them apart from another look."""
LEAST_FALL = 0.01
"""A loss that falls by less, as a share of itself, is flat. From one quarter of a run to the next it falls by several times as much
while a detector learns: by 6 % where it is the fifth root of the number of iterations."""


class RunEvaluations:
    """The evaluations of a run: figures are compared with the task's baseline, and the best checkpoint is kept.

    Args:
        cfg: config of the run.
        task: task of the run.
        records: images of the run's training sets, for the baseline.
        tests: test sets; the first one decides.
        checkpointer: checkpointer of the run, whose node ``cpvt_det`` keeps the best evaluation and the thresholds.

    Raises:
        ConfigError: ``TEST.BEST_FIGURE`` that cannot be used.
    """

    def __init__(self, cfg: CfgNode, task: Task, records: Sequence[Any], tests: Sequence[Any], checkpointer: RunCheckpointer):
        self.task = task
        self.tests = tests
        self.checkpointer = checkpointer
        self.state: RunState = checkpointer.checkpointables["cpvt_det"]
        self._records = records
        self._baseline: dict[str, float] | None = None
        self._helps = what_helps(cfg)
        self._constant = task.constant
        figure = cfg.TEST.BEST_FIGURE
        if figure and not tests:
            raise ConfigError(
                f"TEST.BEST_FIGURE is {figure}, but nothing is evaluated: name a test set in DATASETS.TEST, or leave the key out"
            )
        if figure:
            require_figure(figure, task, tests)

    def evaluate(self, detector: nn.Module, iteration: int, output: Path) -> Results:
        """Evaluate after an iteration, in every process; arguments and results as of :func:`cpvt_det.runner.evaluate.evaluate`."""
        results, self.state.thresholds = measure(self.task, detector, self.tests, output)
        if distributed.rank() == 0:
            self._compare(results, iteration)
        self.checkpointer.keep_best(figure_of(self.state.best.name, results), iteration)
        return results

    def _compare(self, results: Results, iteration: int) -> None:
        """Warn of figures below the baseline, which is computed once, without looking at an image."""
        if self._baseline is None:
            self._baseline = self.task.baseline(self._records, self.tests[0])
            if self._baseline:
                listed = ", ".join(f"{name} {value:.1f}" for name, value in self._baseline.items())
                logger.info("For comparison, %s: %s", self._constant, listed)
        scalars = flatten(results if len(self.tests) == 1 else results[self.tests[0].name])
        below = [name for name, value in self._baseline.items() if scalars.get(name, value) < value]
        if below:
            listed = ", ".join(_is_below(name, scalars[name], self._baseline[name]) for name in below)
            logger.warning("After iteration %d the model is worse than %s: %s; %s", iteration, self._constant, listed, self._helps)


def none_yet(cfg: CfgNode, task: Task) -> BestSoFar:
    """The best evaluation of a run that has had none: ``TEST.BEST_FIGURE``, or else the task's figure, of the first test set."""
    return BestSoFar(cfg.TEST.BEST_FIGURE or task.main_figure, next(iter(cfg.DATASETS.TEST), ""))


def _is_below(name: str, value: float, bound: float) -> str:
    """The two figures, with as many decimals as their difference takes."""
    decimals = next((one for one in range(1, 6) if f"{value:.{one}f}" != f"{bound:.{one}f}"), 6)
    return f"{name} {value:.{decimals}f} is below {bound:.{decimals}f}"


class LossWatch:
    """Warns of a total loss that is flat while the learning rate is still high.

    After 400, 800, 1600, ... iterations, and shortly before the middle of the run, the means of the last two quarters until then
    are compared. Later in a schedule, at less than half of the highest learning rate, a loss may be flat.

    Args:
        cfg: config of the run.
        max_iter: its length in iterations.
    """

    def __init__(self, cfg: CfgNode, max_iter: int) -> None:
        self._losses: list[tuple[int, float]] = []
        middle = round(MIDDLE * max_iter)
        doubled = [FIRST_LOOK << number for number in range(max(1, max_iter).bit_length())]
        is_apart = all(abs(look - middle) > APART * middle for look in doubled)
        self._looks = sorted([*doubled, *([middle] if middle >= SHORTEST and is_apart else [])])
        self._helps = what_helps(cfg)
        self._highest_lr = 0.0

    def put(self, iteration: int, scalars: dict[str, float]) -> None:
        """Take ``total_loss`` and ``lr`` of an iteration, or their means since the last call; warn if a look is due."""
        done, loss = iteration + 1, scalars.get("total_loss")
        if loss is None or loss != loss:
            return
        self._losses.append((done, loss))
        self._highest_lr = max(self._highest_lr, scalars["lr"])
        if not self._looks or done < self._looks[0]:
            return
        self._looks = [look for look in self._looks if look > done]
        half, later = 0.5 * done, 0.75 * done
        before = [value for at, value in self._losses if half < at <= later]
        now = [value for at, value in self._losses if at > later]
        whole = self._losses[0][0] <= half  # a resumed run has not seen its beginning
        if whole and before and now and scalars["lr"] >= 0.5 * self._highest_lr:
            self._warn_of_flat(*(sum(values) / len(values) for values in (before, now)), half, done)

    def _warn_of_flat(self, before: float, now: float, half: float, done: int) -> None:
        if now > before * (1 - LEAST_FALL):
            logger.warning(
                "The total loss is flat: %.4g from iteration %d to %d, %.4g from there to %d; %s",
                *(before, half, 0.75 * done, now, done - 1, self._helps),
            )


def what_helps(cfg: CfgNode) -> str:
    """What to change about a run that does not learn: what it has not been given yet."""
    weights = "MODEL.WEIGHTS" if cfg.MODEL.BACKBONE.WEIGHTS else "MODEL.WEIGHTS, or MODEL.BACKBONE.WEIGHTS"
    start = "" if cfg.MODEL.WEIGHTS else f"trained weights to start from ({weights}), "
    config = shlex.quote(str(Path(cfg.OUTPUT_DIR) / "config.yaml"))
    return (
        f"what helps: {start}more iterations (SOLVER.EPOCHS, a smaller SOLVER.IMS_PER_BATCH, or a larger --budget where it was the "
        f"limit), another SOLVER.BASE_LR; `cpvt-det show data --config-file {config} --output pictures` draws whether boxes and "
        "images belong together"
    )
