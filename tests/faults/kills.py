# SPDX-License-Identifier: Apache-2.0
"""Kills a process that saves one checkpoint after another, again and again, and looks at what it left.

Alone, for more kills than the tests take::

    PYTHONPATH=tests python -m faults.kills 50 --write
"""

import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from forked import Forked
from nodes import wait_for

from cpvt_det.checkpoint.checkpointer import RunCheckpointer, RunState
from cpvt_det.checkpoint.files import read_checkpoint
from cpvt_det.checkpoint.resume import checkpoints_of, choose_to_resume
from cpvt_det.common.class_names import Classes
from faults.records import keep

NUMBERS = 2_000_000  # in the checkpoint, 8 MB
LATEST = 0.3  # seconds after the first save: some saves later


class Count(NamedTuple):
    """How kills ended: in the middle of a save, without a checkpoint that loads, with one older than it had to be.

    ``damaged`` counts files that cannot be read under the name of a checkpoint: resuming would skip them, but none may be there.
    """

    kills: int
    during_a_save: int
    lost: int
    outdated: int
    damaged: int


class _Step:
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def save_for_ever(folder: str) -> None:
    """Resume, and save iteration after iteration, each number in it being the iteration's; print every one that is saved."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(NUMBERS, 1, bias=False)
    state = RunState(Classes((0,), ("cat",)), "VERSION: 2\n", 0, "a", {"images": 1, "sha256": ""})
    checkpointer = RunCheckpointer(model, folder, 2, _Step(), state)
    iteration = checkpointer.begin(resume=True)
    while True:
        model.weight.data.fill_(iteration)
        checkpointer.save(f"model_{iteration:07d}", iteration)
        checkpointer.save("model_final", iteration)  # the same name each time
        print(iteration, flush=True)
        iteration += 1


def kill(kills: int, folder: Path, seed: int = 0) -> Count:
    """Kill a process ``kills`` times at random moments; each goes on from what the one before left."""
    draw, during, lost, outdated, damaged = random.Random(seed), 0, 0, 0, 0
    for _ in range(kills):
        child = Forked(before=f"from faults.kills import save_for_ever; save_for_ever({str(folder)!r})")
        wait_for(lambda child=child: "\n" in child.stdout(), what="the first save")
        time.sleep(draw.uniform(0, LATEST))
        child.send_signal(signal.SIGKILL)
        child.wait()
        saved = max(map(int, child.stdout().split()))
        child.end()
        during += any(folder.glob(".*.tmp"))
        damaged += sum(map(_is_damaged, checkpoints_of(folder)))
        try:
            checkpoint = read_checkpoint(choose_to_resume(folder)[0])
            weight = checkpoint["model"]["weight"]
            whole = bool((weight == checkpoint["iteration"]).all())
        except ValueError:
            lost += 1
            continue
        lost += not whole
        outdated += checkpoint["iteration"] < saved
    return Count(kills, during, lost, outdated, damaged)


def _is_damaged(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except ValueError:
        return True
    return False


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = kill(int(sys.argv[1]), Path(temporary))
    print(found)
    if "--write" in sys.argv:
        keep("kills", int(sys.argv[1]), found)
