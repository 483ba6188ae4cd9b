# SPDX-License-Identifier: Apache-2.0
"""Batches of samples, the same whatever the number of workers, and from any iteration on.

A sample's random state depends on (seed, epoch, image) alone, a batch on (seed, iteration) alone; so a run continues where it
stopped once it knows its iteration.
"""

import atexit
import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from cpvt_det.data.coco import ImageRecord
from cpvt_det.data.mapper import Mapper, Sample
from cpvt_det.errors import DeadWorkerError

Draw = tuple[int, int]
"""(epoch, index of the record)."""

NEWS = 5.0  # seconds in which torch hears of a worker that ended; its signal cuts them short


class MappedDataset(Dataset):
    """Records that become samples when they are asked for.

    Args:
        records: of one or more data sets.
        mapper: record -> sample.
        seed: of the run.

    Attributes:
        at_work: (workers, 2) int64 in shared memory, each one's process id and the index of the record it is reading, or -1.
    """

    def __init__(self, records: Sequence[ImageRecord], mapper: Mapper, seed: int = 0):
        self.records = records
        self.mapper = mapper
        self.seed = seed
        self.at_work = torch.zeros(0, 2, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, draw: Draw) -> Sample:
        epoch, index = draw
        worker = get_worker_info()
        if worker is not None:
            self.at_work[worker.id] = torch.tensor([os.getpid(), index])
        with torch.random.fork_rng(devices=[]):  # in the main process the model's dropout draws from the same state
            # Not torch.manual_seed: it would reseed the GPUs too, whose states stay outside of this fork.
            torch.default_generator.manual_seed(mix_seed(self.seed, epoch, index))
            sample = self.mapper(self.records[index])
        if worker is not None:
            self.at_work[worker.id, 1] = -1
        return sample


@contextlib.contextmanager
def dead_workers_named(dataset: MappedDataset) -> Iterator[None]:
    """Within this block the death of a data worker, which torch tells of wherever it meets the program, says what it was reading.

    Raises:
        DeadWorkerError: a worker died.
    """
    try:
        try:
            yield
        except (ConnectionError, EOFError):  # of the socket that hands over tensors, some moments before torch knows why
            time.sleep(NEWS)
            raise
    except RuntimeError as error:
        told = re.match(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", str(error))
        if told is None:
            raise
        dead = [int(pid) for pid in told[1].split(",")]
        images = [dataset.records[index].file_name for pid, index in dataset.at_work.tolist() if pid in dead and index >= 0]
        reading = f"while reading {', '.join(images)}" if images else "between two images"
        raise DeadWorkerError(
            f"a data worker (process {told[1]}) died {reading}; --resume goes on from the last checkpoint"
        ) from error


class TrainBatches(Sampler[list[Draw]]):
    """An endless stream of batches: every image once an epoch, in an order drawn anew for each.

    With grouping, a batch holds images that are all wide or all tall, which saves padding; images wait for their batch across the
    border of epochs.

    Args:
        wide: for each record, whether it is wider than tall; ``None`` for no grouping.
        num_records: how many there are.
        batch_size: of a batch, over all processes.
        seed: of the run.
        rank, world_size: this process takes its slice of every batch.

    Raises:
        ValueError: no record, or a batch that the processes do not divide.
    """

    def __init__(
        self,
        num_records: int,
        batch_size: int,
        seed: int,
        wide: Sequence[bool] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        if num_records < 1:
            raise ValueError("there is no image to train on")
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(f"the batch of {batch_size} images must be a positive multiple of the {world_size} processes")
        self.num_records = num_records
        self.batch_size = batch_size
        self.seed = seed
        self.groups = np.zeros(num_records, dtype=int) if wide is None else np.asarray(wide, dtype=int)
        share = batch_size // world_size
        self.slice = slice(rank * share, (rank + 1) * share)
        self.start = 0

    def __iter__(self) -> Iterator[list[Draw]]:
        """Batches from number ``start`` on; those before are counted off without loading anything."""
        waiting: dict[int, list[Draw]] = {0: [], 1: []}
        number = 0
        for epoch in itertools.count():
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_records)
            for index in order.tolist():
                group = waiting[self.groups[index]]
                group.append((epoch, index))
                if len(group) == self.batch_size:
                    if number >= self.start:
                        yield group[self.slice]
                    number += 1
                    group.clear()


class TrainLoader:
    """Batches for training, from a given iteration on.

    Args:
        dataset: samples with targets.
        batches: which samples.
        num_workers: processes that decode; 0 for none.
        pin_memory: for copies to a GPU.
    """

    def __init__(self, dataset: MappedDataset, batches: TrainBatches, num_workers: int, pin_memory: bool = False):
        self.dataset = dataset
        self.batches = batches
        self._loader = _data_loader(dataset, batches, num_workers, pin_memory)

    def from_iteration(self, iteration: int) -> "TrainLoader":
        """Start at the batch of this iteration."""
        self.batches.start = iteration
        return self

    def __iter__(self) -> Iterator[list[Sample]]:
        return iter(self._loader)


def evaluation_loader(dataset: MappedDataset, batch_size: int, num_workers: int, rank: int = 0, world_size: int = 1) -> DataLoader:
    """Every record once, over all processes; batches of this process's ``batch_size``."""
    draws = [(0, index) for index in range(rank, len(dataset), world_size)]
    batches = [draws[start : start + batch_size] for start in range(0, len(draws), batch_size)]
    return _data_loader(dataset, batches, num_workers, pin_memory=False)


def _data_loader(dataset: MappedDataset, batches: Sampler | list, num_workers: int, pin_memory: bool) -> DataLoader:
    dataset.at_work = torch.full((num_workers, 2), -1, dtype=torch.int64).share_memory_()
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=list,
        pin_memory=pin_memory,
        persistent_workers=False,
        # Its own generator: the loader would draw a base seed from the global state, and dropout would change with workers.
        generator=torch.Generator().manual_seed(dataset.seed % 2**63),
        worker_init_fn=_leave_signals_to_the_run,
    )


def _leave_signals_to_the_run(worker: int) -> None:
    """Ctrl-C in a terminal, and many a SIGTERM, goes to the workers too; the run still needs them for the step at hand."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


@atexit.register  # after multiprocessing's own, so it is called before that
def _end_workers() -> None:
    """Those that an error left behind: multiprocessing would send them SIGTERM, which they ignore, and wait for ever."""
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    if workers and os.name == "posix":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for every one of them
    for worker in workers:
        worker.kill()


def mix_seed(*numbers: int) -> int:
    """One seed from several, without collisions between neighbours."""
    return int(np.random.SeedSequence([number % 2**63 for number in numbers]).generate_state(1, np.uint64)[0])
