# SPDX-License-Identifier: Apache-2.0
"""The records of a study -> tables with 95 % intervals over seeds, paired by seed, and figures."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tabulate import tabulate

from cpvt_det.study.plan import Group, Plan, load_plan
from cpvt_det.study.run import FIGURES, Record, is_done, read_record
from cpvt_det.visualize.curves import new_figure, save_figure

Values = dict[int, float]
"""Seed -> value."""
Curves = dict[str, dict[float | str, Values]]
"""Variant -> position on an axis -> AP or another metric by seed; for a probe, variant -> name -> value by seed."""


def write_report(path: Path) -> list[Path]:
    """Write ``report.md`` and ``figures/`` beside the plan, from the records that match the current plan.

    Returns:
        The paths of the files.

    Raises:
        BadInputError: a plan that cannot be read, or matplotlib is not installed.
    """
    plan = load_plan(path)
    parts, files = [f"# {plan.folder.name}", f"`cpvt-det study report {os.path.relpath(path)}`"], []
    for group in plan.groups:
        records = read_group(plan, group)
        if not records.keys() & group.variants.keys():
            continue
        parts += [f"## {group.name}", results_table(records)]
        parts += [f"paired by seed:\n\n{differences_table(group, records)}"] if records.keys() & set(group.baselines) else []
        by_axis = curves_of(plan, group, records)
        for axis, curves in by_axis.items():
            parts.append(f"### AP by {axis}\n\n{curve_tables(group, curves)}")
            files.append(draw_figure(plan, group, axis, curves))
            if axis == "iteration" and (reached := iterations_to(curves)):
                parts.append(f"### iterations to an AP\n\n{curve_tables(group, reached, functools.partial(_text, digits=0))}")
        if sentences := corrected_over_sweeps(plan, group, by_axis):
            parts += ["### all sweeps", *sentences]
        for probe in group.probes:
            if measured := probe_figures(probe, records):
                parts.append(f"### {probe}\n\n{curve_tables(group, measured, _three_digits)}")
    parts.append(_account(plan))
    report = plan.folder / "report.md"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [report, *files]


def read_group(plan: Plan, group: Group) -> dict[str, dict[int, Record]]:
    """The existing records of a group and of the variants ``beside`` it, by variant and seed."""
    found: dict[str, dict[int, Record]] = {}
    runs = list(plan.runs())
    for name in (*group.beside, *group.variants):
        of = name if "/" in name else f"{group.name}/{name}"
        seeds = (run for run in runs if run.name.rpartition("/")[0] == of and run.seed < group.seeds)
        records = {run.seed: record for run in seeds if (record := read_record(plan, run))}
        if records:
            found[name] = records
    return found


def _account(plan: Plan) -> str:
    """The number of finished runs, their CPU time, and their environments."""
    runs = list(plan.runs())
    records = [record for run in runs if (record := read_record(plan, run))]
    hours = sum(record["cpu_seconds"] + record["measured"]["cpu_seconds"] for record in records) / 3600
    environments = sorted({record["environment"] for record in records})
    done = sum(is_done(plan, run) for run in runs)
    return "\n\n".join([f"{done} of {len(runs)} runs; {hours:.1f} hours of one core, training and measuring.", *environments])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t; the latter is NaN for a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    return mean, float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))


def paired(values: Values, others: Values) -> tuple[float, float, float]:
    """Mean difference over the common seeds, half of its 95 % interval, and the p of Student's paired test."""
    seeds = sorted(values.keys() & others.keys())
    differences = [values[seed] - others[seed] for seed in seeds]
    if not seeds:
        return math.nan, math.nan, math.nan
    mean, half = interval(differences)
    p = float(stats.ttest_1samp(differences, 0).pvalue) if len(seeds) > 1 and np.ptp(differences) > 0 else math.nan
    return mean, half, p


