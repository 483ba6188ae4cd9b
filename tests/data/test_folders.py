# SPDX-License-Identifier: Apache-2.0
"""Folders in the layouts of many tools, written here from six images, are read as those images."""

import json
import os
import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from cpvt_det.cli import main
from cpvt_det.common.errors import DataError, UnknownNameError
from cpvt_det.data import read_folder
from cpvt_det.data.catalog import find_datasets
from cpvt_det.data.coco import load_coco
from cpvt_det.data.folders.layouts import find_layout
from cpvt_det.data.folders.prepare import count_classes, name_datasets, refuse_overlap
from cpvt_det.data.formats.format import FORMAT_REGISTRY, register_format
from cpvt_det.data.listing import Listing, split_named

NAMES = ["cat", "dog"]
SIZE = (40, 60)  # height, width
TRAIN, VAL = ["a", "b", "c", "d"], ["e", "f"]
BOXES = {  # image -> class, x, y, width, height; image d has no object
    "a": [("cat", 3, 4, 12, 10), ("dog", 20, 10, 30, 20)],
    "b": [("dog", 0, 0, 60, 40)],
    "c": [("cat", 5, 5, 6, 30)],
    "d": [],
    "e": [("cat", 10, 2, 30, 36), ("dog", 1, 1, 5, 5)],
    "f": [("dog", 30, 8, 10, 4)],
}


def draw(path, name):
    path.parent.mkdir(parents=True, exist_ok=True)
    spots = np.random.default_rng(ord(name)).integers(0, 255, (8, 12, 3), dtype=np.uint8)
    Image.fromarray(spots).resize(SIZE[::-1], Image.Resampling.BILINEAR).save(path)


def coco(names, prefix=""):
    images = [{"id": n, "file_name": f"{prefix}{name}.png", "height": SIZE[0], "width": SIZE[1]} for n, name in enumerate(names)]
    boxes = [
        {"image_id": n, "category_id": 5 + NAMES.index(kind), "bbox": box}
        for n, name in enumerate(names)
        for kind, *box in BOXES[name]
    ]
    boxes = [{"id": n, "area": box["bbox"][2] * box["bbox"][3], "iscrowd": 0, **box} for n, box in enumerate(boxes)]
    return json.dumps(
        {"images": images, "annotations": boxes, "categories": [{"id": 5 + n, "name": c} for n, c in enumerate(NAMES)]}
    )


def yolo(name):
    lines = (
        f"{NAMES.index(kind)} {(x + w / 2) / SIZE[1]} {(y + h / 2) / SIZE[0]} {w / SIZE[1]} {h / SIZE[0]}"
        for kind, x, y, w, h in BOXES[name]
    )
    return "\n".join(lines)


def voc(name, file_name=None):
    objects = "".join(
        f"<object><name>{kind}</name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>"
        f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
        for kind, x, y, w, h in BOXES[name]
    )
    return f"<annotation><filename>{file_name or name + '.png'}</filename>{objects}</annotation>"


def cvat(names):
    def box(kind, x, y, w, h):
        if kind == "cat":
            return f'<box label="cat" xtl="{x}" ytl="{y}" xbr="{x + w}" ybr="{y + h}"></box>'
        return f'<polygon label="dog" points="{x},{y};{x + w},{y};{x + w / 2},{y + h}"></polygon>'

    images = "".join(f'<image id="0" name="{name}.png">{"".join(box(*entry) for entry in BOXES[name])}</image>' for name in names)
    return f"<annotations><meta><job><labels><label><name>cat</name></label></labels></job></meta>{images}</annotations>"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def both(folder, place, text, train="train", val="val"):
    """Images by ``place`` (of split and name), and a text file of each by the path that ``text`` returns with its content."""
    for split, names in ((train, TRAIN), (val, VAL)):
        for name in names:
            draw(folder / place.format(split=split, name=name), name)
            for path, content in text(split, name):
                write(folder / path, content)


def write_coco(folder):
    both(folder, "{split}2017/{name}.png", lambda split, name: ())
    write(folder / "annotations/instances_train2017.json", coco(TRAIN))
    write(folder / "annotations/instances_val2017.json", coco(VAL))
    write(folder / "annotations/captions_train2017.json", coco(TRAIN))


def write_coco_trainval(folder):
    """As VOC's splits in COCO's format."""
    both(folder, "images/{name}.png", lambda split, name: ())
    write(folder / "trainval.json", coco(TRAIN))
    write(folder / "test.json", coco(VAL))


def write_voc_of_prefixed_lists(folder):
    both(folder, "JPEGImages/{name}.png", lambda split, name: [(f"Annotations/{name}.xml", voc(name))])
    for split, names in (("cat_train", TRAIN), ("cat_val", VAL), ("cat_trainval", TRAIN + VAL)):
        write(folder / f"ImageSets/Main/{split}.txt", "\n".join(names))


def write_roboflow_coco(folder):
    both(folder, "{split}/{name}.png", lambda split, name: (), val="valid")
    write(folder / "train/_annotations.coco.json", coco(TRAIN))
    write(folder / "valid/_annotations.coco.json", coco(VAL))


