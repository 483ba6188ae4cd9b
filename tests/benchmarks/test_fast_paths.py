# SPDX-License-Identifier: Apache-2.0
"""The benchmark of single ways: what is left out, and what its figure says. Never a speed."""

import os

import pytest

from benchmarks import fast_paths
from benchmarks.harness import Row, Spread
from cpvt_det.ops import routes


@pytest.mark.parametrize("before", [None, "rows"])
def test_a_way_is_left_out_within_the_block_alone(before, monkeypatch):
    monkeypatch.delenv(routes.SWITCH, raising=False)
    if before:
        monkeypatch.setenv(routes.SWITCH, before)
    routes.is_on.cache_clear()
    outside = {way: routes.is_on(way) for way in routes.ROUTES}
    assert outside["dropout"] and outside["packing"]
    with fast_paths.without("dropout"):
        assert {way for way in outside if outside[way] and not routes.is_on(way)} == {"dropout"}
    assert {way: routes.is_on(way) for way in outside} == outside and os.environ.get(routes.SWITCH) == before
    monkeypatch.undo()
    routes.is_on.cache_clear()


@pytest.mark.parametrize(("way", "left_out"), [("packing", {"packing"}), (fast_paths.CONTROL, set())])
def test_a_way_is_called_without_itself_and_the_control_with_all(way, left_out):
    seen = []
    call = lambda: seen.append({way for way in ("dropout", "packing") if not routes.is_on(way)})  # noqa: E731
    for contender in fast_paths.contenders_of(call, call, way):
        contender.call()
    assert seen == [set(), left_out]


def test_the_figure_is_the_time_without_a_way_over_the_time_with_all():
    spread = Spread(median=0.8, q1=0.5, q3=1.0, least=0.5, most=1.0)
    row = Row("packing", False, False, 0.0, 1, 5, spread, spread, spread, spread)
    assert fast_paths._gain(row) == [1.25, 1.0, 2.0]
    text = fast_paths.table({"a": {"packing": [1.25, 1.0, 2.0], "rows": [1.04, 1.0, 1.1]}, "b": {"packing": [1.0] * 3}})
    assert (
        "| packing   | 1.25 (1.00-2.00) | 1.00 (1.00-1.00) | yes" in text
        and "| rows      | 1.04 (1.00-1.10) |                  | no" in text
    )
