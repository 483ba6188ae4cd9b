# SPDX-License-Identifier: Apache-2.0
"""Annotations in columns: every entry as the rules say, whatever the way it is read; kept once, shared, and never half."""

import copy
import errno
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from cpvt_det.data import annotations, cache, coco, json_stream
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import read_coco
from cpvt_det.data.columns import ARRAYS, load_columns
from cpvt_det.data.formats.registry import FORMAT_REGISTRY, register_format
from cpvt_det.data.records import JoinedRecords, Records, blocks_of, join, sizes_of
from cpvt_det.data.validation.check import CheckedData
from cpvt_det.data.validation.image_classes import SEVERAL, check_image_classes, count_images
from cpvt_det.data.validation.issues import Issues
from cpvt_det.errors import DataError
from cpvt_det.evaluation.coco import CocoEvaluator
from cpvt_det.evaluation.constant import constant_detections
from cpvt_det.tasks.classification import ClassificationTask

ODD = [None, True, -1, 0, 0.5, 1, 2, 7, 1e-3, 1e16, 10**400, 2**63, float("nan"), float("inf"), "1", "x", [], [1, 2], {}]


def messy(seed: int, images: int = 30, boxes: int = 400) -> dict:
    """A COCO dict with all kinds of entries, most of them plain, some with a fault or a remark."""
    rng = random.Random(seed)
    sizes = {number: (rng.randint(20, 90), rng.randint(20, 90)) for number in rng.sample(range(-5, 1000), images)}
    content = {
        "info": {"nested": [1, {"annotations": []}]},
        "images": [{"id": i, "file_name": f"é{i}.png", "height": h, "width": w} for i, (h, w) in sizes.items()],
        "annotations": [],
        "categories": [{"id": i, "name": f"class {i}"} for i in (90, 3, 17)],
    }
    for number in range(boxes):
        owner = rng.choice(list(sizes))
        height, width = sizes[owner]
        box = [rng.uniform(0, width - 3), rng.uniform(0, height - 3), rng.uniform(1, 3), rng.randint(1, 3)]
        entry = {"id": number, "image_id": owner, "category_id": rng.choice((3, 17, 90)), "bbox": box}
        content["annotations"].append({**entry, "area": rng.choice((5, 7.25)), "iscrowd": int(rng.random() < 0.1)})
    for _ in range(boxes // 4):
        entry, key = rng.choice(content["annotations"]), rng.choice(("id", "image_id", "category_id", "area", "iscrowd"))
        entry[key] = rng.choice(ODD)
    for _ in range(boxes // 8):
        entry = rng.choice(content["annotations"])
        entry["bbox"][rng.randrange(4)] = rng.choice((rng.uniform(-5, 100), rng.choice(ODD)))
    for _ in range(boxes // 40):
        del rng.choice(content["annotations"])[rng.choice(("id", "area", "iscrowd"))]  # there is a "bbox", a KeyError otherwise
    content["annotations"].insert(rng.randrange(boxes), rng.choice((7, "box", None, [1])))
    content["images"] += [{"id": 5000, "file_name": "no size.png"}, dict(content["images"][0])]
    content["annotations"] += [{"id": boxes, "image_id": 5000, "category_id": 3, "bbox": [1, 1, 2, 2], "area": 4, "iscrowd": 0}]
    return content


def write(path, content, order=("info", "images", "annotations", "categories")) -> DatasetFiles:
    path.write_text(json.dumps({key: content[key] for key in order}), encoding="utf-8")
    return DatasetFiles("messy", path, path.parent)


def all_of(dataset) -> tuple:
    """What there is in a data set, as it can be compared; NaN in examples is text."""
    issues = dataset.issues
    found = [{h: (g.count, g.examples) for h, g in kind.items()} for kind in (issues.errors, issues.faults, issues.infos)]
    return dataset.classes, dataset.ground_truth, [list(kind.items()) for kind in found]


@pytest.mark.parametrize("seed", range(6))
def test_every_way_of_reading_finds_the_same_boxes_and_says_the_same(tmp_path, seed, monkeypatch):
    """Plain boxes are recognised in one expression; here nothing is plain, and every rule is asked of all: the oracle."""
    content = messy(seed)
    files = write(tmp_path / "a.json", content)
    read = read_coco(files)
    assert sum(len(group.examples) for group in read.issues.faults.values()) > 40
    assert 100 < len(read.ground_truth["annotations"]) < 400
    with monkeypatch.context() as patch:
        patch.setattr(annotations, "NUMBERS", frozenset())
        assert all_of(read_coco(files)) == all_of(read)
    with monkeypatch.context() as patch:  # from the dict of the whole file, as other formats are read
        patch.setattr(coco, "entries", refuse)
        assert all_of(read_coco(files)) == all_of(read)
    for order in (("annotations", "categories", "images"), ("categories", "images", "info", "annotations")):
        assert all_of(read_coco(write(tmp_path / "a.json", content, order))) == all_of(read)


@pytest.mark.parametrize("examples", [3, 20, math.inf])
def test_boxes_without_area_iscrowd_and_id_are_plain(tmp_path, monkeypatch, examples):
    """Their remarks and the first examples are those of the rules, though these are asked of the first boxes alone."""
    content, rng = messy(7), random.Random(0)
    for entry in (entry for entry in content["annotations"] if isinstance(entry, dict)):
        for key in rng.sample(("id", "area", "iscrowd"), rng.randint(0, 3)):
            entry[key] = None
            if rng.random() < 0.7:
                del entry[key]
    files = write(tmp_path / "a.json", content)
    read = read_coco(files, examples)
    assert read.issues.infos[annotations.FILLED].count > 100
    monkeypatch.setattr(annotations, "NUMBERS", frozenset())
    assert all_of(read_coco(files, examples)) == all_of(read)


def test_boxes_without_area_iscrowd_and_id_take_no_more_memory():
    """About 200 bytes while they are read, not a dict each."""
    issues = Issues()
    images = annotations.ImageTable(issues)
    images.add({"id": 1, "file_name": "a.png", "height": 50, "width": 50})
    table = annotations.AnnotationTable(images, issues)
    tracemalloc.start()
    for _ in range(20_000):
        table.add({"image_id": 1, "category_id": 1, "bbox": [1.5, 2.5, 10.0, 20.0]})
    columns = table.columns({1: 0})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(columns.labels) == 20_000 and set(columns.areas.tolist()) == {200.0} and peak < 20_000 * 200


def refuse(*arguments):
    raise json_stream.NotAStreamError("refused")


def test_a_file_is_read_piece_by_piece(tmp_path, monkeypatch):
    values = {"a": [1, -2.5e-3, '\u00e9"]}', {"x": [[]]}, None, True, 123456789], "b": {"a": [7]}, "c": [], "d": 12345}
    path = tmp_path / "a.json"
    for indent in (None, 2):
        path.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8")
        for chunk in (*range(1, 80), 1000):
            monkeypatch.setattr(json_stream, "CHUNK", chunk)
            assert list(json_stream.entries(path, ("a", "c"))) == [("a", value) for value in values["a"]]


WHOLE = ["", "[]", "{", '{"a": [1, 2}', '{"a": [1 2]}', '{"a": [1,]}', '{"a": 5}', '{"a": [1]} 2', '{"a": [], "a": [1]}']
WHOLE += ['{"a" [1]}', '{"b": 1,}', "{5: 1}", '{"a": [nul]}']


@pytest.mark.parametrize("text", WHOLE)
def test_a_file_that_has_to_be_read_whole_is_not_streamed(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(json_stream.NotAStreamError):
        list(json_stream.entries(path, ("a",)))


def test_records_are_chosen_and_joined_without_reading_them(tmp_path):
    files = write(tmp_path / "a.json", messy(1))
    records, plain = read_coco(files).records, list(read_coco(files).records)
    assert [len(record.labels) for record in plain] == records.num_boxes.tolist()
    assert [[record.height, record.width] for record in plain] == records.sizes.tolist() == sizes_of(plain).tolist()
    chosen = records.num_boxes > 8
    some = records.select(chosen)
    assert 0 < len(some) < len(records)
    assert [one.image_id for one in some] == [one.image_id for one in plain if len(one.labels) > 8]
    assert some[-1].boxes_xyxy.tolist() == some[len(some) - 1].boxes_xyxy.tolist()
    kept = set(some.image_ids.tolist())
    objects, everything = some.objects, records.objects
    is_kept = np.isin(records.image_ids[everything.image_of], list(kept))
    assert objects.boxes_xywh.tolist() == everything.boxes_xywh[is_kept].tolist()
    assert some.image_ids[objects.image_of].tolist() == records.image_ids[everything.image_of[is_kept]].tolist()
    some.set_path(1, "elsewhere.png")
    assert some[1].file_name == "elsewhere.png" and some[0].file_name == str(tmp_path / f"é{some[0].image_id}.png")
    both = join([some, records])
    assert isinstance(both, JoinedRecords) and len(both) == len(some) + len(records)
    assert [one.image_id for one in both] == [*some.image_ids.tolist(), *records.image_ids.tolist()]
    assert both[-1].image_id == plain[-1].image_id and both.sizes.tolist() == [*some.sizes.tolist(), *records.sizes.tolist()]
    assert [one.image_id for one in both[3:9:2]] == [both[index].image_id for index in (3, 5, 7)]
    assert [one.image_id for one in records[-2:]] == [one.image_id for one in plain[-2:]]
    assert join([records]) is records
    for sequence in (records, both):
        with pytest.raises(IndexError):
            sequence[len(sequence)]


def records_of(tmp_path):
    """Records of all kinds of one data set: all, some, of two parts, and as a list; with images that have no box."""
    content = messy(1)
    content["images"] += [{"id": 6000 + number, "file_name": "empty.png", "height": 9, "width": 8} for number in range(3)]
    records = read_coco(write(tmp_path / "a.json", content)).records
    assert not records.num_boxes[-3:].any()
    some = records.select(records.num_boxes != 9)
    assert 0 < len(some) < len(records)
    return [records, some, join([some, records.select(records.num_boxes == 0)]), list(records)]


@pytest.fixture
def no_records(monkeypatch):
    """A function after whose call no single record is made of columns."""

    def refuse_records(*arguments):
        raise AssertionError("a record is made for each image")

    return lambda: monkeypatch.setattr(Records, "__getitem__", refuse_records)


def test_blocks_have_the_boxes_of_the_records(tmp_path):
    for records in records_of(tmp_path):
        for images in (1, 7, 1000):
            found = [
                (int(image_id), *size, block.boxes_xyxy[block.image_of == at].tolist(), block.labels[block.image_of == at].tolist())
                for block in blocks_of(records, images)
                for at, (image_id, size) in enumerate(zip(block.image_ids, block.sizes.tolist(), strict=True))
            ]
            assert found == [(r.image_id, r.height, r.width, r.boxes_xyxy.tolist(), r.labels.tolist()) for r in records]
            assert {block.boxes_xyxy.dtype for block in blocks_of(records)} == {np.dtype(np.float32)}


def test_the_hash_of_a_run_s_records_is_of_their_bytes_without_making_them(tmp_path, no_records):
    every, expected = records_of(tmp_path), []
    for records in every:
        digest = hashlib.sha256()
        for one in records:
            digest.update(f"{one.image_id} {one.height} {one.width}".encode() + one.boxes_xyxy.tobytes() + one.labels.tobytes())
        expected.append({"images": len(records), "sha256": digest.hexdigest()})
    no_records()
    assert [coco.describe_records(records) for records in every] == expected


def test_the_constant_box_is_that_of_the_records_without_making_them(tmp_path, no_records):
    records, some, joined, plain = records_of(tmp_path)
    of_some = constant_detections(list(some))
    no_records()
    for found, expected in ((constant_detections(records), constant_detections(plain)), (constant_detections(some), of_some)):
        assert len(found.labels) == 3 and torch.equal(found.labels, expected.labels) and torch.equal(found.scores, expected.scores)
        torch.testing.assert_close(found.boxes_xyxy, expected.boxes_xyxy, rtol=1e-6, atol=0)
    assert constant_detections(joined).scores.max() < of_some.scores.max()  # the images without boxes count twice


def test_images_of_a_class_are_counted_without_making_records(tmp_path, no_records):
    dataset = read_coco(write(tmp_path / "a.json", messy(1)))
    plain = list(dataset.records)
    one = [len(set(record.labels.tolist())) == 1 for record in plain]
    assert 0 < sum(one) < len(one)
    dataset.records = dataset.records.select(np.array(one))
    expected = np.bincount([record.labels[0] for record, is_one in zip(plain, one, strict=True) if is_one], minlength=3)
    checked = check_image_classes(CheckedData([read_coco(DatasetFiles("messy", tmp_path / "a.json", tmp_path))], [], []))
    assert checked.train[0].issues.faults[SEVERAL].count == len(one) - sum(one)
    assert [record.image_id for record in checked.train[0].records] == [record.image_id for record in dataset.records]
    no_records()
    assert count_images(dataset.records, 3).tolist() == expected.tolist()
    train = [check_image_classes(CheckedData([dataset], [], [])).train[0], dataset]
    assert len(ClassificationTask(None).training_records(train)) == 2 * sum(one)


def test_evaluation_takes_records_or_their_coco_dict(tmp_path):
    dataset = read_coco(write(tmp_path / "a.json", messy(2)))
    for kept in (dataset.records, dataset.records.select(dataset.records.num_boxes > 5)):
        part = replace(dataset, records=kept)
        one, other = (CocoEvaluator(source, part.classes.ids, part.classes.names) for source in (kept, part.ground_truth))
        mine, theirs = (evaluator._ground_truth for evaluator in (one, other))
        assert mine.image_ids.tolist() == theirs.image_ids.tolist()
        labels = range(len(part.classes.ids))
        assert mine.annotations(part.classes.ids, labels) == theirs.annotations(part.classes.ids, labels)


# what is kept


@pytest.fixture
def large(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SMALL", 0)
    return write(tmp_path / "a.json", messy(3))


def test_what_was_read_is_kept_for_the_next_time(large, tmp_path, monkeypatch):
    first = read_coco(large, cache=tmp_path / "kept")
    assert all_of(first) == all_of(read_coco(large))
    described = coco.describe_records(list(first.records))
    monkeypatch.setattr(coco, "_read", None)  # nothing is read again
    second = read_coco(replace(large, name="other"), cache=tmp_path / "kept")
    assert all_of(second) == all_of(first)
    assert coco.describe_records(second.records) == described
    second.leave_out([second.records[0].image_id])
    assert coco.describe_records(second.records) != described
    second = read_coco(replace(large, name="other"), cache=tmp_path / "kept")
    assert second.issues.source == f"other ({large.annotations})"
    assert second.records.columns.path.parent == tmp_path / "kept"
    assert not second.records.columns.boxes_xywh.flags.writeable
    again = pickle.loads(pickle.dumps(second.records))
    assert len(pickle.dumps(second.records)) < 1000
    for name in ARRAYS:
        assert np.array_equal(getattr(again.columns, name), getattr(first.records.columns, name))


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


@pytest.mark.parametrize("just_written", [False, True])
def test_a_file_of_the_same_size_and_time_is_not_taken_for_another(large, tmp_path, monkeypatch, just_written):
    """As `cp -p` makes it; or as it is within the tick of a file system, where all times are equal."""
    monkeypatch.setattr(cache, "TICK", 3600.0 if just_written else 0.0)
    state, text = large.annotations.stat(), large.annotations.read_text()
    first = read_coco(large, cache=tmp_path / "kept")
    if just_written:
        place = cache._place_of(large.annotations)
        monkeypatch.setattr(cache, "_place_of", lambda path: place)
    large.annotations.write_text(text.replace('"class 90"', '"class 91"'))
    os.utime(large.annotations, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert large.annotations.stat().st_size == state.st_size
    second = read_coco(large, cache=tmp_path / "kept")
    assert "class 91" in second.classes.names and "class 91" not in first.classes.names


def test_a_copy_of_the_same_content_and_time_is_not_read_again(large, tmp_path, monkeypatch):
    """On the disk of another machine, with which the folder of what is kept is shared."""
    monkeypatch.setattr(cache, "TICK", 0.0)
    first = all_of(read_coco(large, cache=tmp_path / "kept"))
    shutil.copy2(large.annotations, tmp_path / "copy")
    (tmp_path / "copy").replace(large.annotations)
    monkeypatch.setattr(coco, "_read", None)
    assert all_of(read_coco(large, cache=tmp_path / "kept")) == first


def test_a_reading_that_cannot_be_written_is_not_lost(large, tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "save_columns", full)
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
    return [folder / name for name in places], folder / "JPEGImages/2.jpg"


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
    monkeypatch.setattr(coco, "read_foreign", lambda files: times.append(1) or read(files))

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
    assert read_coco(files, cache=kept).records.columns.path.parent == kept
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
    assert "Annotations are not kept in" in caplog.text


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
    columns, _ = load_columns(next((tmp_path / "kept").glob("*.columns")))
    assert len(columns.image_ids) == found[0][0]


def test_columns_do_not_change_with_what_is_made_of_them(large, tmp_path):
    """A record is a copy: an augmentation may write into it."""
    records = read_coco(large, cache=tmp_path / "kept").records
    record = next(one for one in records if len(one.labels))
    before = copy.deepcopy(record)
    record.boxes_xyxy += 1
    record.labels += 1
    again = next(one for one in records if one.image_id == record.image_id)
    assert np.array_equal(again.boxes_xyxy, before.boxes_xyxy) and np.array_equal(again.labels, before.labels)
