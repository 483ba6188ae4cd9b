# SPDX-License-Identifier: Apache-2.0
"""Every row of ``tests/faults/`` ends as its table says, and the document holds every row."""

import importlib
import re

import pytest
import torch
from faults.case import Case
from faults.drawn import DataCase, call_on, draw
from faults.report import DOCUMENT, areas, report
from tiny import coco_dict, overrides

from cpvt_det import builders
from cpvt_det.common.errors import DataError
from cpvt_det.common.structures import Detections

ROWS = [pytest.param(case, id=f"{area.__name__.split('.')[-1]}: {case.what}") for area in areas() for case in area.CASES]


@pytest.mark.parametrize("case", ROWS)
def test_fault_ends_as_its_row_says(case: Case, tmp_path):
    assert not case.contradiction(case.run(tmp_path))


def test_the_readme_counts_the_rows():
    readme = (DOCUMENT.parent.parent / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\[(\d+) faulty or odd inputs\]", readme) == [str(len(ROWS))]


def test_document_holds_every_row():
    """After a change to a table: ``PYTHONPATH=tests python -m faults.report``."""
    assert DOCUMENT.read_text(encoding="utf-8") == report()


def test_rows_of_an_area_have_names_of_their_own():
    for area in areas():
        names = [case.what for case in area.CASES]
        assert len(set(names)) == len(names)


def data_rows(*codes):
    """The rows of data sets that end with one of these exit codes, but for what only decoding finds."""
    cases = [case for area in areas() for case in area.CASES if isinstance(case, DataCase) and not case.options]
    cases = [case for case in cases if case.code in codes]
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.what) for case in cases])


@pytest.mark.parametrize("runner", ["builtin", pytest.param("detectron2", marks=pytest.mark.detectron2)])
@pytest.mark.parametrize("words", [["train"], ["train", "--eval-only"]], ids=" ".join)
@data_rows(2)
def test_training_and_evaluation_stop_at_the_same_faults(case: DataCase, tmp_path, words, runner):
    """Before anything is written down."""
    ending = call_on(draw(tmp_path / "data", case.make), *words, runner=runner)
    assert not case.contradiction(ending)
    assert not (tmp_path / "out" / "log.txt").exists()


@pytest.mark.parametrize("runner", ["builtin", pytest.param("detectron2", marks=pytest.mark.detectron2)])
@data_rows(0, 2)
def test_ground_truth_used_as_detections_scores_100_after_dropping(case: DataCase, tmp_path, runner):
    """What is left is the same images and boxes in training and evaluation, and every image of it can be decoded."""
    drawn = draw(tmp_path / "data", case.make)
    load_cfg = importlib.import_module("cpvt_det.d2.config" if runner == "detectron2" else "cpvt_det.config").load_cfg
    cfg = load_cfg(
        "", overrides(drawn.files, tmp_path, DATASETS__ON_BAD="error" if case.code == 0 else "drop", INPUT__MIN_SIZE_TEST=0)
    )
    if case.code == 2 and FATAL.search(case.says):
        with pytest.raises(DataError):
            builders.load_splits(cfg)
        return
    (train,), (test,) = builders.load_splits(cfg)
    assert [record.image_id for record in train.records] == [image["id"] for image in coco_dict(test)["images"]]
    assert sum(len(record.labels) for record in train.records) == sum(not a["iscrowd"] for a in coco_dict(test)["annotations"])
    evaluator = builders.build_evaluator(test)
    boxes_of = {record.image_id: record for record in train.records}
    for (sample,) in builders.build_test_loader(cfg, test.records):
        record = boxes_of[sample["image_id"]]
        boxes, labels = torch.from_numpy(record.boxes_xyxy), torch.from_numpy(record.labels)
        evaluator.add(sample["image_id"], Detections(boxes, torch.ones(len(labels)), labels))
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100)


FATAL = re.compile(
    "not COCO|not JSON|not in pixels|is not a data set|no image has an object|category (ids|names)|without a field: ...categories"
)
"""What no image or box can be left out for."""


@pytest.mark.parametrize("runner", ["builtin", pytest.param("detectron2", marks=pytest.mark.detectron2)])
def test_training_goes_on_without_what_is_dropped_and_the_log_counts_it(tmp_path, runner):
    """In training and in evaluation by either runner; more boxes than queries are a warning."""

    def make(drawn):
        drawn.path(1).write_bytes(b"")
        drawn.content["annotations"][-1]["bbox"] = [1, 2, 3]
        drawn.content["annotations"][-3]["bbox"] = [900, 1, 5, 5]

    drawn = draw(tmp_path / "data", make)
    more = {"DATASETS__ON_BAD": "drop", "MODEL__DETR__NUM_OBJECT_QUERIES": 1, "SOLVER__MAX_ITER": 2}
    ending = call_on(drawn, "train", runner=runner, **more)
    assert ending.code == 0, ending.text
    log = (tmp_path / "out/log.txt").read_text(encoding="utf-8")
    line = (
        "drawn: 3 images, 0 of them without objects, 4 boxes, 2 classes; boxes outside the image, left out: 1; "
        "boxes that are not four numbers: 1; image files that cannot be read: 1"
    )
    assert log.count(line) == 2, log
    assert "WARNING: drawn: images with more boxes than queries, so that some boxes cannot be learned: 1; raise MODEL.DETR" in log
    more["MODEL__WEIGHTS"] = tmp_path / "out/model_final.pth"
    ending = call_on(drawn, "train", "--eval-only", runner=runner, OUTPUT_DIR=tmp_path / "eval", **more)
    assert ending.code == 0, ending.text
    assert line in (tmp_path / "eval/log.txt").read_text(encoding="utf-8")
