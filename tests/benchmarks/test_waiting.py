# SPDX-License-Identifier: Apache-2.0
"""The benchmark of waiting threads: which processes it starts with what, and what its record has. Never a speed."""

import json
import subprocess

import pytest
from click.testing import CliRunner

from benchmarks import waiting

pytestmark = pytest.mark.usefixtures("quiet_machine")


def test_busy_processes_are_there_and_go(monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **options: started.append(popen(*words, **options)) or started[-1])
    with waiting.busy_processes(2):
        assert [process.poll() for process in started] == [None, None]
    assert all(process.poll() is not None for process in started)


def test_settings_take_turns_and_the_record_has_every_time(monkeypatch, tmp_path):
    seen = []

    def step_of(spin_count, steps, config):
        seen.append(spin_count)
        return {"1": 10.0, "2": float(len(seen))}

    monkeypatch.setattr(waiting, "step_of", step_of)
    result = CliRunner().invoke(waiting.main, ["--rounds", "2", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert seen == ["300000", waiting.SPIN_COUNT] * 4
    (path,) = tmp_path.glob("waiting_cpu*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["busy processes"], row["waiting"], row["ms"]["2"]) for row in record["rows"]] == [
        (0, "GCC's own", [1.0, 5.0]),
        (0, "ours", [2.0, 6.0]),
        (1, "GCC's own", [3.0, 7.0]),
        (1, "ours", [4.0, 8.0]),
    ]
    assert {"commit", "machine", "versions", "command", "busy", "spin_counts"} <= record.keys()
