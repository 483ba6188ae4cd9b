# SPDX-License-Identifier: Apache-2.0
"""Studies: a plan's runs are trained once each, start from what they should, and are told with honest intervals."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
import yaml

from cpvt_det.build import load_trained
from cpvt_det.errors import ConfigError, RunStoppedError, UnknownNameError
from cpvt_det.study import probes
from cpvt_det.study.plan import load_plan
from cpvt_det.study.report import interval, paired, write_report
from cpvt_det.study.run import is_done, run_study

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "studies" / "position_encodings" / "plan.yaml"
TINY = {"images": 6, "seed": 0, "image_sides": [48, 64], "object_sides": [12, 40], "max_objects": 2}
CONFIG = """
_BASE_: {base}
MODEL:
  BACKBONE: {{NAME: resnet10, WIDTH: 4, NORM: BN, FREEZE_AT: 0, STAGES: [3]}}
  DETR: {{HIDDEN_DIM: 8, NHEADS: 2, DIM_FEEDFORWARD: 8, ENC_LAYERS: 1, DEC_LAYERS: 1, NUM_OBJECT_QUERIES: 5}}
INPUT: {{MIN_SIZE_TRAIN: [], MIN_SIZE_TEST: 0, RESIZE_CROP: {{ENABLED: False}}}}
DATASETS: {{TRAIN: [train], TEST: [val]}}
DATALOADER: {{NUM_WORKERS: 0}}
SOLVER: {{EPOCHS: 2.0, STEP_EPOCHS: [], IMS_PER_BATCH: 3}}
TEST: {{PICTURES: 0, EVAL_EPOCHS: 1.0}}
"""


def plan_of(folder, **changes):
    told = {
        "output": str(folder / "output"),
        "data": {
            "train": TINY,
            "val": {**TINY, "seed": 1},
            "wide": {**TINY, "seed": 1, "object_sides": [12, 27], "aspect": 3.0, "scale": 2.0},
        },
        "sweeps": {"shape": {"val": 1.0, "wide": 3.0}},
        "groups": {
            "first": {"config": "tiny.yaml", "seeds": 1, "variants": {"none": {"MODEL.POSITION.NAME": "none"}}},
            "main": {
                "config": "tiny.yaml",
                "backbone": "first/none/0",
                "seeds": 2,
                "baseline": "learned",
                "sweeps": ["shape"],
                "probes": ["padding"],
                "variants": {
                    "learned": {"MODEL.POSITION.NAME": "learned", "MODEL.POSITION.TABLE_SIZE": 20},
                    "peg": {"MODEL.POSITION.NAME": "peg"},
                },
            },
            "tuned": {
                "config": "tiny.yaml",
                "weights": "main/learned",
                "keys": {"SOLVER.EPOCHS": 1.0, "SOLVER.BASE_LR": 0.0, "SOLVER.BACKBONE_LR": 0.0, "MODEL.BACKBONE.FREEZE_AT": 3},
                "seeds": 1,
                "variants": {"same": {"MODEL.POSITION.NAME": "learned", "MODEL.POSITION.TABLE_SIZE": 20}},
            },
        },
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(CONFIG.format(base=ROOT / "configs" / "_detectron2.yaml"))
    (folder / "plan.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    return folder / "plan.yaml"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A plan that was worked through, with the lines that were told."""
    path = plan_of(tmp_path_factory.mktemp("study"))
    told = []
    run_study(path, 2, tell=told.append)
    return path, told


def record(path, name):
    return json.loads(load_plan(path).record_path(name).read_text())


def test_every_run_of_the_plan_has_a_record(done):
    path, told = done
    plan = load_plan(path)
    names = [run.name for run in plan.runs()]
    assert names == ["first/none/0", "main/learned/0", "main/peg/0", "main/learned/1", "main/peg/1", "tuned/same/0"]
    assert all(is_done(plan, run) for run in plan.runs())
    assert sorted(line.split()[2].rstrip(":") for line in told) == sorted(names)
    assert (plan.folder / "log.txt").read_text().splitlines() == told
    for name in names:
        kept = record(path, name)
        assert kept["run"] == name and kept["iterations"] == (2 if name.startswith("tuned") else 4)
        assert 0 <= kept["AP"] <= 100 and kept["APl"] is None  # there are no large objects
        assert "1 threads" in kept["environment"]


