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
from tabulate import tabulate

from studies.engine.corrections import (
    Comparison,
    Groups,
    all_comparisons,
    corrected,
    corrected_over_levels,
    corrected_over_sweeps,
    values_at,
)
from studies.engine.figures import draw_figure, draw_panels
from studies.engine.plan import Group, Plan, load_plan
from studies.engine.questions import answers_of, values_of
from studies.engine.run import Record, is_done, read_record
from studies.engine.statistics import Curves, holm, interval, paired, unpaired


def write_report(path: Path) -> list[Path]:
    """Write ``report.md`` and ``figures/`` beside the plan, from the records that match the current plan.

    Returns:
        The paths of the files.

    Raises:
        BadInputError: a plan that cannot be read.
    """
    plan = load_plan(path)
    parts, files = [f"# {plan.folder.name}", f"`python -m studies report {os.path.relpath(path)}`"], []
    groups = {group.name: read_group(plan, group) for group in plan.groups}
    for group in plan.groups:
        records = groups[group.name]
        if not records.keys() & group.variants.keys():
            continue
        figures = plan.figures_of(group)
        parts += [f"## {group.name}", results_table(records, figures)]
        parts += (
            [f"paired by seed:\n\n{differences_table(group, records, figures[0])}"] if records.keys() & set(group.baselines) else []
        )
        by_axis = curves_of(plan, group, records)
        for axis, curves in by_axis.items():
            parts.append(f"### {figures[0]} by {axis}\n\n{curve_tables(group, curves)}")
            files.append(draw_figure(plan, group, axis, curves))
            if axis == "iteration" and (reached := iterations_to(curves)):
                parts.append(
                    f"### iterations to reach {figures[0]}\n\n{curve_tables(group, reached, functools.partial(_text, digits=0))}"
                )
                parts += corrected_over_levels(group, reached, figures[0])
        if sentences := corrected_over_sweeps(plan, group, by_axis):
            parts += ["### all sweeps", *sentences]
        for probe in group.probes:
            if measured := probe_figures(probe, records):
                parts.append(f"### {probe}\n\n{curve_tables(group, measured, _three_digits)}")
    if plan.questions:
        parts += ["## Questions", *answers_of(plan, groups)]
    if plan.panels:
        files.append(draw_panels(plan, [values_of(plan, panel, groups) for panel in plan.panels]))
    parts += [*whole_study(plan, groups), _account(plan)]
    report = plan.folder / "report.md"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [report, *files]


def read_group(plan: Plan, group: Group) -> dict[str, dict[int, Record]]:
    """The existing records of a group and of the variants ``beside`` it, by variant and seed."""
    found: dict[str, dict[int, Record]] = {}
    runs = list(plan.runs())
    for name in (*group.beside, *group.variants):
        of = name if "/" in name else f"{group.name}/{name}"
        seeds = (run for run in runs if run.name.rpartition("/")[0] == of and run.seed in group.seed_range)
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


def _with_interval(values: Iterable[float | None], text: Callable[..., str]) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return text(*interval(known)) if known else "n/a"


def _text(mean: float, half: float, digits: int = 1, sign: str = "") -> str:
    if math.isnan(mean):
        return "n/a"
    return f"{mean:{sign}.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def _three_digits(mean: float, half: float, sign: str = "") -> str:
    return f"{mean:{sign}.3g}" + ("" if math.isnan(half) else f" ± {half:.2g}")


def results_table(records: Mapping[str, Mapping[int, Record]], figures: Sequence[str]) -> str:
    """A row per variant: CPU time of a training, and the figures that are in the records.

    The time is a median, since older records lack what killed attempts used.
    """
    known = [key for key in figures if any(run[key] is not None for runs in records.values() for run in runs.values())]
    rows = []
    for variant, runs in records.items():
        seconds = f"{np.median([run['cpu_seconds'] for run in runs.values()]):.0f}"
        rows.append([variant, len(runs), seconds, *(_with_interval([run[key] for run in runs.values()], _text) for key in known)])
    return _table(rows, ["encoding", "seeds", "CPU s per run", *known])


