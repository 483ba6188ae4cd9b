# SPDX-License-Identifier: Apache-2.0
"""Score thresholds and the constant box, worked out by hand."""

import math

import numpy as np
import pytest
import torch
from test_evaluation import detections, evaluator_of, scene

from cpvt_det.data.records import BOX, IMAGE, Records, Table
from cpvt_det.evaluation.thresholds import Thresholds
from cpvt_det.training.tasks.detection import constant_detections

CAT, DOG = (0, 0, 40, 40), (100, 100, 140, 140)  # of image 42


def test_thresholds_are_those_of_the_highest_f1():
    """Cats: right at 0.75, wrong at 0.5, right at 0.25: F1 is 2/3, 2/4, 4/5. The dog's is 1 at 0.625. Together 0.25 is best:
    four detections on three objects, three of them right: F1 6/7; at 0.625 it is 4/5, at 0.75 2/4.
    """
    evaluator = evaluator_of(scene())
    evaluator.add(42, detections((0, 0.75, *CAT), (1, 0.625, *DOG), (0, 0.5, *DOG)))
    evaluator.add(5, detections((0, 0.25, 10, 20, 110, 120)))
    assert evaluator.thresholds() == Thresholds(0.25, (0.25, 0.625, None))


def test_without_a_right_detection_there_are_no_thresholds():
    evaluator = evaluator_of(scene())
    assert evaluator.thresholds() == Thresholds(None, (None, None, None))
    evaluator.add(42, detections((1, 0.9, *CAT)))
    assert evaluator.thresholds() == Thresholds(None, (None, None, None))
    assert evaluator.thresholds().describe(("cat", "dog", "toothbrush")) == "none, because no detection is correct"


def test_thresholds_become_plain_values_and_back():
    thresholds = Thresholds(0.25, (0.5, None))
    assert thresholds.state_dict() == {"overall": 0.25, "classes": [0.5, None]}
    assert Thresholds.from_state_dict(thresholds.state_dict(), 2) == thresholds
    assert thresholds.describe(("cat", "dog")) == "0.250 (cat 0.500, dog none)"
    assert thresholds.describe(("cat", "dog"), most=1) == "0.250 (cat 0.500, ...)"


@pytest.mark.parametrize(
    "state",
    [
        0.5,
        {"overall": 0.5},
        {"overall": 0.5, "classes": [0.5]},
        {"overall": 1.5, "classes": [0.5, 0.5]},
        {"overall": 0.5, "classes": [math.nan, None]},
        {"overall": "0.5", "classes": [0.5, 0.5]},
    ],
)
def test_other_values_are_no_thresholds(state):
    with pytest.raises(ValueError, match=r'thresholds must be {"overall": score, "classes": \[2 scores\]}, scores from 0 to 1'):
        Thresholds.from_state_dict(state, 2)


def records_of(*sizes, boxes):
    """Images of (height, width), and boxes of (index of the image, label, x1, y1, x2, y2), image by image."""
    images, table = np.zeros(len(sizes), IMAGE), np.array(boxes)
    images["height"], images["width"] = zip(*sizes, strict=True)
    images["count"] = images["to_learn"] = np.bincount(table[:, 0], minlength=len(sizes))
    images["first"] = np.searchsorted(table[:, 0], np.arange(len(sizes)))
    objects = np.zeros(len(table), BOX)
    objects["label"], objects["xywh"] = table[:, 1], np.hstack((table[:, 2:4], table[:, 4:] - table[:, 2:4]))
    return Records([(Table(images, np.zeros(0, np.uint8), objects), "")])


def test_the_constant_box_is_the_mean_of_each_class_in_shares_of_the_image():
    """Class 2 is in both images, once over the left half and once, twice as large in pixels, over the right half: the mean of
    [0, 0, 1/2, 1] and [1/2, 0, 1, 1]. Class 0 is in one of three. Class 1 has no box.
    """
    boxes = [(0, 2, 0, 0, 100, 100), (0, 0, 20, 10, 40, 30), (1, 2, 200, 0, 400, 200)]
    records = records_of((100, 200), (200, 400), (50, 50), boxes=boxes)
    found = constant_detections(records)
    assert found.labels.tolist() == [2, 0]
    torch.testing.assert_close(found.scores, torch.tensor([2 / 3, 1 / 3]))
    torch.testing.assert_close(found.boxes_xyxy, torch.tensor([[0.25, 0, 0.75, 1], [0.1, 0.1, 0.2, 0.3]]))
    assert constant_detections(records, most=1).labels.tolist() == [2]
    assert constant_detections(records[2:]).boxes_xyxy.shape == (0, 4)


def test_no_class_has_more_than_its_share_where_an_image_has_many_boxes():
    boxes = [(0, 0, 0, 0, 5, 5), (0, 0, 5, 5, 10, 10), (0, 0, 0, 0, 10, 10)]
    found = constant_detections(records_of((10, 10), (10, 10), boxes=boxes))
    assert found.scores.tolist() == [0.5]
    torch.testing.assert_close(found.boxes_xyxy, torch.tensor([[1 / 6, 1 / 6, 5 / 6, 5 / 6]]))
