# SPDX-License-Identifier: Apache-2.0
"""Intervals over seeds, differences between variants, and the correction of their p."""

import math
import warnings
from collections.abc import Sequence

import numpy as np
from scipy import stats

Values = dict[int, float]
"""Seed -> value."""
Curves = dict[str, dict[float | str, Values]]
"""Variant -> position on an axis -> AP or another metric by seed; for a probe, variant -> name -> value by seed."""
ROUND_OFF = 1e-9
"""Values of a study that are closer are equal: a test of what is left of their difference would be one of rounding."""


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
    p = float(stats.ttest_1samp(differences, 0).pvalue) if len(seeds) > 1 and np.ptp(differences) > ROUND_OFF else math.nan
    return mean, half, p


def unpaired(values: Values, others: Values) -> float:
    """The p of Welch's test, which takes runs of equal seeds to be independent; NaN where neither has a spread."""
    one, other = list(values.values()), list(others.values())
    if min(len(one), len(other)) < 2 or max(np.ptp(one), np.ptp(other)) <= ROUND_OFF:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of two seeds one variant may have the same value twice
        return float(stats.ttest_ind(one, other, equal_var=False).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction of p for multiple comparisons; NaN remains, and is not counted."""
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    corrected, least = list(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p))
        corrected[index] = least
    return corrected
