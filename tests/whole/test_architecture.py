# SPDX-License-Identifier: Apache-2.0
"""The order of the rooms in docs/architecture.md is the order of the imports, and there is no circle."""

import re
from pathlib import Path

import pytest

from benchmarks import house

PACKAGE = Path(__file__).resolve().parents[2] / "cpvt_det"


def graph(anywhere=False):
    return house.import_graph(house.read_package(PACKAGE), anywhere)


def floors():
    """Room or module -> its line in the drawing of docs/architecture.md, from the top."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    (drawing,) = (text for text in re.findall(r"```text\n(.*?)```", page, re.S) if text.startswith("cli "))
    names = [re.sub(r" {3,}.*", "", line).split() for line in drawing.splitlines()]
    return {name: floor for floor, line in enumerate(names) for name in line}


def test_no_import_points_up():
    """In the drawing of docs/architecture.md, where every room and module has a place."""
    floor_of, found = floors(), graph()
    places = {name: floor_of[name.split(".")[1]] for name in found if name.split(".")[1:] not in ([], ["__main__"])}
    up = [(name, other) for name in places for other in found[name] if other in places and places[other] < places[name]]
    assert up == []
    assert house.upward(found) == []


@pytest.mark.parametrize("anywhere", [False, True], ids=["at import", "anywhere"])
def test_there_is_no_circle(anywhere):
    """Anywhere: with imports for typing, in functions and by ``import_module``."""
    assert house.circles(graph(anywhere)) == []


def test_tests_stand_in_rooms_of_the_package():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"whole", "docs", "benchmarks", "studies"}
    assert {path.parent.name for path in PACKAGE.parent.glob("tests/*/test_*.py")} <= rooms
