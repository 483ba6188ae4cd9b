# SPDX-License-Identifier: Apache-2.0
"""Sphinx's settings: ``make docs`` builds the site. Its first page is the README."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import api_reference
import config_reference

import cpvt_det

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "cpvt_det"
author = copyright = "the cpvt_det authors"
version = release = cpvt_det.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"cpvt_det {release}"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_use_rtype = False
napoleon_use_ivar = True


def setup(app):
    config_reference.DOCUMENT.write_text(config_reference.document(), encoding="utf-8")
    api_reference.write()
    app.connect("source-read", _read)


def _read(app, name, source):
    """The README before the list of pages; links to files of the repository lead to their place in the site."""
    folder = DOCS
    if name == "index":
        source[0], folder = (ROOT / "README.md").read_text(encoding="utf-8") + source[0], ROOT
    source[0] = re.sub(r"\[([^\]]+)\]\(([^)#:]+)(#[^)]*)?\)", lambda link: _link(link, folder), source[0])


def _link(link, folder):
    path = (folder / link[2]).resolve()
    if path.is_relative_to(DOCS):
        return f"[{link[1]}]({path.relative_to(DOCS)}{link[3] or ''})"
    if path.suffix == ".py" and path.is_relative_to(ROOT / "cpvt_det"):
        return f'<a href="_modules/{path.relative_to(ROOT).with_suffix(".html")}">{link[1]}</a>'
    return f"`{path.relative_to(ROOT)}`" if path.exists() else link[0]