def write_coco_of_other_classes(folder):
    """The validation JSON lacks a class and counts the other one differently."""
    write_roboflow_coco(folder)
    content = json.loads(coco(["c"]))
    content["categories"] = [{"id": 0, "name": "cat"}]
    content["annotations"][0]["category_id"] = 0
    write(folder / "valid/_annotations.coco.json", json.dumps(content))
    shutil.copy(folder / "train/c.png", folder / "valid/c.png")


def write_json_beside(folder):
    both(folder, "{name}.png", lambda split, name: ())
    write(folder / "labels.json", coco(TRAIN + VAL, prefix="somewhere/else/"))


def write_cvat_coco(folder):
    both(folder, "images/default/{name}.png", lambda split, name: ())
    write(folder / "annotations/instances_default.json", coco(TRAIN + VAL))


def write_roboflow_yolo(folder):
    both(folder, "{split}/images/{name}.png", lambda split, name: [(f"{split}/labels/{name}.txt", yolo(name))], val="valid")
    write(
        folder / "data.yaml", "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnc: 2\nnames: ['cat', 'dog']\n"
    )


def write_yolo_of_another_machine(folder):
    both(folder, "set/{split}/images/{name}.png", lambda split, name: [(f"set/{split}/labels/{name}.txt", yolo(name))])
    write(folder / "set/data.yaml", "train: /home/me/set/train/images\nval: C:\\set\\val\\images\nnames: {0: cat, 1: dog}\n")
    write(folder / "README.txt", "0 is not a box")


def write_cvat_ultralytics(folder):
    both(folder, "images/{split}/{name}.png", lambda split, name: [(f"labels/{split}/{name}.txt", yolo(name))])
    for split, names in (("train", TRAIN), ("val", VAL)):
        write(folder / f"{split}.txt", "".join(f"images/{split}/{name}.png\n" for name in names))
    write(folder / "data.yaml", "names:\n  0: cat\n  1: dog\npath: .\ntrain: train.txt\nval: val.txt\n")


def write_cvat_yolo(folder):
    both(folder, "obj_{split}_data/{name}.png", lambda split, name: [(f"obj_{split}_data/{name}.txt", yolo(name))], val="valid")
    write(folder / "obj.names", "cat\ndog\n")
    write(folder / "obj.data", "classes = 2\nnames = data/obj.names\n")
    write(folder / "train.txt", "data/obj_train_data/a.png\n")


def write_labelimg_yolo(folder):
    both(folder, "{name}.png", lambda split, name: [(f"{name}.txt", yolo(name))])
    write(folder / "classes.txt", "cat\ndog\n")


def write_voc(folder):
    both(folder, "VOC/JPEGImages/{name}.png", lambda split, name: [(f"VOC/Annotations/{name}.xml", voc(name))])
    for split, names in (("train", TRAIN), ("val", VAL), ("trainval", TRAIN + VAL), ("cat_train", ["a"])):
        write(folder / f"VOC/ImageSets/Main/{split}.txt", "\n".join(names))


def write_cvat_voc(folder):
    both(folder, "JPEGImages/{name}.png", lambda split, name: [(f"Annotations/{name}.xml", voc(name))])
    write(folder / "ImageSets/Main/default.txt", "\n".join(TRAIN + VAL))
    write(folder / "labelmap.txt", "# label:color_rgb:parts:actions\ncat:::\n")


def write_roboflow_voc(folder):
    both(folder, "{split}/{name}.png", lambda split, name: [(f"{split}/{name}.xml", voc(name))], train="Train", val="TEST")


def write_two_folders(folder):
    """The names inside the XML files are those of a folder before it was renamed."""
    both(folder, "My Pictures/{name}.PNG", lambda split, name: [(f"XMLs/{name}.xml", voc(name, "old.png"))])


def write_cvat(folder):
    both(folder, "images/{name}.png", lambda split, name: ())
    write(folder / "annotations.xml", cvat(TRAIN + VAL))


WITH_SPLIT = {
    "COCO trainval": (write_coco_trainval, "coco"),
    "VOC of prefixed lists": (write_voc_of_prefixed_lists, "voc"),
    "coco": (write_coco, "coco"),
    "roboflow coco": (write_roboflow_coco, "coco"),
    "roboflow yolo": (write_roboflow_yolo, "yolo"),
    "yolo of another machine": (write_yolo_of_another_machine, "yolo"),
    "cvat ultralytics": (write_cvat_ultralytics, "yolo"),
    "cvat yolo": (write_cvat_yolo, "yolo"),
    "voc": (write_voc, "voc"),
    "roboflow voc": (write_roboflow_voc, "voc"),
}
WITHOUT_SPLIT = {
    "json beside images": (write_json_beside, "coco"),
    "cvat coco": (write_cvat_coco, "coco"),
    "labelimg yolo": (write_labelimg_yolo, "yolo"),
    "cvat voc": (write_cvat_voc, "voc"),
    "two folders": (write_two_folders, "voc"),
    "cvat": (write_cvat, "cvat"),
}


