# SPDX-License-Identifier: Apache-2.0
"""The pairs of detections and objects: pycocotools' own, and those of every score threshold."""

import io
from contextlib import redirect_stdout

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from test_evaluation import CLASS_IDS, detections, evaluator_of, random_world, records_of, scene

from cpvt_det.evaluation.matches import IGNORED, NOTHING, GroundTruth, Matches


def columns_of(seed: int) -> tuple[dict, list[np.ndarray]]:
    """A random world, with 120 detections of a class in an image, and its detections: image ids, labels, boxes xywh, scores."""
    ground_truth, found = random_world(seed)
    evaluator = evaluator_of(ground_truth)
    for image_id, of_image in found.items():
        evaluator.add(image_id, of_image)
    images, labels, boxes, scores = evaluator._columns()
    many = np.arange(120.0)
    added = np.stack([3 * many, many, np.full(120, 50.0), np.full(120, 60.0)], axis=1)
    columns = [np.append(images, np.full(120, images[0])), np.append(labels, np.full(120, 1))]
    return ground_truth, [*columns, np.concatenate([boxes, added]), np.append(scores, np.full(120, 0.75))]


def truth_of(ground_truth: dict) -> GroundTruth:
    records = records_of(ground_truth)
    return GroundTruth(records.image_ids, *records.boxes())


@pytest.mark.parametrize("seed", range(6))
def test_pairs_of_one_class_are_those_of_pycocotools(seed):
    """Every detection that counts, with crowds, ties of scores and more than 100 detections of a class in an image."""
    ground_truth, columns = columns_of(seed)
    matches = Matches(truth_of(ground_truth), *columns)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    results = [{"image_id": i, "category_id": CLASS_IDS[k], "bbox": box, "score": score} for i, k, box, score in rows]
    for number, annotation in enumerate(ground_truth["annotations"], start=1):
        annotation["id"] = number
    with redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = ground_truth
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
    theirs = {}
    for one in filter(None, evaluation.evalImgs):
        if one["aRng"] == evaluation.params.areaRng[0]:
            for detection, matched, ignored in zip(one["dtIds"], one["dtMatches"][0], one["dtIgnore"][0], strict=True):
                theirs[detection] = IGNORED if ignored else int(matched) - 1 if matched else NOTHING
    order = np.lexsort((-columns[3], columns[0]))
    numbers = np.append(matches.objects["number"], (IGNORED, NOTHING))
    ours = {int(row) + 1: int(numbers[at]) for row, at in zip(order, matches.same_class, strict=True)}
    assert {row: at for row, at in ours.items() if row in theirs} == theirs
    assert {at for row, at in ours.items() if row not in theirs} == {IGNORED}
    assert len({*ours.values()}) > 50 and len(ours) > len(theirs)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_pairs_are_those_of_every_threshold(seed, threshold):
    """The counts above a threshold are those of a matching of what passes it."""
    ground_truth, columns = columns_of(seed)
    truth = truth_of(ground_truth)
    whole, part = Matches(truth, *columns), Matches(truth, *(column[columns[3] >= threshold] for column in columns))
    assert whole.confusion(3, threshold).tolist() == part.confusion(3, 0.0).tolist()
    assert whole.mistakes(threshold).tolist() == part.mistakes(0.0).tolist() and whole.mistakes(threshold).sum() > 100
    labels = np.append(whole.objects["label"], (-1, -1))
    assert (labels[whole.same_class][whole.same_class >= 0] == whole.labels[whole.same_class >= 0]).all()


def test_detections_that_are_added_later_are_matched_too():
    evaluator = evaluator_of(scene())
    assert len(evaluator.matches().scores) == 0 and evaluator.matches() is evaluator.matches()
    evaluator.add(42, detections((0, 0.5, 0, 0, 40, 40)))
    assert evaluator.matches().same_class.tolist() == [1]  # the images are by rising id: 5, 42
    assert evaluator.matches() is evaluator.matches()


def test_all_that_is_made_of_the_pairs_matches_once(monkeypatch):
    """Thresholds, curves, worst images and confusion at several thresholds: one matching by class, one whatever the class."""
    ground_truth, found = random_world(0)
    evaluator, calls, match = evaluator_of(ground_truth), [], Matches._match
    for image_id, of_image in found.items():
        evaluator.add(image_id, of_image)
    monkeypatch.setattr(Matches, "_match", lambda self, same_class: calls.append(same_class) or match(self, same_class))
    for threshold in (0.2, 0.5):
        assert evaluator.thresholds().overall > 0
        matches = evaluator.matches()
        assert len(matches.curves(3)) == 3 and matches.worst(threshold, 3) and matches.confusion(3, threshold).sum()
    assert sorted(calls) == [False, True]
