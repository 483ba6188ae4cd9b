# SPDX-License-Identifier: Apache-2.0
"""YOLO and Pascal VOC folders, written here from a COCO data set, are read as that data set."""

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import OBJECTS, SIZES
from PIL import Image
from tiny import coco_dict, overrides

from cpvt_det.cli import main
from cpvt_det.common.errors import ConfigError, DataError
from cpvt_det.data.catalog import DatasetFiles, registered_datasets
from cpvt_det.data.coco import load_coco, read_coco

NAMES = {3: "cell", 17: "disc", 90: "ring"}
INSIDE = [entry for entry in OBJECTS if not entry[3] and entry[2] not in ([3, 3, 0, 10], [100, 5, 10, 10], [80, -4, 20, 20])]
"""The boxes that both formats can hold: of a positive size and inside their image."""


def draw_images(folder):
    folder.mkdir(parents=True)
    for image_id, (height, width) in SIZES.items():
        Image.fromarray(np.full((height, width, 3), 99, np.uint8)).save(folder / f"{image_id:03d}.png")


def write_yolo(folder, yaml="path: {root}\ntrain: images/train\nval: images/val\nnames: [cell, disc, ring]\n"):
    """All images in train, image 7 in val too."""
    draw_images(folder / "images" / "train")
    (folder / "images" / "val").mkdir()
    shutil.copy(folder / "images/train/007.png", folder / "images/val/007.png")
    (folder / "data.yaml").write_text(yaml.format(root=folder))
    for image_id, category_id, (x, y, w, h), _ in INSIDE:
        height, width = SIZES[image_id]
        line = [list(NAMES).index(category_id), (x + w / 2) / width, (y + h / 2) / height, w / width, h / height]
        for split in ("train", "val") if image_id == 7 else ("train",):
            (folder / "labels" / split).mkdir(parents=True, exist_ok=True)
            with (folder / "labels" / split / f"{image_id:03d}.txt").open("a") as file:
                file.write(" ".join(map(str, line)) + "\n")
    return folder


def write_voc(folder, splits=None):
    """Whole pixels, as VOC has; the box of image 5 becomes difficult. Splits have ids of images."""
    draw_images(folder / "JPEGImages")
    (folder / "Annotations").mkdir()
    for split, image_ids in (splits or {}).items():
        (folder / "ImageSets/Main").mkdir(parents=True, exist_ok=True)
        (folder / f"ImageSets/Main/{split}.txt").write_text("".join(f"{image_id:03d}\n" for image_id in image_ids))
    for image_id, (height, width) in SIZES.items():
        root = ET.Element("annotation")
        ET.SubElement(root, "filename").text = f"{image_id:03d}.png"
        size = ET.SubElement(root, "size")
        ET.SubElement(size, "width").text, ET.SubElement(size, "height").text = str(width), str(height)
        for owner, category_id, (x, y, w, h), _ in INSIDE:
            if owner == image_id:
                element = ET.SubElement(root, "object")
                ET.SubElement(element, "name").text = NAMES[category_id]
                ET.SubElement(element, "difficult").text = str(int(image_id == 5))
                box = ET.SubElement(element, "bndbox")
                for side, value in zip(("xmin", "ymin", "xmax", "ymax"), (x + 1, y + 1, x + w, y + h), strict=True):
                    ET.SubElement(box, side).text = str(int(value))
        ET.ElementTree(root).write(folder / "Annotations" / f"{image_id:03d}.xml")
    return folder


def read(source, split):
    return load_coco(DatasetFiles("foreign", Path(source), split=split))


def boxes_of(dataset):
    """Stem of the file -> class names and boxes."""
    names = dataset.classes.names
    return {
        Path(record.file_name).stem: [
            (names[label], *box) for label, box in zip(record.labels, record.boxes_xyxy.tolist(), strict=True)
        ]
        for record in dataset.records
    }


def expected(objects):
    found = {f"{image_id:03d}": [] for image_id in SIZES}
    for image_id, category_id, (x, y, w, h), _ in objects:
        found[f"{image_id:03d}"].append((NAMES[category_id], x, y, x + w, y + h))
    return found


def assert_same(found, objects):
    wanted = expected(objects)
    assert found.keys() == wanted.keys()
    for stem, boxes in wanted.items():
        assert [box[0] for box in found[stem]] == [box[0] for box in boxes]
        np.testing.assert_allclose([box[1:] for box in found[stem]], [box[1:] for box in boxes], atol=1e-4)


def test_a_yolo_folder_has_the_boxes_it_was_written_from(tmp_path):
    dataset = read(write_yolo(tmp_path / "yolo"), "train")
    assert dataset.classes.names == ("cell", "disc", "ring") and dataset.classes.ids == (0, 1, 2)
    assert {(record.height, record.width) for record in dataset.records} == set(SIZES.values())
    assert_same(boxes_of(dataset), INSIDE)
    assert list(boxes_of(read(tmp_path / "yolo" / "data.yaml", "val"))) == ["007"]


