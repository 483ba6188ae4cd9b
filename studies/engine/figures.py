# SPDX-License-Identifier: Apache-2.0
"""The figures of a study's report."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cpvt_det.visualize.figures import new_figure, save_figure
from studies.engine.plan import Group, Plan
from studies.engine.questions import answer
from studies.engine.statistics import Curves, Values, interval


def draw_figure(plan: Plan, group: Group, axis: str, curves: Curves) -> Path:
    """Draw means, with 95 % bands where there are enough seeds; returns the path."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for number, (variant, along) in enumerate(curves.items()):
        known = [(place, *interval(list(values.values()))) for place, values in along.items() if values]
        if known:
            x, means, halves = np.array(known).T
            axes.plot(x, means, color=f"C{number % 10}", marker=".", linestyle="--" if number > 9 else "-", label=variant)
            axes.fill_between(x, means - halves, means + halves, color=f"C{number % 10}", alpha=0.12, linewidth=0)
    if axis != "iteration":
        axes.set_xscale("log")
        ticks = list(next(iter(curves.values())))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.minorticks_off()
    axes.set(xlabel=axis, ylabel=plan.figures_of(group)[0], ylim=(0, None), title=f"{group.name}: mean of the seeds, 95 % band")
    axes.grid(alpha=0.3)
    axes.legend()
    path = plan.folder / "figures" / f"{group.name}_{axis}.png"
    save_figure(figure, path)
    return path


def draw_panels(plan: Plan, values: Sequence[Mapping[str, Values]]) -> Path:
    """Draw the panels of a plan: a row per variant, a dot per seed, a stroke at their mean; returns the path.

    The bracket below the dots is as long as the smallest difference between two variants that the seeds can show
    (:mod:`studies.engine.questions`): of means that are closer, no order is known.

    Args:
        values: per panel, variant -> value by seed; values that are not finite are left out.
    """
    figure = new_figure(1.4 + 2.2 * len(values), 1.2 + 0.26 * max(map(len, values)))
    for axes, panel, of in zip(np.atleast_1d(figure.subplots(1, len(values))), plan.panels, values, strict=True):
        for row, by_seed in enumerate(of.values()):
            known = [value for value in by_seed.values() if math.isfinite(value)]
            axes.scatter(known, [row] * len(known), s=16, color="C0", alpha=0.6, linewidth=0)
            axes.plot([interval(known)[0]] * 2 if known else [], [row - 0.3, row + 0.3] if known else [], color="C0", linewidth=2)
        axes.set(yticks=range(len(of)), yticklabels=list(of), ylim=(len(of) + 0.6, -0.6))
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(plan.figures_of(plan.group(panel.group))[0])
        first, last = next(iter(of)), next(reversed(of))
        half, middle = answer(first, last, of, len(plan.questions) or 1).half, sum(axes.get_xlim()) / 2
        if math.isfinite(half):
            axes.errorbar(middle, len(of) - 0.3, xerr=half / 2, color="black", capsize=3, linewidth=1)
            axes.text(middle, len(of) - 0.2, f"{half:.1f}", ha="center", va="top", fontsize=8)
        axes.grid(alpha=0.3, axis="x")
    path = plan.folder / "figures" / "panels.png"
    save_figure(figure, path)
    return path
