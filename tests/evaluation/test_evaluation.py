# SPDX-License-Identifier: Apache-2.0
"""Average precision: three scenes worked out by hand, agreement with pycocotools, and what the evaluator refuses."""

import copy
import io
import json
import math
import pickle
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from cpvt_det.common.class_names import Classes
from cpvt_det.common.files import write_json
from cpvt_det.common.structures import Detections
from cpvt_det.data.records import BOX, IMAGE, Records, Table
from cpvt_det.evaluation.coco import CocoEvaluator, format_table, write_results

CLASS_IDS = [7, 3, 90]  # neither dense nor sorted
CLASS_NAMES = ["cat", "dog", "toothbrush"]
MAIN_KEYS = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"]
CLASS_KEYS = [f"AP-{name}" for name in CLASS_NAMES]


def detections(*rows: tuple) -> Detections:
    """Rows of (label, score, x1, y1, x2, y2)."""
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 6)
    return Detections(boxes_xyxy=table[:, 2:].float(), scores=table[:, 1].float(), labels=table[:, 0].long())


def scene() -> dict:
    """Two images; in the first a cat and a dog of 40 x 40 (medium), in the second a cat of 100 x 100 (large).

    The ids have gaps, ``area`` and ``iscrowd`` are left out, and an annotation has the id 0.
    """
    return {
        "images": [{"id": 42, "height": 200, "width": 200}, {"id": 5, "height": 200, "width": 200}],
        "annotations": [
            {"id": 0, "image_id": 42, "category_id": 7, "bbox": [0, 0, 40, 40]},
            {"id": 10, "image_id": 42, "category_id": 3, "bbox": [100, 100, 40, 40]},
            {"id": 20, "image_id": 5, "category_id": 7, "bbox": [10, 20, 100, 100]},
        ],
        "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}, {"id": 90, "name": "toothbrush"}],
    }


def records_of(ground_truth: dict, class_ids: Sequence[int] = CLASS_IDS) -> Records:
    """The records of a COCO dict, whose annotations may lack ``area`` and ``iscrowd``."""
    images, boxes = [], []
    for image in ground_truth["images"]:
        numbered = [(n, one) for n, one in enumerate(ground_truth["annotations"]) if one["image_id"] == image["id"]]
        images.append((image["id"], 0, len(boxes), 0, len(numbered), 0, 0, 0))
        for number, one in numbered:
            area = one.get("area", one["bbox"][2] * one["bbox"][3])
            boxes.append((one["bbox"], area, number, class_ids.index(one["category_id"]), bool(one.get("iscrowd"))))
    table = Table(np.array(images, dtype=IMAGE), np.zeros(0, dtype=np.uint8), np.array(boxes, dtype=BOX))
    return Records([(table, Path())])


def evaluator_of(ground_truth: dict, names: Sequence[str] = CLASS_NAMES) -> CocoEvaluator:
    return CocoEvaluator(records_of(ground_truth), Classes(tuple(CLASS_IDS), tuple(names)))


def assert_figures(figures: dict, expected: dict) -> None:
    assert {name: figures[name] for name in expected} == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_perfect_detections_have_100_percent():
    """Every box is found exactly, alone and with any score, so every figure with ground truth is 100.

    AR1 too: no image has two objects of one class. There is no small box and no toothbrush: NaN.
    """
    evaluator = evaluator_of(scene())
    evaluator.add(42, detections((1, 0.2, 100, 100, 140, 140), (0, 0.1, 0, 0, 40, 40)))
    evaluator.add(5, detections((0, 0.9, 10, 20, 110, 120)))
    figures = evaluator.evaluate()["bbox"]
    assert list(figures) == MAIN_KEYS + CLASS_KEYS
    assert all(type(value) is float for value in figures.values())
    assert_figures(figures, {"AP-toothbrush": math.nan, "APs": math.nan, "ARs": math.nan})
    assert_figures(figures, {name: 100.0 for name in figures if name not in ("AP-toothbrush", "APs", "ARs")})


