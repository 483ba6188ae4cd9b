# SPDX-License-Identifier: Apache-2.0
"""Steps that memory cannot hold are refused before they are taken, and no others."""

import logging

import pytest
import torch
from test_runner import losses_of
from tiny import DETECTORS, DINO, overrides, random_config
from torch import nn

from cpvt_det.builders import build_detector
from cpvt_det.common import memory
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import Targets
from cpvt_det.config import load_cfg
from cpvt_det.losses import TrainingModel
from cpvt_det.solver import memory_check
from cpvt_det.solver.memory_check import _judge, kept_bytes, require_memory
from cpvt_det.training.train import run

GB = 10**9


def test_kept_is_what_the_backward_pass_needs():
    """exp keeps its result, the product its two factors: 3 x 10 floats; the sum keeps nothing."""
    x, y = torch.ones(10, requires_grad=True), torch.ones(10, requires_grad=True)
    assert kept_bytes(lambda: (x * y).exp().sum()) == 3 * 10 * 4
    assert kept_bytes(lambda: (x + y).sum()) == 0


def test_parameters_and_buffers_are_there_already_and_a_storage_counts_once():
    """A linear layer keeps its input, 5 x 3 floats, for the gradient of its weight; views of it are no more."""
    layer, x = nn.Linear(3, 2), torch.ones(5, 3)
    assert kept_bytes(layer, x) == 5 * 3 * 4
    assert kept_bytes(nn.Sequential(layer), x.view(5, 3)[:]) == 5 * 3 * 4


@pytest.mark.parametrize("kind", DETECTORS)
def test_several_images_keep_as_many_times_what_one_keeps(kind):
    torch.manual_seed(0)
    detector = build_detector(random_config(**DETECTORS[kind])).train()
    images, mask = torch.rand(4, 3, 96, 128), torch.zeros(4, 96, 128, dtype=torch.bool)
    one, four = kept_bytes(detector, images[:1].clone(), mask[:1].clone()), kept_bytes(detector, images, mask)
    assert four == pytest.approx(4 * one, rel=0.1)


def judge(each, images, count, available):
    _judge(round(each * GB), images, count, round(available * GB), "images")


def test_only_what_is_clearly_too_much_is_refused(caplog):
    """32 images of 0.8 GB each keep 25.6 GB: too much for 23 GB, not for 24; from 38.4 GB on nothing is said."""
    with pytest.raises(
        ConfigError, match=r"images keep 25.6 GB for .*, but only 23 GB of memory are available; set SOLVER.ACCUMULATE 2,"
    ):
        judge(0.8, 32, 32, 23)
    package, messages = logging.getLogger("cpvt_det"), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    package.addHandler(handler)
    try:
        judge(0.8, 32, 32, 24)
        judge(0.8, 32, 32, 38.3)
        assert len(messages) == 2
        assert all(message.startswith("The first step may not fit into memory: images keep 25.6 GB") for message in messages)
        judge(0.8, 32, 32, 38.5)
        assert len(messages) == 2
    finally:
        package.removeHandler(handler)


