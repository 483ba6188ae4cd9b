# SPDX-License-Identifier: Apache-2.0
"""``SOLVER.EARLY_STOPPING``: a run ends after evaluations that were not better than the best one before."""

from collections.abc import Sequence
from typing import Any

from fvcore.common.config import CfgNode

from cpvt_det.errors import ConfigError, counted
from cpvt_det.runner.callbacks.contract import Callback, TrainingRun
from cpvt_det.tasks.task import Results


class EarlyStopping(Callback):
    """Ends a run after ``patience`` evaluations in a row without a new best one. They are counted in the run's checkpoints, so a
    resumed run goes on counting where it was.
    """

    def __init__(self, patience: int):
        self.patience = patience

    def on_start(self, run: TrainingRun) -> None:
        self._look(run)

    def on_evaluation(self, run: TrainingRun, iteration: int, results: Results) -> None:
        self._look(run)

    def _look(self, run: TrainingRun) -> None:
        best = run.best
        if best.waited >= self.patience:
            higher = best.name
            if best.figure is not None:
                higher = f"a higher {best.name} than the {best.figure:.4g} of iteration {best.iteration}"
            run.stop(f"{counted(best.waited, 'evaluation')} without {higher} (SOLVER.EARLY_STOPPING {self.patience})")


def build_early_stopping(cfg: CfgNode, tests: Sequence[Any]) -> list[Callback]:
    """The callback of ``SOLVER.EARLY_STOPPING``; an empty list for 0.

    Raises:
        ConfigError: a negative number, or a run that has no evaluations to wait for.
    """
    patience, test = cfg.SOLVER.EARLY_STOPPING, cfg.TEST
    by_epochs = cfg.SOLVER.EPOCHS > 0 and test.EVAL_EPOCHS > 0  # else EVAL_EPOCHS is not used
    if patience < 0:
        raise ConfigError(f"SOLVER.EARLY_STOPPING must be at least 0 (0 for no early stopping), got {patience}")
    if patience and not tests:
        raise ConfigError(
            f"SOLVER.EARLY_STOPPING is {patience}, but nothing is evaluated: name a test set in DATASETS.TEST, or leave the key out"
        )
    if patience and not (test.EVAL_PERIOD > 0 or by_epochs):
        raise ConfigError(
            f"SOLVER.EARLY_STOPPING is {patience}, but the run is evaluated at its end only; set TEST.EVAL_EPOCHS or EVAL_PERIOD"
        )
    return [EarlyStopping(patience)] if patience else []
