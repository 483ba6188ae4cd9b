# SPDX-License-Identifier: Apache-2.0
"""How one call is timed: in this process, on a GPU, or as a separate process; and with how many threads."""

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
    """Duration of one call in seconds: wall time, and CPU time of all cores (``None`` if it cannot be measured)."""

    wall: float
    cpu: float | None = None


@dataclass(frozen=True)
class Command:
    """A contender that needs a separate process, for other settings or another interpreter.

    The process is timed from start to end. To exclude its start, it may print a JSON object as its last line, with ``wall`` and
    ``cpu``, the seconds that it measured itself, and ``output``, the output to compare.

    Args:
        words: words of the command line.
        environment: environment variables to add to those of this process.
    """

    words: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self) -> "CommandRun":
        """Run the command to its end.

        Raises:
            RuntimeError: an exit code other than 0; the message contains the last line of the command's errors.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            begin = time.perf_counter()
            process = subprocess.Popen(self.words, stdout=out, stderr=err, env={**os.environ, **self.environment})
            _, status, usage = os.wait4(process.pid, 0)  # the only call that reports the usage of one child
            wall = time.perf_counter() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            lines, errors = out.read().strip().splitlines(), err.read().strip().splitlines()
        if process.returncode:
            last = errors[-1] if errors else "no error message"
            raise RuntimeError(f"{' '.join(self.words)}: exit code {process.returncode}: {last}")
        report = _last_json(lines)
        sample = Sample(report.get("wall", wall), report.get("cpu", usage.ru_utime + usage.ru_stime))
        return CommandRun(sample, report.get("output", lines), usage.ru_maxrss * 1024)


@dataclass(frozen=True)
class CommandRun:
    """Time and output of a command; ``peak_bytes`` is the largest resident size of its process."""

    sample: Sample
    output: Any
    peak_bytes: int


def _last_json(lines: list[str]) -> dict[str, Any]:
    if lines and lines[-1].startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(lines[-1])
    return {}


class Clock(Protocol):
    """Times calls on one kind of device."""

    def time(self, call: Callable[[], Any], repeats: int) -> Sample:
        """The duration of one call, from ``repeats`` calls."""
        ...


class ProcessClock:
    """Wall time, and CPU time of this process, in which the load of other processes does not count."""

    def time(self, call: Callable[[], Any], repeats: int) -> Sample:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            output = call()
        sample = Sample((time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats)
        return output.sample if isinstance(output, CommandRun) else sample


class CudaClock:
    """Time between two events on the GPU's stream, without CPU time."""

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
    """Limit the number of threads of torch (which our kernels follow) and of processes that are started in the block."""
    before, torch_before = {name: os.environ.get(name) for name in THREAD_VARIABLES}, torch.get_num_threads()
    os.environ.update(thread_environment(threads))
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(torch_before)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
