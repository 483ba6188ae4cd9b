# SPDX-License-Identifier: Apache-2.0
"""The report of an evaluation: every figure worked out by hand, or compared with pycocotools."""

import csv
import io
import json
import math
from collections.abc import Sequence
from contextlib import redirect_stdout

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from test_evaluation import CLASS_IDS, evaluator_of, random_world, records_of
from tiny import overrides

from cpvt_det.cli import main
from cpvt_det.data.records import Records
from cpvt_det.evaluation.matches import GroundTruth, Matches
from cpvt_det.evaluation.thresholds import Curve, pooled_curve
from cpvt_det.visualize.report import confusion_figure, precision_recall_figure

IDS = [7, 3]
NAMES = ["cat", "dog"]


def truth(*rows: tuple) -> dict:
    """Rows of (image id, category id, bbox) and perhaps iscrowd; there are the images 1, 2 and 5."""
    keys = ("image_id", "category_id", "bbox", "iscrowd")
    annotations = [dict(zip(keys, (*row, 0)[:4], strict=True)) for row in rows]
    return {"images": [{"id": image_id} for image_id in (5, 1, 2)], "annotations": annotations}


def found(*rows: tuple) -> list[dict]:
    """Rows of (image id, category id, bbox, score)."""
    return [dict(zip(("image_id", "category_id", "bbox", "score"), row, strict=True)) for row in rows]


def matches_of(ground_truth: dict | Records, results: list[dict], class_ids: Sequence[int]) -> Matches:
    """Detections in COCO's results format, in any order of images, with their objects."""
    keys = ("image_id", "category_id", "bbox", "score")
    images, categories, boxes, scores = (np.array([result[key] for result in results]) for key in keys)
    labels = np.array([class_ids.index(category) for category in categories])
    records = ground_truth if isinstance(ground_truth, Records) else records_of(ground_truth, class_ids)
    truth = GroundTruth(records.image_ids, *records.boxes())
    return Matches(truth, images, labels, boxes.astype(float), scores)


LEFT, RIGHT, BELOW = [0, 0, 40, 40], [100, 0, 40, 40], [0, 100, 40, 40]


def curve(*rows: tuple, num_objects: int) -> Curve:
    """Rows of (score, right), by falling score."""
    return Curve(num_objects, np.array([score for score, _ in rows]), np.array([bool(right) for _, right in rows]))


def test_a_curve_worked_out_by_hand():
    """Four objects; of five detections the first, third and fourth are right, the second and third share a score.

    Precision is 1, 1/2, 2/3, 3/4, 3/5 and recall 1/4, 1/4, 2/4, 3/4, 3/4. The best precision from each recall on is 1 up to 1/4,
    3/4 up to 3/4 and 0 above: of the 101 recalls 26 are up to 0.25, 50 more up to 0.75, so AP = (26 + 50 * 3/4) / 101.
    F1 = 2 right / (detections + objects) is 2/5, then 4/7 (both of score 0.8), 6/8, 6/9: best at 0.6, precision and recall 3/4.
    """
    one = curve((0.9, 1), (0.8, 0), (0.8, 1), (0.6, 1), (0.5, 0), num_objects=4)
    assert one.precision.tolist() == pytest.approx([1, 1 / 2, 2 / 3, 3 / 4, 3 / 5])
    assert one.recall.tolist() == pytest.approx([1 / 4, 1 / 4, 2 / 4, 3 / 4, 3 / 4])
    assert one.average_precision() == pytest.approx((26 + 50 * 0.75) / 101)
    best = one.best()
    assert (best.threshold, best.precision, best.recall, best.f1) == pytest.approx((0.6, 0.75, 0.75, 0.75))


def test_equal_scores_pass_a_threshold_together():
    """Right, wrong, wrong at one score: F1 is 2/4 with all three, and no threshold has the first alone, F1 1."""
    best = curve((0.5, 1), (0.5, 0), (0.5, 0), num_objects=1).best()
    assert (best.threshold, best.precision, best.recall, best.f1) == pytest.approx((0.5, 1 / 3, 1, 0.5))


def test_of_equal_f1_the_higher_threshold_is_taken():
    """F1 is 2/3 with one right of two objects found, and 4/6 with both and two wrong ones."""
    assert curve((0.9, 1), (0.8, 0), (0.7, 0), (0.6, 1), num_objects=2).best().threshold == 0.9


def test_a_threshold_lets_no_suppressed_copy_through():
    """NMS gives copies a score of 0, and evaluation keeps them."""
    assert curve((0.9, 0), (0.5, 1), (0.0, 1), (0.0, 1), num_objects=3).best().threshold == 0.5
    assert curve((0.9, 0), (0.0, 1), num_objects=1).best() is None


