# SPDX-License-Identifier: Apache-2.0
"""The counts of ``benchmarks/house.py``, on a package of three files; that its names are still those of the package."""

import ast
import sys

import pytest

from benchmarks import house
from benchmarks.house_road import ROADS, SMALL, Tracer, find, set_key
from cpvt_det.config import get_cfg

FILES = {
    "layers/attention.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cpvt_det.ops import nms\n"
    "def attend():\n    from cpvt_det.models.detr import DETR\n",
    "models/detr.py": "from cpvt_det.layers.attention import attend\nimport cpvt_det.ops.nms\n",
    "ops/nms.py": "try:\n    from cpvt_det.layers import attention\nexcept ImportError:\n    pass\n",
}
ATTENTION, DETR, NMS = "cpvt_det.layers.attention", "cpvt_det.models.detr", "cpvt_det.ops.nms"


@pytest.fixture
def package(tmp_path):
    """The three files, and a package file beside each."""
    root = tmp_path / "cpvt_det"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text, encoding="utf-8")
        (root / name).with_name("__init__.py").touch()
    return root


def test_circles_and_upward_imports_at_import_are_found(package):
    graph = house.import_graph(house.read_package(package), anywhere=False)
    assert graph[DETR] == {ATTENTION, NMS}
    assert house.circles(graph) == []
    assert house.upward(graph) == [(NMS, ATTENTION)]


def test_imports_in_functions_and_for_typing_count_anywhere(package):
    graph = house.import_graph(house.read_package(package), anywhere=True)
    assert house.circles(graph) == [(ATTENTION, DETR, NMS)]
    assert house.upward(graph) == [(ATTENTION, DETR), (NMS, ATTENTION)]


def test_a_room_without_a_floor_is_refused():
    with pytest.raises(KeyError, match="cellar"):
        house.upward({"cpvt_det.cellar": set()})


@pytest.mark.parametrize(
    "text", ["of the run.", "in words.", "that was evaluated.", "changed in place.", "as the JSON says.", "how many."]
)
def test_a_description_without_a_noun_is_found(tmp_path, text):
    (tmp_path / "one.py").write_text(f'def f(x, y):\n    """Do.\n\n    Args:\n        x: the run.\n        y: {text}\n    """\n')
    assert house.headless_arguments(tmp_path) == ([f"{tmp_path.name}/one.py:6: y: {text}"], 2)


@pytest.mark.parametrize(
    "text", ["size of the image.", "(B, N, C) tokens.", "as in :class:`Attention`.", "offset from 1.", "isotropic."]
)
def test_a_description_with_a_noun_is_not_found(tmp_path, text):
    (tmp_path / "one.py").write_text(
        f'class C:\n    """It.\n\n    Attributes:\n        x, y: {text}\n\n    Raises:\n        z: of it.\n    """\n'
    )
    assert house.headless_arguments(tmp_path) == ([], 1)


def test_a_reference_may_stand_in_the_next_line():
    node = ast.parse('def f(x):\n    """Do.\n\n    Args:\n        x: as in\n            :class:`Attention`.\n    """').body[0]
    assert house.described(node) == [(5, "x", "as in :class:`Attention`.")]


def test_the_tracer_counts_functions_hops_and_depth(tmp_path):
    code = "def inner():\n    pass\ndef outer():\n    inner()\n    return [inner() for _ in range(2)]\ndef unused():\n    pass\n"
    names = {}
    exec(compile(code, tmp_path / "solver.py", "exec"), names)
    tracer = Tracer(tmp_path, set())
    before = sys.getprofile()
    sys.setprofile(tracer)
    names["outer"]()
    sys.setprofile(before)
    assert tracer.entered == {("solver.py", 1, "inner"), ("solver.py", 3, "outer")}
    assert tracer.hops == {("solver.py", 3, "outer")}
    assert tracer.deepest == 2


def test_the_names_that_the_roads_need_are_in_the_package():
    package = house.ROOT / house.PACKAGE
    house.upward(house.import_graph(house.read_package(package), anywhere=True))
    for name in ("load_splits", "build_detector", "build_criterion", "build_train_loader", "training_records", "TrainingModel"):
        assert callable(find(name, package))
    assert find("evaluate", package, "training").__module__.startswith("cpvt_det.training")
    for _, keys in ROADS.values():
        cfg = get_cfg()
        for key, value in {**SMALL, **keys}.items():
            set_key(cfg, key, value)


def test_a_key_that_is_gone_is_named():
    with pytest.raises(AttributeError, match="GONE"):
        set_key(get_cfg(), "MODEL.GONE.KEY", 1)


def test_two_checkouts_stand_side_by_side():
    before, after = {"commit": "a", "rows": {"files": "22"}}, {"commit": "b", "rows": {"files": "14", "circles": "0"}}
    assert house.table(after, before).splitlines() == [
        "|  | a | b |",
        "| --- | --- | --- |",
        "| files | 22 | 14 |",
        "| circles |  | 0 |",
    ]
