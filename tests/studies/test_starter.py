# SPDX-License-Identifier: Apache-2.0
"""The files that make the detector of the package: the joined data, and the file in half precision with its README."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import test_folders as layouts
import torch
import yaml
from click.testing import CliRunner
from PIL import Image
from tiny import save_random

from cpvt_det.builders.trained import load_trained
from cpvt_det.checkpoint.fetch import STARTER, locate
from studies.starter import data, package


def test_joined_data_have_one_version_of_a_photograph_and_few_of_a_set(tmp_path, monkeypatch):
    """Boxes are those of the files; a set that cannot be read is named, and the others are taken."""
    clones = tmp_path / "clones"
    layouts.write_roboflow_yolo(clones / "me+one/in")
    layouts.write_roboflow_voc(clones / "me+two")
    (image,) = sorted((clones / "me+one/in/train/images").glob("*"))[:1]
    for version in ("a", "b"):
        label = clones / "me+one/in/train/labels" / f"{image.stem}.txt"
        shutil.copy(label, label.with_name(f"again.rf.{version}.txt"))
        Image.open(image).rotate(180).save(image.with_name(f"again.rf.{version}.png"), compress_level=3 + ord(version) % 5)
    (clones / "me+none").mkdir()
    rows = [{"name": name, "repository": f"me/{name}"} for name in ("one", "none", "two")]
    rows[0] |= {"folder": "in", "leave_out": [layouts.NAMES[1]]}
    rows[2] |= {"most": 2}
    table = tmp_path / "data.yaml"
    table.write_text(yaml.safe_dump(rows))
    monkeypatch.setattr(data, "TABLE", table)
    monkeypatch.setattr(data, "VALIDATED", 0.5)
    done = CliRunner().invoke(data.main, [str(clones), str(tmp_path / "joined")])
    assert done.exit_code == 0 and "none: " in done.output, done.output
    content = {
        split: json.loads((tmp_path / "joined" / split / "_annotations.coco.json").read_text()) for split in ("train", "valid")
    }
    names = [Path(one["file_name"]).stem for split in content.values() for one in split["images"]]
    assert sum(name.startswith("two_") for name in names) == 2
    assert "one: 4 of 7 images, 4 boxes\n" in done.output, "six images, and one more in two versions; some have no cat"
    for split, found in content.items():
        words = {one["id"]: one["name"] for one in found["categories"]}
        sizes = {one["id"]: Image.open(tmp_path / "joined" / split / one["file_name"]).size for one in found["images"]}
        assert all((one["width"], one["height"]) == sizes[one["id"]] for one in found["images"])
        of_one = {one["id"] for one in found["images"] if one["file_name"].startswith("one_")}
        taken = [words[one["category_id"]] for one in found["annotations"] if one["image_id"] in of_one]
        assert layouts.NAMES[1] not in taken
    boxes = {tuple(map(round, one["bbox"])) for found in content.values() for one in found["annotations"]}
    assert boxes and boxes <= {tuple(box) for objects in layouts.BOXES.values() for _, *box in objects}


def test_images_are_shrunk_with_their_boxes_and_copies_are_taken_once(tmp_path):
    for name, color in (("a", "red"), ("copy", "red"), ("b", "blue")):
        Image.new("RGB", (960, 640), color).save(tmp_path / f"{name}.png")
    objects = [("cat", np.array([100.0, 40.0, 300.0, 600.0])), ("flea", np.array([0.0, 0.0, 5.0, 640.0]))]
    images = [(str(tmp_path / f"{name}.png"), objects) for name in ("a", "copy", "b")]
    taken = list(data.take(images, 5, set()))
    assert len(taken) == 2 and len(list(data.take(images, 1, set()))) == 1
    for image, boxes in taken:
        assert image.size == (480, 320) and boxes == [("cat", [50.0, 20.0, 150.0, 300.0])], "the flea is 2.5 pixels wide"


@pytest.mark.parametrize(("name", "expected"), [("Hard-Hat", "hard hat"), ("12", "coins 12"), ("object", "coins object")])
def test_classes_have_names_that_sets_can_share(name, expected):
    assert data._plain(name, "coins") == expected


def test_the_file_has_the_detector_in_half_precision_and_names_its_data(tmp_path):
    checkpoint = save_random(tmp_path / "model.pth")
    done = CliRunner().invoke(package.main, [str(checkpoint), "--output", str(tmp_path / "starter")])
    assert done.exit_code == 0, done.output
    before, after = (load_trained(path, "cpu").detector.state_dict() for path in (checkpoint, tmp_path / "starter"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(
            after[name], tensor.half().to(tensor.dtype) if tensor.is_floating_point() else tensor, rtol=0, atol=0
        )
    page = (tmp_path / "starter/README.md").read_text()
    assert page == (locate(STARTER) / "README.md").read_text(), "that of the package is of the same data"
    sources = yaml.safe_load(package.TABLE.read_text())
    assert all(source["repository"] in page and source["licence"] in page for source in sources)
    allowed = {"CC BY 4.0", "MIT", "Public Domain"}
    assert {source["licence"] for source in sources} <= allowed and all(len(source["commit"]) == 40 for source in sources)
