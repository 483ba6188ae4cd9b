# SPDX-License-Identifier: Apache-2.0
"""Folders rebuilt from public reports, where they are beside the repository: each is read as it was meant, or refused."""

import subprocess
import sys

import pytest
from conftest import ROOT

CASES = ROOT.parent / "shared" / "cases"


def test_folders_from_public_reports_end_as_they_should():
    """``tests/faults/folders.py`` has their kinds, written by a script; this is the independent oracle."""
    if not CASES.is_dir():
        pytest.skip(f"no folders at {CASES}")
    words = [CASES / "score.py", CASES / "data", CASES / "expected.json", CASES / "outcomes.json"]
    result = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
