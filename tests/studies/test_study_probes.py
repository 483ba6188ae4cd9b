# SPDX-License-Identifier: Apache-2.0
"""What a study measures of a trained model beside its AP: on scenes, answers and tokens made by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpvt_det.common.structures import Detections, padding_mask_of
from cpvt_det.data.shapes.scene import Shape
from cpvt_det.position import build_position
from studies.engine import probes


def test_translation_moves_the_object_and_nothing_else():
    spec = probes.ShapesSpec(image_sides=(64, 64), object_sides=(16, 24), max_objects=1)
    seed, scene = next(probes._scenes_of_one(spec))
    moves = list(probes._moves(scene.shapes[0], 64))
    assert len(moves) == probes.PLACES**2
    boxes = torch.tensor([move.box.tolist() for move in moves])
    assert boxes[:, :2].min() == 0 and boxes[:, 2:].max() == 64
    assert torch.allclose(boxes[:, 2:] - boxes[:, :2], boxes[:1, 2:] - boxes[:1, :2])
    images = [probes._paint(probes.replace(scene, marks=[], shapes=[move]), seed) for move in moves]
    outside = torch.ones(64, 64, dtype=torch.bool)
    for move in (moves[0], moves[-1]):
        x1, y1, x2, y2 = move.box.tolist()
        outside[max(0, int(y1) - 1) : int(y2) + 2, max(0, int(x1) - 1) : int(x2) + 2] = False
    assert torch.equal(images[0][:, outside], images[-1][:, outside])
    assert not torch.equal(images[0], images[-1])


def answer(box, label, score, *more):
    boxes, labels, scores = (torch.tensor(part) for part in zip((box, label, score), *more, strict=True))
    return Detections(boxes, scores, labels)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (answer([0.0, 0.0, 10.0, 10.0], 2, 0.8), (0.8, 1.0)),
        (answer([0.0, 0.0, 10.0, 5.0], 2, 0.8), (0.8, 0.5)),
        (answer([0.0, 0.0, 10.0, 4.0], 2, 0.8), (0, 0)),  # too little of it
        (answer([0.0, 0.0, 10.0, 10.0], 1, 0.8), (0, 0)),  # another class
        (answer([0.0, 0.0, 10.0, 10.0], 2, 0.3, ([50.0, 50.0, 60.0, 60.0], 2, 0.4)), (0, 0)),  # not the best one
    ],
)
def test_an_answer_is_the_best_detection_alone(found, expected):
    shape = Shape(2, [], np.array([0.0, 0.0, 10.0, 10.0]))
    assert probes._answer(found, shape) == pytest.approx(expected)


def test_a_duplicate_repeats_a_better_detection_of_its_class():
    box, moved = [0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 8.0]  # IoU 0.8
    found = answer(
        box,
        1,
        0.6,
        (moved, 1, 0.5),  # a duplicate
        (moved, 2, 0.9),  # another class
        ([0.0, 0.0, 10.0, 6.0], 1, 0.8),  # IoU 0.6 with the first, 0.75 with the second
        (moved, 1, 0.3),  # not sure
    )
    assert probes._repeated(found) == (4, 1)
    assert probes._repeated(answer(box, 1, 0.2)) == (0, 0)


def test_place_is_read_off_tokens_that_hold_it():
    """Tokens that are linear in row and column tell them; noise tells nothing."""
    masks = [padding_mask_of([(h, w)], (8, 10))[0] for h, w in ((8, 10), (5, 10), (8, 6), (3, 4), (8, 9), (6, 7))]
    places = [probes._places(mask) for mask in masks]
    assert places[3].view(8, 10, 2)[2, 3].tolist() == pytest.approx([2.5 / 3, 3.5 / 4])
    assert places[3].view(8, 10, 2)[3:].isnan().all() and places[3].view(8, 10, 2)[:, 4:].isnan().all()
    targets = [place[place[:, 0].isfinite()] for place in places]
    generator = torch.Generator().manual_seed(0)
    mixed = [target @ torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).double() + 3 for target in targets]
    noise = [torch.randn(len(target), 8, generator=generator) for target in targets]
    assert probes._r2(mixed, targets) > 0.95
    assert probes._r2(noise, targets) < 0.1


def test_scale_of_a_zero_initialised_peg():
    position = build_position("peg", 8, zero_init=True)
    torch.nn.init.constant_(position.pegs["0"][0].scale, -0.25)
    assert probes.probe_scale(SimpleNamespace(detector=SimpleNamespace(position=position))) == {"mean": 0.25}
