# SPDX-License-Identifier: Apache-2.0
"""Detect whether this process was started by torchrun, by another launcher as one of several, or by a user on its own. Without
this check, processes that do not know of each other would each train alone.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from cpvt_det.common.errors import ConfigError

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class Launcher(NamedTuple):
    """A launcher, and the environment variables that it sets for each process.

    Attributes:
        name: name of the launcher on the command line.
        rank: variable with the index of the process.
        size: variable with the number of processes.
        local_rank: variable with the index of the process on its machine.
    """

    name: str
    rank: str
    size: str
    local_rank: str


LAUNCHERS = (
    # Not SLURM_NTASKS: it is also set in the job's script, with SLURM_PROCID 0, where a process runs alone.
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def is_of_torchrun() -> bool:
    """Whether torchrun, or ``--num-gpus``, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def variables_of_group(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set. They are needed for a process that another launcher or a user started as one of
    several.

    Args:
        environment: environment variables of the process.

    Returns:
        ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT`` and, if it is known, ``LOCAL_RANK``; empty for a process that
        runs alone.

    Raises:
        ConfigError: variables that are incomplete or invalid, such as a missing ``MASTER_ADDR`` for one of several processes; the
            message says what to do.
    """
    found = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if environment.get(name)}
    name = "RANK and WORLD_SIZE"
    if not {"RANK", "WORLD_SIZE"} <= found.keys():
        if ("WORLD_SIZE" in found and found["WORLD_SIZE"] != "1") or "RANK" in found:
            lacking = "WORLD_SIZE" if "RANK" in found else "RANK"
            raise ConfigError(f"one of RANK and WORLD_SIZE is set, but not {lacking}; set both, or start with torchrun")
        name, found = _of_a_launcher(environment)
    size = found.get("WORLD_SIZE", "1")
    if not all(value.isdigit() for value in found.values()):
        raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers, got {found}")
    if int(size) < 2:
        return {}
    if int(found["RANK"]) >= int(size):
        raise ConfigError(f"RANK must be below WORLD_SIZE {size}, got {found['RANK']}")
    lacking = [variable for variable in ADDRESS if not environment.get(variable)]
    if lacking:
        raise ConfigError(_way_out(name, size, lacking))
    return {**found, **{variable: environment[variable] for variable in ADDRESS}}


def _of_a_launcher(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    for launcher in LAUNCHERS:
        size = environment.get(launcher.size) or "1"
        if size != "1" and environment.get(launcher.rank):
            found = {"RANK": environment[launcher.rank], "WORLD_SIZE": size, "LOCAL_RANK": environment.get(launcher.local_rank, "")}
            return launcher.name, {name: value for name, value in found.items() if value}
    return "", {}


def _way_out(name: str, size: str, lacking: list[str]) -> str:
    told = f"this is one of {size} processes ({name}), without {' and '.join(lacking)} of the first: each would train alone"
    if name == "srun":
        return (
            f"{told}; write srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node GPUS --rdzv-backend c10d "
            "--rdzv-endpoint FIRST_HOST:29500 -m cpvt_det train ..., or export MASTER_ADDR and MASTER_PORT before srun; for a "
            "single process, srun --ntasks 1"
        )
    if name == "mpirun":
        return f"{told}; write mpirun -x MASTER_ADDR=FIRST_HOST -x MASTER_PORT=29500 ..., or start one torchrun per machine"
    return f"{told}; export MASTER_ADDR=FIRST_HOST MASTER_PORT=29500, or start one torchrun per machine, which sets them all"
