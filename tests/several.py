# SPDX-License-Identifier: Apache-2.0
"""Several processes of ``cpvt-det``, as another launcher than torchrun starts them: quick, because their imports are shared.

A server imports once and forks each process. Its parent is therefore not the test.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nodes import free_port

CONTEXT = multiprocessing.get_context("forkserver")
SIGNAL_IN_STEP = """
import os, signal
import cpvt_det.solver.step as step
real = step.TrainStep._update
def call(self, bad):
    if self._begun.iteration + 1 == {iteration}:
        os.kill(os.getpid(), signal.{signum})
    return real(self, bad)
step.TrainStep._update = call
"""
"""Python in which a process sends itself a signal in the middle of a step, where it has changed nothing yet."""


class Ended(NamedTuple):
    """How a process ended, and what it printed; ``None`` for one that still ran."""

    code: int | None
    text: str


def start_group(folder: Path, words: Sequence[object], before: Sequence[str] = ("", "")) -> list[multiprocessing.Process]:
    """Start ``cpvt-det WORDS`` in as many processes as ``before`` has Python to run first; they print to ``<folder>/RANK.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    CONTEXT.set_forkserver_preload(["cpvt_det.cli.train", "cpvt_det.runner.train", "cpvt_det.runner.launch", "torch.optim"])
    group = {
        "WORLD_SIZE": str(len(before)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = []
    for rank, code in enumerate(before):
        arguments = ([str(word) for word in words], folder / f"{rank}.txt", {**group, "RANK": str(rank)}, code)
        started.append(CONTEXT.Process(target=_run, args=arguments, daemon=True))
        started[-1].start()
    return started


def end_group(folder: Path, processes: Sequence[multiprocessing.Process], seconds: float = 60) -> list[Ended]:
    """Wait for processes, of which frozen ones are killed when the others have ended."""
    for process in sorted(processes, key=lambda one: _is_frozen(one.pid)):
        process.join(0 if _is_frozen(process.pid) else seconds)
    ended = [Ended(one.exitcode, (folder / f"{rank}.txt").read_text(errors="replace")) for rank, one in enumerate(processes)]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    return ended


def run_group(folder: Path, words: Sequence[object], before: Sequence[str] = ("", "")) -> list[Ended]:
    """:func:`start_group` and :func:`end_group`."""
    return end_group(folder, start_group(folder, words, before))


def _is_frozen(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _run(words: list[str], printed: Path, env: dict[str, str], before: str) -> None:
    with printed.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    from cpvt_det.cli import main

    try:
        exec(before, {})
        main(words)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
