# SPDX-License-Identifier: Apache-2.0
"""kill -9 in the middle of a save."""

from faults.kills import kill


def test_no_kill_loses_a_checkpoint(tmp_path):
    """Five here; ``faults/kills.py`` alone takes as many as it is asked for."""
    count = kill(5, tmp_path)
    assert (count.kills, count.lost, count.outdated, count.damaged) == (5, 0, 0, 0)
