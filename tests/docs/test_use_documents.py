# SPDX-License-Identifier: Apache-2.0
"""What README and docs/use.md show of using a model does what it says."""

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {"README.md": "output/mine", "docs/use.md": "output"}
"""And where the run lies that they use."""


def blocks(document: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.M | re.S)
    return [text for named, text in found if named == language]


@pytest.fixture(params=DOCUMENTS)
def document(request, tiny_run, tmp_path, monkeypatch):
    """The document, in a folder with the run and the photographs that it names."""
    run = tiny_run("detr")
    for name in (DOCUMENTS[request.param], "output/peg", "output/sine", "output/none"):
        shutil.copytree(run.folder, tmp_path / name)
    (tmp_path / "photos/deeper").mkdir(parents=True)
    for name in ("photo.jpg", "photos/a.jpg", "photos/deeper/b.jpg"):
        Image.open(run.image(30)).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return request.param


def test_the_python_runs(document):
    code = [block for block in blocks(document, "python") if "Predictor" in block]
    assert code
    exec("\n".join(code), {})
    with Image.open("found.png") as picture:
        assert picture.size == (90 * 12, 33 * 12)
