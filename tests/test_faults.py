# SPDX-License-Identifier: Apache-2.0
"""Every row of ``tests/faults/`` ends as its table says, and the document holds every row."""

import re

import pytest
from faults.case import Case
from faults.report import DOCUMENT, areas, report

ROWS = [
    pytest.param(case, id=f"{area.__name__.split('.')[-1]}: {case.what}") for area in areas() for case in getattr(area, "CASES", ())
]


@pytest.mark.parametrize("case", ROWS)
def test_fault_ends_as_its_row_says(case: Case, tmp_path):
    ending = case.run(tmp_path)
    assert ending.code == case.code, ending.text
    assert re.search(".*".join(map(re.escape, case.says.split("..."))), ending.text, re.DOTALL), ending.text


def test_document_holds_every_row():
    """After a change to a table: ``PYTHONPATH=tests python -m faults.report``."""
    assert DOCUMENT.read_text(encoding="utf-8") == report()


def test_rows_of_an_area_have_names_of_their_own():
    for area in areas():
        names = [case.what for case in getattr(area, "CASES", ())]
        assert len(set(names)) == len(names)
