# SPDX-License-Identifier: Apache-2.0
"""The statistics of a study's report, by hand; the page of the committed study has the report's tables."""

import math
import re
from pathlib import Path

import pytest

from studies.engine.report import iterations_to
from studies.engine.statistics import holm, interval, paired, unpaired

ROOT = Path(__file__).parents[2]


def test_interval_by_hand():
    """Of 1, 2, 3: standard deviation 1, t of 2 degrees of freedom 4.3027, so 4.3027 / sqrt(3)."""
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval([5.0])[0] == 5 and math.isnan(interval([5.0])[1])


def test_paired_differences_by_hand():
    """Differences 1, 2, 3 of the common seeds: t = 2 / (1 / sqrt(3)), p = 0.0742 two-sided; seed 9 has no partner."""
    mean, half, p = paired({0: 2.0, 1: 4.0, 2: 6.0, 9: 50.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert (mean, half) == (2, pytest.approx(4.302653 / math.sqrt(3), rel=1e-6))
    assert p == pytest.approx(0.0742, abs=1e-4)
    assert all(math.isnan(value) for value in paired({0: 1.0}, {1: 1.0}))
    assert math.isnan(paired({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0})[2])  # equal differences: no test
    assert math.isnan(paired({0: 0.3, 1: 0.2}, {0: 0.2, 1: 0.1})[2])  # equal but for rounding: p would be 1e-16


def test_unpaired_p_is_welch_s_by_hand():
    """1, 2, 3 and 2, 4, 6: t = 2 / sqrt(1/3 + 4/3) = 1.549 with 2.94 degrees of freedom; the order of the seeds does not count."""
    expected = pytest.approx(0.2209, abs=1e-4)
    assert unpaired({0: 2.0, 1: 4.0, 2: 6.0}, {0: 1.0, 1: 2.0, 2: 3.0}) == expected
    assert unpaired({0: 6.0, 1: 2.0, 2: 4.0}, {3: 1.0, 4: 2.0, 5: 3.0}) == expected
    assert math.isnan(unpaired({0: 1.0}, {0: 2.0, 1: 3.0}))
    assert math.isnan(unpaired({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}))
    assert math.isnan(unpaired({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}))  # p would be 0


@pytest.mark.filterwarnings("error")
def test_unpaired_p_of_a_variant_with_one_value_by_hand():
    """1, 1 and 2, 4: t = 2 / sqrt(2 / 2) = 2 with one degree of freedom, p = 1 - 2 atan(2) / pi, and no warning."""
    assert unpaired({0: 1.0, 1: 1.0}, {0: 2.0, 1: 4.0}) == pytest.approx(1 - 2 * math.atan(2) / math.pi)


def test_holm_by_hand():
    """0.01 of three is 0.03, 0.02 of two 0.04, and 0.035 of one is no less than what comes before it."""
    assert holm([0.035, math.nan, 0.01, 0.02]) == pytest.approx([0.04, math.nan, 0.03, 0.04], nan_ok=True)
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_iterations_to_an_ap_by_hand():
    curves = {
        "peg": {100: {0: 4.0, 1: 8.0}, 200: {0: 8.0, 1: 6.0}, 300: {0: 12.0, 1: 14.0}},
        "none": {100: {0: 0.0}, 200: {0: 10.0}, 300: {0: 11.0}},
    }
    found = iterations_to(curves)
    assert found == {"peg": {5: {0: 125, 1: 62.5}, 10: {0: 250, 1: 250}}, "none": {5: {0: 150}, 10: {0: 200}}}
    curves["none"][300][0] = curves["none"][200][0] = 4.0
    assert iterations_to(curves) == {}


def columns_of(table: str) -> list[tuple[str, ...]]:
    """Columns of a Markdown table, without the padding of their cells and the line below the headings."""
    heading, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    return list(zip(heading, *rows, strict=True))


def is_part_of(table: str, whole: str) -> bool:
    """Whether a table is another's first column beside neighbouring columns of it, with every row."""
    (first, *others), (label, *values) = columns_of(table), columns_of(whole)
    runs = [values[start : start + len(others)] for start in range(len(values))]
    return first == label and others in runs


def test_a_part_of_a_table_is_told_from_another_table():
    whole = "| a | p | q | r |\n|:--|--:|--:|--:|\n| x | 1 | 2 | 3 |\n| y | 4 | 5 | 6 |"
    assert is_part_of(whole, whole)
    assert is_part_of("| a   | q | r |\n|--|--|--|\n| x | 2 | 3 |\n| y | 5 | 6 |", whole)
    assert not is_part_of("| a | q | r |\n|--|--|--|\n| x | 2 | 3 |\n| y | 5 | 7 |", whole)
    assert not is_part_of("| a | p | r |\n|--|--|--|\n| x | 1 | 3 |\n| y | 4 | 6 |", whole)
    assert not is_part_of("| a | q | r |\n|--|--|--|\n| x | 2 | 3 |", whole)
    assert not is_part_of("| b | q | r |\n|--|--|--|\n| x | 2 | 3 |\n| y | 5 | 6 |", whole)


def test_tables_of_the_study_s_page_are_those_of_its_report():
    """Each is in the section of the report that the lines above it name: (report: `group`, section), with all its rows."""
    report = (ROOT / "studies/position_encodings/report.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/position_encodings.md").read_text(encoding="utf-8")
    section, tables = None, 0
    for block in page.split("\n\n"):
        for group, part in re.findall(r"\(report: `(\w+)`(?:, ([\w ]+))?[;)]", block):
            of_group = report.split(f"\n## {group}\n")[1].split("\n## ")[0]
            section = of_group.split(f"\n### {part}\n")[1].split("\n### ")[0] if part else of_group.split("\n### ")[0]
        if block.startswith("#"):
            section = None
        if block.startswith("| encoding"):
            tables += 1
            wholes = [whole for whole in section.split("\n\n") if whole.strip().startswith("|")]
            assert any(is_part_of(block, whole) for whole in wholes), block
    assert tables >= 5
