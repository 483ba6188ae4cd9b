# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tiles: canvases show the objects that their JSON names, and every way is measured."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tiny import overrides

from benchmarks import deep_pcb, tiles
from cpvt_det.builders import load_tests
from cpvt_det.config import load_cfg


@pytest.fixture
def dataset(drawn_coco, tmp_path):
    return load_tests(load_cfg("", overrides(drawn_coco.files, tmp_path)))[0]


def test_every_object_is_on_its_canvas_with_its_box(dataset, tmp_path):
    """Objects are rectangles of one colour, of whole pixels but one: where a box is, the canvas has the pixels of the image."""
    path = tiles.paste(dataset, tmp_path, (2, 2), 3, 1.0)
    content = json.loads(path.read_text())
    assert [(image["width"], image["height"]) for image in content["images"]] == [(180, 128)] * 3
    colours = {3: (220, 40, 40), 17: (40, 220, 40), 90: (40, 40, 220)}
    objects = [entry for entry in content["annotations"] if entry["bbox"][2] % 1 == 0]
    assert len(objects) > 6
    for entry in objects:
        x, y, w, h = (round(value) for value in entry["bbox"])
        pixels = np.array(Image.open(tmp_path / f"{entry['image_id'] - 1:04d}.png"))[y : y + h, x : x + w]
        assert (pixels == colours[entry["category_id"]]).all(2).mean() > 0.5  # others are drawn over some
        assert entry["area"] == entry["bbox"][2] * entry["bbox"][3]
    half = json.loads(tiles.paste(dataset, tmp_path, (2, 1), 1, 0.5).read_text())
    assert [(image["width"], image["height"]) for image in half["images"]] == [(90, 32)]


def test_all_ways_are_measured(tiny_run, tmp_path):
    run = tiny_run("detr")
    words = ["--config-file", str(run.folder / "config.yaml"), "--grid", "2", "1", "--canvases", "1", "--tiles", "48", "--busy"]
    result = CliRunner().invoke(tiles.main, [str(run.weights), *words, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("tiles_*.json")
    record = json.loads(path.read_text())
    assert "--grid 2 1 --canvases 1 --shrink 1.0 --tiles 48 --overlap 0.2 --busy" in record["command"]
    assert len(record["ways"]) == 6 and all(found["seconds"] > 0 for found in record["ways"].values())
    assert record["busy"] and all(name in result.output for name in record["ways"])
    refused = CliRunner().invoke(tiles.main, [str(run.weights), *words, "--case", "no such"])
    assert refused.exit_code == 2 and "--case 'no such' matches nothing" in refused.output


def test_deep_pcb_becomes_coco(tmp_path):
    root = tmp_path / "clone/PCBData"
    for split, boxes in (("trainval", "10 20 30 50 4\n1 2 3 4 1\n"), ("test", "")):
        (root / split).mkdir(parents=True)
        (root / f"{split}.txt").write_text(f"{split}/00.jpg {split}/00.txt\n")
        (root / split / "00.txt").write_text(boxes)
    result = CliRunner().invoke(deep_pcb.main, [str(tmp_path / "clone"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    train, test = (json.loads((tmp_path / f"out/{split}.json").read_text()) for split in ("train", "test"))
    assert train["images"] == [{"id": 1, "file_name": "trainval/00_test.jpg", "height": 640, "width": 640}]
    assert [(entry["bbox"], entry["category_id"]) for entry in train["annotations"]] == [([10, 20, 20, 30], 4), ([1, 2, 2, 2], 1)]
    assert test["annotations"] == [] and test["categories"][5] == {"id": 6, "name": "pin-hole"}
