# SPDX-License-Identifier: Apache-2.0
"""Studies: a plan's runs are trained once each, start from what they should, and are told with honest intervals."""

import json
import math
import os
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
import yaml

from cpvt_det.builders.trained import load_trained
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError, DataError, RunStoppedError, UnknownNameError
from cpvt_det.config import load_cfg
from studies.engine import probes
from studies.engine import run as study
from studies.engine.corrections import all_comparisons, corrected, corrected_over_levels, corrected_over_sweeps
from studies.engine.figures import draw_panels
from studies.engine.plan import load_plan
from studies.engine.questions import values_of
from studies.engine.report import curves_of, read_group, write_report
from studies.engine.run import is_done, missing_runs, run_study
from studies.engine.statistics import interval, paired

ROOT = Path(__file__).parents[2]
STUDIES = sorted(ROOT.glob("studies/*/plan.yaml"))
TINY = {"images": 6, "seed": 0, "image_sides": [48, 64], "object_sides": [12, 40], "max_objects": 2}
CONFIG = """
_BASE_: {base}
MODEL:
  BACKBONE: {{NAME: resnet10, WIDTH: 8, NORM: BN, FREEZE_AT: 0, STAGES: [3]}}
  DETR: {{HIDDEN_DIM: 8, NHEADS: 2, DIM_FEEDFORWARD: 8, ENC_LAYERS: 1, DEC_LAYERS: 1, NUM_OBJECT_QUERIES: 5}}
INPUT: {{MIN_SIZE_TRAIN: [], MIN_SIZE_TEST: 0, RESIZE_CROP: {{ENABLED: False}}}}
DATASETS: {{TRAIN: [train], TEST: [val]}}
DATALOADER: {{NUM_WORKERS: 0}}
SOLVER: {{EPOCHS: 2.0, STEP_EPOCHS: [], IMS_PER_BATCH: 3}}
TEST: {{PICTURES: 0, EVAL_EPOCHS: 1.0}}
"""


def told(folder):
    wide = {**TINY, "seed": 1, "object_sides": [12, 27], "aspect": 3.0, "scale": 2.0}
    keys = {"SOLVER.EPOCHS": 1.0, "SOLVER.BASE_LR": 0.0, "SOLVER.BACKBONE_LR": 0.0, "MODEL.BACKBONE.FREEZE_AT": 3}
    learned = {"MODEL.POSITION.NAME": "learned", "MODEL.POSITION.TABLE_SIZE": 20}
    return {
        "output": str(folder / "output"),
        "data": {"train": TINY, "val": {**TINY, "seed": 1}, "wide": wide},
        "sweeps": {"shape": {"val": 1.0, "wide": 3.0}},
        "groups": {
            "first": {
                "config": "tiny.yaml",
                "seeds": 1,
                "keys": {"SOLVER.THREADS": 2},  # as in a chosen.yaml; every run has one all the same
                "variants": {"none": {"MODEL.POSITION.NAME": "none"}},
            },
            "main": {
                "config": "tiny.yaml",
                "backbone": "first/none/0",
                "keys": {"MODEL.BACKBONE.FREEZE_AT": 3, "MODEL.BACKBONE.NORM": "FrozenBN"},
                "seeds": 2,
                "baselines": ["learned"],
                "sweeps": ["shape"],
                "probes": ["padding", "place", "scale"],
                "variants": {"learned": learned, "peg": {"MODEL.POSITION.NAME": "peg"}},
            },
            "tuned": {
                "config": "tiny.yaml",
                "weights": "main/learned",
                "keys": {**keys, "MODEL.BACKBONE.NORM": "FrozenBN"},
                "seeds": 2,
                "beside": ["main/learned"],
                "baselines": ["main/learned"],
                "variants": {"same": learned},
            },
        },
    }


