# SPDX-License-Identifier: Apache-2.0
"""The time of the quickstart's step: which threads each block runs with, and what the record has. Never a speed."""

import json
import multiprocessing
import subprocess

import pytest
import torch
from click.testing import CliRunner

from benchmarks import quickstart_time
from cpvt_det.common.memory import SPIN_COUNT

pytestmark = pytest.mark.usefixtures("quiet_machine")


def test_blocks_take_turns_with_one_thread_and_with_two():
    before, seen = torch.get_num_threads(), []

    def run():
        seen.append(torch.get_num_threads())
        return float(seen[-1])

    times = quickstart_time.step_times(run, rounds=2, steps=3)
    assert times == {1: [1.0, 1.0], 2: [2.0, 2.0]}
    assert seen[quickstart_time.WARM_UP :] == [1, 1, 1, 1, 2, 2, 2, 2] * 2  # of each block the first is not counted
    assert torch.get_num_threads() == before


def test_a_step_trains_and_the_record_has_its_machine(drawn_cfg, tmp_path):
    cfg = drawn_cfg
    cfg.SEED, cfg.MODEL.DEVICE, cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.STAGES = 0, "cpu", "resnet10", (4,)
    cfg.MODEL.DETR.HIDDEN_DIM, cfg.MODEL.DETR.NHEADS, cfg.MODEL.DETR.DIM_FEEDFORWARD = 16, 2, 16
    cfg.MODEL.DETR.ENC_LAYERS = cfg.MODEL.DETR.DEC_LAYERS = 1
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.EPOCHS, cfg.SOLVER.STEPS = 2, 0.0, ()
    config = tmp_path / "tiny.yaml"
    config.write_text(cfg.dump(), encoding="utf-8")
    words = ["--config-file", str(config), "--rounds", "1", "--steps", "1", "--whole", "--output", str(tmp_path)]
    result = CliRunner().invoke(quickstart_time.main, words)
    assert result.exit_code == 0, result.output
    assert "times as fast as one; 1 rounds" in result.output
    (path,) = tmp_path.glob("quickstart_time_cpu*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["times_as_fast"]["median"] == pytest.approx(record["ms"]["1"][0] / record["ms"]["2"][0], rel=0.05)
    assert record["whole"].keys() == {"minutes", "AP", "AP50"}
    assert {"commit", "machine", "versions", "command", "busy"} <= record.keys()


def test_beside_other_work_all_ways_to_wait_are_measured_in_processes_that_see_them(monkeypatch):
    seen, before = [], set(multiprocessing.active_children())  # of tests before it

    def run(command, env, **_):
        seen.append((env.get("GOMP_SPINCOUNT"), env.get("OMP_WAIT_POLICY"), len(set(multiprocessing.active_children()) - before)))
        return subprocess.CompletedProcess(command, 0, stdout=f"a log line\n{len(seen)}.5\n")

    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1")
    monkeypatch.setattr(quickstart_time.subprocess, "run", run)
    monkeypatch.setattr(quickstart_time.os, "cpu_count", lambda: 1)
    times = quickstart_time.beside_times("any.yaml", rounds=1, steps=2)
    assert seen == [(*way, busy) for busy in (0, 1) for way in ((SPIN_COUNT, None), (None, "PASSIVE"), (None, None))]
    ways = [f"{way}, {where}" for where in ("alone", "beside") for way in ("spin briefly", "sleep", "spin")]
    assert times == {way: [number + 0.5] for number, way in enumerate(ways, 1)}
