# SPDX-License-Identifier: Apache-2.0
"""The work between two steps: report bad steps, save checkpoints, and obey SIGTERM and Ctrl-C, but only after the step is finished
and saved."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType

from fvcore.common.config import CfgNode

from cpvt_det.checkpoint.checkpointer import RunCheckpointer
from cpvt_det.checkpoint.resume import FINAL
from cpvt_det.common import distributed
from cpvt_det.common.errors import DeadWorkerError, InterruptedRun, RunStoppedError, exit_code
from cpvt_det.common.structures import Sample
from cpvt_det.solver.step import TrainStep
from cpvt_det.training.launchers import is_of_torchrun

logger = logging.getLogger("cpvt_det")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME = 0.5  # seconds; a second signal within this time is ignored: one Ctrl-C is sent by the terminal and by the launcher
SAME_BY_TORCHRUN = 15.0  # the same under torchrun, which repeats a signal that a scheduler sent to all, and kills after 30 s


class RunGuard:
    """A guard that saves the progress of a run. Every process must call its methods after the same steps.

    If an error leaves the ``with`` block, process 0 saves the state after the last completed step, because at that point all
    processes have the same weights.

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
        self._save_minutes, self._save_time = cfg.SOLVER.CHECKPOINT_MINUTES, time.monotonic()
        self._signals = StopSignals()
        self._is_due = False
        self._start, self._iteration, self._saved = start, start - 1, start - 1

    def __enter__(self) -> "RunGuard":
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *more: object) -> None:
        whole = isinstance(error, DeadWorkerError) or not isinstance(error, RunStoppedError)
        try:
            if isinstance(error, Exception) and whole and self._save_unsaved():
                logger.warning("Iteration %d is saved; --resume continues after it", self._saved)
        except RunStoppedError as failure:  # the first error still ends the run
            logger.warning("The last step could not be saved: %s", failure)
        finally:
            self._signals.__exit__(kind, error, *more)

    def after_step(self, iteration: int) -> None:
        """Save if a checkpoint is due, but only after a good step, so that the last checkpoint is always usable.

        Raises:
            RunStoppedError: too many bad steps in a row, or a checkpoint that cannot be written.
        """
        self._iteration = iteration
        is_last = iteration + 1 == self.max_iter
        is_logged = (iteration + 1) % self._log_period == 0
        self._is_due |= (iteration + 1) % self._save_period == 0
        if is_logged:  # the clocks of the processes differ
            is_late = time.monotonic() - self._save_time > 60 * self._save_minutes
            self._is_due |= bool(distributed.all_reduce_max(int(is_late)))
        if self._is_due or is_last or is_logged:
            self._report_bad_steps()
        if self._is_due and not self.step.bad_steps.in_a_row:
            self._save(iteration)
        if is_last:
            self.save_final(iteration)

    def save_final(self, iteration: int) -> None:
        """Save ``model_final.pth`` after the last evaluation, with the thresholds of this evaluation. This replaces the file that
        was saved before the evaluation."""
        self.checkpointer.save(FINAL, iteration)
        self._saved = iteration

    def obey_signals(self) -> None:
        """End the run if a signal was received. Call this after all work of a step is done.

        Raises:
            InterruptedRun: a received signal; the step is saved.
        """
        if signum := self._signals.received():
            self._leave(signum)

    def batches(self, loader: Iterable[list[Sample]]) -> Iterator[list[Sample]]:
        """The batches of a loader. If the run has only one process, it obeys signals immediately while it waits for a batch.

        With several processes, another process may be waiting for this process's part of a step, so signals are obeyed only after
        the step.

        Raises:
            InterruptedRun: a received signal; the last step is saved.
        """
        batches = iter(loader)
        waiting = self._signals.at_once if distributed.world_size() == 1 else contextlib.nullcontext
        while True:
            try:
                with waiting():
                    batch = next(batches, None)
            except Stopped:
                self._leave(self._signals.signum)
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within this block, obey a signal immediately. If a signal or an error ends the block, save the last step.

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
        """Log bad steps. If they end the run, extend the error message by advice on how to continue."""
        try:
            self.step.bad_steps.report()
        except RunStoppedError as error:
            look = "check these images and MODEL.PIXEL_STD"
            advice = f"the last checkpoint, of iteration {self._saved}, is good: {look}, or --resume with a lower SOLVER.BASE_LR"
            if self._saved < 0:
                advice = f"there is no checkpoint yet: {look}, and train again with a lower SOLVER.BASE_LR"
            elif self._iteration - self._start < self.step.bad_steps.in_a_row:
                way_out = "remove the last checkpoint, which may be bad, and --resume again"
                advice = f"all steps since --resume were bad: {look}; or {way_out}"
            raise RunStoppedError(f"{error}; {advice}") from error

    def _leave(self, signum: int) -> None:
        self._save_unsaved()
        done = f"iteration {self._iteration} is saved; --resume continues after it" if self._iteration >= 0 else "no step was taken"
        error = InterruptedRun(signum, done)
        logger.warning("%s", error)
        raise error

    def _save_unsaved(self) -> bool:
        """Save the last step, in process 0, unless it is saved already; return whether it was saved now."""
        done = self.step.done
        if done is None or done <= self._saved:
            return False
        self._save(done)
        return self.checkpointer.save_to_disk

    def _save(self, iteration: int) -> None:
        self.checkpointer.save(f"model_{iteration:07d}", iteration)
        self._saved, self._save_time, self._is_due = iteration, time.monotonic(), False


class Stopped(BaseException):
    """A signal received where a run may stop immediately."""


class StopSignals:
    """A ``with`` block in which the first signal is recorded and a second one ends the process and its data workers immediately.

    Only the main thread can set signal handlers; entered in another thread, the block changes nothing.

    Attributes:
        signum: signal that this process received; 0 for none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._time = 0.0
        self._at_once = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def received(self) -> int:
        """The signal that any process of the run received, or 0 for none. Every process must call this after the same step."""
        return distributed.all_reduce_max(self.signum)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this block, the first signal raises :class:`Stopped` immediately; a signal received earlier raises it on entry."""
        self._at_once = True
        try:
            if self.signum:
                raise Stopped
            yield
        finally:
            self._at_once = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.signum:
            self.signum, self._time = signum, time.monotonic()
            if self._at_once:
                raise Stopped
        elif time.monotonic() - self._time > (SAME_BY_TORCHRUN if is_of_torchrun() else SAME):
            for worker in multiprocessing.active_children():
                worker.kill()
            os._exit(exit_code(signum))
