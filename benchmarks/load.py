# SPDX-License-Identifier: Apache-2.0
"""Whether a machine is free enough for times. This module imports no library, so that looking is not the load that it sees."""

import os

from cpvt_det.common.errors import BadInputError

BOUND = 0.75
"""Largest load average of a minute. A process that keeps one core busy is a load of 1, and changes the times on all cores: they
share memory, caches and clock, so more cores allow no more. Below the bound is what an editor and a system at rest need, and
what is left a minute after other work has ended."""


def check_load(busy: bool) -> float | None:
    """The load average of the last minute, before a measurement; ``None`` on systems that do not report it.

    Args:
        busy: True: measure beside other work too.

    Raises:
        BadInputError: a machine with other work, unless ``busy``.
    """
    if not hasattr(os, "getloadavg"):
        return None
    load = round(os.getloadavg()[0], 2)
    if load > BOUND and not busy:
        raise BadInputError(
            f"the load average of the last minute is {load}, above {BOUND}: other work would change the times; wait until it has "
            "ended, or measure beside it with --busy, which the record then shows"
        )
    return load
