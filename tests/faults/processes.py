# SPDX-License-Identifier: Apache-2.0
"""Processes.

Two processes take the same steps as one on the same batch: after 20 steps in float64, losses differ by at most 4e-15, weights
by 7e-14 (`test_processes.py`). When a process is killed, the others end within seconds and report its number and signal. A step
that is not finite in one process is skipped in all. `torchrun --max-restarts` continues from the last step, bit for bit.

A run locks `.lock` in its `OUTPUT_DIR`; the lock ends with the process.

A run of 2,000 steps, with an evaluation every 200, used 949 MB of memory and 9 open files in its last tenth, against 939 and 9
in its first (`python -m faults.long_run 2000`; `tests/whole/test_long_run.py` is shorter).
"""

import contextlib
import itertools
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from forked import Forked
from nodes import wait_for

from cpvt_det.data import loader
from cpvt_det.data.mapper import Mapper
from cpvt_det.predict import Predictor
from cpvt_det.solver.step import TrainStep
from faults.case import Case, Cut, Ending
from faults.checkpoints import SHORT
from faults.drawn import call_on, draw, words_on

LONGER = {**SHORT, "SOLVER__MAX_ITER": 9, "SOLVER__CHECKPOINT_PERIOD": 9}
HOLD = """
import time
from fvcore.common.config import CfgNode
from cpvt_det.training.setup import only_run_in
with only_run_in(CfgNode({{"OUTPUT_DIR": {folder!r}}})):
    print("held", flush=True)
    time.sleep(1000)
"""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Forked]:
    """A process that holds a folder as a run does; it is killed after the block, or before."""
    process = Forked(before=HOLD.format(folder=str(folder)))
    try:
        wait_for(lambda: process.stdout() == "held\n", what="the lock")
        yield process
    finally:
        process.end()


def second_run(folder: Path) -> Ending:
    with held(folder / "out"):
        return call_on(draw(folder / "data", lambda _: None), "train", **SHORT)


def killed_run(folder: Path) -> Ending:
    with held(folder / "out") as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (folder / "out/.lock").read_text() == str(first.pid), "the killed run left no trace"
    ending = call_on(draw(folder / "data", lambda _: None), "train", **SHORT)
    assert ending.code or (folder / "out/model_final.pth").is_file()
    return ending


def without_streams(folder: Path) -> Ending:
    """As ``>&- 2>&-``; what a library prints must not land in a file, which would get the free number."""
    drawn = draw(folder / "data", lambda _: None)
    words = words_on(drawn, "train", **SHORT, DATALOADER__NUM_WORKERS=1)
    process = Forked(*words, before="import os, sys\nos.closerange(1, 3)\nsys.stdout = sys.stderr = None")
    try:
        code = process.wait()
    finally:
        process.end()
    return Ending(code, (folder / "out/log.txt").read_text() if (folder / "out/log.txt").is_file() else "")


def dead_worker(folder: Path) -> Ending:
    real = Mapper.__call__

    def read(self: Mapper, record):
        if record.image_id == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, record)

    with mock.patch.object(Mapper, "__call__", read):
        return call_on(draw(folder / "data", lambda _: None), "train", **SHORT, DATALOADER__NUM_WORKERS=1)


def dead_worker_between_steps(folder: Path) -> Ending:
    """It reads for the third step, and dies once the second is done."""
    real_read, reads, real_step, steps = Mapper.__call__, itertools.count(), TrainStep.__call__, multiprocessing.Value("i", 0)

    def read(self: Mapper, record):
        if next(reads) == 4:
            while steps.value < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return real_read(self, record)

    def step(self: TrainStep, samples: list, iteration: int) -> dict:
        scalars = real_step(self, samples, iteration)
        steps.value += 1
        return scalars

    words = {**LONGER, "DATALOADER__NUM_WORKERS": 1}
    with mock.patch.object(Mapper, "__call__", read), mock.patch.object(TrainStep, "__call__", step):
        return call_on(draw(folder / "data", lambda _: None), "train", **words)


def silent_worker(folder: Path) -> Ending:
    """Its third batch takes half a minute."""
    real, reads = Mapper.__call__, itertools.count()

    def read(self: Mapper, record):
        if next(reads) == 4:
            time.sleep(30)
        return real(self, record)

    words = {
        **SHORT,
        "SOLVER__MAX_ITER": 3,
        "SOLVER__CHECKPOINT_PERIOD": 9,
        "DATALOADER__NUM_WORKERS": 1,
        "DATALOADER__PATIENCE": 1,
    }
    with mock.patch.object(Mapper, "__call__", read), mock.patch.object(loader, "NEWS", 0.5):
        return call_on(draw(folder / "data", lambda _: None), "train", **words)


