# SPDX-License-Identifier: Apache-2.0
"""Files of a run on bad days: a flipped byte, a full disk, the newest that is whole, pickles of arrays."""

import errno
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from test_checkpoint import Payload, detector, same

from cpvt_det.checkpoint import load_weights
from cpvt_det.checkpoint.checkpointer import BestSoFar, RunCheckpointer, RunState
from cpvt_det.checkpoint.files import checksum_of, not_finite, read_checkpoint, write_checkpoint
from cpvt_det.checkpoint.resume import choose_to_resume, wait_for
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import RunStoppedError, WeightsError
from cpvt_det.config import changed_keys, get_cfg

DATA = {"images": 2, "sha256": "0"}
WEIGHTS = {"a": torch.arange(600.0), "b": torch.ones(3, dtype=torch.int64)}


class Empty:
    """A training step without a state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def checkpointer(folder, keep=3, model=None, run_id="a"):
    state = RunState(Classes((0,), ("cat",)), "VERSION: 2\n", 1, run_id, DATA)
    return RunCheckpointer(model or torch.nn.Linear(2, 2), folder, keep, Empty(), state)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


# Checksums


def test_the_checksum_is_that_of_sha256sum(tmp_path):
    write_checkpoint(WEIGHTS, tmp_path / "x.pth")
    assert checksum_of(tmp_path / "x.pth").name == "x.pth.sha256"
    result = subprocess.run(["sha256sum", "--check", "x.pth.sha256"], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "x.pth: OK\n")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_every_flipped_byte_is_found(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    write_checkpoint(WEIGHTS, path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(WeightsError, match=r"damaged: its content does not match its checksum file x\.\w+\.sha256"):
            read_checkpoint(path)
    path.write_bytes(whole)
    assert same(read_checkpoint(path), WEIGHTS)


def test_without_a_checksum_flipped_weights_are_found_by_those_inside(tmp_path):
    """As in files from elsewhere: torch writes checksums into its zip files, and does not look at them."""
    path = tmp_path / "x.pth"
    torch.save(WEIGHTS, path)
    whole = path.read_bytes()
    start = whole.index(WEIGHTS["a"].numpy().tobytes())
    for position in range(start, start + 2400, 301):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 128]) + whole[position + 1 :])
        with pytest.raises(WeightsError, match=r"the checksum of its part \S+/data/0 is wrong"):
            read_checkpoint(path)
    path.write_bytes(whole)
    assert same(read_checkpoint(path), WEIGHTS)


def test_a_kill_between_a_file_and_its_checksum_leaves_it_readable(tmp_path):
    write_checkpoint(WEIGHTS, tmp_path / "x.pth")
    checksum_of(tmp_path / "x.pth").unlink()
    assert same(read_checkpoint(tmp_path / "x.pth"), WEIGHTS)


# Disks


@pytest.mark.parametrize("room", [0, 100, 1000, 3000])
def test_a_full_disk_leaves_the_file_of_before_and_nothing_else(tmp_path, monkeypatch, room):
    """Every write beyond some bytes fails, as on a full disk."""
    path = tmp_path / "x.pth"
    write_checkpoint(WEIGHTS, path)
    before, left = path.read_bytes(), [room]
    real_open = type(path).open

    class Limited:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(
        type(path),
        "open",
        lambda self, mode="r", *a, **k: Limited(real_open(self, mode, *a, **k)) if mode == "xb" else real_open(self, mode, *a, **k),
    )
    with pytest.raises(
        RunStoppedError, match=r"cannot write \S+x\.pth: No space left on device; the file that was there before is unchanged"
    ):
        write_checkpoint({name: tensor + 1 for name, tensor in WEIGHTS.items()}, path)
    assert path.read_bytes() == before
    assert set(files(tmp_path)) <= {"x.pth", "x.pth.sha256"}
    assert same(read_checkpoint(path), WEIGHTS)


def test_the_largest_file_that_a_process_may_write_is_a_full_disk_too(tmp_path):
    """RLIMIT_FSIZE, in a process of its own."""
    script = (
        "import resource, sys, torch; from cpvt_det.checkpoint.files import write_checkpoint\n"
        "write_checkpoint({'a': torch.zeros(10)}, sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "write_checkpoint({'a': torch.zeros(100_000)}, sys.argv[1])\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.pth")], capture_output=True, text=True)
    assert "RunStoppedError" in result.stderr
    assert "x.pth: File too large; the file that was there before is unchanged" in result.stderr
    assert files(tmp_path) == ["x.pth", "x.pth.sha256"]
    assert len(read_checkpoint(tmp_path / "x.pth")["a"]) == 10


# The checkpoints of a run


def test_the_last_few_stay_with_the_best_and_the_final(tmp_path):
    keeper = checkpointer(tmp_path, keep=2)
    (tmp_path / "model_0000099.pth").write_bytes(b"of an earlier run")
    for iteration in (3, 7, 11, 15):
        keeper.save(f"model_{iteration:07d}", iteration)
        keeper.keep_best(float(iteration == 7), iteration)
    keeper.save("model_final", 16)
    kept = [name for name in files(tmp_path) if name.endswith(".pth")]
    assert kept == ["model_0000011.pth", "model_0000015.pth", "model_0000099.pth", "model_best.pth", "model_final.pth"]
    assert len([name for name in files(tmp_path) if name.endswith(".sha256")]) == 4
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "checksum", "garbage"])
def test_the_newest_whole_checkpoint_is_resumed_and_the_skipped_are_told(tmp_path, caplog, damage):
    keeper = checkpointer(tmp_path)
    for iteration in (3, 7):
        keeper.save(f"model_{iteration:07d}", iteration)
    newest = tmp_path / "model_0000007.pth"
    whole = bytearray(newest.read_bytes())
    whole[len(whole) // 2] ^= 1
    content = {"empty": b"", "truncated": whole[: len(whole) // 2], "flipped": bytes(whole), "garbage": b"?" * 99}
    if damage == "checksum":
        checksum_of(newest).write_text("0" * 64)
    else:
        newest.write_bytes(content[damage])
    assert choose_to_resume(tmp_path)[0].name == "model_0000003.pth"
    assert checkpointer(tmp_path).begin(resume=True) == 4
    assert "Skipped a checkpoint:" in caplog.text
    assert "model_0000007.pth: damaged" in caplog.text
    os.truncate(tmp_path / "model_0000003.pth", 5)
    with pytest.raises(WeightsError, match=r"all checkpoints in \S+ are damaged \(model_000000[37]\.pth, model_000000[37]\.pth\)"):
        checkpointer(tmp_path).begin(resume=True)


@pytest.mark.parametrize("tag", ["", "model_0000001.pth", "gone.pth"])
def test_a_wrong_last_checkpoint_does_not_matter(tmp_path, tag):
    keeper = checkpointer(tmp_path)
    for iteration in (1, 2):
        keeper.save(f"model_{iteration:07d}", iteration)
    (tmp_path / "last_checkpoint").write_text(tag)
    assert checkpointer(tmp_path).begin(resume=True) == 3


def test_checkpoints_that_are_gone_are_not_a_new_run(tmp_path):
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    with pytest.raises(
        WeightsError, match=r"names \S+model_0000001\.pth, which does not exist; put that file back, or remove last_checkpoint"
    ):
        checkpointer(tmp_path).begin(resume=True)


# Which run a folder is of


def begin(folder, run_id):
    """A run that is started, not resumed."""
    keeper = checkpointer(folder, run_id=run_id)
    assert keeper.begin(resume=False) == 0
    return keeper


def test_an_earlier_run_s_checkpoint_of_a_higher_iteration_is_not_resumed(tmp_path):
    begin(tmp_path, "old").save("model_0000099", 99)
    begin(tmp_path, "new").save("model_0000003", 3)
    (tmp_path / "last_checkpoint").write_text("model_0000099.pth")
    again = checkpointer(tmp_path)
    assert again.begin(resume=True) == 4
    assert again.state.run_id == (tmp_path / "run_id").read_text() == "new"


def test_a_started_run_goes_on_with_its_own_checkpoints_alone(tmp_path):
    """As torchrun starts it anew: the same id, no --resume."""
    begin(tmp_path, "old").save("model_0000099", 99)
    begin(tmp_path, "new")  # and dies
    begin(tmp_path, "new").save("model_0000003", 3)
    assert checkpointer(tmp_path, run_id="new").begin(resume=False) == 4


def test_a_run_without_checkpoints_gives_way_to_the_newest_of_another_and_says_so(tmp_path, caplog):
    """A run that ended before its first checkpoint: --resume takes what is there."""
    begin(tmp_path, "first").save("model_0000099", 99)
    begin(tmp_path, "second").save("model_0000003", 3)
    begin(tmp_path, "third")
    assert checkpointer(tmp_path).begin(resume=True) == 4
    assert "has no undamaged checkpoint; " + str(tmp_path / "model_0000003.pth") + " belongs to an earlier run" in caplog.text
    assert (tmp_path / "run_id").read_text() == "second"


def test_a_checkpoint_copied_into_a_folder_is_resumed_as_the_run_that_it_is_of(tmp_path, caplog):
    begin(tmp_path, "a").save("model_final", 5)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(tmp_path / "model_final.pth", other)
    again = checkpointer(other, run_id="b")
    assert again.begin(resume=True) == 6
    assert again.state.run_id == (other / "run_id").read_text() == "a"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


def test_copies_are_ordered_by_iteration_whatever_times_they_bear(tmp_path):
    keeper = begin(tmp_path, "a")
    for iteration in (1, 2, 3):
        keeper.save(f"model_{iteration:07d}", iteration)
    keeper.save("model_final", 3)
    for number, name in enumerate(("model_final.pth", "model_0000003.pth", "model_0000002.pth", "model_0000001.pth")):
        os.utime(tmp_path / name, (1e9 + number, 1e9 + number))
    assert choose_to_resume(tmp_path)[0].name == "model_0000003.pth"
    assert checkpointer(tmp_path).begin(resume=True) == 4


def test_the_best_of_an_earlier_run_with_the_same_seed_is_replaced(tmp_path):
    begin(tmp_path, "old").keep_best(50.0, 9)
    new = begin(tmp_path, "new")
    new.save("model_0000001", 1)
    again = checkpointer(tmp_path)
    again.begin(resume=True)
    again.keep_best(3.0, 2)
    assert read_checkpoint(tmp_path / "model_best.pth")["cpvt_det"]["best"]["figure"] == 3.0


@pytest.mark.parametrize("now", [("AP50", "cards"), ("bbox/AP", "pets")], ids=["figure", "test set"])
def test_a_best_of_another_figure_or_test_set_is_replaced_and_that_is_told(now, tmp_path, caplog):
    """Figures of two names, or of two test sets, cannot be compared."""
    keeper = begin(tmp_path, "a")
    keeper.state.best = BestSoFar("bbox/AP", "cards")
    keeper.keep_best(50.0, 1)
    keeper.save("model_0000002", 2)
    again = checkpointer(tmp_path)
    again.state.best = BestSoFar(*now)
    again.begin(resume=True)
    assert again.state.best == BestSoFar(*now)
    told = f"The best checkpoint so far was selected by bbox/AP on cards, but this run selects by {now[0]} on {now[1]}"
    assert told in caplog.text
    again.keep_best(3.0, 4)
    saved = BestSoFar(**read_checkpoint(tmp_path / "model_best.pth")["cpvt_det"]["best"])
    assert saved == BestSoFar(*now, 3.0, 4, counted=4)


def test_other_training_data_are_told_at_a_resume(tmp_path, caplog):
    begin(tmp_path, "a").save("model_0000001", 1)
    again = checkpointer(tmp_path)
    again.state.data = {"images": 3, "sha256": "1"}
    again.begin(resume=True)
    assert "The training data of the resumed run has changed: 2 images before, 3 now" in caplog.text
    assert again.state.state_dict()["data"] == {"images": 3, "sha256": "1"}


def test_a_damaged_best_checkpoint_is_forgotten(tmp_path, caplog):
    keeper = checkpointer(tmp_path)
    keeper.save("model_0000001", 1)
    keeper.keep_best(5.0, 1)
    os.truncate(tmp_path / "model_best.pth", 5)
    again = checkpointer(tmp_path)
    again.begin(resume=True)
    assert again.state.best.figure is None
    assert "The best checkpoint cannot be read; the next evaluation writes a new one" in caplog.text


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, bad):
    model = torch.nn.Linear(2, 2)
    keeper = checkpointer(tmp_path, model=model)
    keeper.save("model_0000001", 1)
    model.weight.data[1, 1] = bad
    with pytest.raises(RunStoppedError, match=r"the weights are not finite \(weight\) and are not saved"):
        keeper.save("model_0000002", 2)
    assert checkpointer(tmp_path).begin(resume=True) == 2


def test_large_weights_are_finite():
    assert not_finite({"a": torch.full((9,), 3e38)}) == ""
    assert not_finite({"a": torch.tensor([torch.inf, -torch.inf]), "b": torch.ones(1), "c": torch.zeros(0)}) == "a"


def test_keys_that_matter_to_the_steps_are_compared():
    one, two = get_cfg(), get_cfg()
    two.SOLVER.BASE_LR, two.MODEL.DETR.NHEADS, two.INPUT.MIN_SIZE_TRAIN = 1e-3, 4, (480,)
    two.OUTPUT_DIR, two.SOLVER.LOG_PERIOD, two.DATALOADER.NUM_WORKERS, two.TEST.PICTURES = "x", 7, 0, 0
    found = changed_keys(one.dump(), two.dump())
    assert [change.split()[0] for change in found] == ["INPUT.MIN_SIZE_TRAIN", "MODEL.DETR.NHEADS", "SOLVER.BASE_LR"]
    assert found[1:] == ["MODEL.DETR.NHEADS was 8, is 4", "SOLVER.BASE_LR was 0.0001, is 0.001"]
    assert changed_keys(one.dump(), one.dump()) == []


# Pickles of arrays


ARRAYS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "slice": np.arange(12)[::3],
    "bytes": np.arange(4, dtype=np.uint8),
    "flags": np.array([True, False]),
    "other end": np.arange(3, dtype=">i4"),
    "none": np.zeros((0, 4)),
    "scalar": np.array(2.5),
}


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_arrays_is_read(tmp_path, protocol):
    content = {"model": OrderedDict(ARRAYS), "__author__": "somebody", "numbers": [1, 2.5, None, np.float64(0.5)], "pair": (1, 2)}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content, protocol))
    read = read_checkpoint(tmp_path / "x.pkl")
    assert read["__author__"] == "somebody"
    assert read["numbers"] == [1, 2.5, None, 0.5]
    for name, array in ARRAYS.items():
        assert read["model"][name].dtype == torch.from_numpy(array.astype(array.dtype.newbyteorder("="))).dtype
        assert read["model"][name].tolist() == array.tolist()


def test_weights_of_a_model_zoo_load_from_a_pickle(tmp_path):
    first, second = detector(), detector(seed=1)
    arrays = {name: tensor.numpy() for name, tensor in first.state_dict().items()}
    (tmp_path / "zoo.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "somebody"}, 2))
    assert not load_weights(second, tmp_path / "zoo.pkl").is_partial
    assert same(first.state_dict(), second.state_dict())


class Evil(np.ndarray):
    """An array whose pickle calls what it likes."""

    def __reduce__(self):
        return os.mkdir, (os.environ["RAN"],)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (lambda ran: Payload(ran), r"\w+\.mkdir"),
        (lambda ran: {"model": {"a": Payload(ran)}}, r"\w+\.mkdir"),
        (lambda ran: np.zeros(1).view(Evil), r"\w+\.mkdir"),
        (lambda ran: {"model": torch.ones(1)}, r"torch\._utils\._rebuild_tensor"),
        (lambda ran: np.array([{}], dtype=object), "can't convert np.ndarray of type numpy.object_"),
        (lambda ran: np.array(["text"]), "can't convert np.ndarray of type numpy.str_"),
        (lambda ran: get_cfg, r"cpvt_det\.config\.get_cfg"),
    ],
)
def test_a_pickle_of_anything_else_is_refused_and_runs_nothing(tmp_path, monkeypatch, content, match):
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    for protocol in (2, 5):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps(content(tmp_path / "ran"), protocol))
        with pytest.raises(WeightsError, match=match):
            read_checkpoint(tmp_path / "x.pkl")
    assert not (tmp_path / "ran").exists()


def read_in_little_memory(path, limit=1 << 20):
    """The error of reading a file, which must not take more than ``limit`` bytes of Python's memory on the way."""
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError) as caught:
            read_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
    return str(caught.value)


