# SPDX-License-Identifier: Apache-2.0
"""Several runs side by side: their loss and main figure in one picture, their last and best figures in one table."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from cpvt_det.errors import DataError
from cpvt_det.visualize.curves import Records, main_figures, new_figure, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = tuple[list[int], list[float]]
"""Iterations and values."""


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Records]:
    """Read the metrics of runs.

    Args:
        paths: folders of runs, or files like their ``metrics.json``.

    Returns:
        Metrics by name of the run: the part of its path that differs between the runs.

    Raises:
        DataError: a run that is given twice, or has no metrics.
    """
    files = [Path(path).expanduser() for path in paths]
    files = [file / "metrics.json" if file.is_dir() else file for file in files]
    runs = [(file.parent if file.name == "metrics.json" else file).resolve() for file in files]
    for run in runs:
        if runs.count(run) > 1:
            raise DataError(f"the run {run} is given twice; leave one out")
    common = os.path.commonpath([run.parent for run in runs])
    return {os.path.relpath(run, common): read_metrics(file) for run, file in zip(runs, files, strict=True)}


def comparison_figure(runs: dict[str, Records]) -> "Figure":
    """Total loss (faint: as logged; strong: smoothed over a fiftieth of the run) and main figure over the iterations.

    One colour per run.
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
    if any(value > 0 for line in losses.lines for value in line.get_ydata()):
        losses.set_yscale("log", nonpositive="mask")
    precision.set(ylim=(0, None), ylabel="percent")
    return figure


def comparison_table(runs: dict[str, Records]) -> str:
    """A row per run: its last loss, its best main figure (AP) and the iteration of that, its last two (AP and AP50)."""
    main, second = (name.rpartition("/")[2] for name in _main_figures(next(iter(runs.values()))))
    headers = ("run", "iterations", "last loss", f"best {main}", "at iteration", f"last {main}", f"last {second}")
    rows = [[name, *_figures_of(records)] for name, records in runs.items()]
    return tabulate(rows, headers, tablefmt="pipe", colalign=["left", *["right"] * 6], disable_numparse=True)


def _figures_of(records: Records) -> list[str]:
    key, second = _main_figures(records)
    iterations, precision = _series(records, key)
    known = [(value, -iteration) for iteration, value in zip(iterations, precision, strict=True) if math.isfinite(value)]
    best, when = max(known, default=(math.nan, 0))  # the first of equal ones
    last = [_last(records, name) for name in ("total_loss", key, second)]
    return [
        str(max(records) + 1),
        _text(last[0], 4),
        _text(best, 2),
        str(-when) if known else "n/a",
        _text(last[1], 2),
        _text(last[2], 2),
    ]


def _main_figures(records: Records) -> list[str]:
    """Names of the two main figures of the first test set, where there are several; of a run without an evaluation, AP's."""
    return [*next(iter(main_figures(records)), []), "AP", "AP50"][:2]


def _series(records: Records, key: str) -> Points:
    points = [(iteration, record[key]) for iteration, record in records.items() if key in record]
    return [iteration for iteration, _ in points], [value for _, value in points]


def _last(records: Records, key: str) -> float:
    return next(iter(reversed(_series(records, key)[1])), math.nan)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, ``window`` in all; values that are not finite are left out."""
    parts: Iterable[list[float]] = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    finite = ([value for value in part if math.isfinite(value)] for part in parts)
    return [sum(part) / len(part) if part else math.nan for part in finite]


def _text(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "n/a"
