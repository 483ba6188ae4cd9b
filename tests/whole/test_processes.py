# SPDX-License-Identifier: Apache-2.0
"""Several processes: the steps of one, bad steps in one of them, a killed one, restarts by torchrun."""

import os
import re
import signal
import time
from pathlib import Path

import forked
import pytest
import torch
from forked import Forked
from nodes import ENV, children
from several import run_group
from test_runner import assert_same_run, losses_of
from tiny import DETECTORS, overrides

STANDALONE = ["--standalone", "--nproc-per-node=2"]
RUNNERS = ["builtin", pytest.param("detectron2", marks=pytest.mark.detectron2)]


def start_torchrun(*words, **env):
    """``torchrun`` with two processes, each of which Python starts."""
    code = f"from torch.distributed.run import main; main({[*STANDALONE, *map(str, words)]!r}); raise SystemExit"
    return Forked(before=code, env={**ENV, **env})


def run_torchrun(*words, **env):
    """The exit code of :func:`start_torchrun`, and what it printed."""
    process = start_torchrun(*words, **env)
    try:
        return process.wait(280), process.stderr()
    finally:
        process.end()


def take_steps(job, folder, detector, processes):
    """What :mod:`process_driver` found, and what its processes printed."""
    code = f"import process_driver; process_driver.start({job!r}, {str(folder)!r}, {detector!r}); raise SystemExit"
    ended = run_group(folder / f"printed{processes}", (), [code] * processes)
    assert [one.code for one in ended] == [0] * processes, ended
    return torch.load(folder / f"{processes}.pth", weights_only=True), "".join(one.text for one in ended)


def largest_difference(one, two):
    return max((one[name] - two[name]).abs().max().item() for name in one if one[name].is_floating_point())


@pytest.mark.parametrize("detector", [*DETECTORS, "without noise", "dfine", "rtdetr"])
def test_two_processes_are_one_in_float64(tmp_path, detector):
    """20 steps of the same batches with all objects in one process: losses, weights, running statistics and average to 1e-10.

    The third detector has all that training can add but denoising, whose noise is another in each process; the real-time ones have
    none either.
    """
    two, one = (take_steps("steps", tmp_path, detector, processes)[0] for processes in (2, 1))
    assert (one["losses"][0] - one["losses"][-1]).abs() > 0.1  # they moved
    assert (one["losses"] - two["losses"]).abs().max() <= 1e-10
    for part in ("model", "ema"):
        assert largest_difference(one[part], two[part]) <= 1e-10


def test_with_denoising_and_the_hybrid_branch_a_process_without_objects_trains_on_with_the_others(tmp_path):
    """20 steps with all objects in one process: the same losses are there in both, and the loss falls."""
    two, _ = take_steps("steps", tmp_path, "dino", 2)
    assert two["skipped"] == 0 and two["losses"].isfinite().all()
    assert two["losses"][-5:].mean() < two["losses"][:5].mean() - 0.1
    assert "queries.denoising.label_enc.weight" in two["model"]


def test_a_bad_step_in_one_process_is_skipped_in_all(tmp_path):
    two, told = take_steps("spoilt", tmp_path, "detr", 2)
    one, _ = take_steps("spoilt", tmp_path, "detr", 1)
    assert one["skipped"] == two["skipped"] == 1
    assert largest_difference(one["model"], two["model"]) <= 1e-10
    assert "Iteration 1 is skipped: the predictions are not finite for images 100, 101, 102, 103" in told


@pytest.fixture
def command(drawn_coco, tmp_path):
    """The words of ``cpvt-det train`` on the drawn data set."""
    config = tmp_path / "empty.yaml"
    config.write_text("VERSION: 2\n")

    def words(name, *options, runner="builtin", **more):
        pairs = overrides(drawn_coco.files, tmp_path / name, DATASETS__TEST=(), **more)
        return ["train", *options, "--config-file", str(config), "--runner", runner, *pairs]

    return words


