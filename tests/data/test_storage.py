# SPDX-License-Identifier: Apache-2.0
"""The same images from a folder, from tar files, and from URLs; and what happens when these go away."""

import io
import json
import os
import tarfile
import threading
import time
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from faults.case import call
from image_server import serving
from PIL import Image
from test_loader import assert_same_batches
from tiny import overrides

from cpvt_det.builders import build_train_loader, load_splits, training_records
from cpvt_det.builders.data import _look_together
from cpvt_det.cli.pack import write_shards
from cpvt_det.common.errors import DataError, MissingFileError, UnreachableError
from cpvt_det.config import load_cfg
from cpvt_det.data import cache, shards
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import read_coco
from cpvt_det.data.images import ImageHeader, is_file, open_image, read_header, read_image
from cpvt_det.data.shards import ARRAYS, INDEX, expand, index_shards, open_shards
from cpvt_det.data.storage import Patience
from cpvt_det.data.validation import check
from cpvt_det.data.validation.issues import Issues, Looked


@pytest.fixture
def packed(drawn_coco, tmp_path):
    """The drawn data set in three tar files, by the command."""
    register = ["DATASETS.REGISTER", str([["mine", str(drawn_coco.files.annotations), str(drawn_coco.files.image_root)]])]
    ending = call("pack", "mine", tmp_path / "shards", *register)
    assert ending.code == 0, ending.text
    whole = tmp_path / "shards" / "{000000..000000}.tar"
    assert str(whole) in ending.text
    files = [(f"part/{number:03d}.png", str(drawn_coco.files.image_root / f"part/{number:03d}.png")) for number in ids(drawn_coco)]
    folder = tmp_path / "several"
    folder.mkdir()
    assert write_shards(files, folder, 5_000) == f"{folder}/{{000000..{len(list(folder.glob('*.tar'))) - 1:06}}}.tar"
    assert len(list(folder.glob("*.tar"))) > 2
    (folder / "annotations.json").write_bytes((tmp_path / "shards/annotations.json").read_bytes())
    return folder


def ids(drawn):
    return [image["id"] for image in drawn.content["images"]]


def pattern_of(folder):
    return f"{folder}/{{000000..{len(list(folder.glob('*.tar'))) - 1:06}}}.tar"


def words(annotations, root, output, **more):
    files = DatasetFiles("drawn", annotations, root)
    return overrides(files, output, **more)


def batches(annotations, root, output, number=6, start=0, **more):
    cfg = load_cfg("", words(annotations, root, output, **more))
    records = training_records(cfg, load_splits(cfg)[0])
    return list(islice(build_train_loader(cfg, records, seed=3).from_iteration(start), number))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_tar_files_and_urls_are_those_from_files(drawn_coco, packed, tmp_path, workers):
    """From a folder of tar files, from a server with tar files and one with images, and from fsspec's file system in memory."""
    pytest.importorskip("aiohttp")
    files = drawn_coco.files
    expected = batches(files.annotations, files.image_root, tmp_path, DATALOADER__NUM_WORKERS=workers)
    memory = fsspec.filesystem("memory")
    memory.put(str(packed), "/kept", recursive=True)
    last = pattern_of(packed).rpartition("/")[2]
    with serving(packed) as tars, serving(files.image_root) as images:
        for root in (pattern_of(packed), f"{tars.url}/{last}", images.url, f"memory://kept/{last}"):
            found = batches(files.annotations, root, tmp_path, DATALOADER__NUM_WORKERS=workers)
            assert_same_batches(found, expected)
        later = batches(files.annotations, f"{tars.url}/{last}", tmp_path, number=3, start=3, DATALOADER__NUM_WORKERS=workers)
        assert_same_batches(later, expected[3:])
    memory.rm("/kept", recursive=True)


