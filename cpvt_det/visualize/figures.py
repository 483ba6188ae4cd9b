# SPDX-License-Identifier: Apache-2.0
"""Figures drawn with matplotlib, which is imported only when a figure is drawn."""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from cpvt_det.common.errors import BadInputError, first_line
from cpvt_det.visualize.fonts import families

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure; its sides are in inches, at 100 pixels per inch. It is made without pyplot, because pyplot keeps global
    state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure. The path's suffix chooses the format, and missing folders are created.

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


def new_grid(rows: int, columns: int, panel: tuple[float, float], title: str) -> "tuple[Figure, np.ndarray]":
    """A figure with rows and columns of empty panels.

    Args:
        rows, columns: number of rows and columns, at least 1.
        panel: (width, height) of a panel in inches, at 100 pixels per inch.
        title: text above all panels.

    Returns:
        The figure, and (rows, columns) axes without ticks.
    """
    figure = new_figure(columns * panel[0] + 0.3, rows * panel[1] + 0.5)
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
    return figure, panels