@pytest.mark.parametrize(
    ("yaml", "split"),
    [
        ("train: ../images/train\nnc: 3\nnames:\n  0: cell\n  1: disc\n  2: ring\n", "train"),  # as Roboflow writes
        ("path: /content/gone\ntrain: images/train\nnames: [cell, disc, ring]\n", "train"),  # as written on another machine
        ("valid: [images/train]\nnames: [cell, disc, ring]\n", "val"),
        ("test: list.txt\nnames: [cell, disc, ring]\n", "test"),
    ],
)
def test_the_ways_that_yaml_files_name_their_images(tmp_path, yaml, split):
    folder = write_yolo(tmp_path / "yolo", yaml)
    (folder / "list.txt").write_text("".join(f"./images/train/{image_id:03d}.png\n" for image_id in SIZES))
    assert_same(boxes_of(read(folder, split)), INSIDE)


def test_a_yolo_polygon_becomes_the_box_around_it(tmp_path):
    folder = write_yolo(tmp_path / "yolo")
    (folder / "labels/train/041.txt").write_text("2 0.2 0.5 0.6 0.1 0.4 0.9\n")
    ((name, *box),) = boxes_of(read(folder, "train"))["041"]
    assert name == "ring"
    np.testing.assert_allclose(box, [14, 5, 42, 45], atol=1e-4)  # of 70 x 50 pixels


def test_a_voc_folder_has_the_boxes_it_was_written_from(tmp_path):
    whole = [(i, c, [int(side) for side in box], crowd) for i, c, box, crowd in INSIDE if i != 5]
    dataset = read(write_voc(tmp_path / "voc"), "")
    assert dataset.classes.names == ("cell", "disc", "ring") and dataset.classes.ids == (1, 2, 3)
    assert_same(boxes_of(dataset), whole)
    assert [a["image_id"] for a in coco_dict(dataset)["annotations"] if a["iscrowd"]] == [1]  # what is difficult, of 005.png


def test_a_voc_split_lists_its_images_and_knows_the_classes_of_all(tmp_path):
    folder = write_voc(tmp_path / "voc")
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "ImageSets/Main/val.txt").write_text("041\n007 1\n")
    dataset = read(folder, "val")
    assert [Path(record.file_name).name for record in dataset.records] == ["041.png", "007.png"]
    assert dataset.classes.names == ("cell", "disc", "ring")
    with pytest.raises(DataError, match="no split 'test'.*known: val"):
        read(folder, "test")


def test_xml_beside_images_and_a_list_of_classes_will_do(tmp_path):
    whole, folder = write_voc(tmp_path / "voc"), tmp_path / "flat"
    folder.mkdir()
    for file in [*(whole / "JPEGImages").iterdir(), *(whole / "Annotations").iterdir()]:
        shutil.move(file, folder)
    (folder / "classes.txt").write_text("ring\ndisc\ncell\nrare\n")
    dataset = read(folder, "")
    assert dataset.classes.names == ("ring", "disc", "cell", "rare")
    assert sorted(boxes_of(dataset)["007"]) == [("cell", 50, 5, 62, 30), ("disc", 10, 8, 40, 28)]


@pytest.mark.parametrize(
    ("line", "heading", "detail"),
    [
        ("7 0.5 0.5 0.1 0.1", "classes that have no name", "041.txt, line 1: class 7; there are names for 0 to 2"),
        (
            "0.5 0.5 0.5 0.1 0.1",
            "classes that are not whole numbers",
            "041.txt, line 1: '0.5 0.5 0.5 0.1 0.1'; expected class cx cy",
        ),
        ("-1 0.5 0.5 0.1 0.1", "classes that are not whole numbers", "041.txt, line 1: '-1 0.5 0.5 0.1 0.1'; expected class cx cy"),
        ("0 0.5 0.5", "lines of another length", "041.txt, line 1: 2 numbers after the class; expected class cx cy w h"),
        ("0 0.5 0.5 0.5 0.5 0.5", "lines of another length", "5 numbers after the class; expected class cx cy w h"),
        ("0 0.5 0.1 0.1 0.9 0.5", "lines of another length", "5 numbers after the class; expected class cx cy w h"),
        ("0 0.5 0.5 0.1 0.1 9 7", "lines of another length", "6 numbers after the class; expected class cx cy w h"),
        ("0 0.5 0.5 0.1 0.1 0.9 0.7 1", "lines of another length", "7 numbers after the class; ...; keypoints need kpt_shape in"),
        ("0 left top 1 1", "lines that are not numbers", "041.txt, line 1: '0 left top 1 1'; expected class cx cy w h"),
        ("0 nan 0.5 0.1 0.1", "lines that are not numbers", "041.txt, line 1"),
        ("0 0.5 inf 0.1 0.1", "lines that are not numbers", "041.txt, line 1"),
        ("0,5,5,1,1", "lines that are not numbers", "041.txt, line 1: '0,5,5,1,1'; expected class cx cy w h"),
        (
            "0 30 22.5 20 12",
            "boxes that are not fractions of the image",
            "041.txt, line 1: [30.0, 22.5, 20.0, 12.0]; expected centre",
        ),
        ("0 0.5 0.5 2.1 0.1", "boxes that are not fractions of the image", "041.txt, line 1"),
    ],
)
def test_faults_are_found_by_file_and_line(tmp_path, line, heading, detail):
    folder = write_yolo(tmp_path / "yolo")
    (folder / "labels/train/041.txt").write_text(line)
    found = read_coco(DatasetFiles("foreign", folder, split="train")).issues.faults
    assert list(found) == [heading]
    assert all(part in found[heading].examples[0] for part in detail.split("..."))