def test_a_run_from_tar_files_that_goes_on_ends_with_the_weights_of_one_from_files(drawn_coco, packed, tmp_path):
    config = tmp_path / "empty.yaml"
    config.write_text("VERSION: 2\n")

    def train(root, name, *options, **more):
        line = ["train", "--num-gpus", "0", *options, "--config-file", config, "--runner", "builtin"]
        ending = call(*line, *words(drawn_coco.files.annotations, root, tmp_path / name, DATALOADER__NUM_WORKERS=1, **more))
        assert ending.code == 0, ending.text

    train(drawn_coco.files.image_root, "files")
    train(pattern_of(packed), "shards", SOLVER__MAX_ITER=3)
    train(pattern_of(packed), "shards", "--resume")
    one, two = (torch.load(tmp_path / name / "model_final.pth", weights_only=True)["model"] for name in ("files", "shards"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert (tmp_path / "files/results.json").read_text() == (tmp_path / "shards/results.json").read_text()


def test_webdataset_reads_the_same_images(drawn_coco, packed):
    webdataset = pytest.importorskip("webdataset")
    read = {sample["__key__"]: sample["png"] for sample in webdataset.WebDataset(pattern_of(packed), shardshuffle=False)}
    root = drawn_coco.files.image_root
    assert read == {f"part/{number:03d}": (root / f"part/{number:03d}.png").read_bytes() for number in ids(drawn_coco)}


def test_tar_files_of_others_are_searched(drawn_coco, packed):
    """Without an index, with folders and other members beside the images."""
    (packed / INDEX).unlink()
    with tarfile.open(packed / "000000.tar", "a") as tar:
        tar.add(packed, "part/", recursive=False)
        tar.addfile(tarfile.TarInfo("part/note.json"))
    number = ids(drawn_coco)[0]
    path = f"{pattern_of(packed)}/part/{number:03d}.png"
    expected = drawn_coco.files.image_root / f"part/{number:03d}.png"
    assert open_image(path).read() == expected.read_bytes()
    assert torch.equal(read_image(path), read_image(str(expected)))
    assert read_header(path) == read_header(str(expected))
    assert not is_file(path) and is_file(str(expected))


def test_a_member_is_read_as_a_file(tmp_path):
    """Every place and length, against the bytes themselves."""
    content = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8).tobytes()
    (tmp_path / "a.bin").write_bytes(content)
    write_shards([("first", str(tmp_path / "a.bin")), ("second", str(tmp_path / "a.bin"))], tmp_path, 10**6)
    with open_shards(f"{tmp_path}/{{000000..000000}}.tar").open("first") as file:
        for offset, whence in ((0, 0), (700, 0), (-100, 2), (2000, 0), (5, 1)):
            other = io.BytesIO(content)
            other.seek(300)
            file.seek(300)
            assert file.seek(offset, whence) == other.seek(offset, whence)
            assert file.read(450) == other.read(450)
        file.seek(0)
        assert file.read() == content


def test_ranges_of_names():
    assert expand("a.tar") == ["a.tar"]
    assert expand("x-{08..11}.tar") == ["x-08.tar", "x-09.tar", "x-10.tar", "x-11.tar"]


def test_a_folder_that_is_called_like_a_tar_file_is_a_folder(tmp_path):
    (tmp_path / "old.tar").mkdir()
    Image.new("RGB", (3, 2)).save(tmp_path / "old.tar/a.png")
    assert read_image(f"{tmp_path}/old.tar/a.png").shape == (3, 2, 3)


def test_other_formats_are_packed_with_their_annotations(tmp_path):
    """A YOLO data set becomes COCO JSON and tar files, with the same images and boxes."""
    for name, size in (("a", (40, 30)), ("b", (30, 50))):
        for kind in ("images", "labels"):
            (tmp_path / f"mine/{kind}/train").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (9, 8, 7)).save(tmp_path / f"mine/images/train/{name}.png")
        (tmp_path / f"mine/labels/train/{name}.txt").write_text("1 0.5 0.5 0.2 0.4\n0 0.3 0.25 0.1 0.2\n")
    (tmp_path / "mine/data.yaml").write_text("train: images/train\nnames: [cell, mite]\n")
    register = ["DATASETS.REGISTER", str([["mine", str(tmp_path / "mine"), "train"]])]
    assert call("pack", "mine", tmp_path / "shards", *register).code == 0
    again = call("pack", "mine", tmp_path / "shards", *register)
    assert again.code == 2 and again.text.endswith("is not empty; write the tar files into a new folder\n")
    more = {"DATASETS__TRAIN": ("drawn",), "DATASETS__TEST": (), "MODEL__NUM_CLASSES": 0}
    sources = (tmp_path / "mine", "train"), (tmp_path / "shards/annotations.json", pattern_of(tmp_path / "shards"))
    records = [load_splits(load_cfg("", words(*source, tmp_path, **more)))[0][0].records for source in sources]
    for one, other in zip(*records, strict=True):
        assert np.array_equal(one.boxes_xyxy, other.boxes_xyxy) and np.array_equal(one.labels, other.labels)
        assert torch.equal(read_image(one.file_name), read_image(other.file_name))


