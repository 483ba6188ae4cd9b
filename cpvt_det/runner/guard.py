# SPDX-License-Identifier: Apache-2.0
"""What both runners do between two steps: read which were bad, save, and obey signals."""

import contextlib
import logging
from collections.abc import Iterator

from fvcore.common.config import CfgNode

from cpvt_det.checkpoint.choice import FINAL
from cpvt_det.checkpoint.run import RunCheckpointer
from cpvt_det.errors import InterruptedRun
from cpvt_det.runner.signals import Stopped, StopSignals
from cpvt_det.solver.step import TrainStep

logger = logging.getLogger("cpvt_det")


class RunGuard:
    """Keeps what a run has reached. Every process calls its methods after the same steps.

    Args:
        cfg: the run's, of whose ``SOLVER`` it takes the periods.
        checkpointer: writes in the first process.
        step: of the run.
        start, max_iter: the first iteration to take, and how many the whole run has.
    """

    def __init__(self, cfg: CfgNode, checkpointer: RunCheckpointer, step: TrainStep, start: int, max_iter: int):
        self.checkpointer = checkpointer
        self.step = step
        self.max_iter = max_iter
        self._save_period, self._log_period = cfg.SOLVER.CHECKPOINT_PERIOD, cfg.SOLVER.LOG_PERIOD
        self._signals = StopSignals()
        self._is_due = False
        self._iteration = self._saved = start - 1

    def __enter__(self) -> "RunGuard":
        self._signals.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._signals.__exit__(*error)

    def after_step(self, iteration: int) -> None:
        """Save where a checkpoint is due; it waits for a step that is good, so that the last checkpoint is.

        Raises:
            RunStoppedError: too many bad steps in a row, or a checkpoint that cannot be written.
        """
        self._iteration = iteration
        is_last = iteration + 1 == self.max_iter
        self._is_due |= (iteration + 1) % self._save_period == 0
        if self._is_due or is_last or (iteration + 1) % self._log_period == 0:
            self.step.bad_steps.tell()
        if self._is_due and not self.step.bad_steps.in_a_row:
            self._save()
        if is_last:
            self.checkpointer.save(FINAL, iteration)
            self._saved = iteration

    def obey_signals(self) -> None:
        """End the run where a signal asked for it, at the end of what belongs to a step.

        Raises:
            InterruptedRun: a signal came; the step is saved.
        """
        signum = self._signals.received()
        if signum:
            self._leave(signum)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within this block a signal is obeyed at once; what ends it early, that or an error, finds the last step saved.

        Raises:
            InterruptedRun: a signal came.
        """
        self.step.bad_steps.tell()
        try:
            with self._signals.at_once():
                yield
        except Stopped:
            self._leave(self._signals.signum)
        except Exception:
            self._save_unsaved()
            raise

    def _leave(self, signum: int) -> None:
        self._save_unsaved()
        done = f"iteration {self._iteration} is saved; --resume goes on after it" if self._iteration >= 0 else "nothing was done"
        error = InterruptedRun(signum, done)
        logger.warning("%s", error)
        raise error

    def _save_unsaved(self) -> None:
        if self._saved < self._iteration:
            self._save()

    def _save(self) -> None:
        self.checkpointer.save(f"model_{self._iteration:07d}", self._iteration)
        self._saved, self._is_due = self._iteration, False
