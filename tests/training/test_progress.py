# SPDX-License-Identifier: Apache-2.0
"""What a run reports of its progress: early stops, thresholds, and the commands that come next."""

import json
import logging
import math
import re
import shlex
import shutil

import pytest
import torch
from click.testing import CliRunner
from test_runner import assert_same_run, losses_of, weights_of
from tiny import overrides

from cpvt_det import Predictor
from cpvt_det.checkpoint.checkpointer import RunCheckpointer, RunState
from cpvt_det.cli import main
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.structures import Detections
from cpvt_det.config import load_cfg
from cpvt_det.training.tasks import DetectionTask
from cpvt_det.training.train import log_next_steps, run

EVERY_SECOND = {"TEST__EVAL_PERIOD": 2, "SOLVER__MAX_ITER": 12, "SOLVER__CHECKPOINT_PERIOD": 1, "SOLVER__CHECKPOINT_KEEP": 20}


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations whose AP is the next of a list, whatever the model; which ones were taken, by iteration."""
    real = RunCheckpointer.keep_best

    def script(**figures):
        seen = []

        def keep_best(self, figure, iteration):
            seen.append(iteration)
            real(self, figures[f"at_{iteration}"], iteration)

        monkeypatch.setattr(RunCheckpointer, "keep_best", keep_best)
        return seen

    return script


# Early stopping and the best figure


@pytest.mark.curves
def test_a_run_ends_after_evaluations_without_a_better_one(train, scripted):
    seen = scripted(at_1=1.0, at_3=5.0, at_5=4.0, at_7=5.0, at_9=9.0)
    folder = train("run", SOLVER__EARLY_STOPPING=2, **EVERY_SECOND)
    assert seen == [1, 3, 5, 7]
    final, best = (weights_of(folder / f"model_{name}.pth") for name in ("final", "best"))
    assert (final["iteration"], best["iteration"]) == (7, 3)
    assert (final["cpvt_det"]["best"]["waited"], best["cpvt_det"]["best"]["waited"]) == (2, 0)
    assert (folder / "last_checkpoint").read_text() == "model_final.pth"
    assert max(losses_of(folder)) == 7
    log = (folder / "log.txt").read_text()
    assert "Early stop after iteration 7: 2 evaluations without a higher bbox/AP than the 5 of iteration 3" in log
    assert "--resume SOLVER.MAX_ITER 24 SOLVER.EARLY_STOPPING 0" in log
    assert (folder / "pictures/detections.png").is_file() and (folder / "pictures/curves.png").is_file()


FIGURES = {"at_1": 1.0, "at_3": 5.0, "at_5": 4.0, "at_7": 4.0, "at_9": 3.0, "at_11": 9.0}


def test_a_resumed_run_stops_where_the_run_never_interrupted_stops(train, scripted, tmp_path):
    """Killed after the checkpoint of step ``stop``; 3 evaluations are waited for, so both end after iteration 9."""
    more = {"SOLVER__EARLY_STOPPING": 3, "MODEL__DETR__DROPOUT": 0.3, **EVERY_SECOND}
    scripted(**FIGURES)
    whole, part = train("whole", **more), train("part", **more)
    kept = shutil.copytree(part, tmp_path / "kept")
    for stop in (2, 4, 5, 6, 7):
        shutil.rmtree(part)
        shutil.copytree(kept, part)
        for path in part.glob("model_*.pth"):
            if path.name == "model_final.pth" or (path.name != "model_best.pth" and int(path.stem[-7:]) >= stop):
                path.unlink()
        (part / "last_checkpoint").write_text(f"model_{stop - 1:07d}.pth")
        (part / "metrics.json").unlink()
        seen = scripted(**FIGURES)
        train("part", resume=True, **more)
        assert seen == [iteration for iteration in (1, 3, 5, 7, 9) if iteration >= stop - 1]
        assert_same_run(whole, part)
        nodes = [weights_of(folder / "model_final.pth")["cpvt_det"] for folder in (whole, part)]
        for key in ("best", "thresholds"):
            assert nodes[0][key] == nodes[1][key], (stop, key)
        assert nodes[0]["best"]["waited"] == 3


def test_an_early_stop_stays_one_until_the_patience_is_raised(train, scripted):
    more = {"SOLVER__EARLY_STOPPING": 2, **EVERY_SECOND}
    scripted(**FIGURES)
    folder = train("run", **more)
    seen = scripted(**FIGURES)
    train("run", resume=True, **more)
    assert seen == [7] and weights_of(folder / "model_final.pth")["iteration"] == 7
    train("run", resume=True, **{**more, "SOLVER__EARLY_STOPPING": 3})
    assert seen == [7, 7, 9] and weights_of(folder / "model_final.pth")["iteration"] == 9
    train("run", resume=True, **{**more, "SOLVER__EARLY_STOPPING": 0})
    assert seen == [7, 7, 9, 9, 11] and weights_of(folder / "model_final.pth")["iteration"] == 11
    log = (folder / "log.txt").read_text()
    assert "The config of the resumed run has changed" not in log


def test_a_run_whose_best_checkpoint_is_gone_waits_anew(train, scripted):
    """The patience was used up; what was waited for is nowhere."""
    more = {"SOLVER__EARLY_STOPPING": 2, **EVERY_SECOND}
    scripted(**FIGURES)
    folder = train("run", **more)
    for path in folder.glob("model_best*"):
        path.unlink()
    seen = scripted(**FIGURES)
    train("run", resume=True, **more)
    assert seen == [7, 9, 11]
    assert weights_of(folder / "model_best.pth")["iteration"] == 11


def test_a_figure_that_is_never_defined_ends_a_run_all_the_same(train, scripted):
    scripted(at_1=math.nan, at_3=math.nan, at_5=math.nan)
    log = (train("run", SOLVER__EARLY_STOPPING=2, **EVERY_SECOND) / "log.txt").read_text()
    assert "Early stop after iteration 3: 2 evaluations without bbox/AP (SOLVER.EARLY_STOPPING 2)" in log


def test_the_best_checkpoint_is_that_of_the_chosen_figure(train, monkeypatch):
    """AR rises where AP falls."""
    aps = iter([(3.0, 1.0), (2.0, 2.0), (1.0, 1.5)])

    def evaluate(self, real=None):
        ap, ar = next(aps)
        return {"bbox": {"AP": ap, "AP50": ap, "AR100": ar}}

    monkeypatch.setattr("cpvt_det.training.train.require_best_figure", lambda *_: None)
    monkeypatch.setattr(DetectionTask, "format_results", lambda *_: "")
    monkeypatch.setattr("cpvt_det.evaluation.coco.CocoEvaluator.evaluate", evaluate)
    folder = train("run", TEST__EVAL_PERIOD=2, TEST__BEST_FIGURE="AR100")
    best = weights_of(folder / "model_best.pth")
    assert best["iteration"] == 3
    assert (best["cpvt_det"]["best"]["figure"], best["cpvt_det"]["best"]["name"]) == (2.0, "AR100")


@pytest.mark.parametrize("name", ["AP50", "bbox/AR100", "AP-red"])
def test_a_figure_has_its_name_of_the_metrics_or_the_end_of_it(train, name):
    node = weights_of(train("run", TEST__BEST_FIGURE=name) / "model_best.pth")["cpvt_det"]
    assert node["best"]["name"] == name


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        (
            {"TEST__BEST_FIGURE": "AP51"},
            UnknownNameError,
            r"unknown figure .*TEST.BEST_FIGURE\) 'AP51'; known: .*bbox/AP50, bbox/AP75",
        ),
        ({"TEST__BEST_FIGURE": "APl"}, ConfigError, r"BEST_FIGURE APl: drawn has no objects that it measures"),
        ({"TEST__BEST_FIGURE": "AP", "DATASETS__TEST": ()}, ConfigError, r"BEST_FIGURE is AP, but nothing is evaluated"),
        ({"SOLVER__EARLY_STOPPING": 2, "DATASETS__TEST": ()}, ConfigError, r"EARLY_STOPPING is 2, but nothing is evaluated"),
        ({"SOLVER__EARLY_STOPPING": 2}, ConfigError, r"evaluated at its end only; set TEST.EVAL_EPOCHS or EVAL_PERIOD"),
        ({"SOLVER__EARLY_STOPPING": 2, "TEST__EVAL_EPOCHS": 1.0}, ConfigError, r"at its end only"),
        ({"SOLVER__EARLY_STOPPING": -1}, ConfigError, r"EARLY_STOPPING must be at least 0 \(0 for no early stopping\), got -1"),
        ({"TEST__PICTURE_THRESHOLD": 1.5}, ConfigError, r"PICTURE_THRESHOLD must be a score from 0 to 1, or None .*, got 1.5"),
        ({"TEST__PICTURE_THRESHOLD": "high"}, ConfigError, r"PICTURE_THRESHOLD must be a score from 0 to 1, or None .*'high'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_the_first_step(train, tmp_path, more, error, match):
    with pytest.raises(error, match=match):
        train("run", **more)
    assert not list((tmp_path / "run").glob("model_*")) and not (tmp_path / "run/metrics.json").exists()


# Thresholds and what comes next


@pytest.fixture
def right(monkeypatch):
    """Models that find everything: each image's own objects, with scores of 0.25."""

    def infer(self, detector, samples):
        found = []
        for sample in samples:
            record = self.records[sample["image_id"]]
            boxes, labels = torch.from_numpy(record.boxes_xyxy), torch.from_numpy(record.labels)
            found.append(Detections(boxes, torch.full((len(labels),), 0.25), labels))
        return found

    real = DetectionTask.build_test_loader

    def build_test_loader(self, dataset):
        self.records = {record.image_id: record for record in dataset.records}
        return real(self, dataset)

    monkeypatch.setattr(DetectionTask, "infer", infer)
    monkeypatch.setattr(DetectionTask, "build_test_loader", build_test_loader)


