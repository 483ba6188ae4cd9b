# SPDX-License-Identifier: Apache-2.0
"""What was read of a data set: kept once, shared, never half, and never that of another."""

import copy
import errno
import multiprocessing
import os
import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from test_columns import all_of, messy, write

from cpvt_det.common.errors import DataError
from cpvt_det.data import cache, coco
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import read_coco
from cpvt_det.data.formats.format import FORMAT_REGISTRY, register_format
from cpvt_det.data.records import load_table


@pytest.fixture
def large(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SMALL", 0)
    return write(tmp_path / "a.json", messy(3))


def test_what_was_read_is_kept_for_the_next_time(large, tmp_path, monkeypatch):
    first = read_coco(large, cache=tmp_path / "kept")
    assert all_of(first) == all_of(read_coco(large))
    described = coco.describe_records(first.records)
    monkeypatch.setattr(coco, "_read", None)  # nothing is read again
    second = read_coco(replace(large, name="other"), cache=tmp_path / "kept")
    assert all_of(second) == all_of(first)
    assert coco.describe_records(second.records) == described
    second.leave_out([second.records[0].image_id])
    assert coco.describe_records(second.records) != described
    second = read_coco(replace(large, name="other"), cache=tmp_path / "kept")
    assert second.issues.source == f"other ({large.annotations})"
    assert second.records.table.path.parent == tmp_path / "kept"
    assert not second.records.table.boxes.flags.writeable
    again = pickle.loads(pickle.dumps(second.records))
    assert len(pickle.dumps(second.records)) < 1000
    for name in ("images", "names", "boxes"):
        assert np.array_equal(getattr(again.table, name), getattr(first.records.table, name))


def test_a_file_that_changed_is_read_again(large, tmp_path):
    read_coco(large, cache=tmp_path / "kept")
    content = messy(3)
    content["images"].pop(0)
    write(large.annotations, content)
    assert len(read_coco(large, cache=tmp_path / "kept").records) == len(read_coco(large).records)


def test_what_is_kept_of_earlier_states_is_removed_where_nobody_uses_it(large, tmp_path):
    kept = tmp_path / "kept"
    old = [read_coco(large, cache=kept)]
    read_coco(write(tmp_path / "b.json", messy(4)), cache=kept)
    for count in (3, 2):
        large.annotations.write_text(large.annotations.read_text() + " ")
        read_coco(large, cache=kept)
        assert len(list(kept.glob("*.columns"))) == len(list(kept.glob("*.lock"))) == count
        old.clear()  # it was mapped


def test_a_file_of_the_same_size_and_time_is_not_taken_for_another(large, tmp_path):
    """As `cp -p` makes it."""
    state, text = large.annotations.stat(), large.annotations.read_text()
    first = read_coco(large, cache=tmp_path / "kept")
    large.annotations.write_text(text.replace('"class 90"', '"class 91"'))
    os.utime(large.annotations, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert large.annotations.stat().st_size == state.st_size
    second = read_coco(large, cache=tmp_path / "kept")
    assert "class 91" in second.classes.names and "class 91" not in first.classes.names


def test_a_reading_that_cannot_be_written_is_not_lost(large, tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "save_table", full)
    read, times = coco._read, []
    monkeypatch.setattr(coco, "_read", lambda *arguments: times.append(1) or read(*arguments))
    assert all_of(read_coco(large, cache=tmp_path / "kept")) == all_of(read_coco(large))
    assert len(times) == 2 and "No space left on device" in caplog.text


# other formats


def yolo(folder):
    for number in range(6):
        for kind in ("images", "labels"):
            (folder / kind / "train").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40 + number, 30)).save(folder / f"images/train/{number}.png")
        rows = "1 0.5 0.5 0.2 0.4\n0 0.3 0.25 0.1 0.2\n" + "5 0.5 0.5 0.1 0.1\n" * (number == 3)
        (folder / f"labels/train/{number}.txt").write_text(rows)
    (folder / "data.yaml").write_text("train: images/train\nnames: [cell, mite]\n")
    return [folder / "labels/train/2.txt", folder / "data.yaml", folder / "images/train/5.png"], folder / "images/train/new.png"


def voc(folder):
    for kind in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / kind).mkdir(parents=True)
    for number in range(6):
        Image.new("RGB", (40 + number, 30)).save(folder / f"JPEGImages/{number}.png")
        box = "<bndbox><xmin>3</xmin><ymin>2</ymin><xmax>20</xmax><ymax>9</ymax></bndbox>"
        objects = f"<object><name>{'cat' if number else 'dog'}</name>{box}</object>"
        (folder / f"Annotations/{number}.xml").write_text(f"<annotation>{objects}</annotation>")
    (folder / "ImageSets/Main/train.txt").write_text("0\n1\n2\n")
    places = ("Annotations/5.xml", "ImageSets/Main/train.txt", "JPEGImages/1.png")
    return [folder / name for name in places], folder / "JPEGImages/new.jpg"


