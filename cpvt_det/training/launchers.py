# SPDX-License-Identifier: Apache-2.0
"""Detect whether this process was started by torchrun, by another launcher as one of several, or by a user on its own. Without
this check, processes that do not know of each other would each train alone.
"""

import os
from collections.abc import Mapping

from cpvt_det.common.errors import ConfigError

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
LAUNCHERS = (
    # Not SLURM_NTASKS: it is also set in the job's script, with SLURM_PROCID 0, where a process runs alone.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Launchers, each with the variables that it sets: index of the process, number of processes, index on its machine."""
WAYS_OUT = {
    "srun": (
        "write srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node GPUS --rdzv-backend c10d "
        "--rdzv-endpoint FIRST_HOST:29500 -m cpvt_det train ..., or export MASTER_ADDR and MASTER_PORT before srun; for a "
        "single process, srun --ntasks 1"
    ),
    "mpirun": "write mpirun -x MASTER_ADDR=FIRST_HOST -x MASTER_PORT=29500 ..., or start one torchrun per machine",
}
"""Name of a launcher -> what to do if the address of the first process is missing."""


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
        told = f"this is one of {size} processes ({name}), without {' and '.join(lacking)} of the first: each would train alone"
        way_out = "export MASTER_ADDR=FIRST_HOST MASTER_PORT=29500, or start one torchrun per machine, which sets them all"
        raise ConfigError(f"{told}; {WAYS_OUT.get(name, way_out)}")
    return {**found, **{variable: environment[variable] for variable in ADDRESS}}


def _of_a_launcher(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    for launcher, rank, size, local_rank in LAUNCHERS:
        if environment.get(rank) and environment.get(size) not in (None, "", "1"):
            names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
            return launcher, {name: environment[variable] for name, variable in names.items() if environment.get(variable)}
    return "", {}