def test_hopeless_detections_have_0_percent():
    """The right boxes with the wrong class, the right class elsewhere, and IoU 0.49 are no matches: 0 everywhere."""
    evaluator = evaluator_of(scene())
    evaluator.add(42, detections((2, 0.9, 0, 0, 40, 40), (1, 0.9, 0, 150, 40, 190)))
    evaluator.add(5, detections((0, 0.9, 10, 20, 59, 120)))
    figures = evaluator.evaluate()["bbox"]
    without_truth = {"AP-toothbrush", "APs", "ARs"}
    assert_figures(figures, {name: math.nan if name in without_truth else 0.0 for name in figures})


def test_half_right_detections_have_the_figures_worked_out_by_hand():
    """One cat of two is found exactly; the dog only half, with a false alarm of higher score.

    cat: recall reaches 0.5 at precision 1. Of the 101 recall points 0, 0.01, ..., 1 those up to 0.5 are 51, so its
    AP is 51/101 at each IoU; its recall is 0.5.
    dog: the detection covers 28.4 of 40 columns: IoU 0.71, a match at 0.5, 0.55, ..., 0.7, five thresholds of ten. The
    false alarm comes first, so precision is 1/2 at every recall: AP 0.5 at five thresholds, 0 at five, mean 0.25;
    recall 1 at five, mean 0.5.
    AP = (51/101 + 0.25) / 2, AP50 = (51/101 + 0.5) / 2, AP75 = 51/101 / 2.
    medium: cat of image 42 is found (AP 1, recall 1), the dog as above: APm = (1 + 0.25) / 2, ARm = (1 + 0.5) / 2; the
    false alarm is medium too. large: the cat of image 5 is missed: 0.
    AR1 takes the best of a class in an image: of the dogs the false alarm, recall 0; AR1 = (0.5 + 0) / 2.
    AR10 = AR100 = (0.5 + 0.5) / 2.
    """
    evaluator = evaluator_of(scene())
    dogs = (1, 0.8, 0, 100, 40, 140), (1, 0.6, 100, 100, 128.4, 140)
    evaluator.add(42, detections((0, 0.5, 0, 0, 40, 40), *dogs))
    cat = 51 / 101
    expected = {"AP": (cat + 0.25) / 2, "AP50": (cat + 0.5) / 2, "AP75": cat / 2, "APm": 0.625, "APl": 0.0}
    expected |= {"AR1": 0.25, "AR10": 0.5, "AR100": 0.5, "ARm": 0.75, "ARl": 0.0, "AP-cat": cat, "AP-dog": 0.25}
    expected = {name: 100 * value for name, value in expected.items()}
    assert_figures(evaluator.evaluate()["bbox"], expected | {"APs": math.nan, "ARs": math.nan})


@pytest.mark.parametrize("added", [[], [5], [42, 5]], ids=["no image", "one image", "every image"])
def test_no_detections_give_0_under_all_keys(added):
    evaluator = evaluator_of(scene())
    for image_id in added:
        evaluator.add(image_id, detections())
    figures = evaluator.evaluate()["bbox"]
    assert list(figures) == MAIN_KEYS + CLASS_KEYS
    without_truth = {"AP-toothbrush", "APs", "ARs"}
    assert_figures(figures, {name: math.nan if name in without_truth else 0.0 for name in figures})


def test_ground_truth_without_annotations_gives_nan():
    evaluator = evaluator_of({**scene(), "annotations": []})
    evaluator.add(5, detections((0, 0.9, 10, 20, 110, 120)))
    assert all(math.isnan(value) for value in evaluator.evaluate()["bbox"].values())


