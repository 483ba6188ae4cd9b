# SPDX-License-Identifier: Apache-2.0
"""What tools export, and what people do to it afterwards: nothing is read wrongly or left out without a word."""

import json
import math
import shutil

import pytest
from PIL import Image
from test_folders import BOXES, SIZE, TRAIN, VAL, both, boxes_of, coco, cvat, draw, read, voc, write, yolo

from cpvt_det.common.errors import DataError
from cpvt_det.data import read_folder
from cpvt_det.data.folders.layouts import HEAD


def notes_of(found, datasets):
    """All that is said about a folder, in one text."""
    return "\n".join([*found.notes, *(dataset.describe() for dataset in datasets)])


def test_a_cvat_file_of_any_size_is_recognised(tmp_path):
    both(tmp_path / "mine", "images/{name}.png", lambda split, name: ())
    write(tmp_path / "mine/annotations.xml", cvat(TRAIN + VAL).replace("</meta>", f"<x>{' ' * 3 * HEAD}</x></meta>"))
    assert boxes_of(read_folder(tmp_path / "mine")) == BOXES


def test_a_cvat_project_has_its_own_splits_with_equal_names(tmp_path):
    xml = "<annotations><meta/>{}</annotations>"
    images = ""
    for subset, name in (("Train", "a"), ("Train", "b"), ("Validation", "a"), ("Validation", "b")):
        draw(tmp_path / f"mine/images/{subset}/{name}.png", name if subset == "Train" else name.upper())
        box = f'<box label="cat" xtl="1" ytl="2" xbr="{9 if subset == "Train" else 5}" ybr="8"/>'
        images += f'<image name="{name}.png" subset="{subset}" width="{SIZE[1]}" height="{SIZE[0]}">{box}</image>'
    write(tmp_path / "mine/annotations.xml", xml.format(images))
    found, (train, val) = read(tmp_path / "mine", tmp_path / "out")
    assert "drawn" not in notes_of(found, ())
    assert boxes_of([train]) == {name: [("cat", 1, 2, 8, 6)] for name in "ab"}
    assert boxes_of([val]) == {name: [("cat", 1, 2, 4, 6)] for name in "ab"}


def test_boxes_for_images_that_were_resized_since_are_refused(tmp_path):
    both(tmp_path / "mine", "{name}.png", lambda split, name: ())
    larger = f'<image width="{2 * SIZE[1]}" height="{2 * SIZE[0]}" '
    write(tmp_path / "mine/annotations.xml", cvat(TRAIN + VAL).replace("<image ", larger))
    with pytest.raises(DataError, match="(?s)images whose size differs .*has 60 x 40 pixels, but 120 x 80 in the annotations"):
        read_folder(tmp_path / "mine")


@pytest.mark.parametrize("form", ["yolo beside", "xmls"])
def test_xml_files_are_read_as_such_wherever_they_are(form, tmp_path):
    """The boxes of YOLO's files are other ones."""
    place = "xmls/{}.xml" if form == "xmls" else "Annotations/{}.xml"
    both(tmp_path / "mine", "images/{name}.png", lambda split, name: [(place.format(name), voc(name))])
    for split, names in (("train", TRAIN), ("val", VAL)):
        write(tmp_path / f"mine/ImageSets/Main/{split}.txt", "\n".join(names))
    if form == "yolo beside":
        write(tmp_path / "mine/data.yaml", "train: images\nval: images\nnames: [kat]\n")
        for name in TRAIN + VAL:
            write(tmp_path / f"mine/labels/{name}.txt", "0 0.5 0.5 0.1 0.1")
    _, (train, val) = read(tmp_path / "mine", tmp_path / "out", wanted="voc")
    assert boxes_of([train, val]) == BOXES and boxes_of([val]).keys() == set(VAL)


@pytest.mark.parametrize("place", ["ImageSets/{}.txt", "{}.txt"])
def test_lists_of_splits_at_another_place_are_told(place, tmp_path):
    both(tmp_path / "mine", "JPEGImages/{name}.png", lambda split, name: [(f"Annotations/{name}.xml", voc(name))])
    for split, names in (("train", TRAIN), ("val", VAL)):
        write(tmp_path / "mine" / place.format(split), "\n".join(names))
    found, datasets = read(tmp_path / "mine", tmp_path / "out")
    assert boxes_of(datasets) == BOXES
    first, second = (tmp_path / "mine" / place.format(split) for split in ("train", "val"))
    assert f"not read: {first}, {second}; to use such lists as splits, put them into ImageSets/Main" in found.notes


def test_a_copied_folder_whose_yaml_names_the_original_is_told(tmp_path):
    both(tmp_path / "first", "{split}/images/{name}.png", lambda split, name: [(f"{split}/labels/{name}.txt", yolo(name))])
    write(tmp_path / "first/data.yaml", f"path: {tmp_path}/first\ntrain: train/images\nval: val/images\nnames: [cat, dog]\n")
    found, _ = read(tmp_path / "first", tmp_path / "out")
    assert not any("outside" in note for note in found.notes)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    found, _ = read(tmp_path / "second", tmp_path / "out")
    told = [note for note in found.notes if note.startswith(f"read from outside of {tmp_path}/second: ")]
    assert told == [f"read from outside of {tmp_path}/second: {tmp_path}/first/{split}/images" for split in ("train", "val")]


