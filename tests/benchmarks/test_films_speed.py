# SPDX-License-Identifier: Apache-2.0
"""The benchmark of films: the same detections, and a record with speeds and memory. Never a speed."""

import json

import pytest
from click.testing import CliRunner

pytest.importorskip("av", reason="PyAV is not installed")

from benchmarks import films


def test_the_record_has_speeds_and_the_memory_of_both_films(tiny_run, tmp_path):
    lengths = ["--minutes", "0.05", "--full-minutes", "0.02", "--every", "5", "--size", "64", "48", "--rounds", "1"]
    words = [tiny_run("detr").weights, *lengths, "--busy", "--output", tmp_path]
    result = CliRunner().invoke(films.main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert record["speed"]["frames"] == 200 and record["speed"]["film_over_images"]["median"] > 0
    assert [(film["every"], film["frames"]) for film in record["films"].values()] == [(5, 15), (1, 30)]
    assert all(film["megabytes"]["most"] >= film["megabytes"]["at_the_end"] > 0 for film in record["films"].values())
