# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det compare``: the lines of its figure, the numbers of its table, what it refuses."""

import json
import math

import pytest
from click.testing import CliRunner
from PIL import Image

from cpvt_det.cli import main
from cpvt_det.common.errors import DataError
from cpvt_det.visualize.curves import comparison_figure, comparison_table, read_runs


def write_run(folder, *lines):
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path):
    """One run of two evaluations, the first of them the better; one of two test sets; one without evaluation."""
    peg = [
        {"iteration": 9, "total_loss": 8.0, "bbox/AP": 12.5, "bbox/AP50": 30.0},
        {"iteration": 19, "total_loss": None},
        {"iteration": 29, "total_loss": 4.0, "bbox/AP": 11.25, "bbox/AP50": 40.0},
    ]
    sets = [{"iteration": 4, "total_loss": 2.5, "one/bbox/AP": 3.0, "one/bbox/AP50": 6.0, "two/bbox/AP": 50.0}]
    return [
        write_run(tmp_path / "a/peg", *peg),
        write_run(tmp_path / "a/sets", *sets),
        write_run(tmp_path / "b/bare", {"iteration": 0, "total_loss": 1.0}),
    ]


def test_the_table_has_last_and_best_figures(runs):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in comparison_table(read_runs(runs)).splitlines()]
    assert rows[0] == ["run", "iterations", "last loss", "best AP", "at iteration", "last AP", "last AP50"]
    assert rows[2:] == [
        ["a/peg", "30", "4.0000", "12.50", "9", "11.25", "40.00"],
        ["a/sets", "5", "2.5000", "3.00", "4", "3.00", "6.00"],
        ["b/bare", "1", "1.0000", "n/a", "n/a", "n/a", "n/a"],
    ]


def test_the_figure_has_a_colour_a_run(runs):
    losses, precision = comparison_figure(read_runs(runs)).axes
    assert [line.get_label() for line in precision.lines] == ["a/peg", "a/sets", "b/bare"]
    assert [line.get_xydata().tolist() for line in precision.lines] == [[[9, 12.5], [29, 11.25]], [[4, 3]], []]
    assert [line.get_xydata().tolist() for line in losses.lines[2:]] == [[[4, 2.5]], [[4, 2.5]], [[0, 1]], [[0, 1]]]
    assert losses.lines[0].get_color() == losses.lines[1].get_color() == precision.lines[0].get_color() == "C0"
    assert losses.get_yscale() == "log"


def test_long_runs_are_smoothed_over_what_is_finite(tmp_path):
    """150 lines: over 3 values, so the last is the mean of 148 and 150, as 149 is not finite."""
    lines = [{"iteration": n, "total_loss": None if n == 149 else float(n)} for n in range(1, 151)]
    raw, smooth = comparison_figure(read_runs([write_run(tmp_path / "run", *lines)])).axes[0].lines
    assert raw.get_ydata()[-1] == 150 and math.isnan(raw.get_ydata()[-2])
    assert smooth.get_ydata()[-1] == 149
    assert smooth.get_ydata()[:3].tolist() == [1, 1.5, 2]


def test_runs_are_named_by_what_tells_them_apart(runs, tmp_path):
    assert list(read_runs(runs[:2])) == ["peg", "sets"]
    assert list(read_runs(runs[:1])) == ["peg"]
    assert list(read_runs([runs[0] / "metrics.json", runs[2]])) == ["a/peg", "b/bare"]
    (tmp_path / "b/bare/other.json").write_text('{"iteration": 1}')
    assert list(read_runs([runs[2], tmp_path / "b/bare/other.json"])) == ["bare", "bare/other.json"]


def test_the_command_draws_and_prints(runs, tmp_path):
    result = CliRunner().invoke(main, ["compare", *map(str, runs), "--output", str(tmp_path / "deep/both.png")])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[2].split("|")[1].strip() == "a/peg"
    assert result.stdout.strip().endswith("deep/both.png")
    with Image.open(tmp_path / "deep/both.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1300, 500))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{0}", "nowhere"], "cannot read metrics from 'nowhere': No such file"),
        (["{0}/.."], "peg/../metrics.json': No such file"),
        (["{0}", "--output", "a.cat"], "cannot write a.cat: "),
    ],
)
def test_bad_input_is_a_line_and_code_2(runs, words, said):
    result = CliRunner().invoke(main, ["compare", *(word.format(runs[0]) for word in words)])
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line
    assert CliRunner().invoke(main, ["compare"]).exit_code == 2


def test_a_run_without_metrics_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read metrics"):
        read_runs([tmp_path])
