# SPDX-License-Identifier: Apache-2.0
"""Batches that repeat: of samples, workers, processes and a run that goes on."""

import errno
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpvt_det.builders import build_test_loader, build_train_loader, load_splits, training_records
from cpvt_det.checkpoint.files import write_checkpoint
from cpvt_det.common.errors import ConfigError, DeadWorkerError, RunStoppedError
from cpvt_det.common.structures import PaddedBatch
from cpvt_det.data import loader
from cpvt_det.data.coco import load_coco
from cpvt_det.data.loader import MappedDataset, SampleLoader, TrainBatches, dead_workers_named, evaluation_loader
from cpvt_det.data.mapper import Mapper, RandomShortSide, train_transform

evaluation_loader.__test__ = False  # no test, whatever pytest thinks of its name


# Batches


@pytest.fixture
def dataset(drawn_coco):
    records = load_coco(drawn_coco.files).records
    return MappedDataset(records, Mapper(train_transform((32, 40, 48), 90, crop_sizes=(40, 50), crop_range=(24, 40)), True), seed=3)


def make_loader(dataset, num_workers=0, batch_size=2, **options):
    return SampleLoader(dataset, TrainBatches(len(dataset), batch_size, seed=3, **options), num_workers)


def assert_same_batches(first, second):
    assert len(first) == len(second)
    for batch1, batch2 in zip(first, second, strict=True):
        assert [sample["image_id"] for sample in batch1] == [sample["image_id"] for sample in batch2]
        for sample1, sample2 in zip(batch1, batch2, strict=True):
            assert torch.equal(sample1["image"], sample2["image"])
            assert torch.equal(sample1["targets"].boxes_cxcywh, sample2["targets"].boxes_cxcywh)
            assert torch.equal(sample1["targets"].labels, sample2["targets"].labels)


def test_samples_do_not_depend_on_the_workers(dataset):
    alone = list(islice(make_loader(dataset), 7))
    torch.manual_seed(123)
    assert_same_batches(alone, list(islice(make_loader(dataset, num_workers=2), 7)))


@pytest.mark.parametrize("met", [ConnectionResetError, EOFError])
def test_a_worker_that_dies_while_it_hands_over_tensors_is_named(dataset, met, monkeypatch):
    """The reader meets the end of the worker's socket before torch tells of the worker."""
    batches = iter(make_loader(dataset, num_workers=1))
    next(batches)

    def ends(self):
        threading.Timer(0.2, os.kill, (int(dataset.at_work[0, 0]), signal.SIGKILL)).start()
        raise met

    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__next__", ends)
    with pytest.raises(DeadWorkerError, match=r"a data worker \(process \d+\) died"), dead_workers_named(dataset):
        next(batches)


@pytest.mark.parametrize("covered", [False, True])
def test_a_worker_that_dies_while_a_checkpoint_is_written_is_named(dataset, covered, tmp_path, monkeypatch):
    """torch raises its error for it wherever the main thread is; its writer then may cover it with one of its own."""
    path, dataset.at_work = tmp_path / "run" / "x.pth", torch.tensor([[1234, 0]])
    path.parent.mkdir()
    write_checkpoint({"a": torch.ones(1)}, path)
    before = path.read_bytes()

    def save(obj, file):
        file.write(b"half")
        try:
            raise RuntimeError("DataLoader worker (pid 1234) is killed by signal: Killed. ")
        finally:
            if covered:
                raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(DeadWorkerError, match=r"worker \(process 1234\) died while reading \S+\.png"), dead_workers_named(dataset):
        write_checkpoint({"a": torch.zeros(1)}, path)
    assert path.read_bytes() == before and sorted(os.listdir(path.parent)) == ["x.pth", "x.pth.sha256"]


def test_a_worker_is_named_by_the_inner_of_two_blocks(dataset):
    """Evaluation is within the block of training, whose workers are others."""
    inner = MappedDataset(dataset.records, dataset.mapper)
    inner.at_work = torch.tensor([[1234, 1]])
    named = re.escape(f"died while reading {dataset.records[1].file_name};")
    with pytest.raises(DeadWorkerError, match=named), dead_workers_named(dataset), dead_workers_named(inner):
        raise RuntimeError("DataLoader worker (pid(s) 1234) exited unexpectedly")


@pytest.fixture
def quick_news(monkeypatch):
    monkeypatch.setattr(loader, "NEWS", 0.2)


def is_alive(pid):
    return any(child.pid == pid for child in multiprocessing.active_children())


