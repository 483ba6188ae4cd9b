# SPDX-License-Identifier: Apache-2.0
"""SIGTERM, Ctrl-C, a second run in the same folder, and data workers that die: in processes of their own, in both runners."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from forked import Forked
from test_runner import assert_same_run, losses_of
from tiny import overrides

from cpvt_det.training.guard import StopSignals

RUNNERS = ["builtin", pytest.param("detectron2", marks=pytest.mark.detectron2)]
LONG = {"SOLVER__MAX_ITER": 10_000, "SOLVER__CHECKPOINT_PERIOD": 5_000, "DATALOADER__NUM_WORKERS": 2}
SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.fixture
def start(drawn_coco, tmp_path):
    """Start ``cpvt-det train`` in a folder of the given name, with more settings, as the head of a process group."""
    config = tmp_path / "empty.yaml"
    config.write_text("VERSION: 2\n")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    started = []

    def call(runner, name, *options, before="", **more):
        words = ["train", *options, "--config-file", config, "--runner", runner]
        started.append(Forked(*words, *overrides(drawn_coco.files, tmp_path / name, **more), env=env, before=before))
        return started[-1], tmp_path / name

    yield call
    for process in started:
        process.end()


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def steps_of(folder):
    """How many steps are written down."""
    metrics = folder / "metrics.json"
    return metrics.read_text().count("total_loss") if metrics.exists() else 0


def living(group):
    """Processes of a group that run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, in_group = status.read_text().rpartition(")")[2].split()[:3]
            found += [status.parent.name] if int(in_group) == group and state != "Z" else []
    return found


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_saves_the_step_and_the_resumed_run_is_the_run_never_interrupted(start, runner, signum):
    """The signal goes to the whole group, as from a terminal: the data workers get it too."""
    process, folder = start(runner, "run", **LONG, DATASETS__TEST=())
    wait_for(lambda: steps_of(folder) >= 2)
    os.killpg(process.pid, signum)
    assert process.wait(60) == SIGNALS[signum]
    told = process.stderr()
    (saved,) = folder.glob("model_*.pth")
    stop = int(saved.stem[-7:]) + 1
    assert f"interrupted by {signum.name}: iteration {stop - 1} is saved; --resume continues after it" in told
    assert "Traceback" not in told
    assert steps_of(folder) == stop
    wait_for(lambda: not living(process.pid), 30)
    if signum == signal.SIGINT:
        return  # it has been saved in the same way
    more = {**LONG, "SOLVER__MAX_ITER": stop + 2, "DATASETS__TEST": ()}
    assert start(runner, "run", "--resume", **more)[0].wait(120) == 0
    whole, reference = start(runner, "whole", **more)
    assert whole.wait(120) == 0
    assert losses_of(folder) == losses_of(reference)
    assert_same_run(folder, reference)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_second_signal_leaves_at_once_and_takes_the_workers_along(start, runner, tmp_path):
    """The first waits for a step that never ends."""
    here = tmp_path / "here"
    slow = "import time, cpvt_det.solver.step as s\n"
    slow += f"s.TrainStep._clip = lambda *a: [open({str(here)!r}, 'w').close(), time.sleep(100)]"
    process, folder = start(runner, "run", before=slow, **LONG, DATASETS__TEST=())
    wait_for(here.exists)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
    assert process.wait(30) == 143
    wait_for(lambda: not living(process.pid), 30)
    assert not list(folder.glob("model_*.pth"))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_signal_during_an_evaluation_is_obeyed_at_once_and_the_evaluation_made_up_for(start, runner, tmp_path):
    short = {"SOLVER__MAX_ITER": 4, "TEST__EVAL_PERIOD": 2}
    here = tmp_path / "here"
    slow = f"import time, cpvt_det.training.train as m; m.measure = lambda *a: (open({str(here)!r}, 'w'), time.sleep(100))"
    process, folder = start(runner, "cut", before=slow, **short)
    wait_for(here.exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert [path.name for path in folder.glob("model_*.pth")] == ["model_0000001.pth"]
    assert start(runner, "cut", "--resume", **short)[0].wait(120) == 0
    assert start(runner, "whole", **short)[0].wait(120) == 0
    lines = [[json.loads(line) for line in (folder.parent / name / "metrics.json").open()] for name in ("cut", "whole")]
    evaluated = [[(line["iteration"], line["bbox/AP"]) for line in run if "bbox/AP" in line] for run in lines]
    assert [value for _, value in evaluated[0]] == [value for _, value in evaluated[1]]
    assert_same_run(folder, folder.parent / "whole")


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives(start):
    first, folder = start("builtin", "run", **LONG, DATASETS__TEST=())
    wait_for(lambda: steps_of(folder) >= 1)
    config = (folder / "config.yaml").read_text()
    second, _ = start("builtin", "run", SOLVER__MAX_ITER=1)
    assert second.wait(60) == 2
    told = second.stderr()
    assert f"another run, process {first.pid}, is using OUTPUT_DIR {folder}; stop it, or set another OUTPUT_DIR" in told
    assert (folder / "config.yaml").read_text() == config
    first.send_signal(signal.SIGKILL)
    first.wait()  # its data workers still live for some seconds
    assert start("builtin", "run", SOLVER__MAX_ITER=1, DATASETS__TEST=())[0].wait(60) == 0


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_a_dead_data_worker_names_the_image_it_died_on(start, runner, where):
    condition = {"training": "self.with_targets", "evaluation": "not self.with_targets"}[where]
    dies = (
        "import os, cpvt_det.data.mapper as m; real = m.Mapper.__call__\n"
        "def call(self, record):\n"
        f"    if record.image_id == 30 and {condition}: os.kill(os.getpid(), 9)\n"
        "    return real(self, record)\n"
        "m.Mapper.__call__ = call"
    )
    more = {"DATALOADER__NUM_WORKERS": 2, "SOLVER__MAX_ITER": 20, "TEST__EVAL_PERIOD": 1}
    process, folder = start(runner, "run", before=dies, **more)
    assert process.wait(120) == 1
    told = process.stderr()  # 4 batches of 2 are read ahead, of 5 images: both workers may die on it
    assert re.search(r"stopped: a data worker \(process [\d, ]+\) died while reading (\S+, )?\S+030\.png; --resume continues", told)
    wait_for(lambda: not living(process.pid), 30)
    if where == "evaluation":
        assert (folder / "model_0000000.pth").is_file()


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_worker_that_dies_while_it_hands_over_tensors_costs_no_step(start, runner):
    """The reader meets the end of the socket first; torch's news of the worker must not break into the saving of the last step."""
    dies = (
        "import itertools, threading, time, torch.utils.data.dataloader as loader, cpvt_det.checkpoint.checkpointer as checkpoint\n"
        "count = itertools.count()\n"
        "read, save = loader._MultiProcessingDataLoaderIter._next_data, checkpoint.RunCheckpointer.save\n"
        "def batch(self):\n"
        "    if next(count) == 3:\n"
        "        threading.Timer(0.5, self._workers[0].kill).start()\n"
        "        raise ConnectionResetError\n"
        "    return read(self)\n"
        "def slowly(self, *arguments):\n"
        "    time.sleep(2)\n"
        "    return save(self, *arguments)\n"
        "loader._MultiProcessingDataLoaderIter._next_data, checkpoint.RunCheckpointer.save = batch, slowly"
    )
    process, folder = start(runner, "run", before=dies, **{**LONG, "DATALOADER__NUM_WORKERS": 1}, DATASETS__TEST=())
    assert process.wait(120) == 1
    assert re.search(r"Iteration 2 is saved;.*stopped: a data worker \(process \d+\) died", process.stderr(), re.DOTALL)
    assert (folder / "model_0000002.pth").is_file()


def test_signals_do_again_what_they_did_before():
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with StopSignals() as signals:
        assert signals.received() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # the same once more, as torchrun sends it
        assert signals.received() == signal.SIGTERM
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