def full_shm(folder: Path) -> Ending:
    """As torch meets it when it first shares a tensor."""
    real = torch.UntypedStorage._share_fd_cpu_

    def share(storage: torch.UntypedStorage) -> tuple:
        if not storage.is_shared():
            raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")
        return real(storage)

    with mock.patch.object(torch.UntypedStorage, "_share_fd_cpu_", share), mock.patch.object(loader, "NEWS", 0.5):
        words = {**SHORT, "DATALOADER__NUM_WORKERS": 1, "DATALOADER__PATIENCE": 1}
        return call_on(draw(folder / "data", lambda _: None), "train", **words)


def few_descriptors(folder: Path) -> Ending:
    """Room for 40 more than are open, and a batch of 32 images."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, before[1]))
    words = {**SHORT, "SOLVER__IMS_PER_BATCH": 32, "DATALOADER__NUM_WORKERS": 1, "DATALOADER__PATIENCE": 1}
    try:
        with mock.patch.object(loader, "NEWS", 0.5):
            return call_on(draw(folder / "data", lambda _: None), "train", **words)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def daemonic(folder: Path) -> Ending:
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=True):
        return call_on(draw(folder / "data", lambda _: None), "train", **SHORT, DATALOADER__NUM_WORKERS=1)


def forked_child(folder: Path) -> Ending:
    """Its parent has a model and has computed in two threads."""
    drawn = draw(folder / "data", lambda _: None)
    ending, image = call_on(drawn, "train", **SHORT), str(drawn.path(1))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        predictor = Predictor.from_checkpoint(folder / "out/model_final.pth", overrides=["INPUT.MIN_SIZE_TEST", "256"])
        scores = predictor(image).scores.tolist()
        receiver, sender = multiprocessing.Pipe(duplex=False)
        answer = lambda: sender.send(predictor(image).scores.tolist())  # noqa: E731
        child = multiprocessing.get_context("fork").Process(target=answer, daemon=True)
        child.start()
        if not receiver.poll(20):
            child.kill()
            return Ending("no answer", ending.text)
        assert receiver.recv() == scores
        return Ending("none", ending.text)
    finally:
        torch.set_num_threads(before)


PACKED = (
    Cut("data/loader.py", "yield batch.samples() if self.num_workers else batch", "yield batch"),
    Cut("data/loader.py", "collate_fn=pack if num_workers else list", "collate_fn=list"),
)
LOCK = "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"
STALE = """file.seek(0)
        if file.read():  # a lock that is a file, and outlives its process
            raise OSError"""

CASES = [
    Case(
        "a second run in the folder of one that lives",
        second_run,
        "another run, process ..., is using OUTPUT_DIR ",
        guard=Cut("training/setup.py", LOCK, "pass"),
    ),
    Case(
        "a run in the folder of one that was killed",
        killed_run,
        "Seed 11: iterations 0 to 2 of DETR",
        0,
        guard=Cut("training/setup.py", LOCK, STALE),
    ),
    Case(
        "standard output and error closed",
        without_streams,
        "iterations 0 to 2 of DETR...model_final.pth --input IMAGES",
        0,
        guard=Cut("cli/__init__.py", "if getattr(sys, name) is None:", "if False:"),
    ),
    Case(
        "a data worker killed",
        dead_worker,
        "stopped: a data worker (process ...) died while reading .../3.png; --resume continues from the last checkpoint",
        1,
        guard=Cut("data/loader.py", "        if match is None:\n            raise\n", "        raise\n"),
    ),
    Case(
        "a data worker killed between two steps",
        dead_worker_between_steps,
        "Iteration 1 is saved; --resume continues after it...stopped: a data worker (process ...) died while reading ",
        1,
        guard=Cut(
            "training/guard.py",
            "whole = isinstance(error, DeadWorkerError) or not isinstance(error, RunStoppedError)",
            "whole = not isinstance(error, RunStoppedError)",
        ),
    ),
    Case(
        "data workers that do not come back within DATALOADER.PATIENCE",
        silent_worker,
        "Iteration 1 is saved; --resume continues after it...stopped: no data worker has finished an image for more than 1 s "
        "(DATALOADER.PATIENCE), while reading .../images/...png; --resume continues from the last checkpoint",
        1,
        guard=Cut("data/loader.py", "if silent > (patience := self.dataset.patience):", "if False and (patience := 0):"),
    ),
    Case(
        "no room in /dev/shm, of 64 MB in a container",
        full_shm,
        "Final checkpoint (nothing was evaluated): ",
        0,
        guard=PACKED,
    ),
    Case(
        "more tensors in a batch than files may be open",
        few_descriptors,
        "Final checkpoint (nothing was evaluated): ",
        0,
        guard=PACKED,
    ),
    Case(
        "training in a daemonic process",
        daemonic,
        "This process is a daemon and cannot start others, so it reads the images itself, as with DATALOADER.NUM_WORKERS 0",
        0,
        guard=Cut("data/loader.py", "if num_workers and multiprocessing.current_process().daemon:", "if False:"),
    ),
    Case(
        "a child that is forked from a process with a model (gunicorn --preload, Celery)",
        forked_child,
        "",
        "none",
        guard=Cut("ops/__init__.py", "\nend_threads_at_forks()\n", "\n"),
    ),
]
