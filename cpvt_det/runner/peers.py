# SPDX-License-Identifier: Apache-2.0
"""The other processes of a run: a sign of life from each every second, and an orderly end when one is gone.

A collective notices a process that died, because its connections close; but not one that is frozen, nor a machine without power.
So one thread of every process writes a number that grows into the store, and reads that of the next process; another looks at what
the first found, at signals, and at the torchrun that started it. Where the main thread does not come back, because it waits for a
process that will not answer, the second thread saves what there is to save and ends the process.
"""

import contextlib
import logging
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from cpvt_det.errors import BadInputError, ConfigError, RunStoppedError, exit_code, first_line
from cpvt_det.runner.rounds import Round, token_of

logger = logging.getLogger("cpvt_det")
BEAT = 1.0
"""Seconds between two signs of life."""
PATIENCE = 120.0
"""Seconds without one, until ``SOLVER.PEER_TIMEOUT`` is read."""
LOOK = 3.5
"""Seconds in which a living process gives a sign of life."""
GRACE = 5.0  # seconds in which the main thread may notice by itself that another process is gone
LONGEST = 20.0  # seconds from a signal to the end; torchrun, and most schedulers, kill after 30
SILENT = "has given no sign of life"
BY_OTHERS = "-"  # why a process ended: because of another
HEARD = (signal.SIGTERM, signal.SIGINT)
UNSEEN = 40
"""Seconds in which a torchrun that is well sees that its process has ended; it may wait 30 for others that it ends."""
OF_OTHERS = re.compile(r"(?i:gloo|nccl|distributed|connection|socket)|\bDist[A-Z]")
"""What errors of torch contain when another process does not answer."""
_current: "Peers | None" = None


def current() -> "Peers | None":
    """The other processes; ``None`` in a run of one process, and under a launcher that is not ours."""
    return _current


