# SPDX-License-Identifier: Apache-2.0
"""What a run reads, feeds, compares and measures is asked of its task."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from tiny import overrides

from cpvt_det.cli import main
from cpvt_det.common.errors import UnknownNameError
from cpvt_det.config import load_cfg
from cpvt_det.evaluation.coco import CocoEvaluator
from cpvt_det.training.tasks import TASK_REGISTRY, DetectionTask, build_task, figure_of, flatten
from cpvt_det.training.train import run
from cpvt_det.visualize.curves import main_figures, read_metrics
from studies.engine.plan import load_plan
from studies.engine.report import write_report
from studies.engine.run import execute

PACKAGE = Path(__file__).resolve().parents[2] / "cpvt_det"


class CountEvaluator(CocoEvaluator):
    def evaluate(self):
        """10 less the number of evaluations so far: the first is the best."""
        CountTask.evaluations += 1
        return {"count": {"a_score": 10.0 - CountTask.evaluations, "b_other": 1.0}}


class CountTask(DetectionTask):
    main_figure = "count/a_score"
    figures = ("a_score", "b_other")
    evaluations = 0

    def build_evaluator(self, dataset):
        made = super().build_evaluator(dataset)
        made.__class__ = CountEvaluator
        return made

    def format_results(self, results):
        return str(results["count"])


def test_several_test_sets_have_names_of_their_own():
    results = {"a": {"bbox": {"AP": 1.0}}, "b": {"bbox": {"AP": 2.0}}}
    assert flatten(results) == {"a/bbox/AP": 1.0, "b/bbox/AP": 2.0}
    assert figure_of("bbox/AP", results) == figure_of("bbox/AP", results["a"]) == 1.0
    with pytest.raises(UnknownNameError, match=r"unknown figure of the evaluation .*'bbox/AP'; known: count/n"):
        figure_of("bbox/AP", {"count": {"n": 1.0}})


def test_a_task_of_ones_own_chooses_the_best_checkpoint_and_what_is_drawn(drawn_coco, tmp_path):
    TASK_REGISTRY.register_as("count")(CountTask)
    try:
        results = run(load_cfg("", overrides(drawn_coco.files, tmp_path, TASK="count", TEST__EVAL_PERIOD=2)))
    finally:
        del TASK_REGISTRY._obj_map["count"]
    assert results["count"]["a_score"] == 7.0 and json.loads((tmp_path / "results.json").read_text()) == results
    best = torch.load(tmp_path / "model_best.pth", weights_only=True)
    assert best["iteration"] == 1 and best["cpvt_det"]["best"]["figure"] == 9.0
    records = read_metrics(tmp_path / "metrics.json")
    assert main_figures(records) == [["count/a_score", "count/b_other"]]
    assert [record["count/a_score"] for record in records.values() if "count/a_score" in record] == [9.0, 8.0, 7.0]


def test_a_study_records_and_compares_the_figures_of_a_task_of_ones_own(drawn_coco, tmp_path):
    TASK_REGISTRY.register_as("count")(CountTask)
    CountTask.evaluations = 0
    try:
        cfg = load_cfg("", overrides(drawn_coco.files, tmp_path, TASK="count", TEST__EVAL_PERIOD=2, MODEL__POSITION__NAME="peg"))
        (tmp_path / "tiny.yaml").write_text(cfg.dump(), encoding="utf-8")
        group = {"config": "tiny.yaml", "seeds": 2, "baselines": ["peg"], "variants": {"peg": {}, "slow": {"SOLVER.BASE_LR": 1e-5}}}
        content = {"output": str(tmp_path / "output"), "groups": {"main": group}}
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        plan = load_plan(tmp_path / "plan.yaml")
        records = [execute(plan, one.name) for one in plan.runs()]
        report, *_ = write_report(tmp_path / "plan.yaml")
    finally:
        del TASK_REGISTRY._obj_map["count"]
    assert [record["a_score"] for record in records] == [10.0 - 3 * n for n in range(1, 5)]
    assert all(record["b_other"] == 1.0 and "AP" not in record and record["commit"] for record in records)
    text = report.read_text(encoding="utf-8")
    assert "a_score less peg's" in text and "### a_score by iteration" in text


def test_options_of_a_task_are_keys_of_their_node():
    TASK_REGISTRY.register_as("count")(lambda cfg, top=1: (cfg.TASK, top))
    try:
        assert build_task(load_cfg("", ["TASK", "count", "TASK_OPTIONS.TOP", "5"])) == ("count", 5)
        with pytest.raises(UnknownNameError, match=r"unknown option of task 'count' 'tip'.*; known: top$"):
            build_task(load_cfg("", ["TASK", "count", "TASK_OPTIONS.TIP", "5"]))
    finally:
        del TASK_REGISTRY._obj_map["count"]


def test_an_unknown_task_is_refused_with_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"unknown task 'detecton'.*detection"):
        build_task(load_cfg("", ["TASK", "detecton"]))


def test_the_main_figure_is_named_in_the_task_alone():
    found = [
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if re.search("""["']bbox/AP""", path.read_text())
    ]
    assert found == ["training/tasks/detection.py"]


def test_the_main_figures_of_detection_come_first_in_the_alphabet():
    classes = {f"AP-{name}": 0.0 for name in ("bird", "a b")}
    names = dict.fromkeys(("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"), 0.0) | classes
    records = {9: {"total_loss": 1.0, "lr": 1.0} | flatten({"bbox": names})}
    assert main_figures(records) == [["bbox/AP", "bbox/AP50"]]
    assert DetectionTask.main_figure == main_figures(records)[0][0]


class FewTask(DetectionTask):
    """Of every data set the first image alone."""

    def check_data(self, decode=False, examples=20):
        data = super().check_data(decode, examples)
        for dataset in data.train:
            dataset.leave_out({record.image_id for record in dataset.records[1:]})
        return data

    def load_splits(self):
        datasets, tests = super().load_splits()
        for dataset in datasets:
            dataset.records = dataset.records[:1]
        return datasets, tests


def test_the_commands_that_look_at_data_ask_the_task(drawn_coco, tmp_path):
    config = tmp_path / "empty.yaml"
    config.write_text("VERSION: 2\n")
    words = ["--config-file", str(config), "--runner", "builtin", *overrides(drawn_coco.files, tmp_path, TASK="few")]
    TASK_REGISTRY.register_as("few")(FewTask)
    try:
        checked = CliRunner().invoke(main, ["check-data", *words])
        shown = CliRunner().invoke(main, ["show", "data", *words, "--output", str(tmp_path / "shown"), "--count", "1"])
    finally:
        del TASK_REGISTRY._obj_map["few"]
    assert (checked.exit_code, shown.exit_code) == (0, 0), checked.output + shown.output
    assert "drawn: 1 images, 0 of them without objects" in checked.output
    assert "train.png: 1 of 1 images" in shown.output
