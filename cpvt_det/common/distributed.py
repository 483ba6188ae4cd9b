# SPDX-License-Identifier: Apache-2.0
"""The functions of ``torch.distributed`` that this package uses, which also work in a single process, and a function that mixes
seeds."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_initialized() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The index of this process; process 0 logs and writes files."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if is_initialized() else 1


def all_reduce_sum(values: Tensor) -> Tensor:
    """The elementwise sum of a tensor over all processes, without a gradient."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def all_reduce_max(value: float) -> float:
    """The largest value over all processes, exchanged on the host with gloo, even if gradients go through NCCL.

    Args:
        value: an int or a float, of the same type in all processes; the result has this type.
    """
    if not is_initialized():
        return value
    largest = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def gather_objects(value: Any) -> list[Any]:
    """The picklable values of all processes, in order of rank, on every process; meant for small values."""
    if not is_initialized():
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_to_first(value: Any) -> list[Any]:
    """The picklable values of all processes, in order of rank, on process 0. All other processes get an empty list, and nothing
    is sent to them.
    """
    if not is_initialized():
        return [value]
    values = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def broadcast_object(value: Any) -> Any:
    """Process 0's picklable value, on every process; values of other processes are ignored."""
    if not is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def share_buffers(module: nn.Module) -> None:
    """Copy process 0's buffers to all others, because running statistics of unsynchronised batch norms differ between processes."""
    if is_initialized():
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def mix_seed(*numbers: int) -> int:
    """One seed from several numbers, such as seed, iteration and process, without collisions between neighbouring ones."""
    return int(np.random.SeedSequence([number % 2**63 for number in numbers]).generate_state(1, np.uint64)[0])
