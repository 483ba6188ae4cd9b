# SPDX-License-Identifier: Apache-2.0
"""Several processes of ``cpvt-det``, as another launcher than torchrun starts them: :class:`forked.Forked`."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from forked import Forked
from nodes import free_port

SIGNAL_IN_STEP = """
import os, signal
import cpvt_det.solver.step as step
take, real = step.TrainStep.__call__, step.TrainStep._clip
def start(self, samples, iteration):
    self.now = iteration
    return take(self, samples, iteration)
def call(self, *arguments):
    if self.now == {iteration}:
        os.kill(os.getpid(), signal.{signum})
    return real(self, *arguments)
step.TrainStep.__call__, step.TrainStep._clip = start, call
"""
"""Python in which a process sends itself a signal in the middle of a step, where it has changed nothing yet."""


class Ended(NamedTuple):
    """How a process ended, and what it printed; ``None`` for one that still ran."""

    code: int | None
    text: str


def start_group(folder: Path, words: Sequence[object], before: Sequence[str] = ("", ""), **more: str) -> list[Forked]:
    """Start ``cpvt-det WORDS`` in as many processes as ``before`` has Python to run first.

    Each prints to ``<folder>/RANK.txt`` and has ``RANK`` and the like; and ``more``, where "RANK" stands for its rank, and an empty
    value takes a variable away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    group = {"RANK": "RANK", "WORLD_SIZE": str(len(before)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group |= {"GLOO_SOCKET_IFNAME": "lo", **more}
    started = []
    for rank, code in enumerate(before):
        own = {name: value.replace("RANK", str(rank)) for name, value in group.items()}
        env = {name: value for name, value in {**os.environ, **own}.items() if own.get(name) != ""}
        started.append(Forked(*words, env=env, before=code, printed=folder / f"{rank}.txt"))
    return started


def end_group(folder: Path, processes: Sequence[Forked], seconds: float = 250) -> list[Ended]:
    """Wait for processes; frozen ones are killed when the others have ended."""
    end = time.monotonic() + seconds
    while any(one.returncode is None and not _is_frozen(one.pid) for one in processes) and time.monotonic() < end:
        time.sleep(0.05)
    ended = [Ended(one.returncode, (folder / f"{rank}.txt").read_text(errors="replace")) for rank, one in enumerate(processes)]
    for process in processes:
        process.end()
    return ended


def run_group(folder: Path, words: Sequence[object], before: Sequence[str] = ("", ""), **env: str) -> list[Ended]:
    """:func:`start_group` and :func:`end_group`."""
    return end_group(folder, start_group(folder, words, before, **env))


def _is_frozen(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
