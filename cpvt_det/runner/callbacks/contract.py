# SPDX-License-Identifier: Apache-2.0
"""The contract of callbacks, and their registry."""

from dataclasses import dataclass
from pathlib import Path

from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det.checkpoint.best import BestSoFar
from cpvt_det.registry import PartRegistry
from cpvt_det.tasks.task import Results

CALLBACK_REGISTRY = PartRegistry("CALLBACK", "callback")
"""Name in ``CALLBACKS`` of a config -> class of a :class:`Callback`; its keywords are options."""


@dataclass
class TrainingRun:
    """What callbacks see of a run.

    Attributes:
        cfg: config of the run.
        output: ``OUTPUT_DIR``.
        run_id: id of the run; a resumed run keeps it.
        start: first iteration; above 0 in a resumed run.
        max_iter: number of iterations in the whole run.
        best: the best evaluation so far, and how many there were since.
        evaluated: the model that evaluations measure: the moving average of the weights where there is one.
        reason: reason for which a callback wants the run to end; empty: it goes on.
    """

    cfg: CfgNode
    output: Path
    run_id: str
    start: int
    max_iter: int
    best: BestSoFar
    evaluated: nn.Module
    reason: str = ""

    def stop(self, reason: str) -> None:
        """End the run after the current step, with an evaluation and ``model_final.pth``; the log gives the reason.

        Asked for in ``on_start``, a new run ends after its first step, and a resumed one before the next.

        Raises:
            ValueError: an empty reason.
        """
        if not reason:
            raise ValueError("a run is stopped for a reason, which the log gives; got an empty one")
        self.reason = reason


class Callback:
    """What a run calls, in its first process; a callback overrides what it needs.

    A callback watches: it changes neither weights nor optimiser, which other processes would not see. An exception in ``on_start``
    ends the run before its first step. After any later one the run goes on without that callback, with a warning: a server that is
    down must not end a training. Its ``on_end`` is called all the same, so that it can close what it has opened; errors of that are
    not reported. A :class:`cpvt_det.errors.RunStoppedError` always ends the run.
    """

    def on_start(self, run: TrainingRun) -> None:
        """Called before the first step of a run, also of a resumed one."""

    def on_step(self, run: TrainingRun, iteration: int, scalars: dict[str, float]) -> None:
        """Called every ``SOLVER.LOG_PERIOD`` iterations.

        Args:
            run: the run.
            iteration: iteration of the last step.
            scalars: means since the last call of all losses and metrics and of ``grad_norm``, the number of ``skipped`` steps, and
                ``lr``; NaN where all steps were skipped. And times.
        """

    def on_evaluation(self, run: TrainingRun, iteration: int, results: Results) -> None:
        """Called after an evaluation; ``results`` are its figures, as in ``results.json``, NaN where one is not defined."""

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Called when the run has ended and its files are written, or with the error or the interruption that ended it."""