def unpaired(values: Values, others: Values) -> float:
    """The p of Welch's test, which takes runs of equal seeds to be independent."""
    if min(len(values), len(others)) < 2 or np.ptp([*values.values(), *others.values()]) == 0:
        return math.nan
    return float(stats.ttest_ind(list(values.values()), list(others.values()), equal_var=False).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction of p for multiple comparisons; NaN remains, and is not counted."""
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    corrected, least = list(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p))
        corrected[index] = least
    return corrected


def _with_interval(values: Iterable[float | None], text: Callable[..., str]) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return text(*interval(known)) if known else "n/a"


def _text(mean: float, half: float, digits: int = 1, sign: str = "") -> str:
    if math.isnan(mean):
        return "n/a"
    return f"{mean:{sign}.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def _three_digits(mean: float, half: float, sign: str = "") -> str:
    return f"{mean:{sign}.3g}" + ("" if math.isnan(half) else f" ± {half:.2g}")


def results_table(records: Mapping[str, Mapping[int, Record]]) -> str:
    """A row per variant: time per step, and the COCO metrics in the records."""
    known = [key for key in FIGURES if any(run[key] is not None for runs in records.values() for run in runs.values())]
    rows = []
    for variant, runs in records.items():
        steps = [run["ms_per_step"] for run in runs.values() if run["ms_per_step"]]
        step = f"{np.median(steps):.0f}" if steps else "n/a"
        rows.append([variant, len(runs), step, *(_with_interval([run[key] for run in runs.values()], _text) for key in known)])
    return _table(rows, ["encoding", "seeds", "ms a step", *known])


def differences_table(group: Group, records: Mapping[str, Mapping[int, Record]]) -> str:
    """A row per variant; per baseline the difference of AP, its p, p by Holm's correction over all variants, and Welch's p."""
    aps = {variant: {seed: run["AP"] for seed, run in runs.items()} for variant, runs in records.items()}
    rows, head = {variant: [variant] for variant in aps}, ["encoding"]
    for baseline in (name for name in group.baselines if name in aps):
        found = {variant: paired(values, aps[baseline]) for variant, values in aps.items() if variant != baseline}
        corrected = dict(zip(found, holm([p for *_, p in found.values()]), strict=True))
        head += [f"AP less {baseline}'s", "p", "p, Holm", "p, unpaired"]
        rows[baseline] += [""] * 4
        for variant, (mean, half, p) in found.items():
            values = (p, corrected[variant], unpaired(aps[variant], aps[baseline]))
            rows[variant] += [_text(mean, half, sign="+"), *("n/a" if math.isnan(value) else f"{value:.3f}" for value in values)]
    return _table(list(rows.values()), head)


def curves_of(plan: Plan, group: Group, records: Mapping[str, Mapping[int, Record]]) -> dict[str, Curves]:
    """AP by iteration, if there are several, and by each of the group's sweeps, without those that were not evaluated."""
    own = [run for variant in group.variants for run in records.get(variant, {}).values()]
    iterations = sorted({int(at) for run in own for at in run["curve"]})
    curves = {"iteration": _curves(records, {at: ("curve", str(at)) for at in iterations})} if len(iterations) > 1 else {}
    for sweep in group.sweeps:
        sets = plan.sweeps[sweep].items()
        curves[sweep] = _curves(records, {place: ("measured", "sweeps", sweep, name) for name, place in sets})
    return {axis: found for axis, found in curves.items() if any(values for along in found.values() for values in along.values())}


def _curves(records: Mapping[str, Mapping[int, Record]], path_of: Mapping[float, Sequence[str]]) -> Curves:
    def values(runs: Mapping[int, Record], path: Sequence[str]) -> Values:
        found = {seed: functools.reduce(lambda part, key: (part or {}).get(key), path, run) for seed, run in runs.items()}
        return {seed: ap for seed, ap in found.items() if ap is not None}

    return {variant: {place: values(runs, path) for place, path in path_of.items()} for variant, runs in records.items()}


def iterations_to(curves: Curves) -> Curves:
    """Iterations by variant and AP, for the last five multiples of 5 that every run reaches; interpolated between evaluations."""
    runs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for variant, along in curves.items():
        for iteration, values in along.items():
            for seed, ap in values.items():
                runs.setdefault((variant, seed), [(0.0, 0.0)]).append((iteration, ap))
    least = min((max(ap for _, ap in run) for run in runs.values()), default=0.0)
    found: Curves = {}
    for level in [5.0 * n for n in range(1, 21) if 5 * n <= least][-5:]:
        for (variant, seed), run in runs.items():
            (x0, y0), (x1, y1) = next(pair for pair in pairwise(run) if pair[1][1] >= level)
            found.setdefault(variant, {}).setdefault(level, {})[seed] = x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return found


def curve_tables(group: Group, curves: Curves, text: Callable[..., str] = _text) -> str:
    """A row per variant, a column per position on the axis: the values, and their differences to those of the baselines."""
    head = ["encoding", *(place if isinstance(place, str) else f"{place:g}" for place in next(iter(curves.values())))]
    rows = [[variant, *(_with_interval(values.values(), text) for values in along.values())] for variant, along in curves.items()]
    parts = [_table(rows, head)]
    for baseline in (name for name in group.baselines if name in curves):
        differences = [
            [variant, *(text(*paired(values, curves[baseline][place])[:2], sign="+") for place, values in along.items())]
            for variant, along in curves.items()
            if variant != baseline
        ]
        parts += [f"less {baseline}'s, paired by seed:", _table(differences, head)]
    return "\n\n".join(parts)


def corrected_over_sweeps(plan: Plan, group: Group, by_axis: Mapping[str, Curves]) -> list[str]:
    """For each baseline, the differences that remain significant when the p of all the sweeps' data sets are corrected together.

    A data set of two sweeps counts once.
    """
    sentences = []
    for baseline in group.baselines:
        found = {
            f"{variant} on {name}": paired(along[place], by_axis[sweep][baseline][place])
            for sweep in group.sweeps
            for name, place in plan.sweeps[sweep].items()
            for variant, along in by_axis.get(sweep, {}).items()
            if variant != baseline and baseline in by_axis[sweep]
        }
        known = {name: difference for name, difference in found.items() if not math.isnan(difference[2])}
        p_values = dict(zip(known, holm([p for _, _, p in known.values()]), strict=True))
        remaining = [f"{name} ({p:.3f})" for name, p in p_values.items() if p < 0.05]
        without_zero = sum(p < 0.05 for _, _, p in known.values())
        if known:
            sentences.append(
                f"Of {len(known)} differences to {baseline} on the sweeps' data sets, {without_zero} have intervals without 0; "
                f"after Holm's correction for all of them remain: {', '.join(remaining) or 'none'}."
            )
    return sentences


def probe_figures(probe: str, records: Mapping[str, Mapping[int, Record]]) -> Curves:
    """The results of a probe, by variant, name and seed."""
    found: Curves = {}
    for variant, runs in records.items():
        for seed, run in runs.items():
            for figure, value in run["measured"]["probes"].get(probe, {}).items():
                found.setdefault(variant, {}).setdefault(figure, {})[seed] = value
    return found


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
    axes.set(xlabel=axis, ylabel="AP", ylim=(0, None), title=f"{group.name}: mean of the seeds, 95 % band")
    axes.grid(alpha=0.3)
    axes.legend()
    path = plan.folder / "figures" / f"{group.name}_{axis}.png"
    save_figure(figure, path)
    return path


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=["left", *["right"] * (len(headers) - 1)])
