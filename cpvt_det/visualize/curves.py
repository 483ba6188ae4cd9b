# SPDX-License-Identifier: Apache-2.0
"""Curves from the ``metrics.json`` of runs: one run alone, or several runs side by side in one picture and one table."""

import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from cpvt_det.common.errors import DataError
from cpvt_det.visualize.figures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = dict[int, dict[str, float]]
"""Iteration -> name -> number, for one run."""

logger = logging.getLogger(__name__)


def draw_curves(metrics_json: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Draw losses, learning rate and the main metrics over the iterations of a run.

    Args:
        metrics_json: path of a file that :func:`read_metrics` reads, with "total_loss", "loss_*", "lr" and :func:`main_figures`.
        output: path of the picture; its suffix chooses the format, and missing folders are created.

    Raises:
        DataError: a missing file, or one without an iteration in any line.
    """
    save_figure(curves_figure(read_metrics(metrics_json)), output)


def curves_figure(records: Records) -> "Figure":
    """The matplotlib figure of :func:`draw_curves`, from records as :func:`read_metrics` returns them.

    A panel without values shows a note instead.
    """
    figure = new_figure(15, 4.5)
    losses, rate, precision = figure.subplots(1, 3)
    parts = {key for record in records.values() for key in record if key.startswith("loss_")}
    _draw_lines(losses, "losses", records, ["total_loss", *sorted(parts)])
    _scale_losses(losses)
    _draw_lines(rate, "learning rate", records, ["lr"])
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    figures = [name for group in main_figures(records) for name in group]
    title = figures[0].rpartition("/")[2] if figures else "AP"
    _draw_lines(precision, title, records, figures, marker="o")
    if precision.lines:
        precision.set(ylim=(0, None), ylabel="percent")
    return figure


def read_metrics(metrics_json: str | os.PathLike[str]) -> Records:
    """Read a metrics file in detectron2's format, from a run that may have been stopped and resumed.

    If the iteration number goes back, the run was resumed, and earlier lines from that iteration on are dropped. Lines of the same
    iteration are merged, and the later value wins. Incomplete lines, which a killed run leaves, are skipped with a warning. Bare
    NaN and Infinity are accepted; they and ``null`` are read as NaN.

    Returns:
        The numbers in the file, in the order of their iterations.

    Raises:
        DataError: a missing file, or one without an iteration in any line.
    """
    try:
        lines = Path(metrics_json).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"cannot read metrics from {os.fspath(metrics_json)!r}: {error.strerror}") from error
    records: Records = {}
    skipped = 0
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
            skipped += 1
            continue
        iteration = int(record.pop("iteration"))
        if records and iteration < next(reversed(records)):
            records = {earlier: values for earlier, values in records.items() if earlier < iteration}
        numbers = records.setdefault(iteration, {})
        for key, value in record.items():
            if value is None or isinstance(value, int | float):
                numbers[key] = math.nan if value is None or math.isinf(value) else value
    if not records:
        raise DataError(f"no line of {os.fspath(metrics_json)!r} is a JSON object with an iteration; is it a run's metrics.json?")
    if skipped:
        logger.warning("%s: skipped %d of %d lines: they are incomplete or not JSON", metrics_json, skipped, len(lines))
    return records


def main_figures(records: Records) -> list[list[str]]:
    """Names of the two main metrics of every test set: ``bbox/AP`` and ``bbox/AP50`` for detection.

    Metrics of an evaluation have a slash in their names, and metrics of a single class also have a hyphen. By the contract of
    tasks, the main metrics of a group come first in alphabetical order.
    """
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for record in records.values() for key in record):
        group, _, name = key.rpartition("/")
        if group and "-" not in name:
            groups.setdefault(group, []).append(key)
    return [sorted(names)[:2] for names in groups.values()]


def _draw_lines(axes: "Axes", title: str, records: Records, keys: Iterable[str], marker: str | None = None) -> None:
    """Draw a line per key that has a finite value. The title counts values that are not finite, and an empty panel gets a note."""
    lost = 0
    for key in keys:
        points = [(iteration, record[key]) for iteration, record in records.items() if key in record]
        lost += sum(math.isnan(value) for _, value in points)
        if any(math.isfinite(value) for _, value in points):
            # a single point does not make a line
            axes.plot(*zip(*points, strict=True), label=key, marker=marker or ("." if len(points) == 1 else None))
    axes.set_title(title + (f" ({lost} not finite)" if lost else ""))
    if axes.lines:
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=1 + (len(axes.lines) > 4))
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"no {title} in this file", ha="center", transform=axes.transAxes)


def _scale_losses(axes: "Axes") -> None:
    if any(value > 0 for line in axes.lines for value in line.get_ydata()):
        axes.set_yscale("log", nonpositive="mask")


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Records]:
    """Read the metrics of runs.

    Args:
        paths: folders of runs, or files like their ``metrics.json``.

    Returns:
        The metrics of each run, by the name of the run. The name is the part of the path that differs between the runs.

    Raises:
        DataError: a run that has no metrics.
    """
    files = [Path(path).expanduser() for path in paths]
    files = [file / "metrics.json" if file.is_dir() else file for file in files]
    runs = [(file.parent if file.name == "metrics.json" else file).resolve() for file in files]
    common = os.path.commonpath([run.parent for run in runs])
    return {os.path.relpath(run, common): read_metrics(file) for run, file in zip(runs, files, strict=True)}


def comparison_figure(runs: dict[str, Records]) -> "Figure":
    """Draw the total loss and the main metric over the iterations. The faint curve is the loss as logged, and the strong curve is
    the loss smoothed over a fiftieth of the run.

    Each run has its own colour.
    """
    figure, main = new_figure(13, 5), _main_figures(next(iter(runs.values())))[0]
    losses, precision = figure.subplots(1, 2)
    for number, (name, records) in enumerate(runs.items()):
        color = f"C{number % 10}"
        iterations, values = _series(records, "total_loss")
        losses.plot(iterations, values, color=color, alpha=0.25, linewidth=0.8)
        losses.plot(iterations, _smooth(values, max(1, len(values) // 50)), color=color, label=name)
        precision.plot(*_series(records, _main_figures(records)[0]), color=color, label=name, marker="o", markersize=4)
    for axes, title in ((losses, "total loss"), (precision, main.rpartition("/")[2])):
        axes.set(title=title, xlabel="iteration")
        axes.grid(alpha=0.3)
        axes.legend()
    _scale_losses(losses)
    precision.set(ylim=(0, None), ylabel="percent")
    return figure


def comparison_table(runs: dict[str, Records]) -> str:
    """A table with a row per run: last loss, best value of the main metric (AP) with its iteration, and last values of the two main
    metrics (AP and AP50)."""
    main, second = (name.rpartition("/")[2] for name in _main_figures(next(iter(runs.values()))))
    headers = ("run", "iterations", "last loss", f"best {main}", "at iteration", f"last {main}", f"last {second}")
    rows = []
    for run, records in runs.items():
        names = _main_figures(records)
        iterations, values = _series(records, names[0])
        known = [(value, -iteration) for iteration, value in zip(iterations, values, strict=True) if math.isfinite(value)]
        best, when = max(known, default=(math.nan, 0))  # the first of equal figures
        loss, *last = ([math.nan, *_series(records, name)[1]][-1] for name in ("total_loss", *names))
        found = [_text(loss, 4), _text(best, 2), str(-when) if known else "n/a", *(_text(value, 2) for value in last)]
        rows.append([run, str(max(records) + 1), *found])
    return tabulate(rows, headers, tablefmt="pipe", colalign=["left", *["right"] * 6], disable_numparse=True)


def _main_figures(records: Records) -> list[str]:
    """Names of the two main metrics of the first test set; for a run without an evaluation, "AP" and "AP50"."""
    return [*next(iter(main_figures(records)), []), "AP", "AP50"][:2]


def _series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Iterations and values."""
    points = [(iteration, record[key]) for iteration, record in records.items() if key in record]
    return [iteration for iteration, _ in points], [value for _, value in points]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the values before it, ``window`` in total; values that are not finite are left out."""
    parts: Iterable[list[float]] = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    finite = ([value for value in part if math.isfinite(value)] for part in parts)
    return [sum(part) / len(part) if part else math.nan for part in finite]


def _text(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "n/a"