@pytest.fixture
def never_read(monkeypatch):
    """The third image is."""
    real = Mapper.__call__

    def read(self, record):
        if record.image_id == 30:
            time.sleep(1000)
        return real(self, record)

    monkeypatch.setattr(Mapper, "__call__", read)


def test_workers_that_do_not_come_back_end_a_run_by_name(dataset, never_read, quick_news):
    """As of a mount whose server is gone; they are not waited for at the end either."""
    dataset.patience = 1.0
    start, batches = time.monotonic(), iter(evaluation_loader(dataset, 1, num_workers=2))
    assert [next(batches)[0]["image_id"] for _ in range(2)] == [7, 12]
    with pytest.raises(DeadWorkerError, match=r"no data worker has .* 1 s \(DATALOADER\.PATIENCE\), while reading \S+030\.png;"):
        next(batches)
    assert 1 < time.monotonic() - start < 20
    assert not any(is_alive(pid) for pid in dataset.at_work[:, 0].tolist())


def test_slow_workers_are_waited_for_as_long_as_they_finish_images(dataset, monkeypatch, quick_news):
    """A batch takes longer than the patience, each of its images does not."""
    dataset.patience = 1.5
    monkeypatch.setattr(Mapper, "__call__", lambda self, record: time.sleep(0.4) or {"image_id": record.image_id})
    (batch,) = evaluation_loader(dataset, 5, num_workers=1)
    assert [sample["image_id"] for sample in batch] == [7, 12, 30, 41, 5]


def test_workers_that_a_run_no_longer_needs_are_gone_at_once(dataset, never_read):
    batches = iter(evaluation_loader(dataset, 1, num_workers=2))
    next(batches)
    start, before = time.monotonic(), signal.getsignal(signal.SIGCHLD)
    batches.close()
    assert time.monotonic() - start < 5
    assert not any(is_alive(pid) for pid in dataset.at_work[:, 0].tolist())
    assert signal.getsignal(signal.SIGCHLD) is before  # torch's, which later loaders need


def test_batches_cross_processes_by_one_descriptor_each(dataset):
    """A process may often have 1024."""
    batches = iter(make_loader(dataset, num_workers=1, batch_size=8))
    kept = [next(batches)]
    before = len(os.listdir("/proc/self/fd"))
    kept += islice(batches, 5)
    assert len(os.listdir("/proc/self/fd")) - before <= 5
    assert all(sample["image"].is_shared() for batch in kept for sample in batch)