@pytest.mark.parametrize("own_splits", [True, False])
def test_rectangles_that_cvat_turned_become_the_upright_boxes_around_them(own_splits, tmp_path):
    """Its COCO has the rectangle before it was turned as ``bbox``."""
    both(tmp_path / "mine", "images/{name}.png", lambda split, name: ())
    for split, names in {"train": TRAIN, "val": VAL}.items() if own_splits else {"all": TRAIN + VAL}.items():
        content = json.loads(coco(names))
        for annotation in content["annotations"]:
            if names[annotation["image_id"]] in "ce":
                annotation["attributes"] = {"occluded": False, "rotation": {"c": 90.0, "e": 30.0}[names[annotation["image_id"]]]}
                annotation |= {"bbox": [20, 5, 10, 30]}
        write(tmp_path / f"mine/annotations/{split}.json", json.dumps(content))
    found = boxes_of(read_folder(tmp_path / "mine"))
    (turned,) = found["c"]
    assert turned == ("cat", 10, 15, 30, 10)
    sine, cosine = 0.5, math.sqrt(0.75)
    width, height = 10 * cosine + 30 * sine, 30 * cosine + 10 * sine
    assert found["e"][0][1:] == pytest.approx((25 - width / 2, 20 - height / 2, width, height), abs=2e-3)
    assert found["a"] == BOXES["a"]
    _, datasets = read(tmp_path / "mine", tmp_path / "out")
    said = " ".join(dataset.describe() for dataset in datasets)
    assert "rectangles with attributes.rotation, replaced by the boxes around them: " in said


def test_crowds_of_coco_are_told(tmp_path):
    both(tmp_path / "mine", "images/{name}.png", lambda split, name: ())
    for split, names in (("train", TRAIN), ("val", VAL)):
        content = json.loads(coco(names))
        for annotation in content["annotations"]:
            annotation["iscrowd"] = int(split == "train" and annotation["category_id"] == 6)
        write(tmp_path / f"mine/{split}.json", json.dumps(content))
    _, (train, val) = read(tmp_path / "mine", tmp_path / "out")
    assert "annotations with iscrowd 1, neither learned nor counted in evaluation: 2" in train.describe()
    assert "iscrowd" not in val.describe()
    assert "and 2 more" not in "\n".join(train.issues.lines(train.issues.infos))


@pytest.mark.parametrize(("written", "there"), [("one/day/a.png", "other/day/a.png"), ("a.png", "val/a.png")])
def test_an_image_found_in_a_folder_that_contradicts_the_annotations_is_told(written, there, tmp_path):
    draw(tmp_path / "mine" / there, "a")
    draw(tmp_path / "mine/train/b.png", "b")
    content = json.loads(coco(["a", "b"]))
    content["images"][0]["file_name"] = written
    write(tmp_path / "mine/annotations/train.json", json.dumps(content))
    found, _ = read(tmp_path / "mine", tmp_path / "out")
    assert any(note.startswith("names found in another folder: 1, such as") and there in note for note in found.notes)


def test_paths_of_another_machine_and_voc_s_other_lists_are_no_news(tmp_path):
    both(tmp_path / "mine", "sub/images/{name}.png", lambda split, name: ())
    write(tmp_path / "mine/all.json", coco(TRAIN + VAL, prefix="C:/Users/me/images/"))
    found, _ = read(tmp_path / "mine", tmp_path / "out")
    assert not any("another folder" in note for note in found.notes)
    both(tmp_path / "voc", "JPEGImages/{name}.png", lambda split, name: [(f"Annotations/{name}.xml", voc(name))])
    for kind in ("Main", "Layout"):
        for split, names in (("train", TRAIN), ("val", VAL), ("trainval", [])):
            write(tmp_path / f"voc/ImageSets/{kind}/{split}.txt", "\n".join(names))
    found, _ = read(tmp_path / "voc", tmp_path / "out")
    assert not any("not read" in note for note in found.notes)
    _, datasets = read(tmp_path / "voc", tmp_path / "out", new_split=True)
    assert boxes_of(datasets) == BOXES


def test_equal_images_without_objects_may_be_in_both_splits_but_no_others(tmp_path):
    both(tmp_path / "mine", "{split}/{name}.png", lambda split, name: [(f"{split}/{name}.txt", yolo(name))])
    write(tmp_path / "mine/data.yaml", "train: train\nval: val\nnames: [cat, dog]\n")
    for split in ("train", "val"):
        Image.new("RGB", SIZE[::-1]).save(tmp_path / f"mine/{split}/black_{split}.png")
    assert [len(dataset.records) for dataset in read_folder(tmp_path / "mine")] == [len(TRAIN) + 1, len(VAL) + 1]
    for name in "ed":  # copied with its label file, and without it
        copy = tmp_path / f"mine/val/{name}.png"
        shutil.copy(tmp_path / "mine/train/a.png", copy)
        with pytest.raises(DataError, match="in both training and validation: 1 image, such as"):
            read_folder(tmp_path / "mine")
        copy.unlink()


def test_sizes_of_images_may_be_text_and_other_yaml_files_are_no_data_sets(tmp_path):
    both(tmp_path / "mine", "images/{name}.png", lambda split, name: ())
    content = json.loads(coco(TRAIN + VAL))
    for image in content["images"]:
        image |= {"height": str(image["height"]), "width": str(image["width"])}
    write(tmp_path / "mine/all.json", json.dumps(content))
    write(tmp_path / "mine/run.yaml", "model:\n  names: [x]\nsteps:\n  train: 5\n")
    assert boxes_of(read_folder(tmp_path / "mine")) == BOXES
