# SPDX-License-Identifier: Apache-2.0
"""The table of two checkouts beside each other."""

import json
import os
import subprocess

import pytest
import torch
from click.testing import CliRunner

from benchmarks import before_after


def runs(seconds, peak, outcome=1.0):
    return [{"seconds": {"case": value}, "outcomes": {"case": outcome}, "peak_mib": peak} for value in seconds]


def test_ratios_are_of_pairs_in_a_round():
    """Rounds of 2 / 1, 3 / 1 and 8 / 2 seconds: ratios 2, 3 and 4."""
    text = before_after.table(("old", runs([2.0, 3.0, 8.0], 100)), ("new", runs([1.0, 1.0, 2.0], 80)))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["case", "old", "new", "ratio (quartiles)"]
    assert rows[2] == ["case", "3.000", "1.000", "3.000 (2.500 to 3.500)"]
    assert rows[3] == ["peak memory, MiB", "100", "80", "1.250 (1.250 to 1.250)"]
    assert text.endswith("Sums of all logits and boxes are equal to the last digit.")


def test_other_answers_are_said():
    text = before_after.table(("old", runs([1.0], 1, outcome=-2.0)), ("new", runs([1.0], 1, outcome=-3.0)))
    assert text.endswith("Sums of all logits and boxes differ by at most 5.0e-01 of themselves.")


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0]])
def test_few_rounds_have_quartiles_too(values):
    assert before_after.quartiles(values) == "2.000 (2.000 to 2.000)"


def test_the_record_is_of_both_commits_and_a_free_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(before_after, "commit_of", lambda root: "new" if root == before_after.ROOT else "old")
    real, folders = subprocess.run, set()

    def run(words, **more):
        if "--worker" not in words:
            return real(words, **more)
        folders.add(words[words.index("--worker") + 1])
        return Done(words[2])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.25, 0.0, 0.0))
    words = [str(tmp_path), "--rounds", "2", "--output", str(tmp_path / "record")]
    result = CliRunner().invoke(before_after.main, words)
    assert result.exit_code == 0, result.output
    assert len(folders) == 1  # of the weights that both have
    (path,) = (tmp_path / "record").glob("before_after_cpu*.json")
    content = json.loads(path.read_text())
    assert content["runs"] == {"old": runs([2.0, 2.0], 100), "new": runs([1.0, 1.0], 100)}
    assert content["machine"]["load_average"] == 0.25
    assert content["command"] == "python benchmarks/before_after.py CHECKOUT --rounds 2 --repeats 2"
    assert "| case" in path.with_suffix(".md").read_text()
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert CliRunner().invoke(before_after.main, words).exit_code == 2


def test_both_checkouts_have_the_weights_of_the_first(tmp_path):
    """They may draw others from the same seed."""
    keys = {"META_ARCHITECTURE": "CPVTDetr", "BACKBONE.NAME": "resnet10", "BACKBONE.WIDTH": "8", "BACKBONE.STAGES": "(5,)"}
    keys |= {"DETR.HIDDEN_DIM": "16", "DETR.NHEADS": "2", "DETR.ENC_LAYERS": "1", "DETR.DEC_LAYERS": "1"}
    answers = []
    for seed, name in enumerate(("same.pth", "same.pth", "other.pth")):
        torch.manual_seed(seed)
        answers.append(before_after.prepare(before_after.ROOT / "cpvt_det", keys, tmp_path / name)[1]([(32, 48)]))
    assert answers[0] == answers[1] != answers[2]


class Done:
    """A finished worker: two seconds in any checkout but this one."""

    def __init__(self, root):
        (run,) = runs([1.0 if root == str(before_after.ROOT) else 2.0], 100)
        self.stdout = json.dumps(run)