QUESTIONS = [
    {"text": "Is PEG better?", "group": "main", "variant": "peg", "baseline": "learned"},
    {"text": "Does it keep more?", "group": "main", "variant": "peg", "baseline": "learned", "value": {"val": 2.0}},
]


def write_plan(path, content):
    path.parent.mkdir(exist_ok=True)
    (path.parent / "tiny.yaml").write_text(CONFIG.format(base=ROOT / "configs" / "_detectron2.yaml"))
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def plan_of(folder, **changes):
    return write_plan(folder / "plan.yaml", {**told(folder), **changes})


def changed(path, change):
    """The plan beside it, in the same folder, after a change."""
    content = yaml.safe_load(path.read_text())
    change(content)
    return load_plan(write_plan(path.with_name("changed.yaml"), content))


NAMES = ["first/none/0", "main/learned/0", "main/peg/0", "main/learned/1", "main/peg/1", "tuned/same/0", "tuned/same/1"]


def quick_processes():
    """Processes of runs that are forked from a server with their imports, as :class:`forked.Forked`."""
    return mock.patch.object(study.multiprocessing, "get_context", return_value=forked.CONTEXT)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A plan that was worked through, with the lines that were told."""
    path = plan_of(tmp_path_factory.mktemp("study"))
    lines = []
    with quick_processes():
        run_study(path, 2, write_line=lines.append)
    return path, lines


def record(path, name):
    return json.loads(load_plan(path).record_path(name).read_text())


def test_every_run_of_the_plan_has_a_record(done):
    path, lines = done
    plan = load_plan(path)
    assert [run.name for run in plan.runs()] == NAMES
    assert all(is_done(plan, run) for run in plan.runs())
    assert sorted(line.split()[2].rstrip(":") for line in lines) == sorted(NAMES)
    assert (plan.folder / "log.txt").read_text().splitlines() == lines
    for name in NAMES:
        kept = record(path, name)
        assert kept["run"] == name and kept["iterations"] == (2 if name.startswith("tuned") else 4)
        assert kept["APl"] is None  # there are no large objects
        assert "1 threads" in kept["environment"]
        assert kept["commit"] and kept["cpu"] and kept["instruction_set"] and kept["flags"]


def test_a_record_is_what_the_run_s_own_files_say(done):
    path, _ = done
    for name in ("main/peg/0", "main/learned/1"):
        kept, output = record(path, name), load_plan(path).output_of(name)
        assert kept["AP"] == json.loads((output / "results.json").read_text())["bbox"]["AP"]
        lines = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
        assert kept["curve"] == {str(line["iteration"] + 1): line["bbox/AP"] for line in lines if "bbox/AP" in line}
        assert list(kept["curve"]) == ["2", "4"]


def test_an_encoding_that_refuses_a_size_has_no_figure_there(done):
    """A learned table of 20 does not reach the 21 or more columns of wide images drawn twice as large."""
    path, _ = done
    shape = [record(path, f"main/{name}/0")["measured"]["sweeps"]["shape"] for name in ("learned", "peg")]
    assert [value is None for sweep in shape for value in sweep.values()] == [False, True, False, False]


def weights(path, name):
    return load_trained(load_plan(path).output_of(name) / "model_final.pth").detector.state_dict()


def test_seeds_differ_and_the_backbone_is_the_plan_s(done):
    path, _ = done
    first, second, source = (weights(path, name) for name in ("main/peg/0", "main/peg/1", "first/none/0"))
    frozen = [name for name in first if name.startswith("backbone.") and not name.endswith("num_batches_tracked")]
    assert len(frozen) > 20
    assert all(torch.equal(first[name], source[name]) and torch.equal(second[name], source[name]) for name in frozen)
    assert not torch.equal(first["class_embed.weight"], second["class_embed.weight"])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_starts_from_the_weights_of_its_seed(done, seed):
    """At learning rates of zero the weights are those it started from."""
    path, _ = done
    before, after = weights(path, f"main/learned/{seed}"), weights(path, f"tuned/same/{seed}")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_done_is_not_done_again(done):
    path, _ = done
    lines = []
    run_study(path, 1, write_line=lines.append)
    assert lines == ["Nothing to do: every run has a record"]


def set_rate(plan):
    plan["groups"]["main"]["variants"]["learned"]["SOLVER.BASE_LR"] = 2e-4


def set_images(plan):
    plan["data"]["val"]["images"] = 7


def test_a_changed_plan_asks_for_what_it_changes_and_what_starts_from_it(done):
    path, _ = done
    plan = changed(path, set_rate)
    expected = ["main/learned/0", "main/learned/1", "tuned/same/0", "tuned/same/1"]
    assert [run.name for run in missing_runs(plan, list(plan_groups(plan)))] == expected
    assert set(read_group(plan, plan.group("main"))) == {"peg"}  # the report has none of the old ones
    assert set(read_group(plan, plan.group("tuned"))) == set()


def plan_groups(plan):
    return (group.name for group in plan.groups)


def test_changed_data_asks_for_all_that_use_it(done):
    path, _ = done
    plan = changed(path, set_images)
    assert [run.name for run in missing_runs(plan, list(plan_groups(plan)))] == NAMES


def test_what_is_measured_anew_is_not_trained_anew(done, monkeypatch):
    path, _ = done
    plan = changed(path, lambda plan: plan["groups"]["main"].update(probes=["scale"], sweeps=[]))
    assert [run.name for run in missing_runs(plan, ["main"])] == [name for name in NAMES if name.startswith("main")]
    monkeypatch.setattr(study, "train", None)
    before = record(path, "main/peg/0")
    plan = changed(path, lambda plan: None)
    after = study.execute(plan, "main/peg/0")
    assert after["measured"]["sweeps"] == before["measured"]["sweeps"]
    assert after["measured"]["probes"]["place"] == pytest.approx(before["measured"]["probes"]["place"])


def test_an_origin_whose_weights_are_gone_is_trained_again(done):
    """As in a clone, which has the records only."""
    path, _ = done
    plan = changed(path, lambda plan: plan["groups"]["main"].update(seeds=3))
    names = [run.name for run in missing_runs(plan, ["main"])]
    assert names == ["main/learned/2", "main/peg/2"]
    weights_of_first = plan.output_of("first/none/0") / "model_final.pth"
    weights_of_first.rename(weights_of_first.with_suffix(".away"))
    try:
        assert [run.name for run in missing_runs(plan, ["main"])] == ["first/none/0", *names]
    finally:
        weights_of_first.with_suffix(".away").rename(weights_of_first)


def test_an_origin_that_is_trained_again_has_to_come_out_as_before(done):
    """What started from it, and what is to start from it now, are compared with each other."""
    path, _ = done
    plan, before = load_plan(path), record(path, "first/none/0")
    kept = weights(path, "first/none/0")
    other = {**before, "AP": 12.5}
    plan.record_path("first/none/0").write_text(json.dumps(other))
    output = plan.output_of("first/none/0")
    output.rename(output.with_suffix(".away"))
    with pytest.raises(RunStoppedError, match=r"trained again, its AP is .*, but 12\.5 in its record"):
        study.execute(plan, "first/none/0")
    assert record(path, "first/none/0") == other
    assert not output.exists()  # nothing can start from it
    plan.record_path("first/none/0").write_text(json.dumps(before))
    study.execute(plan, "first/none/0")
    again = weights(path, "first/none/0")
    assert all(torch.equal(again[name], kept[name]) for name in kept)


class Killed(BaseException):
    """What no handler catches."""


def test_a_run_goes_on_only_from_its_own_attempt(tmp_path, monkeypatch):
    """Whatever lies in its folder of a run before the plan changed, and however that ended."""
    path = plan_of(tmp_path / "study", groups={"first": told(tmp_path)["groups"]["first"]})
    study.draw_dataset(load_plan(path).data_root("train"), 1, 6, 0, load_plan(path).data[0].spec, 1)
    study.draw_dataset(load_plan(path).data_root("val"), 1, 6, 1, load_plan(path).data[1].spec, 1)
    study.execute(load_plan(path), "first/none/0")
    before = weights(path, "first/none/0")
    plan = changed(path, lambda plan: plan["groups"]["first"]["variants"]["none"].update({"SOLVER.BASE_LR": 1e-2}))

    def die(cfg, resume, callbacks):
        assert not resume
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(study, "train", die)
        with pytest.raises(Killed):
            study.execute(plan, "first/none/0")
    kept = study.execute(plan, "first/none/0")
    after = weights(path, "first/none/0")
    assert not torch.equal(before["class_embed.weight"], after["class_embed.weight"])
    assert kept["fingerprint"] == plan.fingerprint(plan.run("first/none/0"))
    attempt = json.loads((plan.output_of("first/none/0") / "attempt.json").read_text())
    assert kept["cpu_seconds"] == pytest.approx(attempt["cpu_seconds"], abs=0.1)
    assert attempt["cpu_seconds"] > 0


@pytest.mark.parametrize(
    ("key", "value", "is_new"),
    [
        ("TEST.NMS", 0.5, True),
        ("MODEL.BACKBONE.WEIGHTS", "IMAGENET1K_V1", True),
        ("MODEL.WEIGHTS", "old.pth", True),
        ("SOLVER.EARLY_STOPPING", 3, True),
        ("SOLVER.BASE_LR", 0.5, True),
        ("DATASETS.TEST", ["other"], True),
        ("TEST.PICTURES", 3, False),
        ("TEST.REPORT", True, False),
        ("SOLVER.LOG_PERIOD", 7, False),
    ],
)
def test_a_run_is_another_one_if_a_key_changes_its_result(tmp_path, key, value, is_new):
    path = plan_of(tmp_path / "study")
    plan = changed(path, lambda plan: plan["groups"]["first"]["variants"]["none"].update({key: value}))
    before = load_plan(path)
    for name in ("first/none/0", "main/peg/0"):  # which starts from it
        assert (plan.fingerprint(plan.run(name)) != before.fingerprint(before.run(name))) is is_new


def test_data_of_other_classes_are_not_measured(done):
    path, _ = done
    plan, trained = load_plan(path), load_trained(load_plan(path).output_of("main/peg/0") / "model_final.pth")
    trained.classes = Classes(trained.classes.ids, trained.classes.names[::-1])
    with pytest.raises(DataError, match="main/peg/0 and val have different classes"):
        study.evaluate_sweep(plan, plan.run("main/peg/0"), trained, "shape")


def test_the_time_of_a_killed_attempt_counts(tmp_path, monkeypatch):
    """Of two attempts, the first of which the system ends after a step that was logged, without any handler."""
    clock, file = iter([10.0, 10.0, 17.0, 100.0, 100.0, 102.0, 105.0]), tmp_path / "attempt.json"
    monkeypatch.setattr(study.time, "process_time", lambda: next(clock))
    first = study.CpuTime(file, "f", 0.0)
    first.on_step(None, 19, {})
    second = study.CpuTime(file, **json.loads(file.read_text()))
    second.on_step(None, 39, {})
    second.keep()
    assert json.loads(file.read_text()) == {"fingerprint": "f", "cpu_seconds": 7.0 + 5.0}


def test_a_run_that_fails_is_told_and_the_others_are_done(tmp_path):
    """Here a configuration that only training finds out about."""
    groups = {"first": told(tmp_path)["groups"]["first"]}
    groups["first"]["variants"] = {
        "bad": {"MODEL.POSITION.NAME": "none", "SOLVER.AMP.DTYPE": "float8"},
        "none": {"MODEL.POSITION.NAME": "none"},
    }
    lines = []
    with quick_processes(), pytest.raises(RunStoppedError, match="1 runs failed: first/bad/0"):
        run_study(plan_of(tmp_path / "study", groups=groups), 2, write_line=lines.append)
    told_of = {line.split()[2].rstrip(":"): line for line in lines}
    assert "failed: UnknownNameError: unknown SOLVER.AMP.DTYPE 'float8'" in told_of["first/bad/0"]
    assert "AP " in told_of["first/none/0"]


def group_of(**changes):
    return {"groups": {"a": {"config": "tiny.yaml", "seeds": 1, "variants": {"v": {}}, **changes}}}


def asking(**changes):
    return group_of() | {"questions": [{"text": "Why?", "group": "a", "variant": "v", "baseline": "v", **changes}]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (group_of(variants={"v": {"MODEL.POSITION.NAM": "peg"}}), "position encoding 'peg' 'nam'"),
        (group_of(variants={"v": {"MODEL.POSITIN.NAME": "peg"}}), "MODEL.POSITIN"),
        (group_of(variants={"v": None}), "is not a study plan"),
        (group_of(seed=1), "key of group a 'seed' .did you mean 'seeds'"),
        (group_of(config="no.yaml"), "no config file"),
        (group_of(sweeps=["x"]), "sweep of group a 'x'"),
        (group_of(probes=["x"]), "probe of group a 'x'"),
        (group_of(baselines=["w"]), "baseline of group a 'w'"),
        (group_of(beside=["b/v"]), "variant of an earlier group in 'beside' of group a 'b/v'"),
        (group_of(backbone="b/v/0"), "run of an earlier group that a/v/0 starts from 'b/v/0'"),
        (group_of(weights="a/v"), "run of an earlier group that a/v/0 starts from 'a/v/0'"),
        ({"sweeps": {"shape": {"vall": 1.0}}}, "data set of sweep shape 'vall'"),
        ({"sweeps": None}, "is not a study plan"),
        ({"data": {"train": {"images": 3, "seed": 0, "image_sides": [8, 9]}}}, "do not fit image_sides"),
        ({"data": {"train": {"images": 3, "seed": 0, "sides": [8, 9]}}}, "sides"),
        ({"data": {"train": {"seed": 0}}}, "images"),
        ({"groups": []}, "is not a study plan"),
        (asking(variant="w"), "variant in question 'Why.' 'w'"),
        (asking(group="b"), "group of the study 'b'"),
        (asking(value={"val": 1.0}), "data set in question 'Why.' 'val'"),
        (asking(texts="x"), "is not a study plan"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_before_the_first_run(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        load_plan(plan_of(tmp_path / "study", **changes))


def test_a_missing_plan_and_an_unknown_group_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a study plan"):
        load_plan(tmp_path / "none.yaml")
    with pytest.raises(UnknownNameError, match="group of the study 'mian' .did you mean 'main'"):
        load_plan(plan_of(tmp_path / "study")).group("mian")


# The report


def test_report_tells_means_intervals_and_differences(done):
    path, _ = done
    for place, name in enumerate(NAMES):  # the tiny runs all have an AP of 0
        kept = record(path, name)
        kept["AP"] = 10.0 + place**2
        kept["curve"] = {at: value + place**2 for at, value in kept["curve"].items()}
        for sweep in kept["measured"]["sweeps"].values():
            sweep["val"] = 10.0 + place**2
        load_plan(path).record_path(name).write_text(json.dumps(kept))
    asked = write_plan(path.with_name("asked.yaml"), {**yaml.safe_load(path.read_text()), "questions": QUESTIONS})
    files = write_report(asked)
    text = files[0].read_text()
    mean, half = interval([14.0, 26.0])
    row, against, *_ = (line for line in text.split("## main")[1].splitlines() if line.startswith("| peg"))
    assert f" {mean:.1f} ± {half:.1f} |" in " ".join(row.split())
    mean, half, p = paired({0: 14.0, 1: 26.0}, {0: 11.0, 1: 19.0})
    assert f" {mean:+.1f} ± {half:.1f} | {p:.3f} | {p:.3f} |" in " ".join(against.split())
    assert "AP less learned's" in text
    along = text.split("## main")[1].split("### AP by iteration")[1].split("###")[0].splitlines()
    assert along[2].split() == ["|", "encoding", "|", "2", "|", "4", "|"]
    assert [line.split("|")[2].strip() for line in along if line.startswith("| peg")] == ["10.0 ± 76.2", "+5.0 ± 25.4"]
    assert "| main/learned |" in text.split("## tuned")[1]
    names = ["first_iteration.png", "main_iteration.png", "main_shape.png"]  # the tuned were evaluated once: no curve
    assert [file.name for file in files[1:]] == names
    assert all(file.stat().st_size > 5000 for file in files[1:])
    place = text.split("## main")[1].split("### place")[1].split("###")[0]
    told_of = [record(path, name)["measured"]["probes"]["place"]["after"] for name in NAMES[1:5]]
    mean, half, _ = paired(dict(enumerate(told_of[1::2])), dict(enumerate(told_of[::2])))  # peg's less learned's
    assert "less learned's, paired by seed:" in place
    assert place.rstrip().splitlines()[-1].split("|")[-2].strip() == f"{mean:+.3g} ± {half:.2g}"
    learned = next(line for line in text.split("### AP by shape")[1].splitlines() if line.startswith("| learned"))
    assert learned.split("|")[-2].strip() == "n/a"
    assert "Of 1 differences to learned" in text.split("### all sweeps")[1]  # val: 3 and 7; wide: learned has none
    row = next(line for line in text.split("## Questions")[1].splitlines() if "keep" in line)
    # differences 2 x (14 - 11) and 2 x (26 - 19): 10, with an error of 4, and 25.45 is t(1) of 0.9875, for two questions
    expected = ["peg less learned", "+10.0 ± 101.8", "no further apart than 111.8", "2"]
    assert [cell.strip() for cell in row.split("|")[3:-1]] == expected
    hours = sum(record(path, name)["cpu_seconds"] + record(path, name)["measured"]["cpu_seconds"] for name in NAMES) / 3600
    assert f"7 of 7 runs; {hours:.1f} hours of one core" in text


def swept(**aps):
    """A run that was evaluated on the sweep ``shape`` alone, or not at all."""
    return {"curve": {}, "measured": {"sweeps": {"shape": aps} if aps else {}}}


def test_sweeps_are_corrected_together_by_hand(tmp_path):
    """Differences 1, 2, 3 have p 0.0742; 10.1, 10.2, 10.3 have t = 10.2 / (0.1 / sqrt(3)) and p 3.2e-5, twice of it by Holm."""
    plan = load_plan(plan_of(tmp_path / "study"))
    group = plan.group("main")
    learned = {seed: swept(val=5.0, wide=5.0) for seed in range(3)}
    peg = {seed: swept(val=6.0 + seed, wide=15.1 + seed / 10) for seed in range(3)}
    (said,) = corrected_over_sweeps(plan, group, curves_of(plan, group, {"learned": learned, "peg": peg}))
    assert said.startswith("Of 2 differences to learned on the sweeps' data sets, 1 have intervals without 0; ")
    assert said.endswith("remain: peg on wide (0.000).")
    assert corrected_over_sweeps(plan, group, curves_of(plan, group, {"peg": peg})) == []
    same = {seed: swept(val=5.0 + seed, wide=5.0 - seed) for seed in range(3)}
    (said,) = corrected_over_sweeps(plan, group, curves_of(plan, group, {"learned": learned, "peg": same}))
    assert "0 have intervals without 0" in said and said.endswith("remain: none.")


def test_a_pair_of_variants_is_compared_once_in_the_whole_study(tmp_path):
    """Two groups have the pair of main's, the second with fewer seeds and the other baseline; the other pair is its own."""
    plan = load_plan(plan_of(tmp_path / "study"))
    learned = {seed: {"AP": 5.0, **swept(val=5.0, wide=5.0)} for seed in range(3)}
    peg = {seed: {"AP": 6.0 + seed, **swept(val=6.0 + seed, wide=15.1 + seed / 10)} for seed in range(3)}
    of_ap, on_sweeps = all_comparisons(plan, {"first": {}, "main": {"learned": learned, "peg": peg}, "tuned": {}})
    assert [(one.variant, one.baseline, one.data) for one in of_ap] == [("main/peg", "main/learned", "")]
    assert [one.data for one in on_sweeps] == ["val", "wide"]
    beside = {"main/learned": {0: learned[0], 1: learned[1]}, "same": {0: peg[0], 1: peg[1]}}
    of_ap, _ = all_comparisons(plan, {"first": {}, "main": {"learned": learned, "peg": peg}, "tuned": beside})
    assert [one.variant for one in of_ap] == ["main/peg", "tuned/same"]
    (_, paired_p, welch_p), (_, second, _) = corrected(on_sweeps)
    assert paired_p == pytest.approx(0.0742, abs=1e-4) and second == pytest.approx(2 * 3.2e-5, rel=0.02)
    assert welch_p == pytest.approx(0.0742, abs=1e-4)  # the baseline does not vary: the same t of the same 2 degrees of freedom


