# SPDX-License-Identifier: Apache-2.0
"""kill -9 in the middle of a save."""

from faults import records
from faults.kills import kill
from faults.report import DOCUMENT


def test_no_kill_loses_a_checkpoint(tmp_path):
    """Five here; ``faults/kills.py`` alone takes as many as it is asked for."""
    count = kill(5, tmp_path)
    assert (count.kills, count.lost, count.outdated, count.damaged) == (5, 0, 0, 0)


def test_the_document_has_the_record_of_many_kills():
    found = records.read("kills")
    assert (found["lost"], found["outdated"], found["damaged"]) == (0, 0, 0)
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert f"Of {found['kills']} kills, {found['during_a_save']} came in the middle of a save" in text
