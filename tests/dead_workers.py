# SPDX-License-Identifier: Apache-2.0
"""A test worker that dies is noticed, whatever it leaves behind, and the others run what is left."""

import os
import stat

import pytest
from xdist.scheduler import LoadFileScheduling


def pytest_configure(config):
    """Make a worker of pytest-xdist the only one that holds its ends of the pipes to the process that waits for its results.

    That process knows of the worker's death by the end of the pipe alone. What the worker forked inherits the pipe, a data
    loader's process, say: where it outlives the worker, the pipe has no end, and the run would wait for ever.
    """
    if hasattr(config, "workerinput"):
        pipes = [number for number in range(3, 256) if _is_pipe(number)]
        nothing = os.open(os.devnull, os.O_RDWR)
        os.register_at_fork(after_in_child=lambda: [os.dup2(nothing, pipe) for pipe in pipes])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


class Scheduling(LoadFileScheduling):
    """Workers that never wait for the work of one that died.

    A worker begins a test when it has the next, and asks for files when it has ended one. pytest-xdist hands out a dead worker's
    files again with those that it had ended, in which there is nothing to run: one who gets such a file ends no test, and waits.
    """

    def _reschedule(self, node):
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)


def _is_pipe(number):
    try:
        return stat.S_ISFIFO(os.fstat(number).st_mode)
    except OSError:
        return False
