# SPDX-License-Identifier: Apache-2.0
"""Several machines.

[clusters.md](clusters.md) lists what each loss costs. If one of two processes is killed in a step, the resumed run equals the
uninterrupted one (`tests/whole/test_lost_processes.py`).
"""

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from several import SIGNAL_IN_STEP, run_group
from tiny import overrides

from faults.case import Case, Cut, Ending
from faults.checkpoints import SHORT, after_run
from faults.drawn import call_on, draw


def words_of(folder: Path, *options: str) -> list[str]:
    """``train`` on a drawn data set, without a checkpoint on the way."""
    drawn, config = draw(folder / "data", lambda _: None), folder / "run.yaml"
    config.write_text("VERSION: 2\n")
    more = {**SHORT, **drawn.words, "SOLVER__MAX_ITER": 9, "SOLVER__CHECKPOINT_PERIOD": 9, "SOLVER__COLLECTIVE_TIMEOUT": 4.0}
    return ["train", *options, "--config-file", str(config), "--runner", "builtin", *overrides(drawn.files, folder / "out", **more)]


def signalled(rank: int, signum: str) -> Callable[[Path], Ending]:
    """One of two processes gets a signal in the fifth step; how the other ends."""

    def run(folder: Path) -> Ending:
        before = [SIGNAL_IN_STEP.format(iteration=4, signum=signum) if number == rank else "" for number in (0, 1)]
        return Ending(*run_group(folder / "printed", words_of(folder), before)[1 - rank])

    return run


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
            return call_on(draw(folder / "data", lambda _: None), "train", **SHORT, SOLVER__COLLECTIVE_TIMEOUT=2.0)

    return run


JOINED = Cut("training/launch.py", "{} if is_of_torchrun() else variables_of_group(os.environ)", "{}")

CASES = [
    Case(
        "a process of another machine killed, or its machine lost",
        signalled(1, "SIGKILL"),
        "Iteration ... is saved; --resume continues after it...stopped: process 0 of 2 has lost another one, or waited for it for "
        "more than 4 s (SOLVER.COLLECTIVE_TIMEOUT): look at what that one printed; --resume continues (...)",
        1,
        guard=Cut("training/guard.py", "if isinstance(error, Exception) and whole and", "if False and"),
    ),
    Case(
        "a process of another machine frozen",
        signalled(1, "SIGSTOP"),
        "Iteration 4 is saved; --resume continues after it...stopped: process 0 of 2 has lost another one, or waited for it for "
        "more than 4 s (SOLVER.COLLECTIVE_TIMEOUT)",
        1,
        guard=Cut("training/launch.py", "timedelta(seconds=seconds)", "timedelta(days=1)"),
    ),
    Case(
        "the machine with process 0 frozen",
        signalled(0, "SIGSTOP"),
        "stopped: process 1 of 2 has lost another one, or waited for it for more than 4 s (SOLVER.COLLECTIVE_TIMEOUT)",
        1,
        guard=Cut("training/launch.py", "timedelta(seconds=seconds)", "timedelta(days=1)"),
    ),
    Case(
        "other machines that do not come",
        started_by(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"),
        "stopped: process 1 of 2 has not met the others at 127.0.0.1:1 (",
        1,
        guard=Cut("training/launch.py", "except RuntimeError as error:  # torch", "except ZeroDivisionError as error:  # torch"),
    ),
    Case(
        "--resume with another number of processes",
        after_run(shrunk, "--resume"),
        "The run to resume used 4 process(es), and there are now 1: batches and their order stay the same, but dropout",
        0,
        guard=Cut("checkpoint/checkpointer.py", "if before != now:", "if False:"),
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
        "SOLVER.COLLECTIVE_TIMEOUT 0",
        lambda folder: call_on(draw(folder / "data", lambda _: None), "train", **SHORT, SOLVER__COLLECTIVE_TIMEOUT=0.0),
        "error: SOLVER.COLLECTIVE_TIMEOUT must be at least 1 second, got 0",
        guard=Cut("training/launch.py", "if seconds < 1:", "if False:"),
    ),
    Case(
        "SOLVER.CHECKPOINT_MINUTES 0",
        lambda folder: call_on(draw(folder / "data", lambda _: None), "train", **SHORT, SOLVER__CHECKPOINT_MINUTES=0.0),
        "error: SOLVER.CHECKPOINT_MINUTES must be above 0, got 0",
        guard=Cut("builders/training.py", "if solver.CHECKPOINT_MINUTES <= 0:", "if False:"),
    ),
]