def classes(folder):
    for name in ("train/a/1.png", "train/a/in/2.png", "train/b/3.png", "val/c/1.png", "val/a/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30)).save(folder / name)
    return [folder / "train/a/in/2.png"], folder / "val/d/new.png"


@pytest.mark.parametrize("draw", [yolo, voc, classes])
def test_other_formats_are_kept_too_until_a_file_changes(tmp_path, monkeypatch, draw):
    monkeypatch.setattr(cache, "FEW", 4)
    changed, new = draw(tmp_path / "data")
    files, kept = DatasetFiles("foreign", tmp_path / "data", split="train"), tmp_path / "kept"
    read, times = coco.read_foreign, []
    monkeypatch.setattr(coco, "read_foreign", lambda *words: times.append(1) or read(*words))

    def reads_again():
        expected = all_of(read_coco(files))
        times.clear()
        assert all_of(read_coco(files, cache=kept)) == expected
        return bool(times)

    assert reads_again() and not reads_again()
    for path in changed:
        os.utime(path, (1, 1))
        assert reads_again() and not reads_again()
    new.parent.mkdir(exist_ok=True)
    Image.new("RGB", (3, 2)).save(new)
    assert reads_again() and not reads_again()
    assert read_coco(files, cache=kept).records.table.path.parent == kept
    monkeypatch.setattr(cache, "FEW", 1000)
    assert reads_again() and reads_again()


def test_a_format_of_ones_own_is_kept_if_it_names_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FEW", 1)
    (tmp_path / "a.mine").write_text("20 1 2 3 4")
    files, times = DatasetFiles("mine", tmp_path / "a.mine"), []

    def read_mine(path, split):
        times.append(1)
        height, *box = map(int, path.read_text().split())
        sections = {
            "images": [{"id": 1, "file_name": "a.png", "height": height, "width": 9}],
            "categories": [{"id": 1, "name": "x"}],
        }
        return {**sections, "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": box, "source": "line 1"}]}

    for named, expected in ((None, 2), (lambda path, split: [path], 1)):
        with monkeypatch.context() as patch:
            patch.setattr(FORMAT_REGISTRY, "_obj_map", dict(FORMAT_REGISTRY._obj_map))
            register_format("mine", lambda path: path.suffix == ".mine", files=named)(read_mine)
            times.clear()
            found = [read_coco(files, cache=tmp_path / "kept").records[0].boxes_xyxy.tolist() for _ in range(2)]
            assert found == [[[1, 2, 4, 6]]] * 2 and len(times) == expected


@pytest.mark.parametrize("left", [0, 10, 300, -200])
def test_a_kept_file_that_is_damaged_is_made_again(large, tmp_path, left):
    first = all_of(read_coco(large, cache=tmp_path / "kept"))
    (kept,) = (tmp_path / "kept").glob("*.columns")
    content = kept.read_bytes()
    kept.unlink()  # in place it is mapped
    kept.write_bytes(content[:left])
    (tmp_path / "kept" / f".{kept.name}.0123.tmp").write_bytes(b"of a maker that was killed")
    assert all_of(read_coco(large, cache=tmp_path / "kept")) == first
    assert kept.read_bytes() == content
    assert {path.suffix for path in (tmp_path / "kept").iterdir()} == {".columns", ".lock"}


def test_a_folder_that_cannot_be_written_to_costs_only_time(large, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert all_of(read_coco(large, cache=tmp_path / "file")) == all_of(read_coco(large))
    assert "Annotations cannot be cached in" in caplog.text


def test_only_the_usual_number_of_examples_is_kept(large, tmp_path):
    read_coco(large, cache=tmp_path / "kept")
    shown = read_coco(large, 3, tmp_path / "kept").issues
    assert max(len(group.examples) for group in shown.faults.values()) == 3
    with pytest.raises(DataError, match="cannot read annotations"):
        read_coco(replace(large, annotations=tmp_path / "none.json"), cache=tmp_path / "kept")


def make(files, folder, counted, out):
    """In a process of its own: read, slowly, and say how often."""
    cache.SMALL, plain = 0, coco._read

    def slow(*arguments):
        with counted.get_lock():
            counted.value += 1
        time.sleep(0.5)
        return plain(*arguments)

    coco._read = slow
    dataset = read_coco(files, cache=folder)
    out.put((len(dataset.records), os.getpid()))


def test_of_two_makers_one_reads_and_the_other_waits(large, tmp_path):
    context = multiprocessing.get_context("fork")
    counted, out = context.Value("i", 0), context.Queue()
    makers = [context.Process(target=make, args=(large, tmp_path / "kept", counted, out)) for _ in range(2)]
    for one in makers:
        one.start()
    found = [out.get(timeout=60) for _ in makers]
    for one in makers:
        one.join()
    assert counted.value == 1 and len({count for count, _ in found}) == 1
    assert len(load_table(next((tmp_path / "kept").glob("*.columns"))).images) == found[0][0]


def test_columns_do_not_change_with_what_is_made_of_them(large, tmp_path):
    """A record is a copy: an augmentation may write into it."""
    records = read_coco(large, cache=tmp_path / "kept").records
    record = next(one for one in records if len(one.labels))
    before = copy.deepcopy(record)
    record.boxes_xyxy += 1
    record.labels += 1
    again = next(one for one in records if one.image_id == record.image_id)
    assert np.array_equal(again.boxes_xyxy, before.boxes_xyxy) and np.array_equal(again.labels, before.labels)
