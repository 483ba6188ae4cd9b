# SPDX-License-Identifier: Apache-2.0
"""How one call is timed: in this process, on a GPU, or as a process of its own; and on how many threads."""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.threads import THREAD_VARIABLES, thread_environment


@dataclass(frozen=True)
class Sample:
    """Seconds that one call took: on the clock on the wall, and of all cores (None where nobody can say)."""

    wall: float
    cpu: float | None = None


@dataclass(frozen=True)
class Command:
    """A contender that needs a process of its own: other settings, another interpreter.

    The process is timed from start to end. To leave its start out, it prints a JSON object as its last line, with ``wall`` and
    ``cpu`` in seconds of what it timed itself, and in ``output`` what the others' outputs are compared with.

    Args:
        words: the command line.
        environment: variables beside those of this process.
    """

    words: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self) -> "CommandRun":
        """Run it to its end.

        Raises:
            RuntimeError: an exit code other than 0; with the last line of what the command said.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            begin = time.perf_counter()
            process = subprocess.Popen(self.words, stdout=out, stderr=err, env={**os.environ, **self.environment})
            _, status, usage = os.wait4(process.pid, 0)  # the only call that tells the usage of one child
            wall = time.perf_counter() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            lines, said = out.read().strip().splitlines(), err.read().strip().splitlines()
        if process.returncode:
            raise RuntimeError(f"{' '.join(self.words)}: exit code {process.returncode}: {said[-1] if said else 'nothing said'}")
        report = _last_json(lines)
        sample = Sample(report.get("wall", wall), report.get("cpu", usage.ru_utime + usage.ru_stime))
        return CommandRun(sample, report.get("output", lines), usage.ru_maxrss * 1024)


@dataclass(frozen=True)
class CommandRun:
    """What a command took and gave; ``peak_bytes`` is the largest resident size of its whole process."""

    sample: Sample
    output: Any
    peak_bytes: int


def _last_json(lines: list[str]) -> dict[str, Any]:
    if lines and lines[-1].startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(lines[-1])
    return {}


class Clock(Protocol):
    """Times calls of one kind of device."""

    def time(self, call: Callable[[], Any], repeats: int) -> Sample:
        """Call ``repeats`` times and tell the time of one."""
        ...


class ProcessClock:
    """Wall time and this process's CPU time, which a neighbour's load does not count into."""

    def time(self, call: Callable[[], Any], repeats: int) -> Sample:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            output = call()
        sample = Sample((time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats)
        return output.sample if isinstance(output, CommandRun) else sample


class CudaClock:
    """Time between two events on the GPU's stream; the CPU's share of it is not told."""

    def time(self, call: Callable[[], Any], repeats: int) -> Sample:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            output = call()
        end.record()
        torch.cuda.synchronize()
        return output.sample if isinstance(output, CommandRun) else Sample(begin.elapsed_time(end) / 1000 / repeats)


def clock_of(device: str) -> Clock:
    return CudaClock() if device == "cuda" else ProcessClock()


@contextlib.contextmanager
def fixed_threads(threads: int) -> Iterator[None]:
    """Hold torch, whose number our own kernels follow, and processes started inside to so many threads."""
    before, torch_before = {name: os.environ.get(name) for name in THREAD_VARIABLES}, torch.get_num_threads()
    os.environ.update(thread_environment(threads))
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(torch_before)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
