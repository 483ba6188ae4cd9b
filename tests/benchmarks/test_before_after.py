# SPDX-License-Identifier: Apache-2.0
"""The table of two checkouts beside each other."""

import pytest

from benchmarks import before_after


def runs(seconds, peak, outcome=1.0):
    return [{"seconds": {"case": value}, "outcomes": {"case": outcome}, "peak_mib": peak} for value in seconds]


def test_ratios_are_of_pairs_in_a_round():
    """Rounds of 2 / 1, 3 / 1 and 8 / 2 seconds: ratios 2, 3 and 4."""
    text = before_after.table(("old", runs([2.0, 3.0, 8.0], 100)), ("new", runs([1.0, 1.0, 2.0], 80)))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["case", "old", "new", "ratio (quartiles)"]
    assert rows[2] == ["case", "3.000", "1.000", "3.000 (2.500 to 3.500)"]
    assert rows[3] == ["peak memory, MiB", "100", "80", "1.250 (1.250 to 1.250)"]
    assert text.endswith("Sums of all logits and boxes are equal to the last digit.")


def test_other_answers_are_said():
    text = before_after.table(("old", runs([1.0], 1, outcome=-2.0)), ("new", runs([1.0], 1, outcome=-3.0)))
    assert text.endswith("Sums of all logits and boxes differ by at most 5.0e-01 of themselves.")


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0]])
def test_few_rounds_have_quartiles_too(values):
    assert before_after.quartiles(values) == "2.000 (2.000 to 2.000)"
