# SPDX-License-Identifier: Apache-2.0
"""Memory and open files of a run, in a process of its own."""

import subprocess
import sys
from pathlib import Path

from faults import records
from faults.report import DOCUMENT


def test_memory_and_open_files_stay_flat():
    """150 steps and ten evaluations here, the first of them within the first tenth; ``faults/long_run.py`` alone takes more."""
    command = [sys.executable, "-m", "faults.long_run", "150"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    held = [float(word.rstrip(")\n").partition("=")[2]) for word in result.stdout.split("Held(")[1].split(", ")]
    first_memory, last_memory, first_files, last_files = held
    assert last_memory <= 1.05 * first_memory
    assert last_files <= first_files + 1


def test_the_document_has_the_record_of_a_longer_run():
    found = records.read("long_run")
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    last = f"{found['last_memory']:.0f} MB of memory and {found['last_files']:.0f} open files in its last tenth"
    assert f"{last}, against {found['first_memory']:.0f} and {found['first_files']:.0f} in its first" in text