def test_what_cannot_be_read_says_why(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"expected a COCO JSON file, a YOLO folder.*Pascal VOC"):
        read(tmp_path / "empty", "")
    for text, match in [
        ("names: [a", "is not YAML"),
        ("- a\n", "got a list"),
        ("train: x\nnames: [a]\n", "empty/x does not exist"),
    ]:
        (tmp_path / "empty" / "data.yaml").write_text(text)
        with pytest.raises(DataError, match=match):
            read(tmp_path / "empty", "train")
    (tmp_path / "empty" / "data.yaml").write_text("train: .\nnames: []\n")
    with pytest.raises(DataError, match="no images"):
        read(tmp_path / "empty", "train")
    folder = write_yolo(tmp_path / "yolo", "train: images/train\nnames: 3\n")
    with pytest.raises(DataError, match="names must be a list of class names, or a mapping of numbers"):
        read(folder, "train")
    with pytest.raises(DataError, match="no split 'val'; known: train"):
        read(folder, "val")
    voc = write_voc(tmp_path / "voc")
    (voc / "Annotations" / "041.xml").write_text("<annotation>")
    with pytest.raises(DataError, match="is not XML"):
        read(voc, "")


def test_the_third_of_a_triple_is_a_split_for_folders_and_yaml_files(tmp_path):
    (tmp_path / "voc").mkdir()
    entries = [["a", "a.json", "pictures"], ["b", "b.yaml", "val"], ["c", str(tmp_path / "voc"), ""]]
    coco, yolo, voc = registered_datasets(entries)
    assert (coco.image_root, coco.split, coco.is_coco) == (Path("pictures"), "", True)
    assert (yolo.split, yolo.is_coco, voc.split, voc.is_coco) == ("val", False, "", False)
    with pytest.raises(ConfigError, match="triples"):
        registered_datasets([["a", "b"]])


def test_a_missing_image_is_found_before_training(tmp_path):
    folder = write_yolo(tmp_path / "yolo")
    (folder / "images/train/041.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    words = overrides(DatasetFiles("drawn", folder, split="train"), tmp_path / "out")
    words[words.index("DATASETS.REGISTER") + 1] = json.dumps([["drawn", str(folder), "train"]])
    done = CliRunner().invoke(main, ["check-data", "--config-file", "quickstart/detr_peg.yaml", "--runner", "builtin", *words])
    assert done.exit_code == 2
    assert "image files that cannot be read" in done.output and "041.png" in done.output
    assert "less than a pixel" not in done.output  # of its boxes, whose size in pixels nobody knows


@pytest.mark.parametrize("runner", ["builtin", pytest.param("detectron2", marks=pytest.mark.detectron2)])
def test_a_run_trains_on_one_format_and_evaluates_on_another(tmp_path, runner):
    yolo, voc = write_yolo(tmp_path / "yolo"), write_voc(tmp_path / "voc")
    words = overrides(DatasetFiles("drawn", yolo, split="train"), tmp_path / "out", SOLVER__MAX_ITER=1)
    triples = [["drawn", str(yolo), "train"], ["other", str(voc), ""]]
    words += ["DATASETS.REGISTER", json.dumps(triples), "DATASETS.TEST", "('other',)"]
    done = CliRunner().invoke(main, ["train", "--config-file", "quickstart/detr_peg.yaml", "--runner", runner, *words])
    assert done.exit_code == 0, done.output
    assert set(json.loads((tmp_path / "out" / "results.json").read_text())["bbox"]) >= {"AP", "AP-cell", "AP-ring"}


@pytest.mark.detectron2
def test_detectron2_has_it_in_its_catalogs(tmp_path):
    from detectron2.data import DatasetCatalog, MetadataCatalog

    from cpvt_det.d2.data import register_datasets

    files = DatasetFiles("yolo_in_detectron2", write_yolo(tmp_path / "yolo"), split="train")
    register_datasets([files])
    register_datasets([files])  # again is nothing
    first = DatasetCatalog.get(files.name)[0]
    assert first["annotations"][0]["bbox"] == pytest.approx([4.5, 6.25, 25, 37])  # image 5
    assert MetadataCatalog.get(files.name).thing_classes == ["cell", "disc", "ring"]
