# SPDX-License-Identifier: Apache-2.0
"""The curves of a run and of several, checked by their lines."""

import json
import math
import sys

import numpy as np
import pytest
from PIL import Image

from cpvt_det.common.errors import DataError
from cpvt_det.visualize.curves import curves_figure, draw_curves, read_metrics

METRICS = """\
{"iteration": 19, "total_loss": 9.0, "loss_class": 5.0, "loss_giou": 4.0, "lr": 0.1, "images_per_second": 3.0}
{"iteration": 39, "total_loss": NaN, "loss_class": NaN, "loss_giou": 3.0, "lr": 0.1, "name": "a string"}
{"iteration": 39, "bbox/AP": 1.0, "bbox/AP50": 2.0, "bbox/APs": NaN}
{"iteration": 59, "total_loss": 7.0, "loss_class": null, "loss_giou": Infinity, "lr": 0.1}
{"iteration": 79, "total_loss": 66.0, "lr": 0.1}

{"iteration": 59, "total_loss": 6.0, "loss_class": 3.0, "lr": 0.01}
{"iteration": 59, "total_loss": 5.0}
{"iteration": 69, "total_loss": 4.0, "lr": 0.01, "bbox/AP": 3.0, "bbox/AP50": 4.0}
{"iteration": 79, "total_lo"""


@pytest.fixture
def metrics_json(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text(METRICS)
    return path


def test_metrics_of_a_resumed_and_killed_run_are_read(metrics_json, caplog):
    records = read_metrics(metrics_json)
    assert list(records) == [19, 39, 59, 69]  # 79 was written by the run before it was resumed
    assert records[39] == pytest.approx(
        {"total_loss": math.nan, "loss_class": math.nan, "loss_giou": 3, "lr": 0.1}
        | {"bbox/AP": 1, "bbox/AP50": 2, "bbox/APs": math.nan},
        nan_ok=True,
    )
    assert records[59] == {"total_loss": 5, "loss_class": 3, "lr": 0.01}
    assert "skipped 1 of 10 lines" in caplog.text


def test_curves_show_what_was_measured(metrics_json):
    losses, rate, precision = curves_figure(read_metrics(metrics_json)).axes
    lines = {line.get_label(): line.get_xydata().tolist() for axes in (losses, rate, precision) for line in axes.lines}
    assert list(lines) == ["total_loss", "loss_class", "loss_giou", "lr", "bbox/AP", "bbox/AP50"]
    assert lines["total_loss"] == [[19, 9], [39, pytest.approx(math.nan, nan_ok=True)], [59, 5], [69, 4]]
    assert lines["bbox/AP"] == [[39, 1], [69, 3]]
    assert (losses.get_yscale(), rate.get_yscale(), precision.get_yscale()) == ("log", "linear", "linear")
    assert losses.get_title() == "losses (2 not finite)"


def test_panels_without_values_say_so(tmp_path):
    (tmp_path / "metrics.json").write_text('{"iteration": 0, "bbox/AP": NaN, "lr": 0.5}')
    losses, rate, precision = curves_figure(read_metrics(tmp_path / "metrics.json")).axes
    assert [[text.get_text() for text in axes.texts] for axes in (losses, rate, precision)] == [
        ["no losses in this file"],
        [],
        ["no AP in this file"],
    ]
    assert precision.get_title() == "AP (1 not finite)"


@pytest.mark.parametrize("metrics", [METRICS, '{"iteration": 0}', '{"iteration": 3, "total_loss": 0.0, "loss_l1": -1}'])
def test_curves_are_written_as_a_picture(tmp_path, metrics, recwarn):
    (tmp_path / "metrics.json").write_text(metrics)
    draw_curves(tmp_path / "metrics.json", tmp_path / "plots" / "curves.png")
    with Image.open(tmp_path / "plots" / "curves.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1500, 450))
        assert len(np.unique(np.array(picture))) > 1
    assert not recwarn.list


def test_drawing_curves_leaves_pyplot_alone(metrics_json, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now fails
    draw_curves(metrics_json, tmp_path / "curves.png")


def test_metrics_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read metrics from '.*none.json': No such file"):
        draw_curves(tmp_path / "none.json", tmp_path / "curves.png")
    (tmp_path / "text.json").write_text(f"hello\n[1]\n{json.dumps({'lr': 1})}\n")
    with pytest.raises(DataError, match=r"no line of .* is a JSON object with an iteration"):
        draw_curves(tmp_path / "text.json", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_every_test_set_has_its_curves(tmp_path):
    (tmp_path / "metrics.json").write_text(
        '{"iteration": 3, "one/bbox/AP": 1, "two/bbox/AP": 2, "two/bbox/AP50": 3, "two/bbox/AP-cat": 4}'
    )
    precision = curves_figure(read_metrics(tmp_path / "metrics.json")).axes[2]
    assert [line.get_label() for line in precision.lines] == ["one/bbox/AP", "two/bbox/AP", "two/bbox/AP50"]
