# SPDX-License-Identifier: Apache-2.0
"""The figures of a study's report."""

from pathlib import Path

import numpy as np

from cpvt_det.visualize.figures import new_figure, save_figure
from studies.engine.plan import Group, Plan
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


def draw_bars(plan: Plan, group: Group, bars: dict[str, dict[str, Values]]) -> Path:
    """Draw a cluster of bars per data set, a bar per variant: means with 95 % intervals; returns the path.

    Args:
        bars: label of the data set -> variant -> main figure by seed.
    """
    figure = new_figure(8, 4)
    axes = figure.subplots()
    variants = list(dict.fromkeys(variant for along in bars.values() for variant in along))
    width = 0.8 / max(len(variants), 1)
    for number, variant in enumerate(variants):
        known = [
            (place, *interval(list(along[variant].values()))) for place, along in enumerate(bars.values()) if along.get(variant)
        ]
        places, means, halves = np.array(known).T
        at = places + (number - (len(variants) - 1) / 2) * width
        below = np.minimum(np.nan_to_num(halves), means)  # no figure is below 0
        error = (below, np.nan_to_num(halves))
        axes.bar(at, means, width * 0.95, yerr=error, color=f"C{number % 10}", label=variant, error_kw={"elinewidth": 0.8})
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set(
        ylabel=plan.figures_of(group)[0], ylim=(0, None), title=f"{group.title or group.name}: mean of the seeds, 95 % interval"
    )
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    narrow = {"columnspacing": 1.0, "handlelength": 1.0, "handletextpad": 0.4}
    figure.legend(loc="outside lower center", ncols=8, **narrow)  # beside the axes, which are full of bars
    path = plan.folder / "figures" / f"{group.name}_bars.png"
    save_figure(figure, path)
    return path