LAUNCHER = """
import sys, torch
torch.cuda.is_available = lambda: False
import cpvt_det.training.launch as launch
launch.torch.cuda.device_count = lambda: 2
real = launch.launch
def fake(main, num_gpus, *args):
    launch.torch.cuda.is_available = lambda: True
    try:
        return real(main, num_gpus, *args)
    finally:
        launch.torch.cuda.is_available = lambda: False
launch.launch = fake
import cpvt_det.cli.train as train
train.device_of = lambda num_gpus: "cpu"
"""
"""What makes a launcher take this machine for one with two GPUs; its processes, which are new, do not."""


@pytest.mark.parametrize("by", ["torchrun", "--num-gpus 2"])
def test_a_killed_process_ends_the_others_and_is_named(command, tmp_path, by):
    long = {"SOLVER__MAX_ITER": 100_000, "SOLVER__LOG_PERIOD": 1}
    if by == "torchrun":
        process = start_torchrun("-m", "cpvt_det", *command("run", "--num-gpus", "0", **long))
    else:
        process = Forked(*command("run", "--num-gpus", "2", **long), before=LAUNCHER, env=ENV)
    try:
        end = time.monotonic() + 120
        while not ((tmp_path / "run/metrics.json").exists() and losses_of(tmp_path / "run")) and time.monotonic() < end:
            time.sleep(0.1)
        workers = [
            pid for pid in children(process.pid) if b"train" in Path(f"/proc/{pid}/cmdline").read_bytes() or by != "torchrun"
        ]
        workers = sorted(pid for pid in workers if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes())
        killed = workers[-1]
        start = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        assert process.wait(60) == 1
        assert time.monotonic() - start < 60
        told = process.stderr()
    finally:
        process.end()
    if by == "torchrun":
        assert re.search(rf"rank *: \d.*\n.*exitcode *: -9 \(pid: {killed}\)", told)
        assert f"Signal 9 (SIGKILL) received by PID {killed}" in told
    else:
        assert re.search(rf"stopped: process \d of the run \(pid {killed}\) was ended by SIGKILL; the others were stopped", told)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


KILL_ONCE = """
import os, signal, sys
import cpvt_det.solver.step as step
real = step.TrainStep.__call__
def call(self, samples, iteration):
    if iteration == int(os.environ["KILL_AT"]) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, samples, iteration)
step.TrainStep.__call__ = call
from cpvt_det.cli import main
main()
"""


@pytest.mark.parametrize("runner", RUNNERS)
def test_torchrun_restarts_from_the_step_that_a_survivor_saved_to_the_same_weights(command, tmp_path, runner):
    """The second process is killed before step 4; the last periodic checkpoint is of step 2."""
    more = {"runner": runner, "MODEL__BACKBONE__NORM": "SyncBN", "MODEL__POSITION__NORM": "SyncBN"}
    script = tmp_path / "kill_once.py"
    script.write_text(KILL_ONCE)
    options = ["--num-gpus", "0"]
    code, told = run_torchrun("--max-restarts=1", script, *command("cut", *options, **more), KILL_AT="4")
    assert code == 0, told[-3000:]
    assert f"Resumed from {tmp_path / 'cut' / 'model_0000003.pth'}" in (tmp_path / "cut/log.txt").read_text()
    assert [one.code for one in run_group(tmp_path / "printed", command("whole", *options, **more))] == [0, 0]
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_restart_takes_no_checkpoint_of_an_earlier_run_in_the_folder(command, tmp_path):
    """The earlier run was finished; the new one is killed before its first step, and starts anew."""
    assert forked.run(*command("run", "--num-gpus", "0", SOLVER__MAX_ITER=2)).returncode == 0
    script = tmp_path / "kill_once.py"
    script.write_text(KILL_ONCE)
    words = command("run", "--num-gpus", "0", SOLVER__MAX_ITER=2, SOLVER__BASE_LR=1e-3)
    code, told = run_torchrun("--max-restarts=1", script, *words, KILL_AT="0")
    assert code == 0, told[-3000:]
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("iterations 0 to 2") == 3
    assert "Resumed" not in log
    final = torch.load(tmp_path / "run/model_final.pth", weights_only=True)["cpvt_det"]
    assert "BASE_LR: 0.001" in final["config"]
    assert final["run_id"] == (tmp_path / "run/run_id").read_text()