class Peers:
    """Within its ``with`` block, this process gives signs of life, and ends if another one does not.

    Args:
        found: round that this process has joined.
        rank: index of this process.
        where: address of the store, for messages.

    Attributes:
        members: all processes, by rank.
        rescue: saves what is not saved yet, and returns a sentence about it, or nothing; set while there is something to save.
        saved: what it returned last.
    """

    def __init__(self, found: Round, rank: int, where: str):
        self.members = found.members
        self.rescue: Callable[[], str] | None = None
        self.saved = ""
        self._rank, self._where = rank, where
        self._store, self._own = found.store, found.store.clone()  # a call of a store waits for the others of the same client
        self._all_rounds = found.all_rounds.clone()
        self._patience = PATIENCE
        self._over, self._ending, self._finishing = threading.Event(), threading.Event(), threading.Event()
        self._beats, self._alarm, self._trouble = 0, "", ""
        self._is_mute = False  # the store does not answer, and nobody may wait for it
        self._parent = os.getppid() if self.members[rank].agent else None

    def __enter__(self) -> "Peers":
        global _current
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch)]
        for thread in self._threads:
            thread.start()
        _current = self
        return self

    def __exit__(self, *error: object) -> None:
        global _current
        _current = None
        self._over.set()
        signal.set_wakeup_fd(self._wakeup)
        for thread in self._threads:
            thread.join(2 * BEAT)  # one that waits for a silent store does not end
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._read)
            os.close(self._write)

    def wait_at_most(self, seconds: float) -> None:
        """Set the time without a sign of life after which a process counts as lost."""
        self._patience = seconds

    def finish(self) -> None:
        """From here on the store may go: the work is done, and one process is the first to end."""
        self._finishing.set()

    def note_error(self) -> None:
        """The main thread has met an error and ends by itself; it gets the time to save and to find out why."""
        self._ending.set()

    def claims(self, iteration: int, folder: Path) -> bool:
        """Whether this process is the one to save the state after an iteration: process 0 if it lives, else one of the others.

        Args:
            iteration: number of the iteration.
            folder: ``OUTPUT_DIR``, where the processes agree if the store is gone.
        """
        try:
            if not self._is_mute:
                return self._claims_in_store(iteration)
        except dist.DistError:
            pass
        if self._rank > 0:
            time.sleep(BEAT)
        try:
            (folder / f".rescue_{iteration}_{self.members[0].token}.tmp").touch(exist_ok=False)  # the next run removes it
        except OSError:
            return False
        return True

    def _claims_in_store(self, iteration: int) -> bool:
        """Process 0 claims at once; the others when it gives no sign of life, has ended, or does not come to it."""
        claim, seen, changed = f"rescue/{iteration}", None, time.monotonic()
        end = changed + GRACE * (self._rank > 0)
        while time.monotonic() < min(end, changed + LOOK):
            saved, beat, ended = self._store.multi_get(["saved", "beat/0", "ended/0"])
            if int(saved) >= iteration or self._store.check([claim]):
                return False
            if ended not in (b"", BY_OTHERS.encode()):
                break
            if beat != seen:
                seen, changed = beat, time.monotonic()
            time.sleep(BEAT / 4)
        return self._store.compare_set(claim, "", str(self._rank)).decode() == str(self._rank)

    def tell_saved(self, iteration: int) -> None:
        """Tell the others that the state after an iteration is on the disk."""
        with contextlib.suppress(dist.DistError):
            if not self._is_mute:
                self._store.set("saved", str(iteration))

    def lost(self) -> str:
        """Which other processes have ended of themselves or give no sign of life, and why as far as that is known; else empty."""
        others = [rank for rank in range(len(self.members)) if rank != self._rank]
        if self._trouble or not others:
            return self._trouble
        try:
            first, end = self._store.multi_get([f"beat/{rank}" for rank in others]), time.monotonic() + LOOK
            while time.monotonic() < end and not self._trouble:
                ended = dict(zip(others, self._store.multi_get([f"ended/{rank}" for rank in others]), strict=True))
                told = {rank: why.decode() for rank, why in ended.items() if why not in (b"", BY_OTHERS.encode())}
                if told:
                    rank, why = min(told.items())
                    return f"{self._name(rank)} ended: {why}"
                time.sleep(BEAT)
            beats = self._store.multi_get([f"beat/{rank}" for rank in others])
        except dist.DistError:
            return self._without_store()
        if self._trouble:  # another process knows already
            return self._trouble
        silent = [rank for rank, old, new in zip(others, first, beats, strict=True) if old == new and not ended[rank]]
        more = f", and {len(silent) - 1} more," if len(silent) > 1 else ""
        return f"{self._name(silent[0])}{more} died or lost its machine" if silent else ""

    def tell_end(self, why: str, because_of: str = "") -> None:
        """Tell the others that this process ends, so that none waits for it.

        Args:
            why: the reason, if it is in this process.
            because_of: what is known of another process, if it is the reason.
        """
        self._ending.set()
        with contextlib.suppress(dist.DistError):
            if not self._is_mute:
                self._store.set(f"ended/{self._rank}", BY_OTHERS if because_of else why)
                self._store.compare_set("alarm", "", because_of or f"{self._name(self._rank)} ended: {why}")

    def _name(self, rank: int) -> str:
        member = self.members[rank]
        return f"process {rank} of {len(self.members)} (pid {member.pid} on {member.host})"

    def _without_store(self) -> str:
        return f"{self._name_of_store()} is gone, and maybe its machine"

    def _name_of_store(self) -> str:
        is_of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torch's own rule
        return f"the store of the run at {self._where}{'' if is_of_torchrun else f' in {self._name(0)}'}"

    def _beat(self) -> None:
        """Give signs of life, and look for those of the next process: a ring, so that each is watched whatever their number."""
        watched = (self._rank + 1) % len(self.members)
        seen, silent = b"", 0
        try:
            while not self._over.wait(BEAT):
                self._own.set(f"beat/{self._rank}", str(self._beats + 1))
                beat, ended, alarm = self._own.multi_get([f"beat/{watched}", f"ended/{watched}", "alarm"])
                silent = 0 if beat != seen or ended else silent + 1
                seen = beat
                told = ""
                if silent * BEAT > self._patience:  # counted in own beats: a whole run may be frozen, and go on
                    told = f"{self._name(watched)} {SILENT} for {silent * BEAT:.0f} s (SOLVER.PEER_TIMEOUT)"
                elif token_of(self._all_rounds, watched) != self.members[watched].token:
                    told = f"{self._name(watched)} has been replaced"
                if told and not alarm:
                    alarm = self._own.compare_set("alarm", "", told)
                self._alarm = alarm.decode()
                self._beats += 1
        except dist.DistError:
            self._beats = -1

    def _watch(self) -> None:
        """Look every second whether this process has to end, and give the main thread some time to do it."""
        beats, unanswered, since, last = 0, 0.0, 0.0, time.monotonic()
        end: End | None = None
        while not self._over.is_set():
            signum = self._signal()
            now = time.monotonic()
            passed, last = min(now - last, 2 * BEAT), now  # while this process was frozen, no time passed
            unanswered = 0.0 if beats != self._beats else unanswered + passed
            beats = self._beats
            since = since + passed if end else 0.0
            end = end or self._reason(signum)
            if unanswered > self._patience and not self._finishing.is_set():
                self._is_mute = True
                end, since = End(f"{self._name_of_store()} does not answer", 0.0), LONGEST
            if end and since >= (LONGEST if self._ending.is_set() else end.grace):
                self._end(end)

    def _reason(self, signum: signal.Signals | None) -> "End | None":
        """Why this process has to end; ``None`` if it has not."""
        if signum:
            return End(f"interrupted by {signum.name}", LONGEST, exit_code(signum))
        if self._parent is not None and os.getppid() != self._parent:
            return self._interrupt("the torchrun that started this process is gone")
        if self._alarm:
            self._trouble = self._trouble or self._alarm
            return End(self._alarm, 0.0 if SILENT in self._alarm else GRACE)  # who waits for a silent one does not come back
        if self._beats < 0 and not self._finishing.is_set():
            self._is_mute = True
            return self._interrupt(self._without_store())
        return None

    def _signal(self) -> signal.Signals | None:
        """A signal that came, or ``None`` after a second. Python's handlers wait for the main thread, which may not come back."""
        if not select.select([self._read], [], [], BEAT)[0]:
            return None
        came = [signal.Signals(number) for number in os.read(self._read, 64) if number in HEARD]
        return came[0] if came else None

    def _interrupt(self, why: str) -> "End":
        """Ask the main thread to end as at SIGTERM: all processes save the same step, where they still can."""
        self._trouble = self._trouble or why
        if not self._ending.is_set():
            _print(f"{why}; the run ends")
            os.kill(os.getpid(), signal.SIGTERM)
        return End(why, LONGEST / 2)

    def _end(self, end: "End") -> None:
        """End this process from beside its main thread."""
        saved = self._rescue_in_time()
        _print(f"stopped: {end.why}{saved and '; '}{saved}")
        for worker in multiprocessing.active_children():
            worker.kill()
        self._end_torchrun_if_it_hangs()
        os._exit(end.code)

    def _rescue_in_time(self) -> str:
        """:attr:`rescue`, unless the disk does not answer: then nobody may wait for this process either."""
        if self.rescue is None:
            return ""
        told: list[str] = []
        thread = threading.Thread(target=lambda: told.append(self.rescue()), daemon=True)
        thread.start()
        thread.join(self._patience)
        return told[0] if told else f"the last step could not be saved within {self._patience:.0f} s: OUTPUT_DIR does not answer"

    def _end_torchrun_if_it_hangs(self) -> None:
        """Leave a shell behind that kills torchrun if that does not see the end of this process.

        torchrun looks at its processes and asks its store in turn, and waits without a limit for one on a frozen machine.
        """
        if self._parent is None or self._parent != os.getppid():
            return
        told = f"torchrun (pid {self._parent}) has not seen for {UNSEEN} s that its process has ended, and is killed"
        wait = f"for second in $(seq {UNSEEN}); do sleep 1; kill -0 {os.getpid()} 2>&- || exit; done"
        script = f"{wait}; echo '{told}: its store does not answer' >&2; kill -9 {self._parent}"
        with contextlib.suppress(OSError):
            subprocess.Popen(["sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


class End(NamedTuple):
    """Why a process ends, in how many seconds at most, and its exit code."""

    why: str
    grace: float
    code: int = 1


@contextlib.contextmanager
def lost_peers_named(patience: float) -> Iterator[None]:
    """Within this block, the error of a collective that another process left becomes one that names that process.

    Args:
        patience: seconds without a sign of life after which a process counts as lost.

    Raises:
        RunStoppedError: a lost process.
        ConfigError: a time that is too short.
    """
    if patience < 2 * LOOK:
        raise ConfigError(f"SOLVER.PEER_TIMEOUT must be at least {2 * LOOK:.0f} seconds, got {patience:g}")
    peers = current()
    if peers is None:
        yield
        return
    peers.wait_at_most(patience)
    try:
        yield
    except (BadInputError, RunStoppedError, KeyboardInterrupt) as error:
        peers.tell_end(first_line(error))
        raise
    except Exception as error:
        peers.note_error()
        lost = peers.lost() if OF_OTHERS.search(f"{type(error).__name__} {error}") else ""
        peers.tell_end(f"{type(error).__name__}: {first_line(error)}", lost)
        if not lost:
            raise
        saved = peers.saved and f"; {peers.saved}"
        raise RunStoppedError(f"{lost}{saved}") from error


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