def random_world(seed: int) -> tuple[dict, dict[int, Detections]]:
    """Crowds, scores with ties, empty images, images without detections, all areas, and a class without boxes."""
    random = np.random.default_rng(seed)
    images = [{"id": int(image_id)} for image_id in random.permutation(1000)[:40]]
    annotations, found = [], {}
    for image in images:
        count = int(random.integers(0, 9))
        sizes = np.exp(random.uniform(np.log(4), np.log(250), (count, 2)))
        boxes = np.concatenate([random.uniform(0, 300, (count, 2)), sizes], axis=1)
        classes = random.integers(0, 2, count)
        for box, label in zip(boxes, classes, strict=True):
            annotation = {"id": len(annotations), "image_id": image["id"], "category_id": CLASS_IDS[label]}
            area = float(random.uniform(0.4, 1) * box[2] * box[3])  # that of a mask
            crowd = int(random.random() < 0.1)
            annotations.append(annotation | {"bbox": box.tolist(), "area": area, "iscrowd": crowd})
        if random.random() < 0.2:
            continue
        near = np.repeat(boxes, 4, axis=0)
        near[:, :2] += random.normal(0, 0.1, (4 * count, 2)) * near[:, 2:]
        far = np.concatenate([random.uniform(0, 300, (12, 2)), random.uniform(1, 250, (12, 2))], axis=1)
        rows = np.concatenate([near, far])
        labels = np.concatenate([np.repeat(classes, 4), random.integers(0, 3, 12)])
        scores = random.random(len(rows)).round(1)
        rows[:, 2:] += rows[:, :2]
        found[image["id"]] = Detections(torch.tensor(rows).float(), torch.tensor(scores).float(), torch.tensor(labels))
    categories = [{"id": k, "name": name} for k, name in zip(CLASS_IDS, CLASS_NAMES, strict=True)]
    return {"images": images, "annotations": annotations, "categories": categories}, found


@pytest.mark.parametrize("seed", range(4))
def test_the_figures_are_those_of_pycocotools_summarize(seed):
    """The road that papers and detectron2 take: ``loadRes``, ``evaluate``, ``accumulate``, ``summarize``."""
    ground_truth, found = random_world(seed)
    evaluator = evaluator_of(ground_truth)
    for image_id, of_image in found.items():
        evaluator.add(image_id, of_image)
    for number, annotation in enumerate(ground_truth["annotations"], start=1):
        annotation["id"] = number
    with redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = ground_truth
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(evaluator.coco_results()), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    figures = evaluator.evaluate()["bbox"]
    assert [figures[name] for name in MAIN_KEYS] == pytest.approx((100 * evaluation.stats).tolist(), abs=1e-12)