def test_a_pair_of_two_groups_counts_with_the_most_seeds(tmp_path):
    content = told(tmp_path)
    content["groups"]["tuned"].update(beside=["main/learned", "main/peg"], baselines=["main/peg"])
    plan = load_plan(write_plan(tmp_path / "study" / "plan.yaml", content))
    learned, peg = ({seed: {"AP": ap + seed % 2, **swept()} for seed in range(3)} for ap in (5.0, 6.5))
    peg[1]["AP"] = 7.0
    fewer = {f"main/{name}": {seed: runs[seed] for seed in range(2)} for name, runs in (("learned", learned), ("peg", peg))}
    ((variant, baseline, values),) = {
        (one.variant, one.baseline, len(one.values))
        for one in all_comparisons(plan, {"first": {}, "main": {"learned": learned, "peg": peg}, "tuned": fewer})[0]
    }
    assert (variant, baseline, values) == ("main/peg", "main/learned", 3)


def test_iterations_to_an_ap_are_corrected_together_by_hand(tmp_path):
    """1, 2, 3 more have p 0.0742 and 10.1, 10.2, 10.3 more p 3.2e-5, twice of it by Holm; unpaired the same."""
    group = load_plan(plan_of(tmp_path / "study")).group("main")
    learned = {5.0: dict.fromkeys(range(3), 100.0), 10.0: dict.fromkeys(range(3), 100.0)}
    peg = {5.0: {seed: 101.0 + seed for seed in range(3)}, 10.0: {seed: 110.1 + seed / 10 for seed in range(3)}}
    (said,) = corrected_over_levels(group, {"learned": learned, "peg": peg}, "AP")
    assert said.startswith("Of 2 differences to learned of the iterations to reach AP, 1 have intervals without 0; ")
    assert said.endswith("remain: peg to 10 (0.000); unpaired (Welch): peg to 10 (0.000).")


