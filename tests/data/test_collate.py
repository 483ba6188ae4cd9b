# SPDX-License-Identifier: Apache-2.0
"""Samples cross from a data worker in one piece, unchanged."""

import os
import sys
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from cpvt_det.common.structures import Targets
from cpvt_det.data.loader import Packed, pack, shared_memory


def assert_same(first, second):
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and torch.equal(first, second)
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        [assert_same(*pair) for pair in zip(first, second, strict=True)]
    elif isinstance(first, dict):
        assert_same(list(first.items()), list(second.items()))
    elif isinstance(first, Targets):
        assert_same(vars(first), vars(second))
    else:
        assert np.array_equal(first, second)


SAMPLES = [
    {
        "file_name": "ä/1.png",
        "image_id": 2**70,
        "image": torch.arange(3 * 5 * 7, dtype=torch.uint8).view(3, 5, 7),
        "pixels": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),  # not contiguous
        "targets": Targets(torch.tensor([3, 1]), torch.rand(2, 4)),
    },
    {
        "file_name": "2.png",
        "image": torch.ones(3, 1, 1, dtype=torch.uint8),
        "targets": Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)),
        "number": torch.tensor(0.25, dtype=torch.float64),
        "mask": torch.tensor([True, False]),
        "array": np.arange(3),
        "nothing": None,
    },
]


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES[1:], [{"file_name": "no tensor"}], []], ids=["two", "one", "no", "none"])
def test_samples_are_the_same_afterwards(samples):
    packed = pack(samples)
    assert_same(packed.samples(), samples)
    assert packed.content.is_shared()
    copy = Packed(packed.content.clone(), packed.size)  # as in pinned memory
    assert_same(copy.samples(), samples)


def test_a_tensor_that_samples_share_is_each_one_s_own_in_the_end():
    whole = torch.zeros(2)
    first, second = pack([whole, whole]).samples()
    first += 1
    assert second.tolist() == [0, 0]


def test_what_crosses_the_pipe_is_small_whatever_the_batch():
    """A message of less than 4096 bytes is written at once, so that a worker that dies leaves no half one behind."""
    samples = [{"file_name": f"{number:0100}.png", "image": torch.zeros(3, 8, 8, dtype=torch.uint8)} for number in range(1024)]
    try:
        assert len(ForkingPickler.dumps((0, pack(samples)))) < 4096
    finally:
        resource_sharer.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="no /dev/shm")
def test_memory_of_a_batch_is_not_limited_by_dev_shm(monkeypatch):
    """torch's own shared memory is."""

    def full(*_, **__):
        raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    for name in ("_new_using_fd_cpu", "_new_using_filename_cpu"):
        monkeypatch.setattr(torch.UntypedStorage, name, full)
    assert shared_memory(100).tolist() == [0] * 100


def test_a_system_without_files_in_memory_takes_torch_s_own(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert_same(pack(SAMPLES).samples(), SAMPLES)
    assert pack(SAMPLES).content.is_shared()