def read(folder, output, **options):
    found = name_datasets(folder, output, **options)
    return found, [load_coco(files) for files in find_datasets([entry[0] for entry in found.register], found.register)]


def boxes_of(datasets):
    """Stem of the file -> classes and boxes, rounded to a thousandth of a pixel."""
    return {
        Path(record.file_name).stem: [
            (dataset.classes.names[label], x1, y1, x2 - x1, y2 - y1)
            for label, (x1, y1, x2, y2) in zip(record.labels, record.boxes_xyxy.astype(float).round(3).tolist(), strict=True)
        ]
        for dataset in datasets
        for record in dataset.records
    }


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", {**WITH_SPLIT, **WITHOUT_SPLIT})
def test_a_layout_is_read_as_the_images_that_it_was_written_from(kind, tmp_path):
    make, data_format = {**WITH_SPLIT, **WITHOUT_SPLIT}[kind]
    folder = tmp_path / "mine"
    make(folder)
    before = files_below(folder)
    assert find_layout(Listing(folder)).format == data_format
    found, datasets = read(folder, tmp_path / "out")
    assert [entry[0] for entry in found.register] == ["mine_train", "mine_val"] == [found.train, found.val]
    got = boxes_of(datasets)
    assert {name: sorted(boxes) for name, boxes in got.items()} == {name: sorted(boxes) for name, boxes in BOXES.items()}
    assert files_below(folder) == before
    train, val = ({Path(record.file_name).stem for record in dataset.records} for dataset in datasets)
    if kind in WITH_SPLIT:
        assert (train, val) == (set(TRAIN), set(VAL))
    else:
        assert train | val == {*TRAIN, *VAL} and not train & val and val
        assert all(any(name in [box[0] for box in got[image]] for image in part) for part in (train, val) for name in NAMES)
        assert len(found.written) == 2 and any("split drawn with seed 0" in note for note in found.notes)


def test_a_trainval_beside_a_folder_s_own_splits_is_left_out(tmp_path):
    write_coco(tmp_path / "mine")
    write(tmp_path / "mine/annotations/instances_trainval2017.json", coco(TRAIN + VAL))
    _, datasets = read(tmp_path / "mine", tmp_path / "out")
    assert [len(dataset.records) for dataset in datasets] == [len(TRAIN), len(VAL)]


@pytest.mark.parametrize("kind", WITH_SPLIT)
def test_a_new_split_has_all_images_once(kind, tmp_path):
    WITH_SPLIT[kind][0](tmp_path / "mine")
    found, datasets = read(tmp_path / "mine", tmp_path / "out", new_split=True)
    assert sum(len(dataset.records) for dataset in datasets) == 6
    assert boxes_of(datasets).keys() == BOXES.keys() and found.written