@pytest.mark.parametrize("rows", [[], [(0.5, 0)]])
def test_where_nothing_is_right_there_is_no_threshold(rows):
    one = curve(*rows, num_objects=3)
    assert one.best() is None and one.average_precision() == 0
    none = curve(*rows, num_objects=0)
    assert none.best() is None and math.isnan(none.average_precision())


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_ap50_of_every_class_is_that_of_pycocotools(seed):
    """On random boxes with crowds, ties of scores, and more than 100 detections of a class in an image."""
    ground_truth, detected = random_world(seed)
    evaluator = evaluator_of(ground_truth)
    for image_id, of_image in detected.items():
        evaluator.add(image_id, of_image)
    results = evaluator.coco_results()
    crowded = results[0]["image_id"]
    results += found(*((crowded, CLASS_IDS[1], [3 * n, n, 50, 60], 0.2) for n in range(120)))
    for number, annotation in enumerate(ground_truth["annotations"], start=1):
        annotation["id"] = number
    with redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = ground_truth
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    curves = matches_of(ground_truth, results, CLASS_IDS).curves(3)
    for class_id, ours in zip(CLASS_IDS, curves, strict=True):
        precision = evaluation.eval["precision"][0, :, sorted(CLASS_IDS).index(class_id), 0, -1]
        recall = evaluation.eval["recall"][0, sorted(CLASS_IDS).index(class_id), 0, -1]
        if (precision < 0).any():
            assert math.isnan(ours.average_precision())
        else:
            assert ours.average_precision() == pytest.approx(precision.mean(), abs=1e-12)
            assert ours.recall[-1] == pytest.approx(recall, abs=1e-12)
            assert 0.01 < precision.mean() < 0.99


def test_classes_pool_their_detections():
    both = pooled_curve([curve((0.9, 1), (0.3, 0), num_objects=2), curve((0.5, 1), num_objects=1)])
    assert (both.num_objects, both.scores.tolist(), both.right.tolist()) == (3, [0.9, 0.5, 0.3], [True, True, False])


def test_a_confusion_matrix_worked_out_by_hand():
    """Image 1: a cat seen as a cat, a dog seen as a cat, a second cat on the first, a dog that is nowhere. Image 2: a cat missed
    (the detection on it scores too low), a cat in a crowd of cats, which does not count. Image 5: a dog, IoU 30/50, its better
    detection says cat and takes it, the other one is left on nothing.
    """
    there = truth((1, 7, LEFT), (1, 3, RIGHT), (2, 7, LEFT), (2, 7, [100, 100, 80, 80], 1), (5, 3, LEFT))
    detected = found(
        (1, 7, LEFT, 0.9), (1, 7, RIGHT, 0.8), (1, 7, LEFT, 0.7), (1, 3, BELOW, 0.6),
        (2, 7, LEFT, 0.49), (2, 7, [120, 120, 20, 20], 0.9),
        (5, 7, [10, 0, 40, 40], 0.8), (5, 3, LEFT, 0.7),
    )  # fmt: skip
    matches = matches_of(there, detected, IDS)
    assert matches.confusion(2, threshold=0.5).tolist() == [[1, 0, 1], [2, 0, 0], [1, 2, 0]]
    assert matches.confusion(2, threshold=0.4)[0].tolist() == [2, 0, 0]


def test_the_worst_images_miss_and_invent_most():
    """Of image 1 a dog is missed and there is a wrong cat; of image 2 three objects are missed; image 5 is right."""
    there = truth(
        (1, 7, LEFT), (1, 3, RIGHT), (2, 7, LEFT), (2, 7, RIGHT), (2, 3, BELOW), (2, 3, [0, 0, 200, 200], 1), (5, 3, LEFT)
    )
    detected = found((1, 7, LEFT, 0.9), (1, 7, RIGHT, 0.8), (2, 3, LEFT, 0.9), (5, 3, LEFT, 0.7), (5, 3, RIGHT, 0.3))
    matches = matches_of(there, detected, IDS)
    assert matches.image_ids.tolist() == [1, 2, 5] and matches.record_of.tolist() == [1, 2, 0]
    assert matches.mistakes(0.5).tolist() == [[1, 1], [3, 0], [0, 0]] and matches.mistakes(0.2)[2].tolist() == [0, 1]
    assert (matches.worst(0.5, 8), matches.worst(0.5, 1), matches.worst(0.2, 8)) == ([1, 0], [1], [1, 0, 2])


def test_figures_show_the_curves_and_the_counts():
    curves = [curve((0.9, 1), (0.8, 0), num_objects=2), curve(num_objects=0), curve((0.5, 0), num_objects=1)]
    figure = precision_recall_figure(curves, ["cat", "a $10 dog", "ant"])
    cat, dog, ant = (axes for axes in figure.axes if axes.axison)
    assert cat.get_title() == "cat, AP50 50.5"
    assert cat.lines[0].get_xydata().tolist() == [[0.5, 1], [0.5, 0.5]]
    assert cat.lines[1].get_xydata().tolist() == [[0.5, 1]]
    assert [text.get_text() for text in dog.texts] == ["no objects"] and not dog.lines
    assert len(ant.lines) == 1
    matrix = np.array([[3, 1, 0], [0, 0, 0], [2, 0, 0]])
    axes = confusion_figure(matrix, ["cat", "dog"]).axes[0]
    assert [text.get_text() for text in axes.texts] == [str(count) for count in matrix.ravel()]
    assert axes.images[0].get_array().tolist() == [[0.75, 0.25, 0], [0, 0, 0], [1, 0, 0]]
    assert not confusion_figure(np.eye(31), [str(n) for n in range(30)]).axes[0].texts