def test_a_record_is_what_the_run_s_own_evaluation_said(done):
    path, _ = done
    kept = record(path, "main/peg/0")
    results = json.loads((load_plan(path).output_of("main/peg/0") / "results.json").read_text())
    assert kept["AP"] == results["bbox"]["AP"] == kept["curve"]["4"] == kept["sweeps"]["shape"]["val"]
    assert list(kept["curve"]) == ["2", "4"]


def test_an_encoding_that_refuses_a_size_has_no_figure_there(done):
    """A learned table of 20 does not reach the 21 or more columns of wide images drawn twice as large."""
    path, _ = done
    assert record(path, "main/learned/0")["sweeps"]["shape"]["wide"] is None
    assert record(path, "main/peg/0")["sweeps"]["shape"]["wide"] is not None


def weights(path, name):
    return load_trained(load_plan(path).output_of(name) / "model_final.pth").detector.state_dict()


def test_seeds_and_variants_differ_and_share_what_they_should(done):
    path, _ = done
    first, second = weights(path, "main/peg/0"), weights(path, "main/peg/1")
    assert not torch.equal(first["class_embed.weight"], second["class_embed.weight"])


def test_a_run_starts_from_the_weights_of_its_seed(done):
    """At learning rates of zero the weights are those it started from; batch norms' statistics are frozen."""
    path, _ = done
    before, after = weights(path, "main/learned/0"), weights(path, "tuned/same/0")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_starts_from_the_backbone_of_the_plan(done):
    path, _ = done
    log = (load_plan(path).output_of("main/peg/1") / "log.txt").read_text()
    assert f"Backbone weights: {load_plan(path).output_of('first/none/0') / 'backbone.pth'}" in log


def test_what_is_done_is_not_done_again(done):
    path, _ = done
    told = []
    run_study(path, 1, tell=told.append)
    assert told == []


def test_a_changed_plan_asks_for_what_it_changes_and_what_starts_from_it(done, tmp_path):
    path, _ = done
    told = yaml.safe_load(path.read_text())
    told["groups"]["main"]["variants"]["learned"]["SOLVER.BASE_LR"] = 2e-4
    changed = path.with_name("changed.yaml")
    changed.write_text(yaml.safe_dump(told, sort_keys=False))
    plan = load_plan(changed)
    assert [run.name for run in plan.runs() if not is_done(plan, run)] == ["main/learned/0", "main/learned/1", "tuned/same/0"]


def test_changed_data_asks_for_all_that_use_it(done):
    path, _ = done
    told = yaml.safe_load(path.read_text())
    told["data"]["val"]["images"] = 7
    changed = path.with_name("changed_data.yaml")
    changed.write_text(yaml.safe_dump(told, sort_keys=False))
    plan = load_plan(changed)
    assert not any(is_done(plan, run) for run in plan.runs())