def test_every_evaluation_keeps_its_thresholds_in_the_checkpoints(train, right):
    folder = train("run", TEST__EVAL_PERIOD=4, SOLVER__CHECKPOINT_PERIOD=1, SOLVER__CHECKPOINT_KEEP=9)
    kept = {"overall": 0.25, "classes": [0.25, 0.25, 0.25]}
    found = {path.stem: weights_of(path)["cpvt_det"]["thresholds"] for path in folder.glob("model_*.pth")}
    assert found["model_best"] == found["model_final"] == found["model_0000004"] == kept
    assert found["model_0000002"] is found["model_0000003"] is None  # older than the first evaluation
    predictor = Predictor.from_checkpoint(folder / "model_final.pth", device="cpu")
    assert predictor.threshold == 0.25 and predictor.thresholds.state_dict() == kept
    log = (folder / "log.txt").read_text()
    assert "Score threshold of the best F1: 0.250 (red 0.250, green 0.250, blue 0.250)" in log
    assert "Pictures and report: scores from 0.25 (the best F1; TEST.PICTURE_THRESHOLD sets another)" in log


def report_of(folder):
    return json.loads((folder / "report/report.json").read_text())


def test_a_report_counts_from_the_kept_threshold_unless_told_otherwise(train, right):
    weights = str(train("run") / "model_final.pth")
    more = {"eval_only": True, "MODEL__WEIGHTS": weights, "TEST__REPORT": True}
    kept = report_of(train("kept", **more))
    assert kept["score_threshold"] == 0.25
    assert sum(map(sum, kept["confusion"]["rows_are_the_truth"])) == 5 and not kept["worst"]
    folder = train("told", TEST__PICTURE_THRESHOLD=0.5, **more)
    assert report_of(folder)["score_threshold"] == 0.5 and report_of(folder)["best_score"] == 0.25
    assert (
        "No detection has a score of 0.5 (TEST.PICTURE_THRESHOLD) or more on drawn; the best score is 0.25"
        in (folder / "log.txt").read_text()
    )