@pytest.fixture(scope="module")
def run(tiny_run):
    return tiny_run("detr")


def evaluate_with_report(run, output, runner, *words):
    """``cpvt-det eval --report`` at a score of 0, which everything passes."""
    words = [*words, *overrides(run.drawn.files, output, TEST__PICTURE_THRESHOLD=0.0)]
    config = ["--config-file", run.folder / "config.yaml", "--runner", runner, "--num-gpus", 0]
    return CliRunner().invoke(main, [str(word) for word in ("eval", run.weights, *config, "--report", *words)])


@pytest.mark.parametrize("runner", ["builtin", pytest.param("detectron2", marks=pytest.mark.detectron2)])
def test_eval_writes_its_report(run, tmp_path, runner):
    result = evaluate_with_report(run, tmp_path / "eval", runner)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "eval/report"
    report = json.loads((folder / "report.json").read_text())
    assert (report["dataset"], report["images"], report["score_threshold"]) == ("drawn", 5, 0.0)
    assert [(one["id"], one["name"], one["objects"]) for one in report["classes"]] == [
        (3, "red", 2),
        (17, "green", 2),
        (90, "blue", 1),
    ]
    counts = np.array(report["confusion"]["rows_are_the_truth"])
    assert counts.shape == (4, 4) and counts[:3].sum() == 5
    with (folder / "confusion.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0][1:] == ["red", "green", "blue", "background"]
    assert [[int(count) for count in row[1:]] for row in rows[1:]] == counts.tolist()
    assert len(report["worst"]) == 2  # TEST.PICTURES
    page = (folder / "report.md").read_text()
    shown = [
        "precision_recall.png",
        "confusion.png",
        *(f"worst/{place:02d}_image_{one['image_id']}.png" for place, one in enumerate(report["worst"], 1)),
    ]
    for name in shown:
        assert f"]({name})" in page
        with Image.open(folder / name) as picture:
            assert picture.format == "PNG"
    assert '"dataset":"drawn"' in (folder / "report.html").read_text()
    worst = report["worst"][0]
    assert f"(id {worst['image_id']}): {worst['missed']} missed, {worst['false']} false" in page
    assert "at least 0 (`TEST.PICTURE_THRESHOLD`)" in page


def test_a_run_ends_with_its_report_by_key(run, tmp_path):
    words = overrides(run.drawn.files, tmp_path / "run", TEST__REPORT=True, SOLVER__MAX_ITER=1)
    (tmp_path / "empty.yaml").write_text("VERSION: 2")
    config = ["--config-file", str(tmp_path / "empty.yaml"), "--runner", "builtin"]
    result = CliRunner().invoke(main, ["train", *config, *words])
    assert result.exit_code == 0, result.output
    assert (
        (tmp_path / "run/report/report.md").read_text().startswith("# Evaluation on drawn\n\n5 images, 5 objects of 3 classes.\n")
    )


def test_the_report_tells_the_ap50_of_the_evaluation(run, tmp_path):
    """AP50 of the table is the mean of the classes in the report; NaN is left out of both."""
    assert evaluate_with_report(run, tmp_path / "eval", "builtin").exit_code == 0
    figures = json.loads((tmp_path / "eval/results.json").read_text())["bbox"]
    classes = json.loads((tmp_path / "eval/report/report.json").read_text())["classes"]
    assert np.mean([one["AP50"] for one in classes]) == pytest.approx(figures["AP50"], abs=1e-9)


def test_several_test_sets_have_a_report_each_and_a_plain_evaluation_none(run, tmp_path):
    files = run.drawn.files
    register = [[name, str(files.annotations), str(files.image_root)] for name in ("one", "two")]
    words = ("DATASETS.TEST", "('one', 'two')", "DATASETS.REGISTER", register)
    more = dict(zip((word.replace(".", "__") for word in words[::2]), words[1::2], strict=True))
    config = ["--config-file", run.folder / "config.yaml", "--runner", "builtin", "--num-gpus", 0]
    for name, flag in (("with", ["--report"]), ("without", [])):
        pairs = overrides(files, tmp_path / name, **more)
        result = CliRunner().invoke(main, [str(word) for word in ("eval", run.weights, *config, *flag, *pairs)])
        assert result.exit_code == 0, result.output
    assert sorted(path.parent.name for path in (tmp_path / "with/report").glob("*/report.md")) == ["one", "two"]
    assert not (tmp_path / "without/report").exists()