def test_a_run_whose_origin_has_no_record_says_so(tmp_path):
    with pytest.raises(RunStoppedError, match=r"main/learned/0: it starts from first/none/0, which has no record yet"):
        run_study(plan_of(tmp_path / "study"), 1, groups=["main"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"groups": {"a": {"config": "tiny.yaml", "seeds": 1, "variants": {"v": {"MODEL.POSITION.NAM": "peg"}}}}},
            "position encoding 'peg' 'nam'",
        ),
        ({"groups": {"a": {"config": "tiny.yaml", "seed": 1, "variants": {}}}}, "key of group a 'seed' .did you mean 'seeds'"),
        ({"groups": {"a": {"config": "no.yaml", "seeds": 1, "variants": {"v": {}}}}}, "no config file"),
        ({"groups": {"a": {"config": "tiny.yaml", "seeds": 1, "variants": {"v": {}}, "sweeps": ["x"]}}}, "sweep of group a 'x'"),
        ({"groups": {"a": {"config": "tiny.yaml", "seeds": 1, "variants": {"v": {}}, "probes": ["x"]}}}, "probe of group a 'x'"),
        ({"groups": {"a": {"config": "tiny.yaml", "seeds": 1, "variants": {"v": {}}, "backbone": "b/v/0"}}}, "no run 'b/v/0'"),
        ({"data": {"train": {"images": 3, "seed": 0, "image_sides": [8, 9]}}}, "do not fit image_sides"),
        ({"data": {"train": {"images": 3, "seed": 0, "sides": [8, 9]}}}, "sides"),
        ({"data": {"train": {"seed": 0}}}, "images"),
        ({"groups": []}, "no plan of a study"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_before_the_first_run(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        load_plan(plan_of(tmp_path / "study", **changes))


def test_a_missing_plan_and_an_unknown_group_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no plan of a study"):
        load_plan(tmp_path / "none.yaml")
    with pytest.raises(UnknownNameError, match="group of the study 'mian' .did you mean 'main'"):
        load_plan(plan_of(tmp_path / "study")).group("mian")


# The report


def test_interval_by_hand():
    """Of 1, 2, 3: standard deviation 1, t of 2 degrees of freedom 4.3027, so 4.3027 / sqrt(3)."""
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval([5.0])[0] == 5 and math.isnan(interval([5.0])[1])


def test_paired_differences_by_hand():
    """Differences 1, 2, 3 of the common seeds: t = 2 / (1 / sqrt(3)), p = 0.0742 two-sided; seed 9 has no partner."""
    mean, half, p = paired({0: 2.0, 1: 4.0, 2: 6.0, 9: 50.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert (mean, half) == (2, pytest.approx(4.302653 / math.sqrt(3), rel=1e-6))
    assert p == pytest.approx(0.0742, abs=1e-4)
    assert all(math.isnan(value) for value in paired({0: 1.0}, {1: 1.0}))
    assert math.isnan(paired({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0})[2])  # equal differences: no test


def test_report_tells_means_intervals_and_differences(done):
    path, _ = done
    files = write_report(path)
    text = files[0].read_text()
    aps = [record(path, f"main/peg/{seed}")["AP"] for seed in (0, 1)]
    mean, half = interval(aps)
    row = next(line for line in text.split("## main")[1].splitlines() if line.startswith("| peg"))
    assert f" {mean:.1f} ± {half:.1f} |" in row
    assert "AP less learned's" in text
    assert [file.name for file in files[1:]] == [
        "first_iteration.png",
        "main_iteration.png",
        "main_shape.png",
        "tuned_iteration.png",
    ]
    assert all(file.stat().st_size > 5000 for file in files[1:])
    table = text.split("### AP by shape")[1].split("###")[0]
    learned = next(line for line in table.splitlines() if line.startswith("| learned"))
    assert learned.split("|")[-2].strip() == "n/a"


def test_report_of_a_study_without_records_is_empty(tmp_path):
    files = write_report(plan_of(tmp_path / "study"))
    assert [os.path.basename(file) for file in files] == ["report.md"]
    assert "0.0 hours" in files[0].read_text()


# What is measured


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


def test_probes_of_a_trained_model(done):
    path, _ = done
    trained = load_trained(load_plan(path).output_of("main/peg/0") / "model_final.pth")
    found = probes.probe_translation(trained, canvas=64)
    assert set(found) == {"score", "score_std", "iou", "iou_std", "found"}
    assert 0 <= found["iou"] <= 1 and 0 <= found["found"] <= 100
    changed = probes.probe_padding(trained, images=3)
    assert max(changed.values()) < 1e-4  # an image's answer does not depend on its padding


# The study that is committed


def test_committed_records_are_of_the_committed_plan():
    plan = load_plan(STUDY)
    for run in plan.runs():
        if plan.record_path(run.name).is_file():
            assert is_done(plan, run), run.name