def test_the_threshold_of_a_run_is_not_left_to_the_next(right, drawn_coco, tmp_path):
    cfg = load_cfg("", overrides(drawn_coco.files, tmp_path / "run"))
    run(cfg)
    assert "scores from 0.25 (the best F1;" in (tmp_path / "run/log.txt").read_text() and cfg.TEST.PICTURE_THRESHOLD is None


def test_weights_of_before_count_from_half_and_that_is_told(train, right):
    path = train("run") / "model_final.pth"
    checkpoint = weights_of(path)
    del checkpoint["cpvt_det"]["thresholds"]
    torch.save(checkpoint, path)
    path.with_name("model_final.pth.sha256").unlink()
    folder = train("eval", eval_only=True, MODEL__WEIGHTS=str(path), TEST__REPORT=True)
    assert report_of(folder)["score_threshold"] == 0.5
    assert "scores from 0.5 (no threshold is known; TEST.PICTURE_THRESHOLD sets another)" in (folder / "log.txt").read_text()


def test_a_run_ends_with_its_best_checkpoint_and_commands_that_run(train, scripted, drawn_coco, tmp_path, monkeypatch):
    scripted(at_1=1.0, at_3=5.0, at_5=4.0)
    folder = train("a run", TEST__EVAL_PERIOD=2)
    log = (folder / "log.txt").read_text()
    assert f"Best checkpoint, of iteration 3 (bbox/AP 5): {folder}/model_best.pth. Next: " in log
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for line in log.splitlines() if line.startswith("  cpvt-det ")]
    assert [words[1] for words in commands] == ["predict", "eval", "train"]
    for words in commands:
        words = [str(drawn_coco.files.image_root) if word == "IMAGES" else word for word in words[1:]]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
    assert (folder / "eval/report/report.md").is_file() and (tmp_path / "found/detections.json").is_file()
    assert weights_of(folder / "model_final.pth")["iteration"] == 11


def test_a_run_without_a_test_set_names_its_final_checkpoint(train):
    folder = train("run", DATASETS__TEST=())
    log = (folder / "log.txt").read_text()
    assert re.search(rf"Final checkpoint \(nothing was evaluated\): {folder}/model_final.pth. Next: ", log)


def test_longer_training_has_as_many_processes(monkeypatch, caplog, tmp_path):
    """The batch is theirs together."""
    state = RunState(Classes((1,), ("cell",)), "", 0, "a", {})
    for processes, words in ((1, "train --config-file"), (4, "train --num-gpus 4 --config-file")):
        monkeypatch.setattr("cpvt_det.common.distributed.world_size", lambda number=processes: number)
        caplog.clear()
        with caplog.at_level(logging.INFO, "cpvt_det"):
            log_next_steps(load_cfg(""), state, tmp_path)
        assert f"cpvt-det {words} {tmp_path}/config.yaml --resume " in caplog.text
