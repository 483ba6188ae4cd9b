# SPDX-License-Identifier: Apache-2.0
"""Score thresholds, worked out by hand."""

import math

import pytest
from test_evaluation import detections, evaluator_of, scene

from cpvt_det.common.structures import Thresholds

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