def test_names_that_leave_the_folder_are_not_packed(tmp_path):
    """And nothing is written, so that the folder is free for the next attempt."""
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    for name in (str(tmp_path / "a.png"), "../a.png"):
        (tmp_path / "images").mkdir(exist_ok=True)
        image = {"id": 1, "file_name": name, "height": 20, "width": 30}
        box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 9, 9], "area": 81, "iscrowd": 0}
        (tmp_path / "a.json").write_text(
            json.dumps({"images": [image], "annotations": [box], "categories": [{"id": 1, "name": "a"}]})
        )
        register = ["DATASETS.REGISTER", str([["mine", str(tmp_path / "a.json"), str(tmp_path / "images")]])]
        done = call("pack", "mine", tmp_path / "shards", *register)
        assert done.code == 2 and f"the image {name} cannot be packed" in done.text and not (tmp_path / "shards").exists()
    (tmp_path / "file").touch()
    done = call("pack", "mine", tmp_path / "file", *register)
    assert done.code == 2 and "write the tar files into a new folder" in done.text


def test_an_index_of_other_tar_files_is_refused(packed):
    with pytest.raises(DataError, match="lists . tar files from 000000.tar on, not 000000.tar"):
        open_image(f"{packed}/000000.tar/part/a.png")
    with pytest.raises(DataError, match="index.npz, the index of the tar files; cpvt-det pack writes it"):
        open_image("memory://nothing/{000000..000001}.tar/a.png")
    with pytest.raises(DataError, match="same name"):
        index_shards(str(packed), ["000000.tar", "000000.tar"])


