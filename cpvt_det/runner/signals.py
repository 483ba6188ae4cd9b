# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C: the current step is finished and saved before the run ends."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from cpvt_det import distributed
from cpvt_det.errors import exit_code
from cpvt_det.runner.launchers import is_of_torchrun

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME = 0.5  # seconds; a second signal within this time is ignored: one Ctrl-C is sent by the terminal and by the launcher
SAME_BY_TORCHRUN = 15.0  # the same under torchrun, which passes on what a scheduler may have sent to all, and kills after 30


class Stopped(BaseException):
    """A signal received where a run may stop immediately."""


class StopSignals:
    """Within its ``with`` block, the first signal is recorded; a second one ends the process and its data workers immediately.

    Threads other than the main one cannot have handlers; there, signals act as before.
    """

    def __init__(self) -> None:
        self._signum = 0
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
        """The signal that any process of the run received, 0 for none; every process has to call this after the same step."""
        return distributed.all_reduce_max(self._signum)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this block the first signal raises :class:`Stopped` immediately; a signal received earlier raises it too."""
        self._at_once = True
        try:
            if self._signum:
                raise Stopped
            yield
        finally:
            self._at_once = False

    @property
    def signum(self) -> int:
        """The signal that this process received."""
        return self._signum

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._signum:
            self._signum, self._time = signum, time.monotonic()
            if self._at_once:
                raise Stopped
        elif time.monotonic() - self._time > (SAME_BY_TORCHRUN if is_of_torchrun() else SAME):
            for worker in multiprocessing.active_children():
                worker.kill()
            os._exit(exit_code(signum))