def test_panels_are_drawn_of_a_group_and_of_data_sets_of_its_sweeps(tmp_path):
    content = told(tmp_path) | {"panels": [{"title": "as trained", "group": "main"}]}
    content["panels"].append({"title": "wide", "group": "main", "value": {"wide": 1.0, "val": -1.0}})
    plan = load_plan(write_plan(tmp_path / "study" / "plan.yaml", content))
    peg = {seed: {"AP": 5.0 + seed, "measured": {"sweeps": {"shape": {"val": 5.0, "wide": 3.0 + seed}}}} for seed in range(2)}
    values = [values_of(plan, panel, {"main": {"peg": peg}}) for panel in plan.panels]
    assert values == [{"learned": {}, "peg": {0: 5.0, 1: 6.0}}, {"learned": {}, "peg": {0: -2.0, 1: -1.0}}]
    values[1]["learned"] = {0: math.nan, 1: 2.0}
    path = draw_panels(plan, values)
    assert path.name == "panels.png" and path.stat().st_size > 5000
    content["panels"][1]["value"] = {"train": 1.0}
    with pytest.raises(UnknownNameError, match="data set in panel 'wide' 'train'"):
        load_plan(write_plan(tmp_path / "study" / "plan.yaml", content))


def test_a_sweep_that_is_still_to_be_evaluated_has_no_curves(tmp_path):
    plan = load_plan(plan_of(tmp_path / "study"))
    assert curves_of(plan, plan.group("main"), {"peg": {0: swept()}}) == {}
    assert list(curves_of(plan, plan.group("main"), {"peg": {0: swept(val=1.0)}})) == ["shape"]


