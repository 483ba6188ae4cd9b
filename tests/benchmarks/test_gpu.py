# SPDX-License-Identifier: Apache-2.0
"""The command for a GPU, rehearsed on the CPU: records, bounds, and the steps that take seconds. Never a speed."""

import json
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks import gpu
from benchmarks.harness import Contender, Plan, Work
from benchmarks.on_gpu import Record, Settings, deformable_op, loader, measure, plain, processes, settings_of, training
from benchmarks.peers import official_op

ONCE = Plan(warm_up=0, rounds=1, most_rounds=1, seconds=0)


@pytest.fixture
def settings(tmp_path):
    return Settings("cpu", rehearse=True, commit="abc", command="python benchmarks/gpu.py", output=str(tmp_path))


def written(record):
    return json.loads(record.path.read_text())


def test_a_record_keeps_the_parts_that_ended_and_the_reason_of_one_that_failed(settings):
    record = Record("step", settings)
    record.part("first", lambda: {"seconds": math.nan, "dtype": torch.float32})
    record.part("second", lambda: 1 / 0)
    record.part("third", lambda: [1])
    found = written(record)
    assert (found["first"], found["third"]) == ({"seconds": "nan", "dtype": "torch.float32"}, [1])
    assert found["left_out"] == {"second": "ZeroDivisionError: division by zero"}
    assert found["commit"] == "abc" and found["rehearsal"]


def test_no_part_starts_when_no_time_is_left(settings):
    record = Record("step", replace(settings, end=time.time() + 1))
    record.part("late", pytest.fail)
    assert written(record)["left_out"] == {"late": "no time was left"}


def test_the_commit_of_a_copy_is_that_of_its_note(settings, tmp_path):
    (tmp_path / "COMMIT").write_text("123 with a changed line\n")
    assert (
        written(Record("step", replace(settings, peers={"detr": str(tmp_path)})))["versions"]["detr"] == "123 with a changed line"
    )


def test_settings_survive_the_command_line(settings):
    assert settings_of(json.dumps(asdict(settings))) == settings
    assert plain((Path("a"), None, math.inf)) == ["a", None, "inf"]


def test_a_contender_that_fails_is_left_out_and_one_that_differs_is_timed_and_marked():
    def fail():
        raise RuntimeError("no kernel")

    one, other = torch.ones(2), torch.tensor([1.0, 1.5])
    call = [Contender("first", lambda: one), Contender("broken", lambda: one, check=fail), Contender("other", lambda: other)]
    found = measure(Work(call), ONCE, "cpu")
    assert found["left_out"] == {"broken": "RuntimeError: no kernel"}
    assert [row["name"] for row in found["rows"]] == ["first", "other"]
    assert found["rows"][1]["other_work"] == "differs by 0.5, more than 1e-05" and found["rows"][1]["difference"] == 0.5


def test_the_compiled_op_gets_float32_under_autocast():
    class OnGpu(torch.Tensor):
        is_cuda = True

    half = torch.zeros(1, dtype=torch.bfloat16).as_subclass(OnGpu)
    seen = official_op(
        lambda *given: [x.dtype for x in given if isinstance(x, torch.Tensor)], None, half, None, None, half, half, 64
    )
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_ops_contenders_agree(settings, precision):
    found = deformable_op.time_case(300, "forward+backward", precision, settings)
    assert "cpvt_det" in [row["name"] for row in found["rows"]]
    assert not [row for row in found["rows"] if row["other_work"]]


def test_the_loader_reads_drawn_images(settings):
    record = Record("loader", settings)
    loader.run(record, settings)
    found = written(record)
    assert found["left_out"] == {} and found["images"]["drawn"] and found["0 workers"]["images"] > 0


def test_words_of_the_ends_of_runs_name_no_host():
    text = "step 3\rstopped: process 1 of 2 (pid 7 on box) died\nfailed (exitcode: -9) local_rank: 1\nother\n"
    assert processes._last_words(text) == ["stopped: process 1 of 2 (pid 7) died", "failed (exitcode: -9) local_rank: 1"]


def test_training_without_photographs_is_left_out(settings):
    settings = replace(settings, rehearse=False)
    record = Record("training", settings)
    training.run(record, settings)
    assert written(record)["left_out"] == {"training": "no folder of photographs given: --photos FOLDER"}


def test_a_step_that_outlasts_its_limit_is_killed_with_its_children(settings, tmp_path, monkeypatch):
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    monkeypatch.setattr(gpu.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys._base_executable} -c "{code}"\n')
    (tmp_path / "python").chmod(0o755)
    start = time.monotonic()
    found = gpu._run_step("loader", settings, 1.0, time.time())
    assert found["timed_out"] and found["exit_code"] is None and time.monotonic() - start < 30


def test_unknown_steps_and_a_missing_gpu_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["--output", str(tmp_path / "out")]
    for more, message in ((["--steps", "op"], "unknown step 'op'"), ([], "torch finds no GPU; --rehearse runs")):
        done = CliRunner().invoke(gpu.main, [*words, *more])
        assert done.exit_code == 2 and message in done.output


def test_a_rehearsal_writes_its_summary(tmp_path):
    done = CliRunner().invoke(gpu.main, ["--rehearse", "--steps", "loader", "--output", str(tmp_path), "--commit", "abc"])
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"]["loader"]["exit_code"] == 0 and summary["commit"] == "abc"
    assert json.loads((tmp_path / "loader.json").read_text())["left_out"] == {}
    assert isinstance(gpu.main, click.Command)
