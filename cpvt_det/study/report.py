# SPDX-License-Identifier: Apache-2.0
"""The records of a study -> tables with 95 % intervals over seeds, paired by seed, and figures."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tabulate import tabulate

from cpvt_det.evaluation.curves import new_figure, save_figure
from cpvt_det.study.plan import Group, Plan, load_plan

Record = dict[str, Any]
Values = dict[int, float]
"""By seed."""
FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def write_report(path: Path) -> list[Path]:
    """Write ``report.md`` beside the plan and the figures beside it.

    Returns:
        The files.

    Raises:
        ConfigError: a plan that cannot be read.
    """
    plan = load_plan(path)
    parts, files = [f"# {plan.folder.name}", f"`cpvt-det study report {path.as_posix()}`"], []
    for group in plan.groups:
        records = read_group(plan, group)
        if not records:
            continue
        parts += [f"## {group.name}", results_table(group, records)]
        parts += [f"### AP by {sweep}\n\n{sweep_tables(plan, group, sweep, records)}" for sweep in group.sweeps]
        parts += [f"### {probe}\n\n{probe_table(probe, records)}" for probe in group.probes]
        files += draw_group(plan, group, records)
    seconds = sum(
        record["seconds"] for group in plan.groups for runs in read_group(plan, group).values() for record in runs.values()
    )
    parts.append(f"{seconds / 3600:.1f} hours of one core for training.")
    report = plan.folder / "report.md"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [report, *files]


def read_group(plan: Plan, group: Group) -> dict[str, dict[int, Record]]:
    """The records there are, by variant and seed; with those of a baseline of another group, of the group's seeds."""
    names = {variant: f"{group.name}/{variant}" for variant in group.variants}
    if "/" in group.baseline:
        names = {group.baseline: group.baseline, **names}
    found = {}
    for variant, name in names.items():
        paths = {seed: plan.record_path(f"{name}/{seed}") for seed in range(group.seeds)}
        records = {seed: json.loads(path.read_text(encoding="utf-8")) for seed, path in paths.items() if path.is_file()}
        if records:
            found[variant] = records
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t; NaN of a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    return mean, float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))


def paired(values: Values, others: Values) -> tuple[float, float, float]:
    """The mean difference over the seeds of both, half its 95 % interval, and the p of Student's paired test."""
    seeds = sorted(values.keys() & others.keys())
    differences = [values[seed] - others[seed] for seed in seeds]
    if not seeds:
        return math.nan, math.nan, math.nan
    mean, half = interval(differences)
    p = float(stats.ttest_1samp(differences, 0).pvalue) if len(seeds) > 1 and np.ptp(differences) > 0 else math.nan
    return mean, half, p


def results_table(group: Group, records: Mapping[str, Mapping[int, Record]]) -> str:
    """A row for each variant: the figures of COCO that there are, the difference of AP to the baseline, CPU time a step."""
    known = [key for key in FIGURES if any(run[key] is not None for runs in records.values() for run in runs.values())]
    aps = {variant: {seed: run["AP"] for seed, run in runs.items()} for variant, runs in records.items()}
    rows = []
    for variant, runs in records.items():
        figures = [_with_interval([run[key] for run in runs.values()], 1) for key in known]
        step = np.median([1000 * run["seconds"] / run["iterations"] for run in runs.values()])
        rows.append([variant, len(runs), *figures, *_difference(aps, variant, group.baseline), f"{step:.0f}"])
    against = [f"AP less {group.baseline}'s", "p"] if group.baseline in records else []
    return _table(rows, ["encoding", "seeds", *known, *against, "ms a step"])


def _difference(values: Mapping[str, Values], variant: str, baseline: str) -> list[str]:
    """Of the means, and its p; nothing without a baseline, empty for the baseline itself."""
    if baseline not in values:
        return []
    if variant == baseline:
        return ["", ""]
    mean, half, p = paired(values[variant], values[baseline])
    return [_text(mean, half, 1, "+"), "n/a" if math.isnan(p) else f"{p:.3f}"]


