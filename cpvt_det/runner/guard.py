# SPDX-License-Identifier: Apache-2.0
"""What both runners do between two steps: read which were bad, save, and obey signals."""

import contextlib
import logging
from collections.abc import Iterator

from fvcore.common.config import CfgNode

from cpvt_det import distributed
from cpvt_det.checkpoint.checkpointer import RunCheckpointer
from cpvt_det.checkpoint.resume import FINAL
from cpvt_det.errors import DeadWorkerError, InterruptedRun, RunStoppedError
from cpvt_det.runner.signals import Stopped, StopSignals
from cpvt_det.solver.step import TrainStep

logger = logging.getLogger("cpvt_det")


class RunGuard:
    """Keeps what a run has reached. Every process calls its methods after the same steps.

    An error that leaves its ``with`` block between two steps finds the last one saved, where there is one process: with several,
    the others may be elsewhere.

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
        self._start, self._iteration, self._saved = start, start - 1, start - 1

    def __enter__(self) -> "RunGuard":
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *more: object) -> None:
        whole = isinstance(error, DeadWorkerError) or not isinstance(error, RunStoppedError)
        try:
            if isinstance(error, Exception) and whole and distributed.world_size() == 1:
                self._rescue()
        finally:
            self._signals.__exit__(kind, error, *more)

    def after_step(self, iteration: int) -> None:
        """Save where a checkpoint is due; it waits for a step that is good, so that the last checkpoint is.

        Raises:
            RunStoppedError: too many bad steps in a row, or a checkpoint that cannot be written.
        """
        self._iteration = iteration
        is_last = iteration + 1 == self.max_iter
        self._is_due |= (iteration + 1) % self._save_period == 0
        if self._is_due or is_last or (iteration + 1) % self._log_period == 0:
            self._tell()
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
        self._tell()
        try:
            with self._signals.at_once():
                yield
        except Stopped:
            self._leave(self._signals.signum)
        except Exception:
            self._save_unsaved()
            raise

    def _tell(self) -> None:
        """Have bad steps told; where they end the run, say what there is to go on with."""
        try:
            self.step.bad_steps.tell()
        except RunStoppedError as error:
            raise RunStoppedError(f"{error}; {self._way_out()}") from error

    def _way_out(self) -> str:
        look = "look at those images and at MODEL.PIXEL_STD"
        if self._saved < 0:
            return f"there is no checkpoint: {look}, and start anew with a lower SOLVER.BASE_LR"
        if self._iteration - self._start < self.step.bad_steps.in_a_row:
            return f"no step was good since --resume: {look}; or its checkpoint is spoilt: remove it and --resume the one before"
        return f"the last checkpoint is of iteration {self._saved}, before them: {look}, or --resume it with a lower SOLVER.BASE_LR"

    def _rescue(self) -> None:
        """Save the last step after an error, unless that came in the middle of one; the error itself stays what ends the run."""
        if self.step.done is None or self.step.done <= self._saved:
            return
        self._iteration = self.step.done
        try:
            self._save()
            logger.warning("Iteration %d is saved; --resume goes on after it", self._iteration)
        except RunStoppedError as error:
            logger.warning("The last step is lost: %s", error)

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
