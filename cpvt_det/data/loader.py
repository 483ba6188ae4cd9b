# SPDX-License-Identifier: Apache-2.0
"""Batches of samples, which can start at any iteration and are the same for any number of workers.

A sample's random state depends only on (seed, epoch, image), and the images of a batch depend only on (seed, iteration). A run
therefore needs only its iteration to resume where it stopped.

The samples of a batch come from a data worker as one tensor. By itself, torch would use a file in /dev/shm and a file descriptor
for each tensor. In a container, /dev/shm often holds only 64 MB, and a process can often open only 1024 descriptors.
"""

import atexit
import contextlib
import io
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from cpvt_det.common.distributed import mix_seed
from cpvt_det.common.errors import DeadWorkerError, RunStoppedError, UnreachableError
from cpvt_det.common.structures import Sample
from cpvt_det.data.mapper import Mapper
from cpvt_det.data.records import ImageRecord
from cpvt_det.data.storage import Patience

logger = logging.getLogger("cpvt_det")
Draw = tuple[int, int]
"""(epoch, index of a record)."""

ALIGNMENT = 64
"""Alignment in bytes: each tensor of a batch begins at a multiple of this number."""
NEWS = 5.0  # seconds within which torch notices that a worker ended; usually the worker's signal ends the wait earlier


class MappedDataset(Dataset):
    """Records that become samples on access.

    Args:
        records: records of one or more data sets.
        mapper: function from a record to a sample.
        seed: seed of the run.
        closing: an epoch, counted from 0, and the mapper to use from that epoch on. With ``None``, ``mapper`` is used in all
            epochs.
        patience: seconds for which reading an unreachable image is retried. The loader waits equally long for a batch while no
            data worker finishes an image.

    Attributes:
        at_work: (workers, 2) int64 in shared memory: each worker's process id and the index of the record it is reading, or -1.
    """

    def __init__(
        self,
        records: Sequence[ImageRecord],
        mapper: Mapper,
        seed: int = 0,
        closing: tuple[float, Mapper] | None = None,
        patience: float = 0.0,
    ):
        self.records = records
        self.mapper = mapper
        self.seed = seed
        self.closing = closing or (math.inf, mapper)
        self.patience = patience
        self.at_work = torch.zeros(0, 2, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, draw: Draw) -> Sample:
        epoch, index = draw
        if (worker := get_worker_info()) is not None:
            self.at_work[worker.id] = torch.tensor([os.getpid(), index])
        try:
            return self._sample(epoch, index)
        except UnreachableError:  # its mount or its server may come back
            return Patience(self.patience).read(lambda: self._sample(epoch, index), even_if_missing=True)
        finally:
            if worker is not None:
                self.at_work[worker.id, 1] = -1

    def reading(self, workers: Collection[int]) -> str:
        """Description, for messages, of what the workers with these process ids are doing: ``while reading photos/1.jpg``."""
        images = [self.records[index].file_name for pid, index in self.at_work.tolist() if pid in workers and index >= 0]
        if not images:
            return "between two images"
        return f"while reading {', '.join(images)}" + " or an image that is mixed with it" * bool(self.mapper.mixes)

    def _sample(self, epoch: int, index: int) -> Sample:
        start, closing_mapper = self.closing
        with torch.random.fork_rng(devices=[]):  # in the main process the model's dropout draws from the same state
            # Not torch.manual_seed, which would also reseed the GPUs, whose states this fork does not restore.
            torch.default_generator.manual_seed(mix_seed(self.seed, epoch, index))
            return (self.mapper if epoch < start else closing_mapper)(self.records[index])


@contextlib.contextmanager
def dead_workers_named(dataset: MappedDataset) -> Iterator[None]:
    """If a data worker dies within this block, raise an error that names the image that it was reading.

    Raises:
        DeadWorkerError: a worker died. torch's own error for this may be raised anywhere in the block.
    """
    try:
        yield
    except DeadWorkerError:  # already named by a block inside this one, such as evaluation's inside training's
        raise
    except RuntimeError as error:
        cause, match = error, None
        while cause is not None and match is None:  # another error may hide torch's, such as one from writing a checkpoint
            match = re.match(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", str(cause))
            cause = cause.__context__
        if match is None:
            raise
        dead = [int(pid) for pid in match[1].split(",")]
        raise DeadWorkerError(
            f"a data worker (process {match[1]}) died {dataset.reading(dead)}; --resume continues from the last checkpoint"
        ) from error


class TrainBatches(Sampler[list[Draw]]):
    """An endless stream of batches: every image once per epoch, in a new random order for each epoch.

    With grouping, a batch contains only wide or only tall images, which saves padding. An image may then have to wait until the
    next epoch before its batch is full.

    Args:
        wide: whether each record is wider than tall; ``None`` for no grouping.
        num_records: number of records.
        batch_size: number of images per batch, over all processes.
        seed: seed of the run.
        rank, world_size: index of this process and number of processes; each process takes its slice of every batch.
        repeats: number of times that an image is drawn in a row, each time with a different epoch number, so that its augmentations
            differ (repeated augmentation, arXiv 1901.09335, as in DeiT). The total number of images in an epoch stays the same,
            so an epoch uses only a part of the records.

    Raises:
        ValueError: there is no record, ``repeats`` is below 1, or the batch size is not a multiple of the number of processes.
    """

    def __init__(
        self,
        num_records: int,
        batch_size: int,
        seed: int,
        wide: Sequence[bool] | None = None,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
    ):
        if num_records < 1:
            raise ValueError("there is no image to train on; num_records must be at least 1")
        if repeats < 1:
            raise ValueError(f"images must be repeated at least once, got {repeats}")
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(f"the batch of {batch_size} images must be a positive multiple of the {world_size} processes")
        self.num_records = num_records
        self.batch_size = batch_size
        self.seed = seed
        self.groups = np.zeros(num_records, dtype=int) if wide is None else np.asarray(wide, dtype=int)
        share = batch_size // world_size
        self.repeats = repeats
        self.slice = slice(rank * share, (rank + 1) * share)
        self.start = 0

    def __iter__(self) -> Iterator[list[Draw]]:
        """Batches from number ``start`` on; earlier ones are skipped without loading anything."""
        waiting: dict[int, list[Draw]] = {0: [], 1: []}
        number = 0
        for epoch in itertools.count():
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_records)
            order = order.repeat(self.repeats)[: self.num_records]
            for place, index in enumerate(map(int, order)):  # a list of a million would take 36 MB in every process
                group = waiting[self.groups[index]]
                group.append((epoch * self.repeats + place % self.repeats, index))
                if len(group) == self.batch_size:
                    if number >= self.start:
                        yield group[self.slice]
                    number += 1
                    group.clear()


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