def test_report_of_a_study_without_records_is_empty(tmp_path):
    files = write_report(plan_of(tmp_path / "study"))
    assert [os.path.basename(file) for file in files] == ["report.md"]
    assert "0 of 7 runs; 0.0 hours" in files[0].read_text()


# What is measured


def test_probes_of_a_trained_model(done):
    path, _ = done
    trained = load_trained(load_plan(path).output_of("main/peg/0") / "model_final.pth")
    found = probes.probe_translation(trained, canvas=64)
    assert set(found) == {"score", "score_std", "iou", "iou_std", "found"}
    kept = record(path, "main/peg/0")["measured"]["probes"]
    assert max(kept["padding"].values()) < 1e-4  # an image's answer does not depend on its padding
    assert kept["scale"] == {"mean": 0.0}
    trained.detector.backbone.mask_padding = False  # padding leaks into the features
    assert max(probes.probe_padding(trained).values()) > 1e-4


# The studies that are committed


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_committed_records_are_of_the_committed_plan(path):
    """A plan is committed before its first run."""
    plan = load_plan(path)
    if not (path.parent / "results").exists():
        pytest.skip("the plan comes before its first run")
    recorded = [run for run in plan.runs() if plan.record_path(run.name).is_file()]
    assert recorded or not (plan.folder / "results").exists()
    for run in recorded:
        assert is_done(plan, run), run.name


