# SPDX-License-Identifier: Apache-2.0
"""How long torch's threads on a CPU wait for each other awake; set before torch is imported, which reads it once."""

import os

SPIN_COUNT = "20000"
"""Rounds of waiting, about a third of a millisecond; GCC's OpenMP has 300,000."""


def wait_briefly() -> None:
    """Let threads fall asleep soon, unless ``GOMP_SPINCOUNT`` or ``OMP_WAIT_POLICY`` is set.

    A thread that waits awake keeps its core from the one that it waits for, as soon as another program needs a core too: two
    threads beside one busy process then train a small model ten times as slowly as one thread does.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
