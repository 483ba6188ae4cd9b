# SPDX-License-Identifier: Apache-2.0
"""What is shipped: nothing of the source is ignored, and all of it is in the wheel."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / "cpvt_det/visualize/pages").iterdir()]
CONFIGS = [*(path for end in ("yaml", "py") for path in (ROOT / "configs").rglob(f"*.{end}"))]
SOURCES = [*(ROOT / "cpvt_det").rglob("*.py"), *PAGES, *CONFIGS]


def test_git_ignores_no_source():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "cpvt_det", "configs", "tests", "tools"]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in ignored if name.endswith((".py", ".yaml", ".html", ".css", ".js"))] == []


def test_the_wheel_holds_every_module_config_and_page(tmp_path):
    pytest.importorskip("setuptools")
    tree = tmp_path / "tree"
    for name in ("cpvt_det", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(tree)], check=True, capture_output=True, timeout=200)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    expected = {name if name.startswith("cpvt_det/") else f"cpvt_det/{name}" for name in expected}
    assert expected - names == set()
