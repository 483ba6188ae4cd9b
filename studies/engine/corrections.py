# SPDX-License-Identifier: Apache-2.0
"""Which differences of a study remain significant when the p of many comparisons are corrected together."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from studies.engine.plan import Group, Plan
from studies.engine.run import Record
from studies.engine.statistics import Curves, Values, holm, paired, unpaired

Groups = Mapping[str, Mapping[str, Mapping[int, Record]]]
"""Group -> variant -> seed -> record."""


@dataclass(frozen=True)
class Comparison:
    """One variant beside another.

    Attributes:
        variant: ``group/variant`` of the one.
        baseline: ``group/variant`` of the other.
        data: name of the data set, "" for the one of the training.
        values: seed -> main figure of the variant.
        others: seed -> main figure of the baseline.
    """

    variant: str
    baseline: str
    data: str
    values: Values
    others: Values


def corrected_over_sweeps(plan: Plan, group: Group, by_axis: Mapping[str, Curves]) -> list[str]:
    """For each baseline, the differences that remain significant when the p of all the sweeps' data sets are corrected together.

    A data set of two sweeps counts once.
    """
    sentences = []
    for baseline in group.baselines:
        found = {
            f"{variant} on {name}": paired(along[place], by_axis[sweep][baseline][place])[2]
            for sweep in group.sweeps
            for name, place in plan.sweeps[sweep].items()
            for variant, along in by_axis.get(sweep, {}).items()
            if variant != baseline and baseline in by_axis[sweep]
        }
        sentences += _remaining(found, f"differences to {baseline} on the sweeps' data sets")
    return sentences


def corrected_over_levels(group: Group, reached: Curves, main: str) -> list[str]:
    """For each baseline, the differences of iterations that remain significant after correction, paired and unpaired."""
    sentences = []
    for baseline in (name for name in group.baselines if name in reached):
        pairs = {
            f"{variant} to {level:g}": (values, reached[baseline][level])
            for variant, along in reached.items()
            for level, values in along.items()
            if variant != baseline
        }
        sentences += _remaining(
            {name: paired(*pair)[2] for name, pair in pairs.items()},
            f"differences to {baseline} of the iterations to reach {main}",
            {name: unpaired(*pair) for name, pair in pairs.items()},
        )
    return sentences


def _remaining(p_values: Mapping[str, float], what: str, unpaired_p: Mapping[str, float] | None = None) -> list[str]:
    known = {name: p for name, p in p_values.items() if not math.isnan(p)}
    if not known:
        return []
    without_zero = sum(p < 0.05 for p in known.values())
    also = f"; unpaired (Welch): {_names_after_holm(unpaired_p)}" if unpaired_p else ""
    return [
        f"Of {len(known)} {what}, {without_zero} have intervals without 0; "
        f"after Holm's correction for all of them remain: {_names_after_holm(known)}{also}."
    ]


def _names_after_holm(p_values: Mapping[str, float]) -> str:
    corrected_p = zip(p_values, holm(list(p_values.values())), strict=True)
    return ", ".join(f"{name} ({p:.3f})" for name, p in corrected_p if p < 0.05) or "none"


def all_comparisons(plan: Plan, groups: Groups) -> tuple[list[Comparison], list[Comparison]]:
    """All comparisons that the report contains: of the main figure, and of it on the sweeps' data sets.

    A pair of variants counts once, whichever of them is the baseline and in however many groups they stand, with the most seeds.
    """
    of_ap = (_compare(group, groups[group.name], "", [plan.figures_of(group)[0]]) for group in plan.groups)
    on_sweeps = (
        _compare(group, groups[group.name], name, ["measured", "sweeps", sweep, name])
        for group in plan.groups
        for sweep in group.sweeps
        for name in plan.sweeps[sweep]
    )
    return _distinct(one for found in of_ap for one in found), _distinct(one for found in on_sweeps for one in found)


def _compare(group: Group, records: Mapping[str, Mapping[int, Record]], data: str, path: list[str]) -> Iterator[Comparison]:
    values = {variant: values_at(runs, path) for variant, runs in records.items()}
    for baseline in (name for name in group.baselines if name in records):
        for variant in values:
            if variant != baseline:
                names = (name if "/" in name else f"{group.name}/{name}" for name in (variant, baseline))
                yield Comparison(*names, data, values[variant], values[baseline])


def _distinct(comparisons: Iterable[Comparison]) -> list[Comparison]:
    found: dict[tuple[frozenset[str], str], Comparison] = {}
    for one in comparisons:
        key = (frozenset((one.variant, one.baseline)), one.data)
        if not math.isnan(paired(one.values, one.others)[2]) and (key not in found or len(one.values) > len(found[key].values)):
            found[key] = one
    return list(found.values())


def values_at(runs: Mapping[int, Record], path: Iterable[str]) -> Values:
    """Seed -> the value at a path of keys in its record, without the seeds that have none."""
    found: Values = {}
    for seed, run in runs.items():
        value = run
        for key in path:
            value = (value or {}).get(key)
        if value is not None:
            found[seed] = value
    return found


def corrected(comparisons: Iterable[Comparison]) -> list[tuple[Comparison, float, float]]:
    """Each comparison with its p by Holm's correction for all of them: of the paired test, and of Welch's."""
    comparisons = list(comparisons)
    by_seed = holm([paired(one.values, one.others)[2] for one in comparisons])
    by_welch = holm([unpaired(one.values, one.others) for one in comparisons])
    return list(zip(comparisons, by_seed, by_welch, strict=True))
