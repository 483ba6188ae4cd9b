# SPDX-License-Identifier: Apache-2.0
"""The steps of ``benchmarks/gpu.py``, one file for each, and their record, which is written as soon as a part has ended."""

import contextlib
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.clocks import clock_of
from benchmarks.equal import difference
from benchmarks.harness import Plan, Row, Work, compare
from benchmarks.machine import machine, versions
from benchmarks.memory import peak_on_gpu
from benchmarks.origin import commit_of
from benchmarks.peers import ROOT
from benchmarks.suites import Options
from cpvt_det.common.files import write_json
from cpvt_det.data.shapes.dataset import draw_dataset

LEAST = 4.0  # seconds below which no part starts
TAIL = 2500  # characters of an error that a record keeps
COMMIT = "COMMIT"
"""A file in a copy of a checkout without its history: commit, and what was changed by hand."""


@dataclass(frozen=True)
class Settings:
    """What a step is told.

    Args:
        device: ``cuda``, or ``cpu`` for a rehearsal.
        rehearse: True: tiny sizes, to run every line.
        more: True: more sizes, and float32.
        peers: name -> folder of a checkout, or ``None`` for a library.
        photos: folder of images and annotations; empty for none.
        commit: commit of this tree, where git does not know it.
        command: command line of the whole run, for the record.
        output: folder of the records.
        built: folder in which the official op is built.
        end: time at which the step is killed, in seconds of the epoch.
    """

    device: str = "cuda"
    rehearse: bool = False
    more: bool = False
    peers: dict[str, str | None] = field(default_factory=dict)
    photos: str = ""
    commit: str = ""
    command: str = ""
    output: str = ""
    built: str = ""
    end: float = math.inf

    @property
    def seconds_left(self) -> float:
        return self.end - time.time()

    @property
    def options(self) -> Options:
        """The options of a suite with the same device and peers."""
        peers = {name: path and Path(path) for name, path in self.peers.items()}
        return Options(device=self.device, size="quick" if self.rehearse else "default", peers=peers, busy=True)


class Record:
    """The JSON of one step.

    Args:
        name: name of the step, and of its file.
        settings: what the step is told.
    """

    def __init__(self, name: str, settings: Settings):
        self.path = Path(settings.output) / f"{name}.json"
        self.settings = settings
        self.started = time.time()
        peers = {peer: _commit_of_copy(Path(path)) for peer, path in settings.peers.items() if path}
        self.content: dict[str, Any] = {
            "step": name,
            "command": settings.command,
            "commit": settings.commit or commit_of(ROOT, short=True),
            "rehearsal": settings.rehearse,
            "device": settings.device,
            "machine": machine(settings.device),
            "versions": versions() | peers,
            "seconds": {},
            "left_out": {},
        }
        self.write()

    def part(self, name: str, call: Callable[[], Any]) -> None:
        """Call a part and keep what it returns, or why it failed; the next part runs in any case, if time is left."""
        if self.settings.seconds_left < LEAST:
            self.leave_out(name, "no time was left")
            return
        start = time.perf_counter()
        try:
            self.content[name] = plain(call())
        except Exception as error:
            self.leave_out(name, f"{type(error).__name__}: {error}")
            say(traceback.format_exc()[-TAIL:])
        self.content["seconds"][name] = round(time.perf_counter() - start, 2)
        say(f"{name}: {self.content['seconds'][name]} s")
        self.write()

    def leave_out(self, name: str, reason: str) -> None:
        """Keep the reason for which something is missing."""
        self.content["left_out"][name] = reason[-TAIL:]
        say(f"left out: {name}: {reason[:300]}")
        self.write()

    def write(self) -> None:
        self.content["seconds"]["step"] = round(time.time() - self.started, 1)
        write_json(self.content, self.path, indent=1)


def say(text: str) -> None:
    """A line of progress, with the time since the command began."""
    begin = float(os.environ.get("CPVT_DET_GPU_BEGIN", time.time()))
    click.echo(f"[{time.time() - begin:6.1f} s]   {text}")


def plain(value: Any) -> Any:
    """The value in what JSON has; numbers that are not finite become text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def settings_of(text: str) -> Settings:
    """The settings from the JSON that the command gives to a step."""
    return Settings(**json.loads(text))


def _commit_of_copy(folder: Path) -> str:
    """The commit of a peer: a copy inside of another checkout would have that one's by git."""
    note = folder / COMMIT
    return note.read_text(encoding="utf-8").strip() if note.is_file() else commit_of(folder, short=True)


def fitting(work: Work) -> tuple[Work, dict[str, float]]:
    """The work without contenders that fail here, and the differences of the others.

    A difference above the tolerance is marked and does not end the measurement: time on a GPU is short, and the record has the
    difference.
    """
    expected, kept, reasons, differences = None, [], dict(work.left_out), {}
    for contender in work.contenders:
        try:
            output = contender.output()
            contender.call()  # which may fail where the check does not, under autocast
        except Exception as error:
            reasons[contender.name] = f"{type(error).__name__}: {str(error)[-600:]}"
            say(f"left out: {contender.name}: {reasons[contender.name][:300]}")
            continue
        if expected is None:
            expected = output
        if contender.other_work:
            kept.append(contender)
            continue
        gap = differences[contender.name] = difference(output, expected)
        bound = work.tolerance if contender.tolerance is None else contender.tolerance
        if not gap <= bound:
            say(f"differs: {contender.name} by {gap:.2g} of the largest value, tolerance {bound:.2g}")
            contender = replace(contender, other_work=f"differs by {gap:.2g}, more than {bound:.2g}")
        # Compared here, so not once more by the harness.
        kept.append(replace(contender, check=lambda: 0.0))
    return replace(work, contenders=kept, left_out=reasons), differences


def measure(work: Work, plan: Plan, device: str, before_peak: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Rows of the contenders that run here: times in alternating rounds, ratios with quartiles, peak memory on a GPU.

    Args:
        work: contenders; the first one that runs is the baseline.
        plan: length of the measurement.
        device: ``cpu`` or ``cuda``.
        before_peak: called before each measurement of memory.
    """
    work, differences = fitting(work)
    if not work.contenders:
        return {"rows": [], "left_out": work.left_out}
    rows = compare(work, plan, clock_of(device))
    found = []
    for row, contender in zip(rows, work.contenders, strict=True):
        before_peak()
        peak = peak_on_gpu(contender) if device == "cuda" else None
        row = replace(row, difference=differences.get(row.name), peak_bytes=peak)
        say(_line(row))
        found.append(asdict(row))
    return {"rows": found, "left_out": work.left_out}


def _line(row: Row) -> str:
    ratio = f"{row.ratio_wall.median:.2f} ({row.ratio_wall.q1:.2f}-{row.ratio_wall.q3:.2f})"
    peak = f", peak {row.peak_bytes / 2**20:.0f} MiB" if row.peak_bytes is not None else ""
    gap = f", off by {row.difference:.1g}" if row.difference is not None else f", {row.other_work}"
    return f"{row.name}: {1e3 * row.wall.median:.3g} ms, x {ratio}{peak}{gap}"


def draw_shapes(folder: Path) -> Path:
    """A few drawn images with boxes, in a new folder."""
    draw_dataset(folder, 8, 4, num_processes=1)
    return folder


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Float32 products and convolutions without TF32."""
    products, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions
