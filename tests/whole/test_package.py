# SPDX-License-Identifier: Apache-2.0
"""What is shipped: nothing of the source is ignored, all of it is in the wheel, and what a release says of itself agrees."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import cpvt_det
from cpvt_det.checkpoint.fetch import STARTER, locate

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / "cpvt_det/visualize/pages").iterdir()]
CONFIGS = [*(path for end in ("yaml", "py") for path in (ROOT / "configs").rglob(f"*.{end}"))]
SOURCES = [*(ROOT / "cpvt_det").rglob("*.py"), *PAGES, *CONFIGS]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_git_ignores_no_source():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "cpvt_det", "configs", "tests", "tools"]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in ignored if name.endswith((".py", ".yaml", ".html", ".css", ".js"))] == []


def test_the_wheel_holds_every_module_config_page_and_weight_and_a_description_that_stands_alone(tmp_path):
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
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = set(wheel.namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in (*SOURCES, *locate(STARTER).iterdir())}
    expected = {name if name.startswith("cpvt_det/") else f"cpvt_det/{name}" for name in expected}
    assert expected - names == set()
    about = f"cpvt_det-{cpvt_det.__version__}.dist-info"
    assert wheel.read(f"{about}/top_level.txt").decode().split() == ["cpvt_det"]
    links = re.findall(r"\]\(([^)]*)\)", wheel.read(f"{about}/METADATA").decode())
    assert links and [link for link in links if not link.startswith("https://")] == []


def test_version_changes_and_citation_agree():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, day = re.search(r"^## (\S+) \((\S+)\)$", changes, re.M).groups()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["date-released"]) == (version, day)
    assert version == cpvt_det.__version__


def test_the_oldest_torch_is_the_same_everywhere():
    setup, make, workflow = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("setup.py", "Makefile", ".github/workflows/tests.yml")
    )
    oldest = [re.search(rf'"{name}>=([\d.]+)"', setup)[1] for name in ("torch", "torchvision")]
    pinned = "torch=={}.0 torchvision=={}.0".format(*oldest)
    assert pinned in make and pinned in workflow


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_one_and_names_files_that_exist(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow[True], "YAML 1.1 reads the key on as True"
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job.get("needs") in {None, *workflow["jobs"]}
        for step in job["steps"]:
            assert len({"run", "uses"} & step.keys()) == 1
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step.get("uses", "a/b@v1"))
            named = re.findall(r"\b(?:tests|benchmarks|docs)(?:/[\w.]+)*\b", step.get("run", ""))
            assert [name for name in named if not (ROOT / name).exists()] == []


def test_forms_of_issues_have_what_github_asks_for():
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    for form in (yaml.safe_load(path.read_text(encoding="utf-8")) for path in forms if path.stem != "config"):
        assert form["name"] and form["description"] and form["body"]
        assert all(part["id"] and part["attributes"]["label"] for part in form["body"])
