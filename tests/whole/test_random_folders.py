# SPDX-License-Identifier: Apache-2.0
"""Folders written at random, with one to three oddities: they are read as they were meant, or refused by a message that names one.

The same folders each time. ``PYTHONPATH=tests python -m faults.fuzz 10000 test_random_folders.py`` tries more.
"""

import os
import tempfile
from pathlib import Path

import pytest
from faults.folders import QUIRKS, Quirk, case, meet
from faults.odd_folder import KINDS, plain
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("CPVT_FUZZ_EXAMPLES", "200"))
pytestmark = pytest.mark.timeout(max(300, EXAMPLES))


@st.composite
def odd_folders(draw) -> tuple[str, int, list[Quirk]]:
    """A format, a seed of the pictures, and oddities that leave each other alone."""
    kind, chosen, touched = draw(st.sampled_from(KINDS)), [], set()
    own = [quirk for quirk in QUIRKS if kind in quirk.kinds]
    for quirk in draw(st.lists(st.sampled_from(own), min_size=1, max_size=3, unique_by=lambda quirk: quirk.what)):
        if not touched & set(quirk.touches):
            chosen.append(quirk)
            touched |= set(quirk.touches)
    return kind, draw(st.integers(0, 99)), chosen


@settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(odd_folders())
def test_a_random_folder_is_read_as_meant_or_refused_by_name(folder):
    kind, seed, quirks = folder
    odd = plain(kind, seed)
    try:
        for quirk in quirks:
            quirk.change(odd)
    except (KeyError, IndexError, ValueError):
        assume(len(quirks) == 1)  # one has taken away what another would change
        raise
    with tempfile.TemporaryDirectory() as place:
        ending = meet(Path(place), odd)
    said = [case(quirk, kind) for quirk in quirks if quirk.code]
    assert any(not one.contradiction(ending) for one in said) if said else ending.code == 0, ending


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_of_a_folder_without_oddities(kind, tmp_path):
    ending = meet(tmp_path, plain(kind))
    assert ending.code == 0
    assert not [
        word for word in ("found", "no image", "left out", "not used", "not read") if f" {word}" in ending.text.split("split")[-1]
    ]


def test_most_folders_with_one_oddity_are_read():
    pairs = [(quirk, kind) for quirk in QUIRKS for kind in quirk.kinds]
    assert sum(quirk.code == 0 for quirk, _ in pairs) >= 0.9 * len(pairs)