def sweep_tables(plan: Plan, group: Group, sweep: str, records: Mapping[str, Mapping[int, Record]]) -> str:
    """A row for each variant, a column for each data set of the sweep: AP, and its difference to the baseline's."""
    sets = plan.sweeps[sweep]
    head = ["encoding", *(f"{value:g}" for value in sets.values())]
    aps = {variant: {name: _of_sweep(runs, sweep, name) for name in sets} for variant, runs in records.items()}
    rows = [[variant, *(_with_interval(list(values.values()), 1) for values in found.values())] for variant, found in aps.items()]
    if group.baseline not in aps:
        return _table(rows, head)
    others = [variant for variant in aps if variant != group.baseline]
    differences = [
        [variant, *(_text(*paired(aps[variant][n], aps[group.baseline][n])[:2], 1, "+") for n in sets)] for variant in others
    ]
    return f"{_table(rows, head)}\n\nless {group.baseline}'s, paired by seed:\n\n{_table(differences, head)}"


def probe_table(probe: str, records: Mapping[str, Mapping[int, Record]]) -> str:
    """A row for each variant, a column for each figure of the probe, in three digits."""
    measured = {
        variant: [run["probes"][probe] for run in runs.values() if probe in run["probes"]] for variant, runs in records.items()
    }
    measured = {variant: taken for variant, taken in measured.items() if taken}
    keys = list(next(iter(measured.values()))[0]) if measured else []
    rows = [[variant, *(_digits(*interval([one[key] for one in taken])) for key in keys)] for variant, taken in measured.items()]
    return _table(rows, ["encoding", *keys])


def draw_group(plan: Plan, group: Group, records: Mapping[str, Mapping[int, Record]]) -> list[Path]:
    """AP by iteration, and by each of the group's sweeps: means, with 95 % bands."""
    drawn = [_draw(plan, group, "iteration", _curves(records))]
    for sweep in group.sweeps:
        points = {
            variant: {value: list(_of_sweep(runs, sweep, name).values()) for name, value in plan.sweeps[sweep].items()}
            for variant, runs in records.items()
        }
        drawn.append(_draw(plan, group, sweep, points))
    return drawn


def _curves(records: Mapping[str, Mapping[int, Record]]) -> dict[str, dict[float, list[float]]]:
    return {
        variant: {
            int(at): [run["curve"][at] for run in runs.values() if at in run["curve"]] for at in next(iter(runs.values()))["curve"]
        }
        for variant, runs in records.items()
    }


def _draw(plan: Plan, group: Group, axis: str, series: Mapping[str, Mapping[float, Sequence[float]]]) -> Path:
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for place, (variant, points) in enumerate(series.items()):
        known = {x: interval(values) for x, values in points.items() if values}
        x, means, halves = (np.array(part) for part in (list(known), *zip(*known.values(), strict=True)))
        axes.plot(x, means, color=f"C{place % 10}", marker=".", linestyle="--" if place > 9 else "-", label=variant)
        axes.fill_between(x, means - halves, means + halves, color=f"C{place % 10}", alpha=0.12, linewidth=0)
    if axis != "iteration":
        axes.set_xscale("log")
        ticks = list(next(iter(series.values())))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.minorticks_off()
    axes.set(xlabel=axis, ylabel="AP", ylim=(0, None), title=f"{group.name}: mean of the seeds, 95 % band")
    axes.grid(alpha=0.3)
    axes.legend()
    path = plan.folder / "figures" / f"{group.name}_{axis}.png"
    save_figure(figure, path)
    return path


def _of_sweep(runs: Mapping[int, Record], sweep: str, name: str) -> Values:
    """AP of the seeds on a data set; none where the encoding refuses it, or it was not evaluated."""
    values = {seed: run["sweeps"].get(sweep, {}).get(name) for seed, run in runs.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def _with_interval(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return _text(*interval(known), digits) if known else "n/a"


def _text(mean: float, half: float, digits: int, sign: str = "") -> str:
    if math.isnan(mean):
        return "n/a"
    return f"{mean:{sign}.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def _digits(mean: float, half: float) -> str:
    return f"{mean:.3g}" + ("" if math.isnan(half) else f" ± {half:.2g}")


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=["left", *["right"] * (len(headers) - 1)])
