# SPDX-License-Identifier: Apache-2.0
"""Annotations in columns: every entry as the rules say, whatever the way it is read, and used without an object for each image."""

import hashlib
import json
import math
import random
import tracemalloc

import numpy as np
import pytest
from tiny import coco_dict

from cpvt_det.config import get_cfg
from cpvt_det.data import annotations, coco, json_stream
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import read_coco
from cpvt_det.data.records import Records, join
from cpvt_det.data.validation.check import SEVERAL, CheckedData, check_image_classes, count_images
from cpvt_det.data.validation.issues import Issues
from cpvt_det.training.tasks.classification import ClassificationTask

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
    return dataset.classes, coco_dict(dataset), [list(kind.items()) for kind in found]


@pytest.mark.parametrize("seed", range(6))
def test_every_way_of_reading_finds_the_same_boxes_and_says_the_same(tmp_path, seed, monkeypatch):
    """Plain boxes are recognised in one expression; here nothing is plain, and every rule is asked of all: the oracle."""
    content = messy(seed)
    files = write(tmp_path / "a.json", content)
    read = read_coco(files)
    assert sum(len(group.examples) for group in read.issues.faults.values()) > 40
    assert 100 < len(coco_dict(read)["annotations"]) < 400
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

    def read(sections):
        yield "images", {"id": 1, "file_name": "a.png", "height": 50, "width": 50}
        for number in range(20_000):
            yield "annotations", {"image_id": 1, "category_id": 1, "bbox": [1.5 + number / 2**10, 2.5, 10.0, 20.0]}

    tracemalloc.start()
    found = annotations.Entries(read, Issues()).table({1: 0})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.boxes) == 20_000 and set(found.boxes["area"].tolist()) == {200.0} and peak < 20_000 * 200


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
    assert [[record.height, record.width] for record in plain] == records.sizes.tolist()
    chosen = records.num_boxes > 8
    some = records.select(chosen)
    assert 0 < len(some) < len(records)
    assert [one.image_id for one in some] == [one.image_id for one in plain if len(one.labels) > 8]
    assert some[-1].boxes_xyxy.tolist() == some[len(some) - 1].boxes_xyxy.tolist()
    kept = set(some.image_ids.tolist())
    (image_of, objects), (every_image_of, everything) = some.boxes(), records.boxes()
    is_kept = np.isin(records.image_ids[every_image_of], list(kept))
    assert objects["xywh"].tolist() == everything["xywh"][is_kept].tolist()
    assert some.image_ids[image_of].tolist() == records.image_ids[every_image_of[is_kept]].tolist()
    assert some[1].file_name == str(tmp_path / f"é{some[1].image_id}.png")
    both = join([some, records])
    assert len(both) == len(some) + len(records) and both[1].file_name == some[1].file_name
    assert [one.file_name for block in both.blocks(3) for one in block] == [one.file_name for one in both]
    assert [one.image_id for one in both[::-2]] == [one.image_id for one in both][::-2] == both[::-2].image_ids.tolist()
    assert [one.image_id for one in both] == [*some.image_ids.tolist(), *records.image_ids.tolist()]
    assert both[-1].image_id == plain[-1].image_id and both.sizes.tolist() == [*some.sizes.tolist(), *records.sizes.tolist()]
    assert [one.image_id for one in both[3:9:2]] == [both[index].image_id for index in (3, 5, 7)]
    assert [one.image_id for one in records[-2:]] == [one.image_id for one in plain[-2:]]
    assert join([records]) is records
    for sequence in (records, both):
        with pytest.raises(IndexError):
            sequence[len(sequence)]


def records_of(tmp_path):
    """Records of all kinds of one data set: all, some, and of two parts; with images that have no box."""
    content = messy(1)
    content["images"] += [{"id": 6000 + number, "file_name": f"empty{number}.png", "height": 9, "width": 8} for number in range(3)]
    records = read_coco(write(tmp_path / "a.json", content)).records
    assert not records.num_boxes[-3:].any()
    some = records.select(records.num_boxes != 9)
    assert 0 < len(some) < len(records)
    return [records, some, join([some, records.select(records.num_boxes == 0)])]


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
                (int(image_id), *size, boxes[image_of == at].tolist(), labels[image_of == at].tolist())
                for block in records.blocks(images)
                for image_of, boxes, labels in [block.boxes_to_learn()]
                for at, (image_id, size) in enumerate(zip(block.image_ids, block.sizes.tolist(), strict=True))
            ]
            assert found == [(r.image_id, r.height, r.width, r.boxes_xyxy.tolist(), r.labels.tolist()) for r in records]
            assert {block.boxes_to_learn()[1].dtype for block in records.blocks()} == {np.dtype(np.float32)}


def test_the_hash_of_a_run_s_records_is_of_their_bytes_without_making_them(tmp_path, no_records):
    every, expected = records_of(tmp_path), []
    for records in every:
        digest = hashlib.sha256()
        for one in records:
            digest.update(f"{one.image_id} {one.height} {one.width}".encode() + one.boxes_xyxy.tobytes() + one.labels.tobytes())
        expected.append({"images": len(records), "sha256": digest.hexdigest()})
    no_records()
    assert [coco.describe_records(records) for records in every] == expected


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
    assert len(ClassificationTask(get_cfg()).training_records(train)) == 2 * sum(one)