def crowded(objects: int = 250, others: int = 3) -> tuple[dict, Detections]:
    """An image with so many cats in a grid, and a few dogs, and a detection of each, the scores from 0.9 down to 0.1."""
    corners = [(10 * (number % 20), 10 * (number // 20)) for number in range(objects + others)]
    labels = [0] * objects + [1] * others
    annotations = [
        {"id": number, "image_id": 42, "category_id": CLASS_IDS[label], "bbox": [x, y, 8, 9]}
        for number, (label, (x, y)) in enumerate(zip(labels, corners, strict=True))
    ]
    scores = np.linspace(0.9, 0.1, len(corners))
    found = [(label, score, x, y, x + 8, y + 9) for label, score, (x, y) in zip(labels, scores, corners, strict=True)]
    return {**scene(), "annotations": annotations}, detections(*found)


def test_all_detections_count_where_an_image_has_more_objects_of_a_class_than_coco_counts():
    """AR100 keeps COCO's limit: 100 of the 250 cats. The threshold is the lowest score, so that nothing right is hidden."""
    ground_truth, found = crowded()
    evaluator = evaluator_of(ground_truth)
    evaluator.add(42, found)
    figures = evaluator.evaluate()["bbox"]
    assert list(figures)[6:-6] == ["AR1", "AR10", "AR100", "ARall"]
    assert_figures(figures, {"AP": 100.0, "AP-cat": 100.0, "AP50": 100.0, "ARall": 100.0, "AR100": 100 * (100 / 250 + 1) / 2})
    thresholds = evaluator.thresholds()
    assert thresholds.classes[0] == pytest.approx(float(found.scores[249])) and thresholds.overall == float(found.scores[-1])
    assert int((found.scores >= thresholds.overall).sum()) == 253
    matches = evaluator.matches()
    curve = matches.curves(3)[0]
    assert curve.average_precision() == pytest.approx(1) and len(curve.scores) == 250
    assert (matches.found_at >= 0).all() and not matches.worst(0.0, 2)


@pytest.mark.parametrize("objects", [100, 101])
def test_with_100_detections_the_figures_are_coco_s_whatever_the_objects(objects):
    """Bit for bit; and with more detections too, where no image has more than 100 objects of a class."""
    ground_truth, found = crowded(objects)
    figures = []
    for kept, limit in ((100, None), (100, 100), (len(found.scores), None), (len(found.scores), 100)):
        evaluator = evaluator_of(ground_truth)
        evaluator._limits = [1, 10, limit] if limit else evaluator._limits
        evaluator.add(42, Detections(found.boxes_xyxy[-kept:], found.scores[-kept:], found.labels[-kept:]))
        figures.append(evaluator.evaluate()["bbox"])
        assert (figures[-1].pop("ARall", None) is None) == (objects == 100 or limit == 100)
    assert figures[0] == pytest.approx(figures[1], abs=0, rel=0, nan_ok=True)
    same = figures[2] == pytest.approx(figures[3], abs=0, rel=0, nan_ok=True)
    assert same == (objects == 100)


def test_crowds_are_no_objects_that_make_all_detections_count():
    ground_truth, _ = crowded(101)
    assert evaluator_of(ground_truth).max_detections is None
    ground_truth["annotations"][0]["iscrowd"] = 1
    assert evaluator_of(ground_truth).max_detections == 100


def test_results_are_in_coco_format_with_the_ids_of_the_file():
    evaluator = evaluator_of(scene())
    evaluator.add(np.int64(5), detections((2, 0.25, 1, 2, 11, 22)))
    evaluator.add(42, detections((0, 0.5, 0, 0, 40, 40)))
    assert evaluator.coco_results() == [
        {"image_id": 42, "category_id": 7, "bbox": [0.0, 0.0, 40.0, 40.0], "score": 0.5},
        {"image_id": 5, "category_id": 90, "bbox": [1.0, 2.0, 10.0, 20.0], "score": 0.25},
    ]
    json.dumps(evaluator.coco_results())


def test_detections_of_any_float_type_and_with_gradients_are_taken():
    evaluator = evaluator_of(scene())
    boxes = torch.tensor([[0, 0, 40, 40]], dtype=torch.bfloat16)
    scores = torch.tensor([0.5], dtype=torch.half, requires_grad=True)
    evaluator.add(42, Detections(boxes, scores, labels=torch.tensor([0], dtype=torch.int32)))
    (result,) = evaluator.coco_results()
    assert result == {"image_id": 42, "category_id": 7, "bbox": [0.0, 0.0, 40.0, 40.0], "score": 0.5}


def test_evaluating_changes_no_results_and_prints_nothing(capfd, recwarn):
    evaluator = evaluator_of(scene())
    evaluator.add(42, detections((0, 0.5, 0, 0, 40, 40)))
    results = copy.deepcopy(evaluator.coco_results())
    first = evaluator.evaluate()["bbox"]
    assert evaluator.coco_results() == results
    assert evaluator.evaluate()["bbox"] == pytest.approx(first, abs=0, nan_ok=True)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_merged_states_give_what_one_evaluator_gives():
    ground_truth, found = random_world(4)
    whole, *parts = (evaluator_of(ground_truth) for _ in range(3))
    for number, (image_id, of_image) in enumerate(found.items()):
        whole.add(image_id, of_image)
        parts[number % 2].add(image_id, of_image)
    parts[1].merge(pickle.loads(pickle.dumps(parts[0].state())))
    assert parts[1].coco_results() == whole.coco_results()
    assert parts[1].evaluate()["bbox"] == pytest.approx(whole.evaluate()["bbox"], abs=0, nan_ok=True)


def test_merging_an_image_twice_is_an_error_also_without_detections():
    one, other = evaluator_of(scene()), evaluator_of(scene())
    one.add(5, detections())
    other.add(5, detections())
    with pytest.raises(ValueError, match="image id 5 were already added"):
        one.merge(other.state())


def test_adding_an_image_twice_is_an_error():
    evaluator = evaluator_of(scene())
    evaluator.add(42, detections())
    with pytest.raises(ValueError, match="image id 42 were already added"):
        evaluator.add(42, detections())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, math.nan, 0, 0, 9, 9), r"image id 42: 1 of 2 scores are not finite"),
        ((0, math.inf, 0, 0, 9, 9), r"image id 42: 1 of 2 scores are not finite"),
        ((0, 0.5, 0, math.nan, 9, 9), r"image id 42: 1 of 2 boxes are not finite"),
        ((0, 0.5, 0, 0, math.inf, 9), r"image id 42: 1 of 2 boxes are not finite"),
        ((3, 0.5, 0, 0, 9, 9), r"image id 42: label 3 is not in \[0, 3\)"),
        ((-1, 0.5, 0, 0, 9, 9), r"image id 42: label -1 is not in \[0, 3\)"),
        ((0, 0.5, 9, 0, 0, 9), r"image id 42: box \[9.0, 0.0, 0.0, 9.0\] is not xyxy"),
    ],
)
def test_detections_that_cannot_be_scored_are_refused_by_image(row, message):
    evaluator = evaluator_of(scene())
    with pytest.raises(ValueError, match=message):
        evaluator.add(42, detections((0, 0.9, 0, 0, 40, 40), row))
    evaluator.add(42, detections())  # nothing of the refused ones was kept
    assert evaluator.coco_results() == []


