# SPDX-License-Identifier: Apache-2.0
"""The work of both runners between two steps: report bad steps, save, and obey signals."""

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
    """Saves the progress of a run. Every process must call its methods after the same steps.

    If an error leaves its ``with`` block between two steps, the last step is saved; in a run of one process only, because in
    several the others may be at another step.

    Args:
        cfg: config of the run, whose ``SOLVER`` contains the periods.
        checkpointer: checkpointer of the run, which writes in the first process.
        step: training step of the run.
        start: first iteration.
        max_iter: number of iterations in the whole run.
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
        """Save if a checkpoint is due, but only after a good step, so that the last checkpoint is always good.

        Raises:
            RunStoppedError: too many bad steps in a row, or a checkpoint that cannot be written.
        """
        self._iteration = iteration
        is_last = iteration + 1 == self.max_iter
        self._is_due |= (iteration + 1) % self._save_period == 0
        if self._is_due or is_last or (iteration + 1) % self._log_period == 0:
            self._report_bad_steps()
        if self._is_due and not self.step.bad_steps.in_a_row:
            self._save()
        if is_last:
            self.save_final(iteration)

    def save_final(self, iteration: int) -> None:
        """Save ``model_final.pth`` after the last evaluation, with its thresholds; it may have been saved before it too."""
        self.checkpointer.save(FINAL, iteration)
        self._saved = iteration

    def obey_signals(self) -> None:
        """End the run if a signal was received, after all work of a step is done.

        Raises:
            InterruptedRun: a received signal; the step is saved.
        """
        signum = self._signals.received()
        if signum:
            self._leave(signum)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within this block a signal is obeyed immediately; if a signal or an error ends the block, the last step is saved.

        Raises:
            InterruptedRun: a received signal.
        """
        self._report_bad_steps()
        try:
            with self._signals.at_once():
                yield
        except Stopped:
            self._leave(self._signals.signum)
        except Exception:
            self._save_unsaved()
            raise

    def _report_bad_steps(self) -> None:
        """Log bad steps; if they end the run, add to the error how to continue."""
        try:
            self.step.bad_steps.report()
        except RunStoppedError as error:
            raise RunStoppedError(f"{error}; {self._way_out()}") from error

    def _way_out(self) -> str:
        look = "check these images and MODEL.PIXEL_STD"
        if self._saved < 0:
            return f"there is no checkpoint yet: {look}, and train again with a lower SOLVER.BASE_LR"
        if self._iteration - self._start < self.step.bad_steps.in_a_row:
            return f"all steps since --resume were bad: {look}; or remove the last checkpoint, which may be bad, and --resume again"
        return f"the last checkpoint, of iteration {self._saved}, is good: {look}, or --resume with a lower SOLVER.BASE_LR"

    def _rescue(self) -> None:
        """Save the last step after an error, unless the error came in the middle of a step; the error still ends the run."""
        if self.step.done is None or self.step.done <= self._saved:
            return
        self._iteration = self.step.done
        try:
            self._save()
            logger.warning("Iteration %d is saved; --resume continues after it", self._iteration)
        except RunStoppedError as error:
            logger.warning("The last step could not be saved: %s", error)

    def _leave(self, signum: int) -> None:
        self._save_unsaved()
        done = f"iteration {self._iteration} is saved; --resume continues after it" if self._iteration >= 0 else "no step was taken"
        error = InterruptedRun(signum, done)
        logger.warning("%s", error)
        raise error

    def _save_unsaved(self) -> None:
        if self._saved < self._iteration:
            self._save()

    def _save(self) -> None:
        self.checkpointer.save(f"model_{self._iteration:07d}", self._iteration)
        self._saved, self._is_due = self._iteration, False
