# SPDX-License-Identifier: Apache-2.0
"""Runs ``tests/whole/test_fuzz.py``, or another file beside it, with as many inputs a test as asked for, and counts them.

As in::

    PYTHONPATH=tests python -m faults.fuzz 1500
    PYTHONPATH=tests python -m faults.fuzz 10000 test_random_folders.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "whole"
OUTCOMES = re.compile(r"- (\d+) passing\D+(\d+) failing")


def fuzz(examples: int, file: str) -> str:
    """The counts, and what pytest says of a test that failed."""
    words = [sys.executable, "-m", "pytest", str(FOLDER / file), "-q", "--hypothesis-show-statistics"]
    words += ["-o", "faulthandler_timeout=0"]  # of a single test, which takes as long as all its inputs
    environment = {**os.environ, "CPVT_FUZZ_EXAMPLES": str(examples)}
    told = subprocess.run(words, env=environment, capture_output=True, text=True).stdout
    found = [tuple(map(int, match)) for match in OUTCOMES.findall(told)]
    passed, failed = sum(one[0] for one in found), sum(one[1] for one in found)
    why = "\n".join(line for line in told.splitlines() if line.startswith("E "))
    return f"{passed + failed} inputs tried, {failed} of them failed\n{why}\n{told.splitlines()[-1]}"


if __name__ == "__main__":
    print(fuzz(int(sys.argv[1]), *(sys.argv[2:3] or ["test_fuzz.py"])))
