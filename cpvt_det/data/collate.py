# SPDX-License-Identifier: Apache-2.0
"""Pass the samples of a batch from a data worker to the main process, as one tensor.

By itself, torch would use a file in /dev/shm and a file descriptor for each tensor. In a container, /dev/shm often holds only 64
MB, and a process can often open only 1024 descriptors.
"""

import io
import math
import os
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64
"""Alignment in bytes: each tensor begins at a multiple of this number."""


class Packed(NamedTuple):
    """Samples packed into one tensor.

    Attributes:
        content: (n,) uint8, the bytes of all tensors, followed by the pickled samples. In the pickle, each tensor is replaced by
            its position in the bytes.
        size: number of bytes that the tensors take.
    """

    content: Tensor
    size: int

    def samples(self) -> list[Any]:
        """The samples; their tensors are views of ``content``."""
        unpickler = _Unpickler(io.BytesIO(self.content[self.size :].numpy()))
        unpickler.content = self.content
        return unpickler.load()


def pack(samples: list[Any]) -> Packed:
    """Put samples into shared memory; their tensors must be on the CPU, but may have any dtype and shape."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(samples)
    content = shared_memory(pickler.size + file.tell())
    for place, tensor in pickler.tensors:
        _view(content, *place).copy_(tensor)
    content[pickler.size :] = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    return Packed(content, pickler.size)


def shared_memory(size: int) -> Tensor:
    """(size,) uint8, zeros, in memory that other processes share once the tensor is sent to them."""
    if not hasattr(os, "memfd_create"):
        return torch.zeros(size, dtype=torch.uint8).share_memory_()
    file = os.memfd_create("cpvt_det")  # a file in memory, not in /dev/shm: only memory limits its size
    try:
        os.ftruncate(file, size)
        storage = torch.UntypedStorage._new_shared_fd_cpu(file, size)  # as torch receives tensors; it keeps its own descriptor
    finally:
        os.close(file)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Pickler(pickle.Pickler):
    """Pickles everything except tensors, which it collects."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[tuple, Tensor]] = []
        self.size = 0

    def persistent_id(self, value: object) -> tuple | None:
        if type(value) is not Tensor:
            return None
        place = self.size, value.dtype, tuple(value.shape)
        self.tensors.append((place, value))
        self.size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        return place


class _Unpickler(pickle.Unpickler):
    content: Tensor

    def persistent_load(self, place: tuple) -> Tensor:
        return _view(self.content, *place)


def _view(content: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor of this dtype and shape whose bytes begin at ``start`` in ``content``."""
    return content[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
