# SPDX-License-Identifier: Apache-2.0
"""Figures of many panels."""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from cpvt_det.structures import Size
from cpvt_det.visualize.curves import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARGIN = 0.06  # white border around an image, as a share of its sides, for points outside the image


def new_grid(rows: int, columns: int, panel: tuple[float, float], title: str) -> "tuple[Figure, np.ndarray]":
    """A figure with rows and columns of empty panels.

    Args:
        rows, columns: number of rows and columns, at least 1.
        panel: (width, height) of a panel in inches of 100 pixels.
        title: text above all panels.

    Returns:
        The figure, and (rows, columns) axes without ticks.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    figure = new_figure(columns * panel[0] + 0.3, rows * panel[1] + 0.5)
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
    return figure, panels


def show_faded(axes: "Axes", image: Tensor, size: Size) -> None:
    """Show an image in faded grey, as a background to draw on.

    Args:
        axes: panel to draw in; its units become pixels of the original image.
        image: (3, h, w) uint8, the resized image.
        size: (h, w) of the original image.
    """
    height, width = size
    grey = image.float().mean(0).cpu().numpy()
    axes.imshow(grey, extent=(0, width, height, 0), cmap="gray", vmin=-60, vmax=255, interpolation="bilinear")
    axes.set_xlim(-MARGIN * width, (1 + MARGIN) * width)
    axes.set_ylim((1 + MARGIN) * height, -MARGIN * height)
    axes.spines[:].set_visible(False)