def test_a_server_that_fails_for_a_while_is_asked_again(drawn_coco, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("cpvt_det.data.storage.PAUSE", 0.01)
    path = f"part/{ids(drawn_coco)[0]:03d}.png"
    with serving(drawn_coco.files.image_root) as server:
        server.failures = 3
        read = Patience(10).read(lambda: read_image(f"{server.url}/{path}"))
        assert torch.equal(read, read_image(str(drawn_coco.files.image_root / path))) and server.failures == 0
        server.failures = 1
        with pytest.raises(UnreachableError, match=r"cannot read image http.*503"):
            read_image(f"{server.url}/{path}")
        start = time.monotonic()
        with pytest.raises(MissingFileError, match="nowhere.png: no such file"):
            Patience(10).read(lambda: read_image(f"{server.url}/nowhere.png"))
        assert time.monotonic() - start < 5
    with pytest.raises(UnreachableError, match="cannot read image http"):
        read_image(f"{server.url}/{path}")


def test_a_server_that_refuses_is_not_asked_again(drawn_coco, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("cpvt_det.data.storage.PAUSE", 0.01)
    path = f"part/{ids(drawn_coco)[0]:03d}.png"
    with serving(drawn_coco.files.image_root) as server:
        for status, refuses in ((401, True), (403, True), (410, True), (429, False), (408, False), (500, False)):
            server.failures, server.failure = 2, status
            if refuses:
                with pytest.raises(DataError, match=f"{path}: .*{status}"):
                    Patience(10).read(lambda: read_header(f"{server.url}/{path}"))
            else:
                Patience(10).read(lambda: read_header(f"{server.url}/{path}"))
            assert server.failures == int(refuses)


@pytest.fixture
def away(monkeypatch):
    """Names of the images that cannot be reached, and those that somebody tried to read."""
    names, tried = set(), []

    def read(path):
        tried.append(path)
        if os.path.basename(path) in names:
            raise UnreachableError(f"cannot read image {path}: the server is away")
        return ImageHeader(4, 3, "RGB", 1, True)

    monkeypatch.setattr(check, "read_header", read)
    monkeypatch.setattr(check, "PATIENCE", 0.3)
    monkeypatch.setattr("cpvt_det.data.storage.PAUSE", 0.02)
    return names, tried


def look(tmp_path, number):
    """What is found in images of 4 x 3 pixels, and the seconds that it takes."""
    images = [{"id": one, "file_name": f"{one}.png", "height": 3, "width": 4} for one in range(number)]
    box = {"id": 1, "image_id": 0, "category_id": 1, "bbox": [0, 0, 2, 2]}
    content = {"images": images, "annotations": [box], "categories": [{"id": 1, "name": "x"}]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    files, start = DatasetFiles("drawn", tmp_path / "a.json", "http://host"), time.monotonic()
    found = check.check_data([files], []).train[0]
    return found, time.monotonic() - start


def test_a_server_that_is_away_is_waited_for_once(tmp_path, away):
    names, tried = away
    names |= {f"{one}.png" for one in range(1000)}
    dataset, seconds = look(tmp_path, 1000)
    assert seconds < 5 and len(set(tried)) < 100
    assert dataset.issues.faults["image files that cannot be read"].count == len(set(tried)) == 1000 - len(dataset.records)
    (heading,) = dataset.issues.errors  # nothing that DATASETS.ON_BAD drop would leave out
    assert dataset.issues.errors[heading].count == len(dataset.records)
    assert heading == "images not tried, because no image could be read for 30 seconds"


def test_some_images_that_cannot_be_reached_are_waited_for_once(tmp_path, away):
    names, tried = away
    names |= {f"{one}.png" for one in range(0, 1000, 2)}
    dataset, seconds = look(tmp_path, 1000)
    assert seconds < 5 and len(set(tried)) == 1000 and not dataset.issues.errors
    assert dataset.issues.faults["image files that cannot be read"].count == 500


def test_a_server_that_comes_back_in_time_has_no_faults(tmp_path, away):
    names, tried = away
    names |= {f"{one}.png" for one in range(100)}
    threading.Timer(0.1, names.clear).start()
    dataset, _ = look(tmp_path, 100)
    assert not dataset.issues.faults and len(tried) > 100


def test_members_of_tar_files_are_found_by_the_path_that_they_are_unpacked_to(drawn_coco, tmp_path):
    """``tar -cf a.tar .`` names them ./a.png; an empty one is empty, behind a URL too."""
    image = drawn_coco.files.image_root / f"part/{ids(drawn_coco)[0]:03d}.png"
    with tarfile.open(tmp_path / "000000.tar", "w") as tar:
        tar.add(image, "./a.png")
        tar.addfile(tarfile.TarInfo("./empty.png"))
    found = index_shards(str(tmp_path), ["000000.tar"])
    np.savez(tmp_path / INDEX, **{name: getattr(found, name) for name in ARRAYS})
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/dots", recursive=True)
    for root in (str(tmp_path), "memory://dots"):
        for name in ("a.png", "./a.png"):
            assert read_header(f"{root}/000000.tar/{name}") == read_header(str(image))
        with pytest.raises(DataError, match=r"it is empty \(0 bytes\)"):
            read_header(f"{root}/000000.tar/empty.png")
    memory.rm("/dots", recursive=True)


def test_tar_files_that_are_open_are_not_taken_for_a_folder_again(packed, monkeypatch):
    path = f"{pattern_of(packed)}/part/nothing.png"
    with pytest.raises(MissingFileError):
        open_image(path)
    monkeypatch.setattr(os.path, "isdir", None)
    with pytest.raises(MissingFileError):
        open_image(path)


def test_every_process_opens_the_index_before_its_workers_do(drawn_coco, packed, tmp_path, monkeypatch):
    """One that looks at no image too, as an earlier run has looked at all."""
    files = DatasetFiles("drawn", drawn_coco.files.annotations, Path(pattern_of(packed)))
    monkeypatch.setattr("cpvt_det.common.distributed.rank", lambda: 1)
    monkeypatch.setattr("cpvt_det.common.distributed.broadcast_object", lambda value: Looked(Issues()))
    _look_together(load_cfg("", words(files.annotations, files.image_root, tmp_path)), read_coco(files).records, False, 20)
    assert pattern_of(packed) in shards._OPENED


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_is_gone_is_waited_for(drawn_coco, tmp_path, monkeypatch, workers):
    """The folder goes after the check and comes back; the batches are those of a folder that stays."""
    monkeypatch.setattr("cpvt_det.data.storage.PAUSE", 0.01)
    files = drawn_coco.files
    expected = batches(files.annotations, files.image_root, tmp_path)
    more = {"DATALOADER__PATIENCE": 20.0, "DATALOADER__NUM_WORKERS": workers}
    cfg = load_cfg("", words(files.annotations, files.image_root, tmp_path, **more))
    loader = build_train_loader(cfg, training_records(cfg, load_splits(cfg)[0]), seed=3)
    away = files.image_root.with_name("away")
    os.rename(files.image_root, away)
    threading.Timer(0.3, os.rename, (away, files.image_root)).start()
    assert_same_batches(list(islice(loader, 6)), expected)
    os.rename(files.image_root, away)
    loader.dataset.patience = 0.05
    with pytest.raises(MissingFileError, match="no such file"):
        next(iter(loader))


def test_faults_of_many_images_are_kept_until_these_change(drawn_coco, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FEW", 2)
    monkeypatch.setattr(cache, "TICK", 0.0)
    root = drawn_coco.files.image_root
    one, other = (root / f"part/{number:03d}.png" for number in ids(drawn_coco)[:2])
    content, looked = one.read_bytes(), []
    one.write_bytes(b"nothing")
    other.unlink()
    real = check.read_header
    monkeypatch.setattr(check, "read_header", lambda path: looked.append(path) or real(path))

    def read(number):
        looked.clear()
        more = {"DATASETS__CACHE": str(tmp_path / "cache"), "DATASETS__ON_BAD": "drop"}
        dataset = load_splits(load_cfg("", words(drawn_coco.files.annotations, root, tmp_path, **more)))[0][0]
        assert bool(looked) == bool(number)
        return len(dataset.records), {heading: vars(group) for heading, group in dataset.issues.faults.items()}

    time.sleep(0.05)  # the clock of a file system may be late
    first = read(5)
    assert first[0] == 3 and sum(group["count"] for group in first[1].values()) == 2
    assert read(0) == first
    one.write_bytes(content)  # the folder stays as it is
    assert read(5)[0] == 4 and read(0)[0] == 4
    assert cache._state_of(str(other)) == [] and cache._state_of(str(root)) != []  # what is away is told from what is there


def test_what_was_found_in_many_images_is_kept(drawn_coco, packed, tmp_path, monkeypatch):
    """As long as nothing changes in the folders, or in the tar files."""
    monkeypatch.setattr(cache, "FEW", 2)
    looked = []
    real = open_image
    monkeypatch.setattr("cpvt_det.data.images.open_image", lambda path: looked.append(path) or real(path))
    files, number = drawn_coco.files, len(ids(drawn_coco))

    def read(root):
        looked.clear()
        cfg = load_cfg("", words(files.annotations, root, tmp_path, DATASETS__CACHE=str(tmp_path / "cache")))
        issues = load_splits(cfg)[0][0].issues.infos
        return len(looked), json.dumps({heading: vars(group) for heading, group in issues.items()})

    first = read(files.image_root)
    assert first[0] == number and read(files.image_root) == (0, first[1])
    (files.image_root / "part/new.png").touch()
    assert read(files.image_root) == first
    assert read(pattern_of(packed))[0] == number and read(pattern_of(packed))[0] == 0
    (tmp_path / "cache").joinpath(next(path.name for path in (tmp_path / "cache").iterdir())).write_text("{")
    assert sorted(count for count, _ in (read(files.image_root), read(pattern_of(packed)))) == [0, number]
    os.utime(packed / "000001.tar", (1, 1))
    assert read(pattern_of(packed))[0] == number
