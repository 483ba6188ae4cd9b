# SPDX-License-Identifier: Apache-2.0
"""Several machines.

Every process gives a sign of life each second. When one is gone, those that live save the step that they hold (the weights are the
same in all of them; process 0 does it if it lives, else another), say which process on which machine it was, and end within
seconds; after `SOLVER.PEER_TIMEOUT` seconds where it is frozen. Under `torchrun --max-restarts` the run then goes on by itself:
[clusters.md](clusters.md).

`python benchmarks/kills.py` does it twenty times to two processes on the loopback, each with its own torchrun, at random
moments: it kills a process, a torchrun, both, both with the store, and these while the other torchrun starts; then it gives the
same command again where a torchrun has gone. For each kill [kills.json](../benchmarks/results/kills.json) has the last step
before it, the step from which the run went on, and the seconds until the earlier ones had ended, until new processes had imported
torch, and until the next step (or until the other torchrun had ended, where the store was lost); for each run of five kills,
whether its weights are those of an unhurt one.

A torchrun whose store is on a frozen machine waits for it without a limit and does not see that its processes have ended; 40
seconds later it is killed (`tests/docs/test_clusters.py` freezes one of two torchruns). A process that has to end waits for a
disk that does not answer for `SOLVER.PEER_TIMEOUT` seconds (`tests/runner/test_peers.py`).

A run of two processes of which either was killed in the middle of a step, and which was then resumed, has the weights, average,
optimizer and losses of an unhurt one, with equality (`tests/whole/test_lost_processes.py`; norms are synchronised). Where process 0
died and a `NORM` is `BN`, the running statistics that are saved are those of another process, and the message says so; the weights
do not depend on them.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from several import SIGNAL_IN_STEP, end_group, run_group, start_group
from tiny import overrides

from faults.case import Case, Cut, Ending
from faults.checkpoints import SHORT, after_run
from faults.drawn import call_on, draw

KILL_THE_AGENT = """
import os, signal, time
if os.fork():
    time.sleep(100)
import cpvt_det.solver.step as step
real = step.TrainStep._update
def call(self, bad):
    if self._begun.iteration == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(self._begun.iteration > 0)
    return real(self, bad)
