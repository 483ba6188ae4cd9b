# SPDX-License-Identifier: Apache-2.0
"""The curves of a run, and of several side by side, from their ``metrics.json``. matplotlib is imported when one is drawn."""

import json
import logging
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cpvt_det.errors import BadInputError, DataError, first_line
from cpvt_det.visualize.fonts import families

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = dict[int, dict[str, float]]
"""Iteration -> name -> number, of one run."""

logger = logging.getLogger(__name__)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, its sides in inches of 100 pixels. Made without pyplot, which keeps global state.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadInputError("drawing curves needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure; the path's suffix chooses the format, and missing folders are created.

    Raises:
        BadInputError: a suffix that is not a known format, or a path that cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        for text in figure.findobj(lambda artist: hasattr(artist, "get_text")):
            if not text.get_text().isascii():
                text.set_fontfamily(families(text.get_text()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # the warning of ``families`` says what to do
            figure.savefig(path)
    except (ValueError, OSError) as error:
        raise BadInputError(f"cannot write {os.fspath(path)}: {first_line(error)}") from error


def draw_curves(metrics_json: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Draw losses, learning rate and the main figures over the iterations of a run.

    Args:
        metrics_json: path of a file that :func:`read_metrics` reads, with "total_loss", "loss_*", "lr" and :func:`main_figures`.
        output: path of the picture; its suffix chooses the format, and missing folders are created.

    Raises:
        BadInputError: matplotlib is not installed.
        DataError: a missing file, or one without an iteration in any line.
    """
    save_figure(curves_figure(read_metrics(metrics_json)), output)


def curves_figure(records: Records) -> "Figure":
    """The matplotlib figure of :func:`draw_curves`, from records as :func:`read_metrics` returns them.

    A panel without any value has a note in its place.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    figure = new_figure(15, 4.5)
    losses, rate, precision = figure.subplots(1, 3)
    parts = {key for record in records.values() for key in record if key.startswith("loss_")}
    _draw_lines(losses, "losses", records, ["total_loss", *sorted(parts)])
    if any(value > 0 for line in losses.lines for value in line.get_ydata()):
        losses.set_yscale("log", nonpositive="mask")
    _draw_lines(rate, "learning rate", records, ["lr"])
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    figures = [name for group in main_figures(records) for name in group]
    title = figures[0].rpartition("/")[2] if figures else "AP"
    _draw_lines(precision, title, records, figures, marker="o")
    if precision.lines:
        precision.set(ylim=(0, None), ylabel="percent")
    return figure


def read_metrics(metrics_json: str | os.PathLike[str]) -> Records:
    """Read a metrics file of detectron2's format, from a run that may have been stopped and resumed.

    Where the iteration number goes back, the run was resumed: earlier lines from that iteration on are dropped. Lines of the same
    iteration are merged; the later value wins. Incomplete lines, which a killed run leaves, are skipped with a warning. Bare NaN
    and Infinity are accepted; they and ``null`` are read as NaN.

    Returns:
        The numbers in the file, by rising iteration.

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
        record = _parse_line(line)
        if record is None:
            skipped += 1
            continue
        iteration = int(record.pop("iteration"))
        if records and iteration < next(reversed(records)):
            records = {earlier: values for earlier, values in records.items() if earlier < iteration}
        records.setdefault(iteration, {}).update(record)
    if not records:
        raise DataError(f"no line of {os.fspath(metrics_json)!r} is a JSON object with an iteration; is it a run's metrics.json?")
    if skipped:
        logger.warning("%s: skipped %d of %d lines: they are incomplete or not JSON", metrics_json, skipped, len(lines))
    return records


def main_figures(records: Records) -> list[list[str]]:
    """Names of the two main figures of every test set: ``bbox/AP`` and ``bbox/AP50`` of detection.

    What an evaluation measured has a slash in its name. By the contract of tasks the main figures of a group are the first in
    alphabetical order; those of one class have a hyphen.
    """
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for record in records.values() for key in record):
        group, _, name = key.rpartition("/")
        if group and "-" not in name:
            groups.setdefault(group, []).append(key)
    return [sorted(names)[:2] for names in groups.values()]


def _parse_line(line: str) -> dict[str, float] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        return None
    numbers = {key: value for key, value in record.items() if value is None or isinstance(value, int | float)}
    return {key: math.nan if value is None or math.isinf(value) else value for key, value in numbers.items()}


def _draw_lines(axes: "Axes", title: str, records: Records, keys: Iterable[str], marker: str | None = None) -> None:
    """One line per key that has a finite value; the title counts values that are not finite; an empty panel gets a note."""
    lost = 0
    for key in keys:
        points = [(iteration, record[key]) for iteration, record in records.items() if key in record]
        lost += sum(math.isnan(value) for _, value in points)
        if any(math.isfinite(value) for _, value in points):
            # a single point makes no line
            axes.plot(*zip(*points, strict=True), label=key, marker=marker or ("." if len(points) == 1 else None))
    axes.set_title(title + (f" ({lost} not finite)" if lost else ""))
    if axes.lines:
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=1 + (len(axes.lines) > 4))
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"no {title} in this file", ha="center", transform=axes.transAxes)
