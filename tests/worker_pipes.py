# SPDX-License-Identifier: Apache-2.0
"""A test worker that dies is noticed, whatever it leaves behind."""

import os
import stat


def pytest_configure(config):
    """Make a worker of pytest-xdist the only one that holds its ends of the pipes to the process that waits for its results.

    That process knows of the worker's death by the end of the pipe alone. What the worker forked inherits the pipe, a data
    loader's process, say: where it outlives the worker, the pipe has no end, and the run would wait for ever.
    """
    if hasattr(config, "workerinput"):
        pipes = [number for number in range(3, 256) if _is_pipe(number)]
        nothing = os.open(os.devnull, os.O_RDWR)
        os.register_at_fork(after_in_child=lambda: [os.dup2(nothing, pipe) for pipe in pipes])


def _is_pipe(number):
    try:
        return stat.S_ISFIFO(os.fstat(number).st_mode)
    except OSError:
        return False