def test_workers_that_cannot_be_started_are_told_with_the_way_out(dataset, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", full)
    told = r"the 2 data workers cannot be started: No space left on device; .*/dev/shm.*--shm-size.*NUM_WORKERS to 0"
    with pytest.raises(RunStoppedError, match=told):
        next(iter(make_loader(dataset, num_workers=2)))


def test_a_daemonic_process_reads_images_itself(dataset, monkeypatch, caplog):
    """It may have no children: multiprocessing's daemons, tasks of Celery."""
    expected = list(islice(make_loader(dataset), 3))
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert_same_batches(expected, list(islice(make_loader(dataset, num_workers=2), 3)))
    assert "This process is a daemon and cannot start others, so it reads the images itself" in caplog.text


def test_loader_continues_from_an_iteration(dataset):
    """Three epochs of 5 images in batches of 2, from batch 5 on: what an interrupted run still has to see."""
    whole = list(islice(make_loader(dataset), 8))
    for num_workers in (0, 2):
        continued = make_loader(dataset, num_workers).from_iteration(5)
        assert_same_batches(whole[5:], list(islice(continued, 3)))
    restarted = make_loader(dataset).from_iteration(5).from_iteration(0)
    assert_same_batches(whole, list(islice(restarted, 8)))


def test_slices_of_two_processes_make_up_the_batch(dataset):
    whole = list(islice(make_loader(dataset, batch_size=4), 4))
    slices = [list(islice(make_loader(dataset, batch_size=4, rank=rank, world_size=2), 4)) for rank in range(2)]
    assert all(len(batch) == 2 for part in slices for batch in part)
    assert_same_batches(whole, [first + second for first, second in zip(*slices, strict=True)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_state_of_the_process_is_untouched(dataset, num_workers):
    """Dropout draws the same numbers whatever the loader did in between."""
    torch.manual_seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    list(islice(make_loader(dataset, num_workers), 4))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


def test_random_state_of_gpus_is_untouched(dataset, monkeypatch):
    """``torch.manual_seed`` would reseed them for each image, and every step's dropout there would be drawn from it."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    list(islice(make_loader(dataset), 2))
    assert seeds == []


def test_sample_depends_on_seed_epoch_and_image_alone(dataset):
    def draw(seed, epoch, index):
        return tuple(MappedDataset(dataset.records, lambda record: torch.rand(3), seed)[epoch, index].tolist())

    assert draw(3, 1, 2) == draw(3, 1, 2)
    draws = [draw(seed, epoch, index) for seed in (3, 4) for epoch in range(4) for index in range(5)]
    assert len(set(draws)) == 2 * 4 * 5


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2**40), st.booleans())
def test_every_image_comes_once_an_epoch(num_records, batch_size, seed, grouped):
    """Counted over three epochs: each draw (epoch, image) at most once, and none left behind but what waits."""
    wide = [index % 3 == 0 for index in range(num_records)] if grouped else None
    batches = TrainBatches(num_records, batch_size, seed, wide)
    draws = [draw for batch in islice(batches, 3 * num_records // batch_size + 2) for draw in batch]
    assert len(set(draws)) == len(draws)
    groups = 2 if grouped else 1
    by_epoch = Counter(epoch for epoch, _ in draws)
    for epoch in range(max(by_epoch) - 1 - batch_size * groups // num_records):
        assert by_epoch[epoch] >= num_records - groups * (batch_size - 1)
    counts = Counter(index for _, index in draws)
    if not grouped:
        assert max(counts.values()) - min(counts.get(index, 0) for index in range(num_records)) <= 1


def test_epochs_have_different_orders():
    batches = list(islice(TrainBatches(20, 20, seed=0), 3))
    orders = [[index for _, index in batch] for batch in batches]
    assert [sorted(order) for order in orders] == [list(range(20))] * 3
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [index for _, index in next(iter(TrainBatches(20, 20, seed=1)))] != orders[0]


def test_grouped_batches_are_all_wide_or_all_tall():
    wide = [index % 3 == 0 for index in range(31)]
    kinds = [{wide[index] for _, index in batch} for batch in islice(TrainBatches(31, 4, 0, wide), 60)]
    assert all(len(kind) == 1 for kind in kinds)
    assert {kind.pop() for kind in kinds} == {True, False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_records": 0}, "no image to train on"),
        ({"batch_size": 0}, "batch of 0 images"),
        ({"batch_size": 3, "world_size": 2}, "batch of 3 images must be a positive multiple of the 2 processes"),
    ],
)
def test_impossible_batches_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainBatches(**{"num_records": 5, "batch_size": 2, "seed": 0, **arguments})


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_sees_every_image_once(drawn_coco, world_size):
    """Over all processes, also where there are more of them than images."""
    records = load_coco(drawn_coco.files).records
    dataset = MappedDataset(records, Mapper(RandomShortSide([0], None), with_targets=False))
    seen = []
    for rank in range(world_size):
        for batch in evaluation_loader(dataset, 2, 0, rank, world_size):
            assert 1 <= len(batch) <= 2
            seen += [sample["image_id"] for sample in batch]
    assert sorted(seen) == [5, 7, 12, 30, 41]


def test_loaders_of_the_config_give_batches_a_detector_takes(drawn_cfg):
    (data,), _ = load_splits(drawn_cfg)
    for batch in islice(build_train_loader(drawn_cfg, training_records(drawn_cfg, [data]), seed=0), 5):
        sizes = {sample["image"].shape[1] < sample["image"].shape[2] for sample in batch}
        assert len(sizes) == 1  # grouped by aspect ratio
        padded = PaddedBatch.from_images([sample["image"].float() for sample in batch])
        assert padded.image_sizes == [tuple(sample["image"].shape[1:]) for sample in batch]
        assert all(32 <= min(size) <= 40 and max(size) <= 96 for size in padded.image_sizes)
    tested = [sample for batch in build_test_loader(drawn_cfg, data.records) for sample in batch]
    assert [tuple(sample["image"].shape[1:]) for sample in tested] == [(40, 72), (64, 48), (33, 90), (50, 70), (56, 40)]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("SOLVER.IMS_PER_BATCH", 0, "batch of 0 images"),
        ("INPUT.FORMAT", "BGR", r"INPUT\.FORMAT is 'BGR', but the data loader reads only RGB"),
        ("INPUT.RANDOM_FLIP", "vertical", r"unknown INPUT\.RANDOM_FLIP 'vertical'; known: horizontal, none"),
    ],
)
def test_settings_of_the_loader_that_cannot_be_had_are_config_errors(drawn_cfg, key, value, message):
    drawn_cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=message):
        build_train_loader(drawn_cfg, training_records(drawn_cfg, load_splits(drawn_cfg)[0]), seed=0)
