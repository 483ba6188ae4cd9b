# SPDX-License-Identifier: Apache-2.0
"""``make test`` ends, not in success, and with the name of the test whose worker died."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = re.search(r"^WORKERS := --numprocesses auto (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M).group(1)
DIES = """
import os, signal, time

def test_before(): pass

def test_that_dies():
    if os.fork() == 0:  # as a loader's process that outlives its parent
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.{signal})
"""
STUCK = """
import ctypes

def test_that_never_ends():  # holds the interpreter's lock: no signal is heard
    ctypes.PyDLL(None).pause()
"""
OTHERS = "import time\ndef test_one(): time.sleep(1)\ndef test_two(): pass\n"
BEFORE = "def test_one(): pass\ndef test_two(): pass\n"


def run_suite(folder, text, before=0):
    """Exit code and output of two files of tests, of some before them, with this suite's hooks and the options of ``make test``."""
    shutil.copy(ROOT / "tests" / "dead_workers.py", folder / "conftest.py")
    (folder / "test_dies.py").write_text(text)
    (folder / "test_others.py").write_text(OTHERS)
    for number in range(before):
        (folder / f"test_before{number}.py").write_text(BEFORE)
    words = [*OPTIONS.split(), "--numprocesses", "2", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=3"]
    words += ["-o", "faulthandler_exit_on_timeout=true", "--rootdir", str(folder), str(folder)]
    with open(folder / "printed.txt", "w+", encoding="utf-8") as printed:  # a pipe would stay open in what the worker left behind
        command = [sys.executable, "-m", "pytest", *words]
        code = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=90, cwd=folder).returncode
        printed.seek(0)
        return code, printed.read()


@pytest.mark.parametrize(
    ("text", "name"),
    [(DIES.format(signal="SIGKILL"), "dies"), (DIES.format(signal="SIGSEGV"), "dies"), (STUCK, "never_ends")],
    ids=["killed", "crashed", "stuck"],
)
def test_a_worker_that_dies_ends_the_run_by_name(tmp_path, text, name):
    code, printed = run_suite(tmp_path, text)
    assert code == 1, printed
    assert re.search(rf"worker 'gw\d' crashed while running 'test_dies.py::test_that_{name}'", printed)
    assert re.search(r"[23] passed", printed), "the tests of the other file"


def test_what_is_left_of_a_worker_that_died_is_run(tmp_path):
    """The files that it had ended are handed out once more, without a test in them."""
    once = "def test_that_dies():\n    if os.path.exists('died'): return\n    open('died', 'w')\n"
    code, printed = run_suite(tmp_path, DIES.format(signal="SIGKILL").replace("def test_that_dies():\n", once), before=30)
    assert code == 1, printed
    assert re.search(r"worker 'gw\d' crashed while running 'test_dies.py::test_that_dies'", printed)
    assert "1 failed, 64 passed" in printed
