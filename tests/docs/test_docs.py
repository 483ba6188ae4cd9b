# SPDX-License-Identifier: Apache-2.0
"""The documents: what is generated is up to date, links lead somewhere, and the site builds without a warning."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import config_reference
import pytest

from cpvt_det.config import flat_items, get_cfg

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)


def test_the_config_reference_is_that_of_the_defaults():
    assert config_reference.DOCUMENT.read_text(encoding="utf-8") == config_reference.document(), (
        "out of date: python docs/config_reference.py"
    )


def test_every_key_has_its_default_and_a_meaning():
    keys = config_reference.find_keys()
    assert [key.name for key in keys] == list(dict(flat_items(get_cfg())))
    assert [key.name for key in keys if not key.comment] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_to_files(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (ROOT / document).parent.joinpath(target).exists()] == []


def test_the_site_builds_without_a_warning(tmp_path):
    """In Sphinx's plainest theme: the site's own takes as long again, and is only looked for."""
    assert importlib.util.find_spec(re.search(r'html_theme = "(\w+)"', (ROOT / "docs/conf.py").read_text(encoding="utf-8"))[1])
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-D", "html_theme=basic"]
    words += ["-d", tmp_path / "trees", ROOT / "docs", tmp_path / "site"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "PEGDetection" in (tmp_path / "site/api/cpvt_det.position.html").read_text(encoding="utf-8")
    assert "MODEL.POSITION.NAME" in (tmp_path / "site/config.html").read_text(encoding="utf-8")
    assert "_modules/cpvt_det/models/detector.html" in (tmp_path / "site/index.html").read_text(encoding="utf-8")
