# SPDX-License-Identifier: Apache-2.0
"""Answers to a plan's questions: against a least-squares fit of the whole group, and in words."""

import math

import numpy as np
import pytest
from scipy import stats

from studies.engine.questions import Answer, answer

VALUES = {
    "none": {0: 10.0, 1: 12.5, 2: 11.0},
    "sine": {0: 13.0, 1: 14.5, 2: 14.5},
    "peg": {0: 13.5, 1: 16.0, 2: 13.0},
    "rope": {0: 12.0, 1: 15.0, 2: 14.0},
}


def fitted(values, variant, baseline, level):
    """Difference and half interval of a linear model with a column per variant and per seed but the first."""
    variants, seeds = list(values), sorted(next(iter(values.values())))
    rows = [(v, s) for v in range(len(variants)) for s in range(len(seeds))]
    x = np.array([[*np.eye(len(variants))[v], *np.eye(len(seeds))[s][1:]] for v, s in rows])
    y = np.array([values[variants[v]][seeds[s]] for v, s in rows])
    beta = np.linalg.lstsq(x, y, rcond=None)[0]
    freedom = len(rows) - x.shape[1]
    contrast = np.zeros(x.shape[1])
    contrast[variants.index(variant)], contrast[variants.index(baseline)] = 1, -1
    variance = np.square(y - x @ beta).sum() / freedom * contrast @ np.linalg.inv(x.T @ x) @ contrast
    return contrast @ beta, math.sqrt(variance) * stats.t.ppf(1 - (1 - level) / 2, freedom)


@pytest.mark.parametrize("questions", [1, 6])
def test_a_difference_is_that_of_a_linear_model(questions):
    found = answer("peg", "none", VALUES, questions)
    assert (found.difference, found.half) == pytest.approx(fitted(VALUES, "peg", "none", 1 - 0.05 / questions))
    assert found.seeds == 3


def test_only_seeds_of_all_variants_count():
    more = {name: {**of_seed, 7: 90.0} for name, of_seed in VALUES.items() if name != "rope"} | {"rope": VALUES["rope"]}
    assert answer("peg", "none", more) == answer("peg", "none", VALUES)
    assert answer("peg", "none", VALUES | {"rope": {0: math.nan, 1: 1.0, 2: 1.0}}).seeds == 2  # an encoding that refused a size


def test_answers_in_words():
    assert str(Answer(2.0, 1.5, 3)) == "better" and str(Answer(-2.0, 1.5, 3)) == "worse"
    assert str(Answer(-1.0, 1.5, 3)) == "no further apart than 2.5"
    alone = {name: {0: of_seed[0]} for name, of_seed in VALUES.items()}
    assert str(answer("peg", "none", alone)) == "not known" and answer("peg", "none", alone).difference == 3.5
    assert str(answer("peg", "none", {name: {} for name in VALUES})) == "not known"