class SampleLoader(DataLoader):
    """Batches of samples, each batch a list.

    Args:
        dataset: data set of samples.
        batches: draws of each batch.
        num_workers: number of processes that decode images; with 0, the main process decodes them.
        pin_memory: whether to put batches into pinned memory, for fast copies to a GPU.
    """

    def __init__(self, dataset: MappedDataset, batches: Iterable[list[Draw]], num_workers: int, pin_memory: bool = False):
        if num_workers and multiprocessing.current_process().daemon:
            if dataset.mapper.with_targets:  # once, not for each evaluation
                logger.warning(
                    "This process is a daemon and cannot start others, so it reads the images itself, as with "
                    "DATALOADER.NUM_WORKERS 0"
                )
            num_workers = 0
        if num_workers:
            dataset.at_work = shared_memory(16 * num_workers).view(torch.int64).view(num_workers, 2).fill_(-1)
        super().__init__(
            dataset,
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=pack if num_workers else list,
            pin_memory=pin_memory,
            # Otherwise the loader draws a base seed from the global state, and dropout depends on the workers.
            generator=torch.Generator().manual_seed(dataset.seed % 2**63),
            worker_init_fn=_begin_worker,
            timeout=NEWS if num_workers else 0,
        )

    def from_iteration(self, iteration: int) -> "SampleLoader":
        """Start with the batch of this iteration, and return the loader itself; ``batches`` must be :class:`TrainBatches`."""
        self.batch_sampler.start = iteration
        return self

    def __iter__(self) -> Iterator[list[Sample]]:
        """The batches.

        Raises:
            DeadWorkerError: for longer than the data set's ``patience``, no worker has finished an image.
            RunStoppedError: the workers cannot be started.
        """
        try:
            _ = self.num_workers and multiprocessing.Lock()  # fails before torch's iterator is half made
            batches = super().__iter__()
        except OSError as error:
            raise RunStoppedError(
                f"the {self.num_workers} data workers cannot be started: {error.strerror}; raise the limit on /dev/shm (docker run "
                "--shm-size 1g) or on processes (ulimit -u), or set DATALOADER.NUM_WORKERS to 0"
            ) from error
        at_work, seen, silent = self.dataset.at_work, None, 0.0
        try:
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                except (ConnectionError, EOFError):  # from a worker's socket, a moment before torch knows why
                    time.sleep(NEWS)
                    raise
                except RuntimeError as error:
                    if not str(error).startswith("DataLoader timed out"):
                        raise
                    # Counted in time-outs: no time passes while all processes are frozen.
                    now = at_work.tolist()
                    seen, silent = now, silent + NEWS if now == seen else 0.0
                    if silent > (patience := self.dataset.patience):
                        raise DeadWorkerError(
                            f"no data worker has finished an image for more than {patience:.0f} s (DATALOADER.PATIENCE), "
                            f"{self.dataset.reading([pid for pid, _ in now])}; --resume continues from the last checkpoint"
                        ) from error
                else:
                    seen, silent = None, 0.0
                    yield batch.samples() if self.num_workers else batch
        finally:  # torch would wait ten seconds for each worker that does not come back
            reading = [pid for pid, index in at_work.tolist() if index >= 0]  # others may hold a lock that torch takes
            if stuck := [child for child in multiprocessing.active_children() if child.pid in reading]:
                _kill(stuck)


def evaluation_loader(
    dataset: MappedDataset, batch_size: int, num_workers: int, rank: int = 0, world_size: int = 1
) -> SampleLoader:
    """A loader that reads every record once, divided among all processes; ``batch_size`` counts the images of this process."""
    draws = [(0, index) for index in range(rank, len(dataset), world_size)]
    return SampleLoader(dataset, [draws[start : start + batch_size] for start in range(0, len(draws), batch_size)], num_workers)


def _begin_worker(worker: int) -> None:
    """Ignore Ctrl-C and SIGTERM, which often reach the workers too: the run still needs the workers to finish its step."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    if "file_descriptor" in torch.multiprocessing.get_all_sharing_strategies():  # else each batch would be copied to /dev/shm
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


@atexit.register  # registered after multiprocessing's own handler, so called before it
def _end_workers() -> None:
    """End workers that an error left behind. multiprocessing would send SIGTERM, which they ignore, and then wait forever."""
    _kill([child for child in multiprocessing.active_children() if child.daemon])


def _kill(workers: Sequence[multiprocessing.Process]) -> None:
    """End workers without triggering torch's error for each of them."""
    hears = os.name == "posix" and threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if hears else None
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(NEWS)
    if hears:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
