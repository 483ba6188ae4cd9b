# SPDX-License-Identifier: Apache-2.0
"""Tracks of a film: the same object has the same id, in the lines and in the order of its detections."""

import json
import sys

import pytest
import torch
from click.testing import CliRunner

from cpvt_det.cli import main
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import BadInputError
from cpvt_det.predict import ImageDetections
from cpvt_det.predict.detect_files import predict_film
from cpvt_det.predict.films import Tracks
from cpvt_det.predict.predictor import FoundFrame

CLASSES = Classes((1, 2), ("cat", "dog"))


def frame(number):
    """A cat that walks to the right, a dog that stands still, and a faint box that is elsewhere each time; the best comes first."""
    cat, dog, noise = [10.0 + 3 * number, 10, 40 + 3 * number, 40], [60.0, 60, 90, 95], [0, 100, 5.0 + 7 * number % 30, 120]
    scores = [0.9, 0.8, 0.05] if number % 2 else [0.8, 0.9, 0.05]
    boxes, labels = ([cat, dog, noise], [0, 1, 0]) if number % 2 else ([dog, cat, noise], [1, 0, 0])
    scores = sorted(scores, reverse=True)
    image = torch.zeros(3, 128, 128, dtype=torch.uint8)
    return ImageDetections(torch.tensor(boxes), torch.tensor(scores), torch.tensor(labels), CLASSES, image)


class Stream:
    """A stand-in for a predictor and the film that it reads."""

    classes, rate, expected = CLASSES, 10.0, 6

    def stream(self, reader, batch_size):
        return (FoundFrame(number, number / 10, frame(number)) for number in range(6))


def test_objects_keep_their_ids(tmp_path):
    pytest.importorskip("trackers", reason="tracks need trackers: pip install 'cpvt-det[track]'")
    pytest.importorskip("av", reason="films need av: pip install 'cpvt-det[video]'")
    tracks = Tracks(10.0, 0.5)
    ids = [tracks(frame(number)) for number in range(6)]
    cats = [one[0 if number % 2 else 1] for number, one in enumerate(ids)][2:]
    dogs = [one[1 if number % 2 else 0] for number, one in enumerate(ids)][2:]
    assert len(set(cats)) == len(set(dogs)) == 1 and None not in (*cats, *dogs) and cats[0] != dogs[0]
    assert all(one[2] is None for one in ids)
    nothing = frame(0).above(1)
    assert tracks(nothing) == []
    predict_film(Stream(), Stream(), tmp_path / "out", 0.5, 1, track=True)
    lines = [json.loads(line) for line in (tmp_path / "out/frames.jsonl").read_text().splitlines()]
    last = {row["name"]: row["track"] for row in lines[-1]["detections"]}
    assert set(last) == {"cat", "dog"} and None not in last.values() and last["cat"] != last["dog"]
    assert {row["name"]: row["track"] for row in lines[-2]["detections"]} == last


def test_tracks_are_of_films_and_need_their_package(monkeypatch, tmp_path):
    words = ["predict", "none.pth", "--input", "photo.jpg", "--output", str(tmp_path / "out"), "--track"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and "--track and --every are for videos, and photo.jpg is not one" in result.output
    monkeypatch.setitem(sys.modules, "trackers", None)
    with pytest.raises(BadInputError, match=r"--track needs the package trackers: pip install 'cpvt-det\[track\]'"):
        Tracks(10.0, 0.5)
