# SPDX-License-Identifier: Apache-2.0
"""Commands let threads that wait fall asleep soon, and leave it to who has said otherwise."""

import os
import re
import subprocess
import sys

import pytest

from cpvt_det.threads import SPIN_COUNT


@pytest.mark.parametrize(
    ("set_before", "count"),
    [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
@pytest.mark.parametrize("entry", ["cpvt_det.cli", "cpvt_det.cli.train"])
def test_torch_s_threads_read_what_a_command_sets(set_before, count, entry):
    """What GCC's OpenMP says of itself when torch loads it; ``None``: its own choice."""
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", f"import {entry}, torch"],
        env=environment | set_before | {"OMP_DISPLAY_ENV": "VERBOSE"},
        **{"capture_output": True, "text": True, "timeout": 100, "check": True},
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\d+|INFINITY)'", done.stderr)
    if found is None:
        pytest.skip("torch's OpenMP is another than GCC's")
    assert found[1] == count if count is not None else found[1] not in (SPIN_COUNT, "7")
