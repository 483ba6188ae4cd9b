# SPDX-License-Identifier: Apache-2.0
"""What a process learns of the launcher that started it."""

import pytest

from cpvt_det.common.errors import ConfigError
from cpvt_det.training.launchers import variables_of_group

ADDRESS = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("found", "local_rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        (SRUN, "0"),
        (MPIRUN, "1"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, None),
        ({**SRUN, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "1"),
    ],
)
def test_one_of_several_joins_where_the_address_is_known(found, local_rank):
    expected = {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS} | ({} if local_rank is None else {"LOCAL_RANK": local_rank})
    assert variables_of_group({**found, **ADDRESS}) == expected


@pytest.mark.parametrize(
    "alone",
    [
        {},
        ADDRESS,
        {"SLURM_NTASKS": "8"},  # the shell of salloc
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", **ADDRESS},  # the script of sbatch --ntasks 8
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", **ADDRESS},
        {"WORLD_SIZE": "1"},
    ],
)
def test_a_process_that_is_alone_stays_alone(alone):
    assert variables_of_group(alone) == {}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            SRUN,
            r"one of 2 processes \(srun\), without MASTER_ADDR and MASTER_PORT of the first.*write srun --ntasks-per-node 1 torch",
        ),
        ({**MPIRUN, "MASTER_ADDR": "node-a"}, r"\(mpirun\), without MASTER_PORT of the first: .*write mpirun -x MASTER_ADDR="),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "export MASTER_ADDR=FIRST_HOST MASTER_PORT=29500, or start one torchrun per machine"),
        ({"RANK": "0", **ADDRESS}, "but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2", **ADDRESS}, "but not RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "RANK must be below WORLD_SIZE 2, got 2"),
        ({"RANK": "a", "WORLD_SIZE": "2", **ADDRESS}, "must be whole numbers"),
    ],
)
def test_one_of_several_that_cannot_join_is_refused(found, message):
    with pytest.raises(ConfigError, match=message):
        variables_of_group(found)
