# SPDX-License-Identifier: Apache-2.0
"""The rows of ``tests/faults/`` depend on guards of the package: where these are, and that a row fails without its own."""

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from faults import mutate
from faults.case import Case, Cut
from faults.mutate import DOCUMENT, PACKAGE, all_rows, cut_text, document, judge, without

ROWS = [pytest.param(case, id=row) for row, case in all_rows().items()]
TRIED = ["classes: unknown DATASETS.ON_BAD", "images: palette"]


@pytest.mark.parametrize("case", ROWS)
def test_a_row_names_its_guard_where_it_stands(case: Case):
    """A row that refuses something cannot do without; the text of each guard occurs exactly once, and the rest is still Python."""
    assert case.guard
    assert case.cuts or case.code in (0, "none")
    texts = {cut.file: (PACKAGE / cut.file).read_text(encoding="utf-8") for cut in case.cuts}
    for cut in case.cuts:
        texts[cut.file] = cut_text(texts[cut.file], cut)
        assert cut.old != cut.new
    for text in texts.values():
        ast.parse(text)


def test_the_record_is_of_the_rows_there_are():
    """After a change to a row: ``PYTHONPATH=tests python -m faults.mutate --write --row NAME``; all take half an hour."""
    rows = {row: case for row, case in all_rows().items() if case.cuts}
    record = mutate.read_record()
    assert record.keys() == rows.keys()
    assert [row for row, case in rows.items() if not mutate.is_of(record[row], case)] == []
    assert [row for row, ended in record.items() if not mutate.is_good(mutate.Result(row, ended["why"], ended["verdict"]))] == []
    assert DOCUMENT.read_text(encoding="utf-8") == document(all_rows())


def test_the_record_keeps_how_a_row_ended_last(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate, "RECORD", tmp_path / "mutants.json")
    one, other = (Case(name, lambda folder: None, "", guard=Cut("common/errors.py", name, "")) for name in ("one", "other"))
    rows = {"a: one": one, "a: other": other, "a: plain": Case("plain", lambda folder: None, "", 0, guard="nothing is at fault")}
    mutate.write_record([mutate.Result("a: one", "ended\nwith 0", "killed")], rows, "c1")
    assert "2 have a guard, and 1 of them failed" in document(rows)
    assert "| a: other | None |" in document(rows)
    mutate.write_record([mutate.Result("a: other", "", "survives, unexplained")], rows, "c2")
    assert mutate.read_record()["a: one"] == {
        "verdict": "killed", "why": "ended with 0", "guard": [["common/errors.py", "one", ""]], "expects": [2, ""], "commit": "c1",
    }  # fmt: skip
    assert "| a: other | survives, unexplained |" in document(rows)
    for changed in (
        replace(one, guard=Cut("common/errors.py", "another guard", "")),
        replace(one, code=0),
        replace(one, says="less"),
    ):
        rows["a: one"] = changed
        assert "2 have a guard, and 0 of them failed" in document(rows)
    del rows["a: other"]
    mutate.write_record([], rows, "c3")
    assert list(mutate.read_record()) == ["a: one"]


@pytest.mark.timeout(600)
def test_rows_fail_without_their_guards():
    """Two of them; the script takes all."""
    words = [word for row in TRIED for word in ("--row", row)]
    command = [sys.executable, "-m", "faults.mutate", *words]
    result = subprocess.run(command, cwd=Path(mutate.__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 rows, 2 with a guard, 2 as they should be" in result.stdout


@pytest.mark.parametrize(
    ("with_guard", "without_guard", "survives", "verdict"),
    [
        ("", "ended with 0, not 2", "", "killed"),
        ("", "", "", "survives, unexplained"),
        ("", "", "another guard", "survives: another guard"),
        ("", "ended with 0, not 2", "another guard", "was killed, though it explains why not"),
        ("", "NameError: name 'x' is not defined", "", "the mutant does not run"),
        ("ended with 0, not 2", "", "", "fails with its guard"),
    ],
)
def test_only_a_row_that_fails_for_want_of_its_guard_is_killed(tmp_path, monkeypatch, with_guard, without_guard, survives, verdict):
    cut = Cut("common/errors.py", "class ConfigError(BadInputError):", "class ConfigError(ValueError):")
    case = Case("a row", lambda folder: None, "", guard=cut, survives=survives)
    (tmp_path / "cpvt_det/common").mkdir(parents=True)
    copy = tmp_path / "cpvt_det" / cut.file
    copy.write_bytes((PACKAGE / cut.file).read_bytes())

    def meet_apart(row: str, root: Path) -> str:
        return without_guard if cut.new in copy.read_text(encoding="utf-8") else with_guard

    monkeypatch.setattr(mutate, "meet_apart", meet_apart)
    result = judge("area: a row", case, tmp_path)
    assert result.verdict == verdict
    assert mutate.is_good(result) == (verdict == "killed" or verdict.startswith("survives: "))
    assert copy.read_bytes() == (PACKAGE / cut.file).read_bytes()


def test_a_guard_that_has_gone_is_an_error(tmp_path):
    (tmp_path / "cpvt_det/common").mkdir(parents=True)
    (tmp_path / "cpvt_det/common/errors.py").write_bytes((PACKAGE / "common/errors.py").read_bytes())
    with (
        pytest.raises(ValueError, match="contains 0 times, not once: gone"),
        without([Cut("common/errors.py", "gone", "")], tmp_path),
    ):
        pass