def test_an_image_that_is_not_in_the_ground_truth_is_refused():
    with pytest.raises(ValueError, match="image id 6 is not among the 2 images of the test set"):
        evaluator_of(scene()).add(6, detections())


def refuse_constant(name: str):
    raise AssertionError(f"{name} is not JSON")


def test_files_are_strict_json_and_complete(tmp_path):
    evaluator = evaluator_of(scene())
    evaluator.add(42, detections((0, 0.5, 0, 0, 40, 40)))
    results = evaluator.evaluate()
    write_results(results, tmp_path / "inference" / "results.json")
    write_json(evaluator.coco_results(), tmp_path / "inference" / "detections.json")
    files = (tmp_path / "inference").iterdir()
    read = {path.name: json.loads(path.read_text(), parse_constant=refuse_constant) for path in files}
    assert set(read) == {"results.json", "detections.json"}  # and no temporary file
    assert read["detections.json"] == evaluator.coco_results()
    assert read["results.json"]["bbox"]["APs"] is None
    assert read["results.json"]["bbox"]["AP"] == results["bbox"]["AP"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "results.json"
    write_results({"bbox": {"AP": 1.0}}, path)
    with pytest.raises(ValueError, match="JSON"):
        write_results({"bbox": {"AP": math.inf}}, path)
    assert json.loads(path.read_text()) == {"bbox": {"AP": 1.0}}
    assert list(tmp_path.iterdir()) == [path]


def test_the_table_shows_every_figure_and_class():
    evaluator = evaluator_of(scene(), ["cat", "1e3", "toothbrush"])
    evaluator.add(42, detections((0, 0.5, 0, 0, 40, 40)))
    results = evaluator.evaluate()
    table = format_table(results)
    cells = [cell.strip() for line in table.splitlines() for cell in line.split("|")]
    assert set(MAIN_KEYS) | {"cat", "1e3", "toothbrush", "n/a", "50.495"} <= set(cells)
    assert max(map(len, table.splitlines())) <= 120


def test_the_table_fills_its_last_row():
    figures = {"AP": 1.0, "AR1": 1.0} | {f"AP-{k}": float(k) for k in range(4)}
    rows = format_table({"bbox": figures}).splitlines()[-2:]
    assert [row.count("|") for row in rows] == [7, 7]