step.TrainStep._update = call
"""
"""Python that makes a process the parent of the one that trains, as torchrun is, and kills it in the second step."""
OF_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "logs/torchelastic_a/none_b/attempt_0/0/error.json"}


def words_of(folder: Path, *options: str) -> list[str]:
    """``train`` on a drawn data set, without a checkpoint on the way."""
    drawn, config = draw(folder / "data", lambda _: None), folder / "run.yaml"
    config.write_text("VERSION: 2\n")
    more = {**SHORT, **drawn.words, "SOLVER__MAX_ITER": 9, "SOLVER__CHECKPOINT_PERIOD": 9, "SOLVER__PEER_TIMEOUT": 7}
    return ["train", *options, "--config-file", str(config), "--runner", "builtin", *overrides(drawn.files, folder / "out", **more)]


def signalled(rank: int, signum: str) -> Callable[[Path], Ending]:
    """One of two processes gets a signal in the fifth step; how the other ends."""

    def run(folder: Path) -> Ending:
        before = [SIGNAL_IN_STEP.format(iteration=4, signum=signum) if number == rank else "" for number in (0, 1)]
        return Ending(*run_group(folder / "printed", words_of(folder), before)[1 - rank])

    return run


def without_torchrun(folder: Path) -> Ending:
    """The torchrun of a process is killed; its process is nobody's child then, so that its end is looked for in what it prints."""
    printed = folder / "0.txt"
    printed.touch()
    processes, end = start_group(folder, words_of(folder), [KILL_THE_AGENT], **OF_TORCHRUN), time.monotonic() + 60
    while not re.search("is saved|Next: find", printed.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    return Ending(*end_group(folder, processes)[0])


def shrunk(out: Path) -> None:
    """The checkpoint of a finished run becomes one of four processes."""
    path = out / "model_final.pth"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["cpvt_det"]["processes"] = 4
    torch.save(checkpoint, path)
    path.with_name(f"{path.name}.sha256").unlink()


def started_by(**environment: str) -> Callable[[Path], Ending]:
    """``cpvt-det train`` with variables of another launcher."""

    def run(folder: Path) -> Ending:
        with mock.patch.dict(os.environ, environment):
            return call_on(draw(folder / "data", lambda _: None), "train", **SHORT)

    return run


NAMED = Cut("runner/peers.py", "lost = peers.lost()", 'lost = ""')
JOINED = Cut("runner/launch.py", "{} if is_of_torchrun() else variables_of_group(os.environ)", "{}")

CASES = [
    Case(
        "a process of another machine killed, or its machine lost",
        signalled(1, "SIGKILL"),
        "stopped: process 1 of 2 (pid ... on ...) died or lost its machine; iteration ... is saved; --resume continues after it",
        1,
        guard=NAMED,
    ),
    Case(
        "the same: what is left",
        signalled(1, "SIGKILL"),
        "Iteration ... is saved; --resume continues after it",
        1,
        guard=Cut("runner/guard.py", "if isinstance(error, Exception) and whole:", "if False:"),
    ),
    Case(
        "the machine with process 0 and the store lost",
        signalled(0, "SIGKILL"),
        "stopped: the store of the run at ... in process 0 of 2 (pid ... on ...) is gone, and maybe its machine; iteration ... is "
        "saved (running statistics of norms are those of process 1); --resume continues after it",
        1,
        guard=(
            Cut("runner/peers.py", "            return self._without_store()\n", "            raise\n"),
            Cut("runner/peers.py", "if self._beats < 0 and not", "if False and not"),
        ),
    ),
    Case(
        "a process of another machine frozen",
        signalled(1, "SIGSTOP"),
        "stopped: process 1 of 2 (pid ... on ...) has given no sign of life for ... s (SOLVER.PEER_TIMEOUT); iteration 4 is saved",
        1,
        guard=Cut("runner/peers.py", "if silent * BEAT > self._patience:", "if False:"),
    ),
    Case(
        "the machine with the store frozen",
        signalled(0, "SIGSTOP"),
        "stopped: the store of the run at ... in process 0 of 2 (pid ... on ...) does not answer; iteration 4 is saved",
        1,
        guard=Cut("runner/peers.py", "if unanswered > self._patience and", "if False and"),
    ),
    Case(
        "torchrun killed, its process left",
        without_torchrun,
        "the torchrun that started this process is gone; the run ends...iteration ... is saved; --resume continues after it",
        -9,
        guard=Cut("runner/peers.py", "os.getppid() != self._parent:", "False:"),
    ),
    Case(
        "--resume with another number of processes",
        after_run(shrunk, "--resume"),
        "The run to resume had 4 process(es), and now there are 1: batches and their order stay the same; sums are in ",
        0,
        guard=Cut("checkpoint/checkpointer.py", "if before not in (None, now):", "if False:"),
    ),
    Case(
        "several processes by srun, without torchrun",
        started_by(SLURM_PROCID="1", SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2"),
        "error: this is one of 2 processes (srun), without MASTER_ADDR and MASTER_PORT of the first: each would train alone; "
        "write srun --ntasks-per-node 1 torchrun ",
        guard=JOINED,
    ),
    Case(
        "several processes by mpirun, without torchrun",
        started_by(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2"),
        "error: this is one of 2 processes (mpirun), without MASTER_ADDR and MASTER_PORT of the first: each would train alone; ",
        guard=JOINED,
    ),
    Case(
        "RANK and WORLD_SIZE set by hand, without MASTER_ADDR",
        started_by(RANK="0", WORLD_SIZE="2", MASTER_PORT="29500"),
        "error: this is one of 2 processes (RANK and WORLD_SIZE), without MASTER_ADDR of the first: each would train alone; ",
        guard=JOINED,
    ),
    Case(
        "SOLVER.PEER_TIMEOUT 1",
        lambda folder: call_on(draw(folder / "data", lambda _: None), "train", **SHORT, SOLVER__PEER_TIMEOUT=1),
        "error: SOLVER.PEER_TIMEOUT must be at least 7 seconds, got 1",
        guard=Cut("runner/peers.py", "if patience < 2 * LOOK:", "if False:"),
    ),
]
