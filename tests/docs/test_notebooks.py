# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom; a line of the shell, ``!cpvt-det ...``, in this process."""

import json
import os
import re
import shlex

import pytest
from click.testing import CliRunner
from conftest import ROOT

from cpvt_det.cli import main

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def command(words: str) -> None:
    """A line of the shell, which has to succeed."""
    program, *arguments = shlex.split(words)
    assert program == "cpvt-det"
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, f"{words}\n{done.output[-3000:]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names = {"command": command, "__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "saved with outputs"
            exec(re.sub(r"^!(.*)$", lambda line: f"command({line[1]!r})", "".join(cell["source"]), flags=re.M), names)
    assert len(names["found"]) and len(os.listdir("output")) > 1


def test_there_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["first_detector", "own_data"]
