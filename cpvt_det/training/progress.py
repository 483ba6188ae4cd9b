# SPDX-License-Identifier: Apache-2.0
"""Feedback on a run: comparison with a constant prediction, the best checkpoint, warnings, and the commands to use next."""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det import builders
from cpvt_det.checkpoint.checkpointer import BEST, RunCheckpointer, RunState
from cpvt_det.checkpoint.resume import FINAL
from cpvt_det.common import distributed
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.registry import import_words
from cpvt_det.data.records import Records
from cpvt_det.solver.schedule import TrainingSchedule
from cpvt_det.training.evaluate import measure
from cpvt_det.training.tasks.task import Results, Task, figure_of, flatten, require_figure

logger = logging.getLogger("cpvt_det")
FEW = {"random weights": 30_000, "a pretrained backbone": 1_000}
"""Start of a run -> number of iterations below which the log calls the run short for photographs (docs/small_data.md)."""


class RunEvaluations:
    """The evaluations of a run. They compare the metrics with the task's baseline, and store the best checkpoint.

    Args:
        cfg: config of the run.
        task: task of the run.
        records: images of the run's training sets, for the baseline.
        tests: test sets; evaluations are compared on the first one.
        checkpointer: checkpointer of the run; its node ``cpvt_det`` stores the best evaluation and the thresholds.

    Raises:
        ConfigError: a ``TEST.BEST_FIGURE`` that cannot be used.
    """

    def __init__(self, cfg: CfgNode, task: Task, records: Sequence[Any], tests: Sequence[Any], checkpointer: RunCheckpointer):
        self.task = task
        self.tests = tests
        self.checkpointer = checkpointer
        self.state: RunState = checkpointer.checkpointables["cpvt_det"]
        self._records = records
        self._baseline: dict[str, float] | None = None
        self._helps = what_helps(cfg)
        figure = cfg.TEST.BEST_FIGURE
        if figure and not tests:
            raise ConfigError(
                f"TEST.BEST_FIGURE is {figure}, but nothing is evaluated: name a test set in DATASETS.TEST, or leave the key out"
            )
        if figure:
            require_figure(figure, task, tests)

    def evaluate(self, detector: nn.Module, iteration: int, output: Path) -> Results:
        """Evaluate after an iteration, in every process; arguments and results as in :func:`.evaluate.evaluate`."""
        results, self.state.thresholds = measure(self.task, detector, self.tests, output)
        if distributed.rank() == 0:
            self._compare(results, iteration)
        self.checkpointer.keep_best(figure_of(self.state.best.name, results), iteration)
        return results

    def _compare(self, results: Results, iteration: int) -> None:
        """Warn about metrics below the baseline. The baseline is computed once, without looking at any image."""
        if self._baseline is None:
            self._baseline = self.task.baseline(self._records, self.tests[0])
            if self._baseline:
                listed = ", ".join(f"{name} {value:.1f}" for name, value in self._baseline.items())
                logger.info("For comparison, %s: %s", self.task.constant, listed)
        scalars = flatten(results if len(self.tests) == 1 else results[self.tests[0].name])
        below = [name for name, value in self._baseline.items() if scalars.get(name, value) < value]
        if below:
            listed = ", ".join(_is_below(name, scalars[name], self._baseline[name]) for name in below)
            logger.warning(
                "After iteration %d the model is worse than %s: %s; %s", iteration, self.task.constant, listed, self._helps
            )


def _is_below(name: str, value: float, bound: float) -> str:
    """The two values as text, with enough decimals to show their difference."""
    decimals = next((one for one in range(1, 6) if f"{value:.{one}f}" != f"{bound:.{one}f}"), 6)
    return f"{name} {value:.{decimals}f} is below {bound:.{decimals}f}"


def what_helps(cfg: CfgNode) -> str:
    """Advice for a run that does not learn: changes that its config does not have yet."""
    weights = "MODEL.WEIGHTS" if cfg.MODEL.BACKBONE.WEIGHTS else "MODEL.WEIGHTS, or MODEL.BACKBONE.WEIGHTS"
    start = "" if cfg.MODEL.WEIGHTS else f"trained weights to start from ({weights}), "
    config = shlex.quote(str(Path(cfg.OUTPUT_DIR) / "config.yaml"))
    return (
        f"what helps: {start}more iterations (SOLVER.EPOCHS, a smaller SOLVER.IMS_PER_BATCH, or a larger --budget where it was the "
        f"limit), another SOLVER.BASE_LR; `cpvt-det show data --config-file {config} --output pictures` shows whether the boxes "
        "fit the images"
    )


def log_advice(cfg: CfgNode, schedule: TrainingSchedule, records: Records) -> None:
    """Log a note if a detector's run is short for photographs, and warn about images with nearly as many objects as queries.

    Args:
        cfg: config of the run.
        schedule: schedule of the run.
        records: training images of the run.
    """
    if builders.is_classifier(cfg):
        return
    start = "a pretrained backbone" if cfg.MODEL.BACKBONE.WEIGHTS else "random weights"
    if not cfg.MODEL.WEIGHTS and schedule.max_iter < FEW[start]:
        logger.info(
            "%d iterations (%s) from %s: enough for simple images, few for photographs. For those train longer, or set "
            "MODEL.BACKBONE.WEIGHTS or MODEL.WEIGHTS to start from trained weights",
            schedule.max_iter,
            f"{len(records)} images x epochs / batch of {cfg.SOLVER.IMS_PER_BATCH}",
            start,
        )
    queries = cfg.MODEL.DETR.NUM_OBJECT_QUERIES
    most = int(records.num_boxes.max(initial=0))
    if queries / 2 < most <= queries:  # above that, the check of the data reports an error
        logger.warning(
            "An image has %d objects, more than half of the %d queries; raise MODEL.DETR.NUM_OBJECT_QUERIES", most, queries
        )


def log_next_steps(cfg: CfgNode, state: RunState, output: Path) -> None:
    """Log the best checkpoint of a finished run, its iteration, and the commands to use next.

    Args:
        cfg: config of the run.
        state: state of the run, with its best evaluation.
        output: ``OUTPUT_DIR``.
    """
    best = state.best
    if best.figure is None:
        weights, which = output / f"{FINAL}.pth", "Final checkpoint (nothing was evaluated)"
    else:
        weights, which = output / f"{BEST}.pth", f"Best checkpoint, of iteration {best.iteration} ({best.name} {best.figure:.4g})"
    longer = f"SOLVER.EPOCHS {2 * cfg.SOLVER.EPOCHS:g}" if cfg.SOLVER.EPOCHS > 0 else f"SOLVER.MAX_ITER {2 * cfg.SOLVER.MAX_ITER}"
    if 0 < cfg.SOLVER.EARLY_STOPPING <= best.waited:
        longer += " SOLVER.EARLY_STOPPING 0"
    config, report, best_file = (shlex.quote(str(path)) for path in (output / "config.yaml", output / "eval", weights))
    own, processes = import_words(), distributed.world_size()
    gpus = f" --num-gpus {processes}" if processes > 1 else ""  # the batch is divided among them
    commands = [
        f"cpvt-det predict{own} {best_file} --input IMAGES --output found",
        f"cpvt-det eval{own} {best_file} --config-file {config} --report OUTPUT_DIR {report}",
        f"cpvt-det train{own}{gpus} --config-file {config} --resume {longer}",
    ]
    logger.info("%s: %s. Next: predict, report, train longer:\n  %s", which, weights, "\n  ".join(commands))
