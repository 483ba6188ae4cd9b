# SPDX-License-Identifier: Apache-2.0
"""The table of what imports cost in two checkouts."""

import json

import pytest
from click.testing import CliRunner

from benchmarks import start_up

TEXT = """\
import time: self [us] | cumulative | imported package
import time:       200 |        200 |   a
import time:      1300 |       1500 | a.b
noise | 7 | a.b
"""


def test_times_are_cumulative():
    assert start_up.read_times(TEXT, "a.b") == {"wall_s": 0.002, "modules": 2}


def test_quotients_are_of_pairs_in_a_round():
    """Rounds of 1 / 2, 1 / 4 and 2 / 2 seconds: 0.5, 0.25 and 1."""
    old, new = ([{"wall_s": s, "cpu_s": s, "modules": 4} for s in side] for side in ((2.0, 4.0, 2.0), (1.0, 1.0, 2.0)))
    head, wall, cpu, modules = start_up.compare({"old": {"m": old}, "new": {"m": new}})
    assert head == ["", "old", "new", "quotient"]
    assert wall[1:] == cpu[1:] == ["2.00", "1.00", "0.50 (0.38-0.75)"]
    assert modules == ["`m`, modules", "4", "4", "1.00 (1.00-1.00)"]


@pytest.mark.usefixtures("quiet_machine")
def test_two_checkouts_are_measured(tmp_path, monkeypatch):
    """The other checkout has both modules, empty."""
    for module in start_up.MODULES:
        path = tmp_path / "other" / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, path.parent.parent):
            (folder / "__init__.py").touch()
        path.touch()
    monkeypatch.setattr(start_up, "MODULES", start_up.MODULES[:1])  # without torch
    words = [str(tmp_path / "other"), "--rounds", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(start_up.main, words)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "start_up.json").read_text())
    assert len(record["rows"]) == 3 and record["head"][1:3] == list(record["runs"])
    (old, new) = (runs["cpvt_det.cli.train"] for runs in record["runs"].values())
    assert len(old) == len(new) == 1 and old[0]["modules"] < new[0]["modules"] and old[0]["wall_s"] < new[0]["wall_s"]


@pytest.mark.usefixtures("quiet_machine")
def test_another_folder_is_refused(tmp_path):
    result = CliRunner().invoke(start_up.main, [str(tmp_path)])
    assert result.exit_code == 2 and "is no checkout of this package" in result.output
