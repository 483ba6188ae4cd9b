# SPDX-License-Identifier: Apache-2.0
"""The examples run: the one that does without config and runner, which is short, and the web server."""

import os
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest

from cpvt_det import Predictor

ROOT = Path(__file__).resolve().parents[2]
BY_HAND = ROOT / "examples" / "by_hand.py"


def test_by_hand_trains_and_evaluates(tmp_path):
    code = f"import runpy, sys; sys.argv[1:] = ['2']; runpy.run_path({str(BY_HAND)!r}, run_name='__main__'); raise SystemExit"
    ended = forked.run(before=code, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ended.returncode == 0, ended.stderr
    first, second, figures = ended.stdout.strip().splitlines()
    assert all("'loss_class'" in line and "'loss_giou'" in line for line in (first, second)) and first != second
    assert figures.startswith("{'AP': ")


def test_by_hand_is_short_and_without_config():
    text = BY_HAND.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert "cpvt_det.config" not in text and "cpvt_det.training" not in text and "cpvt_det.builders" not in text


def test_the_web_server_answers_several_at_once_as_the_predictor_does(tiny_run, monkeypatch):
    testing = pytest.importorskip("fastapi.testclient", exc_type=ImportError)
    run = tiny_run("detr")
    monkeypatch.setenv("WEIGHTS", str(run.weights))
    monkeypatch.setattr(Predictor, "threshold", 0.2)  # three steps teach little
    client, headers = testing.TestClient(runpy.run_path(str(ROOT / "examples" / "web.py"))["app"]), {"Content-Type": "image/png"}
    predictor, photos = Predictor.from_checkpoint(run.weights), [run.image(number) for number in (7, 12, 5)] * 4
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda photo: client.post("/detect", content=photo.read_bytes(), headers=headers), photos))
    for photo, answer in zip(photos, answers, strict=True):
        found = predictor(photo).above(predictor.threshold)
        assert [(row["name"], row["score"]) for row in answer.json()] == list(zip(found.names, found.scores.tolist(), strict=True))
        assert [row["box_xyxy"] for row in answer.json()] == found.boxes_xyxy.tolist()
    assert any(answer.json() for answer in answers)
    refused = client.post("/detect", content=b"no image", headers=headers)
    assert refused.status_code == 422 and refused.json()["detail"].startswith("no image: cannot identify image file")