def test_names_of_classes_that_are_not_utf_8_are_refused_with_what_to_do(tmp_path):
    write_labelimg_yolo(tmp_path / "mine")
    (tmp_path / "mine/classes.txt").write_bytes("cat\nKäfer\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"cannot read .*classes\.txt: .*; save it as UTF-8"):
        read(tmp_path / "mine", tmp_path / "out")


def test_the_same_classes_by_other_numbers_become_one_list(tmp_path):
    write_roboflow_coco(tmp_path / "mine")
    path = tmp_path / "mine/valid/_annotations.coco.json"
    content = json.loads(path.read_text())
    expected = boxes_of(read(tmp_path / "mine", tmp_path / "out")[1])
    swapped = {one["id"]: other["id"] for one, other in zip(content["categories"], content["categories"][::-1], strict=True)}
    for category in content["categories"]:
        category["id"] = swapped[category["id"]]
    for annotation in content["annotations"]:
        annotation["category_id"] = swapped[annotation["category_id"]]
    write(path, json.dumps(content))
    assert boxes_of(read(tmp_path / "mine", tmp_path / "out")[1]) == expected


def test_splits_with_different_classes_become_one_list(tmp_path):
    write_coco_of_other_classes(tmp_path / "mine")
    _, (train, val) = read(tmp_path / "mine", tmp_path / "out")
    assert train.classes.names == val.classes.names == ("cat", "dog") and train.classes.ids == (5, 6)
    assert boxes_of([val]) == {"c": [("cat", 5, 5, 6, 30)]}
    rows, notes = count_classes({"train": train, "val": val})
    assert rows == [("cat", 2, 1), ("dog", 2, 0)]
    assert notes == ["val has no object of 1 of 2 classes, whose AP is not measured: dog"]
    with pytest.raises(DataError, match=r"in both training and validation: 1 image, such as .*train/c.png, which is .*valid/c.png"):
        refuse_overlap(train, val)


def test_a_test_set_stands_in_for_a_missing_validation_set(tmp_path):
    write_coco(tmp_path / "mine")
    os.rename(tmp_path / "mine/annotations/instances_val2017.json", tmp_path / "mine/annotations/instances_test.json")
    os.rename(tmp_path / "mine/val2017", tmp_path / "mine/test")
    found, (_, val) = read(tmp_path / "mine", tmp_path / "out")
    assert boxes_of([val]).keys() == set(VAL) and "the test set is used for it" in found.notes[1] and not found.written


def test_a_format_of_ones_own_comes_first(tmp_path):
    """Beside a layout that is known, with its own splits, or whole."""
    write_labelimg_yolo(tmp_path / "mine")
    write(tmp_path / "mine/own.list", "")
    sets = {"fit": TRAIN, "test": VAL, "": TRAIN + VAL}

    def read_own(path, split):
        content = json.loads(coco(sets[split], f"{path.parent}/"))
        return {**content, "annotations": [{**box, "source": "own"} for box in content["annotations"]]}

    try:
        register_format("own", lambda path: path.name == "own.list", splits=lambda path: ["train", "test"])(
            lambda path, split: read_own(path, {"train": "fit"}.get(split, split))
        )
        assert "own" in name_datasets(tmp_path / "mine", tmp_path / "out").notes[0]
        _, (train, val) = read(tmp_path / "mine", tmp_path / "out")
        assert boxes_of([train]).keys() == set(TRAIN) and boxes_of([val]).keys() == set(VAL)
        assert name_datasets(tmp_path / "mine", tmp_path / "out", "yolo").notes[0].startswith(f"{tmp_path}/mine: yolo")
        FORMAT_REGISTRY._obj_map.pop("own")
        register_format("own", lambda path: (path / "own.list").is_file())(lambda path, split: read_own(path / "list", split))
        assert boxes_of(read(tmp_path, tmp_path / "out")[1]) == BOXES  # in a folder of a clone
        write(tmp_path / "mine/deeper/own.list", "")
        assert boxes_of(read(tmp_path, tmp_path / "out")[1]) == BOXES
        write(tmp_path / "other/own.list", "")
        with pytest.raises(DataError, match=r"several folders in the format own: .*mine, .*other; give one of them instead of"):
            name_datasets(tmp_path, tmp_path / "out")
        FORMAT_REGISTRY._obj_map.pop("own")
        register_format("own", lambda path: path.name == "own.list")(read_own)
        assert boxes_of(read(tmp_path / "mine", tmp_path / "out")[1]) == BOXES
    finally:
        FORMAT_REGISTRY._obj_map.pop("own", None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "there is no folder .*mine"),
        (lambda folder: draw(folder / "a.png", "a"), "has 1 images and no annotations in a known format; put a COCO JSON"),
        (
            lambda folder: [draw(folder / "train" / name / "a.png", "a") for name in ("cat", "dog")],
            "has 2 images and .* beside them; if each class has its own folder of images, train a classifier: --config-file "
            "quickstart/",
        ),
        (lambda folder: write(folder / "notes.txt", "nothing"), "has no images and no annotations in a known format"),
        (
            lambda folder: [write_cvat(folder), write_json_beside(folder)],
            r"several formats: coco \(.*labels.json\); cvat \(.*--format coco",
        ),
        (
            lambda folder: [write_coco(folder), write(folder / "old_train.json", coco(TRAIN))],
            r"train2017/a.png is in .*instances_train2017.json and in .*old_train.json; keep one, or name the data sets",
        ),
        (
            lambda folder: [write(folder / "c/a.txt", yolo("a")), draw(folder / "x/a.png", "a"), draw(folder / "y/a.png", "a")],
            "c/a.txt could belong to .*x/a.png or to .*y/a.png; give only one of them this name",
        ),
        (
            lambda folder: [draw(folder / "a.png", "a"), write(folder / "all.json", coco(["a"]))],
            "too few images with annotations to train and validate on: 1",
        ),
        (
            lambda folder: [
                write_roboflow_yolo(folder),
                write(folder / "other.yaml", "names:\ntrain:\n"),
                (folder / "data.yaml").unlink(),
                write(folder / "more.yaml", "names:\ntrain:\n"),
            ],
            "several YAML files",
        ),
        (
            lambda folder: [draw(folder / "a.png", "a"), write(folder / "data.yaml", "train: there/images\nval: x\nnames: [a]\n")],
            "split 'train' is there/images, but .*there/images does not exist; write its path relative to the folder of this YAML "
            "file",
        ),
        (
            lambda folder: [write_labelimg_yolo(folder), write(folder / "more/classes.txt", "dog\ncat\n")],
            "classes.txt and .*more/classes.txt list different class names, or the same in a different order; keep the correct one",
        ),
        (
            lambda folder: [write_roboflow_yolo(folder), shutil.rmtree(folder / "train")],
            "split 'train' is ../train/images, but .*train/images does not exist",
        ),
        (
            lambda folder: [draw(folder / "a.png", "a"), write(folder / "a.xml", "<annotations><track id='0'/></annotations>")],
            'a.xml describes a video .*: export the task as "CVAT for images" or as COCO',
        ),
        (
            lambda folder: [draw(folder / "a.png", "a"), write(folder / "a.txt", "3000000 0.5 0.5 0.1 0.1")],
            "a.txt, line 1: found class 3000000, but no file lists the class names",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_with_a_way_out(make, message, tmp_path):
    make(tmp_path / "mine")
    with pytest.raises(DataError, match=message):
        name_datasets(tmp_path / "mine", tmp_path / "out")


def test_an_unknown_format_is_named(tmp_path):
    write_coco(tmp_path / "mine")
    with pytest.raises(UnknownNameError, match=r"unknown data format \(--format\) 'coko' \(did you mean 'coco'\?\)"):
        name_datasets(tmp_path / "mine", tmp_path / "out", "coko")
    with pytest.raises(DataError, match="has no annotations in the format voc"):
        name_datasets(tmp_path / "mine", tmp_path / "out", "voc")


def test_words_of_splits():
    names = {
        "instances_train2017": "train",
        "obj_valid_data": "val",
        "Testing": "test",
        "strain": "",
        "latest": "",
        "x-val.v2": "val",
    }
    assert {name: split_named(name) for name in names} == names


def test_annotations_of_nothing_are_refused(tmp_path):
    for name in "abc":
        draw(tmp_path / f"mine/{name}.png", name)
        write(tmp_path / f"mine/{name}.xml", "<annotation></annotation>")
    with pytest.raises(DataError, match=r"mine: voc, 3 files .*, and no image has an object; are these the right annotations"):
        name_datasets(tmp_path / "mine", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_yolo_file_names_in_vain_is_noted(tmp_path):
    write_roboflow_yolo(tmp_path / "mine")
    notes = name_datasets(tmp_path / "mine", tmp_path / "out").notes
    assert [note for note in notes if note.startswith("not read: ")] == [
        f"not read: {tmp_path}/mine/data.yaml: split 'test' is ../test/images, but {tmp_path}/mine/../test/images does not exist; "
        "write its path relative to the folder of this YAML file"
    ]
    write_cvat_yolo(tmp_path / "other")
    notes = name_datasets(tmp_path / "other", tmp_path / "out").notes
    assert (
        f"not read: {tmp_path}/other/train.txt; to use such lists as splits, name them in a data.yaml with train: and val:" in notes
    )


def test_images_that_no_annotation_names_are_noted(tmp_path):
    write_cvat(tmp_path / "mine")
    assert not any("not used" in note for note in name_datasets(tmp_path / "mine", tmp_path / "out").notes)
    for name in "xyz":
        draw(tmp_path / "mine/more" / f"{name}.png", name)
    data = name_datasets(tmp_path / "mine", tmp_path / "out")
    assert f"3 of 9 images have no annotations and are not used, such as {tmp_path}/mine/more/x.png" in data.notes


@pytest.mark.parametrize("make", [write_coco, write_roboflow_coco, write_voc, write_cvat], ids=lambda make: make.__name__)
def test_photographs_that_cannot_be_read_are_noted_in_every_format(make, tmp_path):
    make(tmp_path / "mine")
    place = next((tmp_path / "mine").rglob("*.png")).parent
    (place / "x.heic").touch()
    notes = name_datasets(tmp_path / "mine", tmp_path / "out").notes
    assert f"1 image left out; {place}/x.heic cannot be read here: convert them to JPEG or PNG" in notes


def test_annotations_of_one_id_are_faults_where_a_folder_is_written_anew_too(tmp_path):
    write_json_beside(tmp_path / "mine")
    (path,) = (tmp_path / "mine").rglob("*.json")
    content = json.loads(path.read_text())
    for annotation in content["annotations"][:2]:
        annotation["id"] = 7
    path.write_text(json.dumps(content))
    assert name_datasets(tmp_path / "mine", tmp_path / "out").written
    with pytest.raises(DataError, match=r"annotation ids that are not unique"):
        read(tmp_path / "mine", tmp_path / "other")


def test_classes_that_training_lacks_are_left_out_of_the_table(tmp_path):
    write_coco(tmp_path / "mine")
    _, (train, val) = read(tmp_path / "mine", tmp_path / "out")
    val.classes = train.classes
    train.classes = replace(train.classes, ids=train.classes.ids[:1], names=train.classes.names[:1])
    assert [row[0] for row in count_classes({"train": train, "val": val})[0]] == list(train.classes.names)


def test_shapes_of_cvat_become_the_boxes_around_them(tmp_path):
    draw(tmp_path / "mine/a.png", "a")
    shapes = (
        '<box label="cat" xtl="10" ytl="5" xbr="30" ybr="15" rotation="90"/>'
        '<box label="cat" xtl="0" ytl="0" xbr="10" ybr="10" rotation="45"/>'
        '<ellipse label="cat" cx="20" cy="10" rx="8" ry="4"/><ellipse label="cat" cx="20" cy="10" rx="8" ry="4" rotation="30"/>'
        '<mask label="cat" rle="1, 2" left="3" top="4" width="5" height="6"/>'
        '<points label="cat" points="1,2;3,4"/><points label="cat" points="1,2"/>'
        '<polyline label="cat" points="1,2;3,4"/><tag label="cat"/>'
    )
    write(tmp_path / "mine/annotations.xml", f'<annotations><image id="0" name="a.png">{shapes}</image></annotations>')
    layout = find_layout(Listing(tmp_path / "mine"))
    boxes = [annotation["bbox"] for annotation in layout.read()["annotations"]]
    around = np.array([[8 * np.cos(t), 4 * np.sin(t)] for t in np.linspace(0, 2 * np.pi, 100_001)])
    turn = np.deg2rad(30)
    turned = around @ np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]) + (20, 10)
    wide = 10 * np.sqrt(2)
    expected = [
        [15, 0, 10, 20],
        [5 - wide / 2, 5 - wide / 2, wide, wide],
        [12, 6, 16, 8],
        [*turned.min(0), *(turned.max(0) - turned.min(0))],
        [3, 4, 5, 6],
    ]
    np.testing.assert_allclose(boxes, expected, atol=1e-6)
    assert layout.notes == [
        "not read: 2 annotations of the kind 'points', which have no box",
        "not read: 1 annotations of the kind 'polyline', which have no box",
    ]


def test_folders_and_files_belong_together_in_whatever_case(tmp_path):
    both(tmp_path / "mine", "Images/{split}/{name}.png", lambda split, name: [(f"Labels/{split}/{name}.txt", yolo(name))])
    write(tmp_path / "mine/data.yaml", "train: Images/train\nval: Images/val\nnames: [cat, dog]\n")
    _, datasets = read(tmp_path / "mine", tmp_path / "out")
    assert boxes_of(datasets).keys() == BOXES.keys() and sum(map(len, boxes_of(datasets).values())) == sum(map(len, BOXES.values()))
    both(tmp_path / "two", "photos/{name}.PNG", lambda split, name: [(f"marks/{name.upper()}.xml", voc(name, "x.png"))])
    _, datasets = read(tmp_path / "two", tmp_path / "out_of_two")
    assert sum(map(len, boxes_of(datasets).values())) == sum(map(len, BOXES.values()))


def test_a_link_to_a_folder_around_it_multiplies_nothing(tmp_path):
    write_labelimg_yolo(tmp_path / "mine")
    (tmp_path / "mine/deeper").mkdir()
    (tmp_path / "mine/deeper/up").symlink_to(tmp_path / "mine", target_is_directory=True)
    assert len(Listing(tmp_path / "mine").images) == len(BOXES)


def test_a_third_set_is_named_and_left_for_the_end(tmp_path):
    write_coco(tmp_path / "mine")
    draw(tmp_path / "mine/test2017/a.png", "z")
    write(tmp_path / "mine/annotations/instances_test2017.json", coco(["a"]))
    found = name_datasets(tmp_path / "mine", tmp_path / "out")
    assert len(found.register) == 3
    assert "mine_test is set aside for the final evaluation: cpvt-det eval ... DATASETS.TEST mine_test" in found.notes


def test_a_folder_is_read_in_python_as_the_commands_read_it(tmp_path):
    write_roboflow_yolo(tmp_path / "mine")
    train, val = read_folder(tmp_path / "mine")
    assert (train.name, val.name, train.classes.names) == ("mine_train", "mine_val", tuple(NAMES))
    assert boxes_of([train, val]) == BOXES
    drawn = read_folder(str(tmp_path / "mine"), data_format="yolo", new_split=True)
    assert boxes_of(drawn) == BOXES and [len(data.records) for data in drawn] != [len(train.records), len(val.records)]
    write(tmp_path / "mine/train/labels/a.txt", "0 0.5 0.5 0.1\n")
    with pytest.raises(DataError, match=r"mine_train \(.*data.yaml\): lines of another length: .*a.txt, line 1: 3 numbers after"):
        read_folder(tmp_path / "mine")
    with pytest.raises(DataError, match=rf"mine_\w+ \({tmp_path}/mine\): lines of another length"):  # no file that was drawn
        read_folder(tmp_path / "mine", new_split=True)
    with pytest.raises(DataError, match="there is no folder"):
        read_folder(tmp_path / "yours")


def test_the_absolute_path_of_its_own_folder_in_a_yaml_file(tmp_path, monkeypatch):
    """Also where the folder is given as a relative one, and where a split has to be drawn."""
    write_roboflow_yolo(tmp_path / "mine")
    for yaml in (
        f"path: {tmp_path}/mine\ntrain: train/images\nval: valid/images\n",
        f"train: {tmp_path}/mine/train/images\nval: {tmp_path}/mine/valid/images\n",
        f"path: {tmp_path}/mine\ntrain: [train/images, valid/images]\n",
    ):
        write(tmp_path / "mine/data.yaml", f"{yaml}names: [cat, dog]\n")
        monkeypatch.chdir(tmp_path)
        for folder in (Path("mine"), Path("mine/../mine"), tmp_path / "mine"):
            assert boxes_of(read_folder(folder)) == boxes_of(read_folder(folder, new_split=True)) == BOXES


def test_images_of_a_yaml_file_may_be_outside_its_folder(tmp_path):
    write_cvat_ultralytics(tmp_path / "pictures")
    (tmp_path / "pictures/data.yaml").unlink()
    write(tmp_path / "mine/data.yaml", "path: ../pictures\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n")
    assert boxes_of(read_folder(tmp_path / "mine")) == BOXES
    write(tmp_path / "mine/data.yaml", "train: ../pictures/images/train\nval: ../pictures/images/val\nnames: [cat, dog]\n")
    assert boxes_of(read_folder(tmp_path / "mine")) == BOXES


@pytest.mark.parametrize("kind", ["yaml", "flat", "voc", "coco"])
def test_photographs_that_cannot_be_read_are_named(kind, tmp_path):
    folder = tmp_path / "mine"
    {"yaml": write_roboflow_yolo, "flat": write_labelimg_yolo, "voc": write_roboflow_voc, "coco": write_json_beside}[kind](folder)
    (image,) = folder.rglob("b.png")
    os.rename(image, image.with_suffix(".heic"))
    if kind in ("voc", "coco"):
        with pytest.raises(DataError, match=r"image files that are missing: .*b.heic cannot be read here: convert them"):
            read_folder(folder)
        return
    done = CliRunner().invoke(main, ["check-data", str(folder)])
    assert done.exit_code == 0
    assert "images that cannot be read here, left out; convert them to JPEG or PNG: 1" in done.output and "b.heic" in done.output
    assert "label files that belong to no image: 1" in done.output


def test_a_json_for_each_image_is_one_data_set(tmp_path):
    both(tmp_path / "mine", "images/{name}.png", lambda split, name: [(f"annotations/{name}.json", coco([name]))])
    assert boxes_of(read_folder(tmp_path / "mine")) == BOXES


def test_jsons_keep_their_split_where_the_images_are_in_one_folder(tmp_path):
    """Also where names have to be looked for, so that no config could name them."""
    both(tmp_path / "mine", "images/{name}.png", lambda split, name: ())
    for split, names in (("train", TRAIN), ("val", VAL)):
        content = coco(names, "gone/").replace(".png", ".jpg")
        write(tmp_path / f"mine/{split}.json", content)
    train, val = read_folder(tmp_path / "mine")
    assert boxes_of([train]).keys() == set(TRAIN) and boxes_of([val]).keys() == set(VAL)
    assert (
        "split by the names of files and folders: 4 images for train, 2 images for val"
        in name_datasets(tmp_path / "mine", tmp_path).notes
    )


def test_names_of_classes_that_look_the_same_are_one_class_or_noted(tmp_path):
    forms = {name: unicodedata.normalize("NFC" if name in "ab" else "NFD", "caf\u00e9") for name in TRAIN + VAL}
    both(tmp_path / "mine", "{name}.png", lambda split, name: [(f"{name}.xml", voc(name).replace("cat", forms[name]))])
    assert len(set(forms.values())) == 2 and read_folder(tmp_path / "mine")[0].classes.names == ("caf\u00e9", "dog")
    both(tmp_path / "other", "{name}.png", lambda split, name: ())
    content = json.loads(coco(TRAIN + VAL))
    content["categories"][0]["name"] = "Dog "
    write(tmp_path / "other/all.json", json.dumps(content))
    done = CliRunner().invoke(main, ["check-data", str(tmp_path / "other")])
    assert "classes whose names look the same: 1\n    'Dog ', 'dog'" in done.output


def test_what_labelme_has_deleted_is_left_out(tmp_path):
    both(tmp_path / "mine", "{name}.png", lambda split, name: [(f"{name}.xml", voc(name))])
    path = tmp_path / "mine/a.xml"
    write(path, path.read_text().replace("<object><name>dog", "<object><deleted>1</deleted><name>dog"))
    assert boxes_of(read_folder(tmp_path / "mine"))["a"] == BOXES["a"][:1]


@pytest.mark.parametrize("kind", ["json", "xml", "txt", "yaml", "png"])
def test_a_link_to_nothing_is_no_file(kind, tmp_path):
    write_labelimg_yolo(tmp_path / "mine")
    (tmp_path / f"mine/zz.{kind}").symlink_to(tmp_path / "gone")
    assert boxes_of(read_folder(tmp_path / "mine")) == BOXES


@pytest.mark.parametrize("name", ["", "a\0.png", "\ud83d.png", "file://[cam 1]/gone.png", "x" * 300 + ".png", None, 7])
def test_a_name_that_no_file_can_have_is_a_fault(name, tmp_path):
    both(tmp_path / "mine", "images/{name}.png", lambda split, name: ())
    content = json.loads(coco(TRAIN + VAL))
    content["images"][0]["file_name"] = name
    write(tmp_path / "mine/all.json", json.dumps(content))
    with pytest.raises(
        DataError, match=r"(?s)image files that are missing: .*all.json names|file names that are not text: .*all.json"
    ):
        read_folder(tmp_path / "mine")


def test_lists_may_name_images_outside_the_folder_of_the_yaml_file(tmp_path):
    """Their label files are where they are."""
    write_cvat_ultralytics(tmp_path / "sets")
    (tmp_path / "sets/data.yaml").unlink()
    for split, names in (("train", TRAIN), ("val", VAL)):
        write(tmp_path / f"sets/{split}.txt", "".join(f"./images/{split}/{name}.png\n" for name in names))
        write(tmp_path / f"absolute/{split}.txt", "".join(f"{tmp_path}/sets/images/{split}/{name}.png\n" for name in names))
    for place in ("../sets", "../absolute"):
        write(tmp_path / "mine/data.yaml", f"train: {place}/train.txt\nval: {place}/val.txt\nnames: [cat, dog]\n")
        assert boxes_of(read_folder(tmp_path / "mine")) == BOXES


def test_all_lists_of_a_split_are_read_and_others_are_told(tmp_path):
    both(tmp_path / "mine", "JPEGImages/{name}.png", lambda split, name: [(f"Annotations/{name}.xml", voc(name))])
    for name, images in {"cam0_train": "ab", "cam1_train": "cd", "cam0_val": "ef"}.items():
        write(tmp_path / f"mine/ImageSets/Main/{name}.TXT", "\n".join(images))
    train, val = read_folder(tmp_path / "mine")
    assert boxes_of([train]).keys() == set("abcd") and boxes_of([val]).keys() == set("ef")
    write(tmp_path / "mine/ImageSets/Main/extra.txt", "a")
    assert not any(re.match("not read|left out", note) for note in name_datasets(tmp_path / "mine", tmp_path / "out").notes)


@pytest.mark.parametrize("form", ["coco", "voc"])
def test_images_of_files_that_name_no_split_are_told_and_are_in_a_new_split(form, tmp_path):
    both(tmp_path / "mine", "JPEGImages/{name}.png", lambda split, name: [(f"Annotations/{name}.xml", voc(name))][form == "coco" :])
    for name, images in {"train": "ab", "val": "cd", "extra": "ef"}.items():
        path = {"coco": f"annotations/{name}.json", "voc": f"ImageSets/Main/{name}.txt"}[form]
        write(tmp_path / "mine" / path, "\n".join(images) if form == "voc" else coco(images))
    found, datasets = read(tmp_path / "mine", tmp_path / "out")
    assert [boxes_of([dataset]).keys() for dataset in datasets] == [set("ab"), set("cd")]
    (note,) = (note for note in found.notes if note.startswith("not read"))
    assert re.fullmatch(r"not read: \S*extra\S*; name .* in a config, or split all images anew with --new-split", note)
    found, datasets = read(tmp_path / "mine", tmp_path / "out", new_split=True)
    assert boxes_of(datasets) == BOXES and not any("not read" in note or "no annotations" in note for note in found.notes)


def test_classes_of_one_id_are_refused(tmp_path):
    both(tmp_path / "mine", "images/{name}.png", lambda split, name: ())
    content = json.loads(coco(TRAIN + VAL))
    content["categories"].append({"id": 5, "name": "bird"})
    write(tmp_path / "mine/all.json", json.dumps(content))
    with pytest.raises(DataError, match=r"all.json: category ids that are not unique: categories\[2\]: id 5"):
        read_folder(tmp_path / "mine")


def test_polygons_of_three_points_stay_polygons_beside_others(tmp_path):
    """A triangle at the lower edge ends in 1, as tracks do."""
    write_labelimg_yolo(tmp_path / "mine")
    for name, line in (
        ("a", "0 .5 .5 .6 .9 .9 1"),
        ("b", "1 .1 .1 .5 .1 .5 .5 .1 .5"),
        ("c", "1 .1 .1 .5 .1 .5 .5 .1 .5 .1 .3 .1 .2"),
    ):
        write(tmp_path / f"mine/{name}.txt", line)
    ((name, *box),) = boxes_of(read_folder(tmp_path / "mine"))["a"]
    np.testing.assert_allclose(box, [0.5 * SIZE[1], 0.5 * SIZE[0], 0.4 * SIZE[1], 0.5 * SIZE[0]], atol=1e-4)
    write(tmp_path / "mine/a.txt", "0 .5 .5 .1 .1 .3 .3 2 .4 .4 2")
    with pytest.raises(DataError, match="lines that are not polygons: .*keypoints need kpt_shape in data.yaml"):
        read_folder(tmp_path / "mine")


@pytest.mark.parametrize(
    "keys", ['{{"train": "{}", "val": "{}", "names": ["cat", "dog"]}}', '"train": {}\n"val": {}\n"names" : [cat, dog]\n']
)
def test_keys_of_a_yaml_file_may_be_in_quotes(keys, tmp_path):
    write_cvat_ultralytics(tmp_path / "mine")
    write(tmp_path / "mine/data.yaml", keys.format("images/train", "images/val"))
    assert read_folder(tmp_path / "mine")[0].classes.names == ("cat", "dog")