@pytest.mark.parametrize(("available", "parts"), [(23, 2), (13, 4), (4, 11), (1.3, 32)])
def test_the_advised_parts_fit_with_room(available, parts):
    """ceil(32 / parts) x 0.8 GB x 1.5 is within what is available, and with a part less it is not."""
    assert -(-32 // parts) * 1.2 <= available < -(-32 // (parts - 1)) * 1.2
    with pytest.raises(ConfigError, match=rf"set SOLVER.ACCUMULATE {parts}, which splits the step into {parts} parts"):
        judge(0.8, 32, 32, available)


def test_where_one_image_is_too_much_smaller_ones_are_advised():
    with pytest.raises(
        ConfigError, match=r"hardly needs less: set smaller INPUT.MIN_SIZE_TRAIN and MAX_SIZE_TRAIN, or MODEL.CHECKPOINT"
    ):
        judge(0.8, 1, 32, 0.5)


@pytest.fixture
def samples():
    return [{"image": torch.randint(256, (3, 64, size)), "targets": None} for size in (96, 80, 96, 96)]


@pytest.mark.parametrize("kind", DETECTORS)
def test_a_look_leaves_the_detector_as_it_is(monkeypatch, samples, kind):
    monkeypatch.setattr(memory_check, "LARGE", 10**12)
    torch.manual_seed(0)
    detector = build_detector(random_config(**DETECTORS[kind])).train()
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    require_memory(detector, samples, 4)
    assert all(torch.equal(value, before[name]) for name, value in detector.state_dict().items())
    assert all(parameter.grad is None for parameter in detector.parameters()) and detector.training


def test_small_batches_are_not_looked_at(monkeypatch, samples):
    monkeypatch.setattr(memory_check, "kept_bytes", lambda *_: pytest.fail("a look"))
    monkeypatch.setattr(memory, "available", lambda: 4 * 64 * 96 * memory_check.LARGE)
    detector = build_detector(random_config()).train()
    require_memory(detector, samples, 4)
    monkeypatch.setattr(memory, "available", lambda: None)  # a system that does not report it
    require_memory(detector, samples, 4)


def test_images_that_cannot_fit_are_refused_by_arithmetic(monkeypatch, samples):
    """4 images of 3 x 64 x 96 float32 take 294,912 bytes; they are not allocated."""
    detector = build_detector(random_config()).train()
    monkeypatch.setattr(detector, "preprocess", lambda *_: pytest.fail("a batch"))
    monkeypatch.setattr(memory, "available", lambda: 294_911)
    with pytest.raises(ConfigError, match=r"4 images on a canvas of 64 x 96 pixels take 0.000295 GB .*or SOLVER.ACCUMULATE 8"):
        require_memory(detector, samples, 8)
    monkeypatch.setattr(memory, "available", lambda: 73_727)  # less than one takes
    for part in (samples, samples[:1]):
        with pytest.raises(ConfigError, match=r"images? on a canvas of .*; set smaller INPUT.MIN_SIZE_TRAIN"):
            require_memory(detector, part, 8)


def with_objects(samples, count):
    boxes = torch.full((count, 4), 0.5)
    return [{**sample, "targets": Targets(torch.zeros(count, dtype=torch.int64), boxes)} for sample in samples]


@pytest.mark.parametrize(("pairs", "objects", "said"), [(30_000, 2, "15000 groups of 4"), (100, 40_000, "1 groups of 80000")])
def test_denoising_whose_attention_mask_cannot_fit_is_refused_by_arithmetic(monkeypatch, samples, pairs, objects, said):
    """60,000 or 80,000 queries: 14.4 and 25.6 GB, for less than which nobody has to wait until the system ends the process."""
    monkeypatch.setattr(memory_check, "kept_bytes", lambda *_: pytest.fail("a look"))
    monkeypatch.setattr(memory, "available", lambda: 14 * GB)
    detector = build_detector(random_config(**{**DINO, "MODEL__QUERIES__DENOISING": pairs})).train()
    with pytest.raises(ConfigError, match=rf"DENOISING {pairs} makes {said} queries for the first batch.* alone needs \d+\.\d GB"):
        require_memory(detector, with_objects(samples, objects), 4)
    require_memory(detector, samples, 4)  # without targets there is no denoising


def test_a_hybrid_branch_whose_attention_mask_cannot_fit_is_refused_too(monkeypatch, samples):
    """150,000 queries and 3 groups of 8 more: 90 GB; the branch alone is no less."""
    monkeypatch.setattr(memory_check, "kept_bytes", lambda *_: pytest.fail("a look"))
    monkeypatch.setattr(memory, "available", lambda: 80 * GB)
    for denoising, said in (
        (12, "DENOISING 12 makes 3 groups of 8 .* and MODEL.QUERIES.HYBRID makes 150000"),
        (0, "HYBRID makes 150000"),
    ):
        keys = {
            **DINO,
            "MODEL__QUERIES__HYBRID": 150_000,
            "MODEL__QUERIES__SHARED_CONTENT": True,
            "MODEL__QUERIES__DENOISING": denoising,
        }
        detector = build_detector(random_config(**keys)).train()
        with pytest.raises(ConfigError, match=rf"MODEL.QUERIES.{said} queries, and their attention mask alone needs 90(\.\d)? GB"):
            require_memory(detector, with_objects(samples, 4), 4)
        require_memory(detector, samples, 4)  # without targets there is no branch


def test_many_queries_of_denoising_are_looked_at_with_the_most_objects_of_the_batch(monkeypatch, samples):
    """Small images that need no look alone; 400 objects in one of them make 800 queries in each."""
    monkeypatch.setattr(memory, "available", lambda: 5 * 64 * 96 * memory_check.LARGE)
    seen = []
    monkeypatch.setattr(memory_check, "kept_bytes", lambda *args: seen.append(args[3]) or 1)
    detector = build_detector(random_config(**DINO)).train()
    require_memory(detector, with_objects(samples, 2), 4)
    assert seen == []
    require_memory(detector, [*with_objects(samples[:3], 2), *with_objects(samples[3:], 400)], 4)
    assert [len(target) for target in seen[0]] == [400]


def test_a_run_is_refused_before_its_first_step_and_goes_in_parts(monkeypatch, drawn_coco, tmp_path):
    """Five images at once are too much for what is there, one at a time is not; a look changes no loss."""

    def train(name, **more):
        words = overrides(drawn_coco.files, tmp_path / name, SOLVER__IMS_PER_BATCH=5, SOLVER__MAX_ITER=2, DATASETS__TEST=(), **more)
        run(load_cfg("", words))
        return tmp_path / name

    usual, measured = train("usual", SOLVER__ACCUMULATE=5), []
    real = memory_check.kept_bytes
    monkeypatch.setattr(memory_check, "kept_bytes", lambda *args: measured.append(real(*args)) or measured[-1])
    monkeypatch.setattr(memory, "available", lambda: 2 * measured[-1] if measured else 10**6)
    with pytest.raises(ConfigError):
        train("measuring")
    with pytest.raises(
        ConfigError, match=r"the first step does not fit into memory: 5 images on a canvas of .*ACCUMULATE 5, which"
    ):
        train("refused")
    assert not list((tmp_path / "refused").glob("model_*"))
    assert losses_of(train("parts", SOLVER__ACCUMULATE=5)) == losses_of(usual)
    assert len(measured) >= 2


def test_what_is_available_is_within_the_limits_of_all_groups(monkeypatch, tmp_path):
    """A group of 1000 bytes of which 400 are used, 100 of these by files that can be dropped, within one of 5000 bytes."""
    usual = memory.available()
    if usual is None:
        pytest.skip("not Linux")
    assert usual > 0
    for folder, limit, used, files in ((tmp_path, "5000", 1000, 0), (tmp_path / "inner", "1000", 400, 100)):
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(used))
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {files}\n")
    assert memory.room_in(tmp_path / "inner") == 700
    assert memory.room_in(tmp_path) == 4000
    (tmp_path / "memory.max").write_text("max")
    assert memory.room_in(tmp_path) is None and memory.room_in(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("batch", "parts", "said"),
    [
        (4, 1, "the step of 4 images does not fit into the memory of the GPU .*; set SOLVER.ACCUMULATE 2, which"),
        (4, 2, "set SOLVER.ACCUMULATE 4, which splits the step into 4 parts; a run that has begun continues with --resume"),
        (
            2,
            2,
            r"of the GPU \(CUDA out of memory. .*\); set smaller INPUT.MIN_SIZE_TRAIN .* MODEL.CHECKPOINTING True; a run",
        ),
    ],
)
def test_a_gpu_without_memory_ends_a_run_with_the_line_to_write_and_its_last_step(
    monkeypatch, drawn_coco, tmp_path, batch, parts, said
):
    more = {"SOLVER__IMS_PER_BATCH": batch, "SOLVER__ACCUMULATE": parts, "SOLVER__MAX_ITER": 3}
    words = overrides(drawn_coco.files, tmp_path, DATASETS__TEST=(), **more)
    forward, calls = TrainingModel.forward, []

    def full(self, *args):
        calls.append(args)
        if len(calls) > parts:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, *args)

    monkeypatch.setattr(TrainingModel, "forward", full)
    with pytest.raises(ConfigError, match=said):
        run(load_cfg("", words))
    assert torch.load(tmp_path / "model_0000000.pth", weights_only=False)["iteration"] == 0