@pytest.mark.parametrize("index", [1 << 20, 1 << 26, (1 << 32) - 1])
def test_a_few_bytes_cannot_ask_for_all_memory(tmp_path, index):
    """Python makes room for as many objects as an index says, eight bytes or more each."""
    path = tmp_path / "x.pkl"
    for content in (b"\x80\x02Nr" + struct.pack("<I", index) + b".", b"Np%d\n." % index):
        path.write_bytes(content)
        assert f"asks for more memory than a file of its size can need: {index}" in read_in_little_memory(path)
    path.write_bytes(b"\x80\x04\x95" + struct.pack("<Q", index) + b"N.")
    assert f"can need: {index}" in read_in_little_memory(path)


def test_a_small_zip_does_not_unpack_to_all_memory(tmp_path):
    plain, path = tmp_path / "a.pth", tmp_path / "x.pth"
    torch.save(WEIGHTS, plain)
    for zeros in (0, 64 << 20):
        with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
            for part in source.namelist():
                target.writestr(part, source.read(part) + bytes(zeros if part.endswith("data.pkl") else 0))
        if not zeros:
            assert same(read_checkpoint(path), WEIGHTS)
    assert re.search(r"refused, because its \d+ bytes unpack to 671\d+ bytes; save it with torch.save", read_in_little_memory(path))


def test_a_checkpoint_that_another_machine_found_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("cpvt_det.checkpoint.resume.SEEN", 1.0)
    path = tmp_path / "model_0000001.pth"
    with pytest.raises(WeightsError, match=r"process 0 resumes from .*1.pth, which is not on this machine; set OUTPUT_DIR"):
        wait_for(path)
    threading.Timer(0.3, write_checkpoint, ({"iteration": 1}, path)).start()
    assert wait_for(path) == (path, {"iteration": 1})
