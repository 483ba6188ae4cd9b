# SPDX-License-Identifier: Apache-2.0
"""The answers to the questions of a plan: better, worse, or no further apart than X.

A group's values are taken as the sum of a variant's part, a seed's part and a rest; the rest of all variants together gives the
interval of a difference. That needs fewer seeds than a test of each pair by itself, and assumes an equal spread of all variants.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats
from tabulate import tabulate

from studies.engine.corrections import Groups
from studies.engine.plan import Panel, Plan, Question
from studies.engine.run import Record


@dataclass(frozen=True)
class Answer:
    """One difference, with its interval.

    Attributes:
        difference: the variant's mean less the baseline's.
        half: half of the interval, which is the smallest difference that could be seen; NaN for a single seed.
        seeds: number of seeds.
    """

    difference: float
    half: float
    seeds: int

    def __str__(self) -> str:
        if abs(self.difference) > self.half:
            return "better" if self.difference > 0 else "worse"
        return "not known" if math.isnan(self.half) else f"no further apart than {abs(self.difference) + self.half:.1f}"


def answer(variant: str, baseline: str, values: Mapping[str, Mapping[int, float]], questions: int = 1) -> Answer:
    """Compare two variants.

    Args:
        variant, baseline: names of the two.
        values: variant -> seed -> value, for all variants of the group; only seeds for which all have a value are used.
        questions: number of questions whose intervals hold together at 95 % (Bonferroni).
    """
    seeds = [seed for seed in values[variant] if all(math.isfinite(of_seed.get(seed, math.nan)) for of_seed in values.values())]
    table = np.array([[of_seed[seed] for seed in seeds] for of_seed in values.values()])  # (variants, seeds)
    difference = float(np.mean([values[variant][seed] - values[baseline][seed] for seed in seeds])) if seeds else math.nan
    freedom = (len(values) - 1) * (len(seeds) - 1)
    if freedom < 1:
        return Answer(difference, math.nan, len(seeds))
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    error = math.sqrt(2 / len(seeds) * float(np.square(rest).sum()) / freedom)
    return Answer(difference, error * float(stats.t.ppf(1 - 0.025 / questions, freedom)), len(seeds))


def answers_of(plan: Plan, groups: Groups) -> Iterable[str]:
    """A table with a row for each question, and a sentence about the intervals."""
    rows = []
    for question in plan.questions:
        found = answer(question.variant, question.baseline, values_of(plan, question, groups), len(plan.questions))
        pair = f"{question.variant} less {question.baseline}"
        rows.append([question.text, question.group, pair, f"{found.difference:+.1f} ± {found.half:.1f}", found, found.seeds])
    head = ["question", "group", "difference of", "difference", "answer", "seeds"]
    yield tabulate(rows, head, tablefmt="pipe", disable_numparse=True)
    yield f"All {len(rows)} intervals hold together at 95 %."


def values_of(plan: Plan, of: Question | Panel, groups: Groups) -> dict[str, dict[int, float]]:
    """What is asked or shown, by variant and seed; NaN where a variant refused a data set."""
    group, records = plan.group(of.group), groups[of.group]
    main = plan.figures_of(group)[0]
    return {name: {seed: _value(of, main, run) for seed, run in records.get(name, {}).items()} for name in group.variants}


def _value(of: Question | Panel, main: str, run: Record) -> float:
    on = {name: value for sweep in run["measured"]["sweeps"].values() for name, value in sweep.items()}
    numbers = [(weight, on[name]) for name, weight in of.value.items()] or [(1.0, run[main])]
    return math.nan if any(value is None for _, value in numbers) else sum(weight * value for weight, value in numbers)