SHIPPED = {
    "quickstart/deformable_peg.yaml": ("mechanisms", "pairs/40 pairs/0"),
    "bccd/tutorial.yaml": ("bccd", "tutorial/small together/0"),
    "bccd/hour.yaml": ("bccd", "hour larger/small together/0"),
}
"""Config whose figures are those of a study -> the study and a run of it."""
NOT_OF_THE_TRAINING = {"OUTPUT_DIR", "SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD", "TEST.EVAL_EPOCHS", "TEST.PICTURES"}
OF_DETECTRON2_S_TRAINER = {"SOLVER.MAX_ITER", "SOLVER.WARMUP_ITERS"}
"""Lengths in iterations, which epochs go before here."""


def settings(cfg, prefix=""):
    found = {}
    for key, value in cfg.items():
        found |= settings(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("config", SHIPPED)
def test_a_config_whose_figures_are_published_is_the_one_that_was_measured(config):
    """The study of blood cells reads COCO's copy of the same images."""
    study, run = SHIPPED[config]
    plan = load_plan(ROOT / "studies" / study / "plan.yaml")
    measured, shipped = settings(plan.config_of(plan.run(run))), settings(load_cfg(str(ROOT / "configs" / config)))
    other = {key for key in measured | shipped if measured.get(key) != shipped.get(key)}
    data = {"DATASETS.REGISTER"} if study == "bccd" else set()
    assert other - NOT_OF_THE_TRAINING - OF_DETECTRON2_S_TRAINER - data == set()
