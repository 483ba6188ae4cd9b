# SPDX-License-Identifier: Apache-2.0
"""Detections in other people's tools: supervision's objects, and COCO JSON in the readers of FiftyOne and CVAT."""

import json
import re
import shutil
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import ROOT
from PIL import Image

from cpvt_det.cli import main
from cpvt_det.common.class_names import Classes
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import load_coco
from cpvt_det.predict import ImageDetections

CLASSES = Classes((3, 17, 90), ("red", "green", "blue"))


def detections(count=2):
    boxes = torch.tensor([[1.5, 2, 11.5, 22], [0, 0, 60, 40]])[:count]
    return ImageDetections(boxes, torch.tensor([0.75, 0.5])[:count], torch.tensor([2, 0])[:count], CLASSES, torch.zeros(3, 40, 60))


def test_supervision_is_given_arrays_and_names(monkeypatch):
    """By a stand-in for the package."""
    module = types.ModuleType("supervision")
    module.Detections = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "supervision", module)
    found = detections().to_supervision()
    assert found.xyxy.tolist() == [[1.5, 2, 11.5, 22], [0, 0, 60, 40]] and found.confidence.tolist() == [0.75, 0.5]
    assert found.class_id.tolist() == [2, 0] and found.data["class_name"].tolist() == ["blue", "red"]
    assert detections(0).to_supervision().xyxy.shape == (0, 4)


@pytest.mark.parametrize("count", [0, 2])
def test_supervision_itself_takes_detections(count):
    supervision = pytest.importorskip("supervision", reason="supervision is not installed")
    found = detections(count).to_supervision()
    assert isinstance(found, supervision.Detections) and len(found) == count
    assert found.area.tolist() == [200, 2400][:count]
    drawn = supervision.BoxAnnotator().annotate(np.zeros((40, 60, 3), np.uint8), found)
    assert drawn.any() == (count > 0) and len(found[found.confidence > 0.6]) == min(count, 1)


@pytest.fixture(scope="module")
def predicted(tiny_run, tmp_path_factory):
    """What the command found in five images, one of them deeper than the others: images and ``coco.json``."""
    run, folder = tiny_run("detr"), tmp_path_factory.mktemp("predicted")
    shutil.copytree(run.drawn.files.image_root, folder / "photos")
    shutil.move(folder / "photos/part/041.png", folder / "photos/041.png")
    words = ["--input", folder / "photos", "--output", folder / "found", "--device", "cpu", "--threshold", 0]
    result = CliRunner().invoke(main, list(map(str, ["predict", run.weights, *words])))
    assert result.exit_code == 0, result.output
    return folder


def assert_read(found, predicted):
    """Rows of file, class, score and box xywh are those of the JSON; readers round boxes to a hundredth of a pixel."""
    content = json.loads((predicted / "found/coco.json").read_text())
    files = {image["id"]: image["file_name"] for image in content["images"]}
    names = {category["id"]: category["name"] for category in content["categories"]}
    rows = [(files[row["image_id"]], names[row["category_id"]], row["score"], *row["bbox"]) for row in content["annotations"]]
    assert len(rows) == 30 and [row[:3] for row in sorted(found)] == [row[:3] for row in sorted(rows)]
    np.testing.assert_allclose([row[3:] for row in sorted(found)], [row[3:] for row in sorted(rows)], atol=0.02)


def test_the_data_set_of_detections_is_the_results_with_its_images(predicted):
    content, results = (json.loads((predicted / f"found/{name}.json").read_text()) for name in ("coco", "detections"))
    keys = ("image_id", "category_id", "bbox", "score")
    assert [{key: row[key] for key in keys} for row in content["annotations"]] == results and len(results) == 30
    assert [row["id"] for row in content["annotations"]] == list(range(1, 31))
    assert all(row["area"] == row["bbox"][2] * row["bbox"][3] and row["iscrowd"] == 0 for row in content["annotations"])
    dataset = load_coco(
        DatasetFiles("found", predicted / "found/coco.json", predicted / "photos")
    )  # may be trained on, when corrected
    assert len(dataset.records) == 5 and sum(len(record.labels) for record in dataset.records) <= 30


def test_fiftyone_reads_the_detections(predicted):
    """By its importer, which needs no data base."""
    coco = pytest.importorskip("fiftyone.utils.coco", reason="fiftyone is not installed")
    importer = coco.COCODetectionDatasetImporter(
        data_path=str(predicted / "photos"), labels_path=str(predicted / "found/coco.json"), extra_attrs=True
    )
    images = json.loads((predicted / "found/images.json").read_text())["images"]
    sizes = {image["file_name"]: np.array([image["width"], image["height"]] * 2) for image in images}
    found = []
    with importer:
        for path, _, labels in importer:
            name = next(name for name in sizes if path.endswith(name))
            found += [
                (name, one.label, one.confidence, *(one.bounding_box * sizes[name])) for one in labels["detections"].detections
            ]
    assert_read(found, predicted)


def test_a_model_that_takes_boxes_makes_masks_of_them(monkeypatch, tmp_path):
    """The lines of docs/use.md, with a tiny SAM of random weights and a stand-in for supervision; EXIF turns the photograph."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    (code,) = re.findall(r"```python\n(import torch\n[^`]*SamModel[^`]*)```", (ROOT / "docs/use.md").read_text(encoding="utf-8"))
    small = {"hidden_size": 16, "image_size": 64, "patch_size": 16}
    vision = {**small, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 16, "num_pos_feats": 8}
    mask = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 16, "iou_head_hidden_dim": 16}
    config = transformers.SamConfig(
        vision_config={**vision, "window_size": 0},
        prompt_encoder_config={**small, "mask_input_channels": 4},
        mask_decoder_config=mask,
    )
    images = transformers.SamImageProcessor(size={"longest_edge": 64}, pad_size={"height": 64, "width": 64})
    monkeypatch.setattr(transformers.SamModel, "from_pretrained", lambda name: transformers.SamModel(config))
    monkeypatch.setattr(transformers.SamProcessor, "from_pretrained", lambda name: transformers.SamProcessor(images))
    module = types.ModuleType("supervision")
    module.Detections = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "supervision", module)
    monkeypatch.chdir(tmp_path)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (60, 40)).save("photo.jpg", exif=turned)
    names = {"found": replace(detections(), source="photo.jpg")}
    exec(code, names)
    assert names["objects"].mask.shape == (2, 60, 40) and names["objects"].mask.dtype == bool


def test_datumaro_the_reader_of_cvat_reads_the_detections(predicted, tmp_path):
    datumaro = pytest.importorskip("datumaro", reason="datumaro is not installed")
    (tmp_path / "annotations").mkdir()
    shutil.copy(predicted / "found/coco.json", tmp_path / "annotations/instances_default.json")
    shutil.copytree(predicted / "photos", tmp_path / "images/default")
    dataset = datumaro.Dataset.import_from(str(tmp_path), "coco_instances")
    names = [category.name for category in dataset.categories()[datumaro.AnnotationType.label]]
    found = [
        (f"{item.id}.png", names[one.label], one.attributes["score"], *one.get_bbox())
        for item in dataset
        for one in item.annotations
    ]
    assert_read(found, predicted)
