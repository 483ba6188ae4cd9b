# SPDX-License-Identifier: Apache-2.0
"""A run of many tiny steps with evaluations between them, and what it holds of memory and open files on the way.

Alone, for the full length::

    PYTHONPATH=tests python -m faults.long_run 2000 --write
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from tiny import overrides

from cpvt_det.config import load_cfg
from cpvt_det.training.guard import RunGuard
from cpvt_det.training.train import run
from faults.drawn import draw
from faults.records import keep


class Held(NamedTuple):
    """Means over the first and the last tenth of the steps: resident memory in MB, and open files."""

    first_memory: float
    last_memory: float
    first_files: float
    last_files: float


def take(steps: int, folder: Path) -> Held:
    """Run ``steps`` steps with ten evaluations, in this process."""
    memory, files = [], []
    real = RunGuard.after_step

    def after_step(guard: RunGuard, iteration: int) -> None:
        real(guard, iteration)
        memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
        files.append(len(os.listdir("/proc/self/fd")))

    more = {"SOLVER__MAX_ITER": steps, "TEST__EVAL_PERIOD": steps // 10, "SOLVER__CHECKPOINT_PERIOD": steps // 10}
    more |= {"SOLVER__EMA__ENABLED": True, "SOLVER__LOG_PERIOD": 20, "TEST__PICTURES": 0}
    words = overrides(draw(folder / "data", lambda _: None).files, folder / "out", **more)
    with mock.patch.object(RunGuard, "after_step", after_step):
        run(load_cfg("", words))
    tenth = steps // 10
    return Held(*(sum(part) / tenth for series in (memory, files) for part in (series[:tenth], series[-tenth:])))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        found = take(int(sys.argv[1]), Path(temporary))
    print(found)
    if "--write" in sys.argv:
        keep("long_run", int(sys.argv[1]), found)