def differences_table(group: Group, records: Mapping[str, Mapping[int, Record]], main: str) -> str:
    """A row per variant; per baseline the difference of the main figure, its p, p by Holm's correction over all variants, and
    Welch's p."""
    of = {variant: {seed: run[main] for seed, run in runs.items()} for variant, runs in records.items()}
    rows, head = {variant: [variant] for variant in of}, ["encoding"]
    for baseline in (name for name in group.baselines if name in of):
        found = {variant: paired(values, of[baseline]) for variant, values in of.items() if variant != baseline}
        by_holm = dict(zip(found, holm([p for *_, p in found.values()]), strict=True))
        head += [f"{main} less {baseline}'s", "p", "p, Holm", "p, unpaired"]
        rows[baseline] += [""] * 4
        for variant, (mean, half, p) in found.items():
            values = (p, by_holm[variant], unpaired(of[variant], of[baseline]))
            rows[variant] += [_text(mean, half, sign="+"), *("n/a" if math.isnan(value) else f"{value:.3f}" for value in values)]
    return _table(list(rows.values()), head)


def curves_of(plan: Plan, group: Group, records: Mapping[str, Mapping[int, Record]]) -> dict[str, Curves]:
    """The main figure by iteration, if there are several, and by each sweep of the group that was evaluated."""
    own = [run for variant in group.variants for run in records.get(variant, {}).values()]
    iterations = sorted({int(at) for run in own for at in run["curve"]})
    curves = {"iteration": _curves(records, {at: ("curve", str(at)) for at in iterations})} if len(iterations) > 1 else {}
    for sweep in group.sweeps:
        sets = plan.sweeps[sweep].items()
        curves[sweep] = _curves(records, {place: ("measured", "sweeps", sweep, name) for name, place in sets})
    return {axis: found for axis, found in curves.items() if any(values for along in found.values() for values in along.values())}


def _curves(records: Mapping[str, Mapping[int, Record]], path_of: Mapping[float, Sequence[str]]) -> Curves:
    return {variant: {place: values_at(runs, path) for place, path in path_of.items()} for variant, runs in records.items()}


def whole_study(plan: Plan, groups: Groups) -> list[str]:
    """What remains significant when all comparisons of the study are corrected together; nothing for fewer than two comparisons."""
    parts, main = [], " and ".join(dict.fromkeys(plan.figures_of(group)[0] for group in plan.groups))
    for what, found in zip((main, f"{main} on the sweeps' data sets"), all_comparisons(plan, groups), strict=True):
        if len(found) > 1:
            without_zero = sum(paired(one.values, one.others)[2] < 0.05 for one in found)
            rows = [_row(*one) for one in corrected(found) if min(one[1:]) < 0.05]
            parts.append(
                f"Of {len(found)} differences of {what}, {without_zero} have intervals without 0. "
                f"After Holm's correction for all of them, paired or unpaired (Welch), remain: {'' if rows else 'none.'}".rstrip()
            )
            if rows:
                parts.append(_table(rows, ["encoding", "less that of", "on", "difference", "p, Holm", "p, unpaired, Holm"]))
    return ["## all comparisons", *parts] if parts else []


def _row(one: Comparison, by_seed: float, by_welch: float) -> list[str]:
    difference = _text(*paired(one.values, one.others)[:2], sign="+")
    return [one.variant, one.baseline, one.data or "the training's", difference, f"{by_seed:.3f}", f"{by_welch:.3f}"]


def iterations_to(curves: Curves) -> Curves:
    """Iterations by variant and main figure, for the last five multiples of 5 that every run reaches; interpolated."""
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


def probe_figures(probe: str, records: Mapping[str, Mapping[int, Record]]) -> Curves:
    """The results of a probe, by variant, name and seed."""
    found: Curves = {}
    for variant, runs in records.items():
        for seed, run in runs.items():
            for figure, value in run["measured"]["probes"].get(probe, {}).items():
                found.setdefault(variant, {}).setdefault(figure, {})[seed] = value
    return found


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=["left", *["right"] * (len(headers) - 1)])
