# SPDX-License-Identifier: Apache-2.0
"""Studies of classifiers: the main figure is the task's, and sweeps are evaluations with keys of their own."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from image_classes import class_words, draw_folders
from PIL import Image

from cpvt_det.builders.trained import load_trained
from cpvt_det.common.errors import ConfigError
from cpvt_det.config import load_cfg
from cpvt_det.training.evaluate import evaluate
from cpvt_det.training.tasks import build_task
from studies.engine.plan import load_plan
from studies.engine.report import write_report
from studies.engine.run import execute, is_done

ROOT = Path(__file__).parents[2]
VIT = {
    "MODEL__BACKBONE__NAME": "deit_tiny",
    "MODEL__BACKBONE__STAGES": (3,),
    "MODEL__BACKBONE__PATCH_SIZE": 8,
    "MODEL__BACKBONE__EMBED_DIM": 16,
    "MODEL__BACKBONE__DEPTH": 1,
    "MODEL__BACKBONE__NUM_HEADS": 2,
    "MODEL__BACKBONE__NORM": "FrozenBN",
    "MODEL__BACKBONE__FREEZE_AT": 2,
    "TEST__PICTURES": 0,
}
PLAN = {
    "evaluations": {
        "half": {"INPUT.CLASSIFY.TEST_SIZE": 16},
        "twice": {"INPUT.CLASSIFY.TEST_SIZE": 64},
        "trained": {"DATASETS.TEST": ["train"]},
    },
    "sweeps": {"size": {"half": 0.5, "twice": 2.0}, "data": {"trained": 1.0}},
    "groups": {
        "main": {
            "config": "small.yaml",
            "seeds": 1,
            "baselines": ["table"],
            "sweeps": ["size", "data"],
            "variants": {
                "table": {"MODEL.BACKBONE.POSITION.NAME": "table", "MODEL.BACKBONE.POSITION.GRID": [4, 4]},
                "peg": {"MODEL.BACKBONE.POSITION.NAME": "peg_plain"},
            },
        }
    },
}


def write_plan(folder, **changes):
    cfg = load_cfg("", class_words(draw_folders(folder / "data"), folder / "unused", **VIT))
    (folder / "small.yaml").write_text(cfg.dump(), encoding="utf-8")
    (folder / "plan.yaml").write_text(
        yaml.safe_dump({"output": str(folder / "output"), **PLAN, **changes}, sort_keys=False), encoding="utf-8"
    )
    return folder / "plan.yaml"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    path = write_plan(tmp_path_factory.mktemp("classifiers"))
    plan = load_plan(path)
    for run in plan.runs():
        execute(plan, run.name)
    return path


def test_records_have_accuracies_and_evaluations_of_the_sweeps(done):
    """Each value is that of an evaluation beside the study, with these keys alone."""
    plan = load_plan(done)
    assert all(is_done(plan, run) for run in plan.runs())
    assert plan.figures_of(plan.group("main")) == ("top1", "top1_class_mean", "top5")
    record = json.loads(plan.record_path("main/peg/0").read_text())
    trained = load_trained(plan.output_of("main/peg/0") / "model_final.pth")
    found = []
    for keys in ({}, {"TEST_SIZE": 16}, {"TEST_SIZE": 64}):
        cfg = plan.config_of(plan.run("main/peg/0"))
        cfg.INPUT.CLASSIFY.update(keys)
        task = build_task(cfg)
        found.append(evaluate(task, trained.detector, task.load_tests(), done.parent / "here")["classes"]["top1"])
    sweeps = record["measured"]["sweeps"]
    assert [record["top1"], *sweeps["size"].values()] == found
    assert list(sweeps["size"]) == ["half", "twice"] and list(sweeps["data"]) == ["trained"]


def test_the_report_is_of_the_task_s_figure(done):
    text = write_report(done)[0].read_text()
    assert "top1 less table's" in text and "### top1 by size" in text and "AP" not in text


def test_a_changed_evaluation_is_measured_again_and_not_trained(done):
    changed = write_plan_beside(done, evaluations={**PLAN["evaluations"], "half": {"INPUT.CLASSIFY.TEST_SIZE": 24}})
    plan, before = load_plan(changed), load_plan(done)
    for run in plan.runs():
        assert not is_done(plan, run) and plan.fingerprint(run) == before.fingerprint(before.run(run.name))


def write_plan_beside(path, **changes):
    content = yaml.safe_load(path.read_text())
    path.with_name("changed.yaml").write_text(yaml.safe_dump({**content, **changes}, sort_keys=False), encoding="utf-8")
    return path.with_name("changed.yaml")


def group_with(**changes):
    return {"groups": {"main": {**PLAN["groups"]["main"], **changes}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluations": {**PLAN["evaluations"], "half": {"INPUT.CLASSIFY.TEST_SIZ": 16}}}, "the plan, half.*TEST_SIZ"),
        ({"sweeps": {"size": {"halv": 0.5}, "data": {}}}, "data set of sweep size 'halv'"),
        (group_with(probes=["place"]), "probes are of detectors, but main/table is a classifier"),
        (group_with(variants={"peg": {"MODEL.BACKBONE.POSITION.NAM": "none"}}, baselines=[]), "'nam'"),
        (group_with(variants={"peg": {"MODEL.BACKBONE.POSITION.NAME": "pge"}}, baselines=[]), "'pge'"),
        (group_with(variants={"peg": {"MODEL.BACKBONE.NUM_HEADS": 3}}, baselines=[]), "MODEL.BACKBONE: channels must be"),
    ],
)
def test_a_plan_of_classifiers_that_cannot_be_run_is_refused_before_the_first_run(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_plan(write_plan(tmp_path, **changes))


# The data of studies/classifiers


def prepare():
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "studies/classifiers/prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_smaller_canvas_is_the_centre_and_a_larger_one_goes_on_as_in_a_mirror():
    image = torch.arange(3 * 4 * 4, dtype=torch.uint8).view(3, 4, 4)
    on_canvas = prepare().on_canvas
    assert torch.equal(on_canvas(image, 2), image[:, 1:3, 1:3])
    assert torch.equal(on_canvas(image, 4), image)
    larger = on_canvas(image, 7)  # one row and column before, two after
    order = [1, 0, 1, 2, 3, 2, 1]
    assert torch.equal(larger, image[:, order][:, :, order])


def test_the_data_of_the_study_are_the_first_images_of_each_class(tmp_path, monkeypatch):
    module = prepare()
    monkeypatch.setattr(module, "TRAIN", 2)
    monkeypatch.setattr(module, "SWEPT", 1)
    for split, count in (("train", 3), ("test", 2)):
        for name in ("airplane", "cat"):
            (tmp_path / "cifar" / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (40 * number, 0, 0)).save(tmp_path / "cifar" / split / name / f"{number:04d}.jpg")
    words = [str(tmp_path / "cifar"), str(tmp_path / "out")]
    result = CliRunner().invoke(module.main, words)
    assert result.exit_code == 0 and result.output == f"{tmp_path / 'out'}: {2 * (2 + 2 + 7)} images\n"
    assert sorted(path.name for path in (tmp_path / "out/train/cat").iterdir()) == ["0000.jpg", "0001.jpg"]
    assert sorted(path.name for path in (tmp_path / "out/canvas_64/cat").iterdir()) == ["0000.png"]
    assert Image.open(tmp_path / "out/canvas_24/airplane/0000.png").size == (24, 24)
    for again, message in ((words, "exists; remove it"), ([str(tmp_path), str(tmp_path / "new")], "it is not CIFAR-10")):
        assert message in CliRunner().invoke(module.main, again).output
