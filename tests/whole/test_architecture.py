# SPDX-License-Identifier: Apache-2.0
"""The drawing of docs/architecture.md is that of the imports, and there is no circle."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks import house

PACKAGE = Path(__file__).resolve().parents[2] / "cpvt_det"


def graph(anywhere=False):
    return house.import_graph(house.read_package(PACKAGE), anywhere)


def test_the_drawing_is_that_of_the_imports():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    (drawing,) = (text for text in re.findall(r"```text\n(.*?)```", page, re.S) if " cli " in text)
    assert drawing.splitlines() == house.drawing(house.read_package(PACKAGE)), "python benchmarks/house.py --draw prints it"


def test_a_room_stands_above_all_that_it_imports():
    """Counted by hand in a package of five modules: what is imported anyhow is left out, imports in functions are not."""
    texts = {"a": "import p.b, p.c", "b": "import p.c", "c": "def f():\n    import p.d", "d": "x = 1"}
    trees = {f"p.{name}": ast.parse(f'"""Room {name}: more."""\n{text}'.replace("p.", "cpvt_det.")) for name, text in texts.items()}
    trees = {"cpvt_det": ast.parse(""), **{name.replace("p.", "cpvt_det."): tree for name, tree in trees.items()}}
    assert [line.split() for line in house.drawing(trees)] == [
        ["3", "a", "Room", "a", "->", "b"],
        ["2", "b", "Room", "b", "->", "c"],
        ["1", "c", "Room", "c", "->", "d"],
        ["0", "d", "Room", "d"],
    ]


def test_no_import_points_up():
    assert house.upward(graph()) == []


@pytest.mark.parametrize("anywhere", [False, True], ids=["at import", "anywhere"])
def test_there_is_no_circle(anywhere):
    """Anywhere: with imports for typing, in functions and by ``import_module``."""
    assert house.circles(graph(anywhere)) == []


def test_tests_stand_in_rooms_of_the_package():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"whole", "docs", "benchmarks", "studies"}
    assert {path.parent.name for path in PACKAGE.parent.glob("tests/*/test_*.py")} <= rooms
