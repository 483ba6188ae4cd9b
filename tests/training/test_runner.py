# SPDX-License-Identifier: Apache-2.0
"""The built-in runner from the command line to the files it leaves."""

import json

import pytest
import torch
from several import run_group
from tiny import DETECTORS, DINO, overrides

from cpvt_det.common.errors import BadInputError, ConfigError, DataError, WeightsError, first_line
from cpvt_det.config import load_cfg
from cpvt_det.solver.optimizer import TrainingSchedule
from cpvt_det.solver.step import TrainStep
from cpvt_det.training import setup
from cpvt_det.training.guard import RunGuard
from cpvt_det.training.launch import launch
from cpvt_det.training.train import is_due, run


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def losses_of(folder):
    return {line["iteration"]: line["total_loss"] for line in metrics_of(folder) if "total_loss" in line}


def weights_of(path):
    return torch.load(path, weights_only=True)


def assert_same_run(one, two):
    """The final checkpoints of two runs agree bit for bit: weights, optimiser, average, seed."""
    one, two = weights_of(one / "model_final.pth"), weights_of(two / "model_final.pth")
    for name, value in one["model"].items():
        assert torch.equal(value, two["model"][name]), name
    torch.testing.assert_close(one["trainer"]["_trainer"]["optimizer"], two["trainer"]["_trainer"]["optimizer"], rtol=0, atol=0)
    assert (one["cpvt_det"]["ema"] is None) == (two["cpvt_det"]["ema"] is None)
    if one["cpvt_det"]["ema"] is not None:
        torch.testing.assert_close(one["cpvt_det"]["ema"], two["cpvt_det"]["ema"], rtol=0, atol=0)
    assert one["cpvt_det"]["seed"] == two["cpvt_det"]["seed"]


@pytest.mark.curves
def test_a_run_leaves_its_files(train):
    folder = train("run", SOLVER__EMA__ENABLED=True, SOLVER__EMA__DECAY=0.9, TEST__EVAL_PERIOD=2)
    expected = "config.yaml log.txt metrics.json last_checkpoint results.json model_0000002.pth model_0000005.pth model_final.pth"
    expected += " model_best.pth inference/coco_instances_results.json pictures/detections.png pictures/curves.png"
    assert [name for name in expected.split() if not (folder / name).is_file()] == []
    assert list(folder.glob("events.out.tfevents*"))
    assert (folder / "last_checkpoint").read_text() == "model_final.pth"
    assert set(json.loads((folder / "results.json").read_text())["bbox"]) >= {
        "AP",
        "AP50",
        "AP75",
        "APs",
        "APm",
        "APl",
        "AP-red",
    }
    lines = metrics_of(folder)
    assert [line["iteration"] for line in lines if "total_loss" in line] == list(range(6))
    assert [line["iteration"] for line in lines if "bbox/AP" in line] == [1, 3, 5]
    assert {"lr", "time", "images_per_second", "eta_seconds", "data_time", "grad_norm", "loss_giou"} <= lines[0].keys()
    log = (folder / "log.txt").read_text()
    assert "6 iterations of 2 images / 5 images = 2.4 epochs" in log
    assert "boxes without area, left out: 1" in log


def test_detections_carry_the_ids_of_the_data(train):
    detections = json.loads((train("run") / "inference/coco_instances_results.json").read_text())
    assert {found["category_id"] for found in detections} <= {3, 17, 90}
    assert {found["image_id"] for found in detections} <= {7, 12, 30, 41, 5}


def test_classes_and_config_travel_in_the_checkpoint(train):
    node = weights_of(train("run") / "model_final.pth")["cpvt_det"]
    assert node["classes"] == {"ids": [3, 17, 90], "names": ["red", "green", "blue"]}
    assert "resnet10" in node["config"]


@pytest.mark.parametrize(("detector", "stop"), [("detr", 2), ("detr", 3), ("detr", 5), ("deformable", 3), ("dino", 2)])
def test_a_resumed_run_is_the_run_never_interrupted(train, detector, stop):
    """Stopped inside an epoch and after one, with dropout, augmentation, denoising, accumulation and a moving average."""
    same = {
        **{**DETECTORS, "dino": DINO}[detector],
        "MODEL__DETR__DROPOUT": 0.3,
        "SOLVER__EMA__ENABLED": True,
        "SOLVER__EMA__DECAY": 0.5,
        "SOLVER__ACCUMULATE": 2,
        "SOLVER__STEPS": (4,),
        "SOLVER__CHECKPOINT_PERIOD": 1,
        "SOLVER__CHECKPOINT_KEEP": 6,
        "DATASETS__TEST": (),
    }
    whole = train("whole", **same)
    part = train("part", **same)
    # As if it had been killed after the checkpoint of iteration `stop`.
    for path in part.glob("model_*.pth"):
        if path.name == "model_final.pth" or int(path.stem[-7:]) >= stop:
            path.unlink()
    (part / "last_checkpoint").write_text(f"model_{stop - 1:07d}.pth")
    (part / "metrics.json").unlink()
    train("part", resume=True, **same)
    assert losses_of(part) == {i: loss for i, loss in losses_of(whole).items() if i >= stop}
    assert_same_run(whole, part)


def test_an_evaluation_that_a_kill_cut_short_is_made_up_for(train):
    """The checkpoint of iteration 2 is there, its evaluation is not."""
    whole, part = train("whole", TEST__EVAL_PERIOD=3), train("part", TEST__EVAL_PERIOD=3)
    for name in ("model_final.pth", "model_0000005.pth", "model_best.pth", "metrics.json"):
        (part / name).unlink()
    (part / "last_checkpoint").write_text("model_0000002.pth")
    train("part", resume=True, TEST__EVAL_PERIOD=3)
    evaluated = [[(line["iteration"], line["bbox/AP"]) for line in metrics_of(run) if "bbox/AP" in line] for run in (whole, part)]
    assert [iteration for iteration, _ in evaluated[0]] == [2, 5]
    assert evaluated[0] == evaluated[1]
    assert weights_of(whole / "model_best.pth")["cpvt_det"]["best"] == weights_of(part / "model_best.pth")["cpvt_det"]["best"]


def test_an_average_switched_on_at_resume_starts_from_the_weights(train):
    folder = train("run", DATASETS__TEST=())
    (folder / "last_checkpoint").write_text("model_0000005.pth")
    train("run", resume=True, SOLVER__EMA__ENABLED=True)
    plain = train("plain", eval_only=True, MODEL__WEIGHTS=str(folder / "model_0000005.pth"))
    found = [(run / "inference/coco_instances_results.json").read_text() for run in (folder, plain)]
    assert found[0] == found[1]


def test_an_evaluation_leaves_the_config_of_the_run(train):
    folder = train("run", DATASETS__TEST=())
    config = (folder / "config.yaml").read_text()
    train("run", eval_only=True, resume=True)
    assert (folder / "config.yaml").read_text() == config


def test_workers_do_not_change_a_run(train):
    none, two = train("none", DATASETS__TEST=()), train("two", DATASETS__TEST=(), DATALOADER__NUM_WORKERS=2)
    assert losses_of(none) == losses_of(two)


def test_a_given_seed_repeats_and_an_open_one_does_not(train):
    short = {"DATASETS__TEST": (), "SOLVER__MAX_ITER": 2}
    assert losses_of(train("a", **short)) == losses_of(train("b", **short))
    assert losses_of(train("c", SEED=-1, **short)) != losses_of(train("d", SEED=-1, **short))


def test_evaluation_repeats_the_result_of_the_run(train):
    folder = train("run")
    again = train("again", eval_only=True, MODEL__WEIGHTS=str(folder / "model_final.pth"))
    assert json.loads((folder / "results.json").read_text()) == json.loads((again / "results.json").read_text())
    by_resume = train("run", eval_only=True, resume=True)
    assert (by_resume / "results.json").read_text() == (again / "results.json").read_text()


def test_the_average_is_what_is_evaluated(train):
    ema = {"SOLVER__EMA__ENABLED": True, "SOLVER__EMA__DECAY": 0.9}
    folder = train("run", **ema)
    again = train("again", eval_only=True, MODEL__WEIGHTS=str(folder / "model_final.pth"), **ema)
    read = [json.loads((run / "inference/coco_instances_results.json").read_text()) for run in (folder, again)]
    assert read[0] == read[1]


def test_a_finished_run_resumed_is_evaluated_again(train):
    folder = train("run")
    results = (folder / "results.json").read_text()
    (folder / "results.json").unlink()
    train("run", resume=True)
    assert (folder / "results.json").read_text() == results


def test_a_run_that_is_longer_than_asked_for_is_not_resumed(train):
    """Neither trained, nor evaluated, nor changed: its config and checkpoints stay those of the run."""
    folder = train("run", DATASETS__TEST=())
    kept = {
        path: path.read_bytes() for path in folder.iterdir() if path.suffix in (".yaml", ".pth") or path.name == "last_checkpoint"
    }
    with pytest.raises(ConfigError, match=r"has 6 iterations already, and the config asks for 5 \(SOLVER.MAX_ITER = 5 iterations"):
        train("run", resume=True, SOLVER__MAX_ITER=5)
    with pytest.raises(ConfigError, match=r"asks for 2 \(2 epochs x 5 images / 4 images per iteration"):
        train("run", resume=True, SOLVER__EPOCHS=2, SOLVER__IMS_PER_BATCH=4)
    assert kept == {path: path.read_bytes() for path in kept}


def test_a_finished_run_without_its_final_checkpoint_gets_it(train):
    """It was killed after its last numbered one."""
    folder = train("run", DATASETS__TEST=())
    before = weights_of(folder / "model_final.pth")
    (folder / "model_final.pth").unlink()
    (folder / "last_checkpoint").write_text("model_0000005.pth")
    train("run", resume=True, DATASETS__TEST=())
    torch.testing.assert_close(weights_of(folder / "model_final.pth")["model"], before["model"], rtol=0, atol=0)


def test_resume_in_an_empty_folder_starts_and_says_so(train):
    folder = train("fresh", resume=True, SOLVER__MAX_ITER=1, DATASETS__TEST=())
    assert "Nothing to resume" in (folder / "log.txt").read_text()


def test_evaluations_are_due_every_period_and_at_the_end():
    length = TrainingSchedule(7, (), 0, 3, "")
    assert [i for i in range(7) if is_due(i, length)] == [2, 5, 6]


def test_several_test_sets_are_evaluated_one_by_one(train, drawn_coco):
    files = drawn_coco.files
    both = [[name, str(files.annotations), str(files.image_root)] for name in ("drawn", "second")]
    folder = train("run", DATASETS__REGISTER=both, DATASETS__TEST=("drawn", "second"), SOLVER__MAX_ITER=1)
    results = json.loads((folder / "results.json").read_text())
    assert results["drawn"] == results["second"]
    assert (folder / "inference/second/coco_instances_results.json").is_file()
    assert "second/bbox/AP" in metrics_of(folder)[-1]


def test_an_evaluation_of_other_classes_is_refused(train, drawn_coco, tmp_path):
    other = {**drawn_coco.content, "categories": [{**c, "name": c["name"] + "ish"} for c in drawn_coco.content["categories"]]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    root = str(drawn_coco.files.image_root)
    both = [["drawn", str(drawn_coco.files.annotations), root], ["other", str(tmp_path / "other.json"), root]]
    for tests in (("other",), ("drawn", "other")):
        with pytest.raises(DataError, match="different classes"):
            train("bad", DATASETS__REGISTER=both, DATASETS__TEST=tests)


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        ({"MODEL__NUM_CLASSES": 7}, DataError, "the data has 3 classes"),
        ({"DATASETS__TRAIN": ("nope",)}, ConfigError, "unknown data set .*'nope'.*coco_2017_train"),
        ({"DATASETS__TRAIN": ()}, ConfigError, r"DATASETS\.TRAIN must list"),
        ({"DATASETS__REGISTER": [["drawn", "missing.json", "."]]}, DataError, "missing.json"),
        ({"MODEL__POSITION__NAME": "pge"}, ConfigError, "unknown position encoding 'pge'.*peg"),
        ({"MODEL__BACKBONE__NAME": "vgg"}, ConfigError, "unknown backbone 'vgg'"),
        ({"MODEL__DETR__HIDDEN_DIM": 33}, ConfigError, "33"),
        ({"MODEL__DEVICE": "warp"}, ConfigError, "MODEL.DEVICE"),
        ({"MODEL__WEIGHTS": "missing.pth"}, WeightsError, "missing.pth"),
        ({"SOLVER__IMS_PER_BATCH": 0}, ConfigError, "batch of 0"),
        ({"INPUT__FORMAT": "BGR"}, ConfigError, "RGB"),
        ({"INPUT__RESIZE_CROP__RANGE": (32, 24)}, ConfigError, "crop sides"),
        ({"TEST__DETECTIONS_PER_IMAGE": 0}, ConfigError, "DETECTIONS_PER_IMAGE"),
        ({"SOLVER__CHECKPOINT_PERIOD": 0}, ConfigError, "CHECKPOINT_PERIOD"),
        ({"MODEL__DETR__NUM_OBJECT_QUERIES": 0}, ConfigError, "num_queries"),
        ({"SEED": 2**63}, ConfigError, "SEED"),
        ({"MODEL__BACKBONE__WEIGHTS": "DEFAULT"}, ConfigError, "unknown backbone weights"),
        ({"MODEL__META_ARCHITECTURE": "RetinaNet"}, ConfigError, "CPVTDetr"),
        ({"MODEL__BACKBONE__WEIGHTS": "IMAGENET1K_V9", "MODEL__BACKBONE__NAME": "resnet18"}, ConfigError, "IMAGENET1K_V1"),
    ],
)
def test_bad_input_is_told_in_words(train, more, error, match):
    with pytest.raises(error, match=match):
        train("bad", **more)


def test_evaluation_without_weights_or_with_others_is_refused(train):
    with pytest.raises(WeightsError, match=r"MODEL\.WEIGHTS"):
        train("none", eval_only=True)
    folder = train("run", DATASETS__TEST=(), SOLVER__MAX_ITER=1)
    with pytest.raises(WeightsError, match="fits only part"):
        train("other", eval_only=True, MODEL__WEIGHTS=str(folder / "model_final.pth"), MODEL__DETR__NUM_OBJECT_QUERIES=5)


def test_weights_of_another_run_start_a_run_but_do_not_resume_it(train):
    folder = train("run", DATASETS__TEST=(), SOLVER__MAX_ITER=1)
    train("next", MODEL__WEIGHTS=str(folder / "model_final.pth"), MODEL__DETR__NUM_OBJECT_QUERIES=4, SOLVER__MAX_ITER=1)
    with pytest.raises(WeightsError, match=r"different shapes.*input_proj"):
        train("wide", MODEL__WEIGHTS=str(folder / "model_final.pth"), MODEL__DETR__HIDDEN_DIM=32)
    with pytest.raises(WeightsError, match="cannot be resumed"):
        train("run", resume=True, MODEL__DETR__HIDDEN_DIM=32)


def test_more_gpus_than_there_are_is_an_error():
    with pytest.raises(ConfigError, match="--num-gpus 99"):
        launch(print, 99)


def test_an_unwritable_folder_is_named(drawn_coco, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="OUTPUT_DIR"):
        run(load_cfg("", overrides(drawn_coco.files, tmp_path / "file" / "below")))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_names_itself(train, drawn_coco, workers):
    """Damaged in the middle, which the check before the run does not see."""
    path = next(drawn_coco.files.image_root.rglob("012.png"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"012\.png") as caught:
        train("run", DATALOADER__NUM_WORKERS=workers)
    assert first_line(caught.value).startswith("cannot read image")


@pytest.mark.parametrize("where", ["between", "within"])
def test_an_error_between_two_steps_loses_none_and_one_within_is_not_saved(train, monkeypatch, where):
    """Resumed, the run is the run never interrupted; half a step would not be."""
    whole = train("whole", DATASETS__TEST=())
    owner, name = (RunGuard, "obey_signals") if where == "between" else (TrainStep, "_clip")
    real, calls = getattr(owner, name), []

    def fail(self, *arguments):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("out of memory")
        return real(self, *arguments)

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        train("cut", DATASETS__TEST=())
    saved = sorted(path.name for path in (whole.parent / "cut").glob("model_*.pth"))
    assert saved == ["model_0000002.pth", *(["model_0000004.pth"] if where == "between" else [])]
    cut = train("cut", resume=True, DATASETS__TEST=())
    assert losses_of(whole) == losses_of(cut)
    assert_same_run(whole, cut)


def test_an_evaluation_removes_what_a_killed_one_left(train):
    folder = train("run", SOLVER__MAX_ITER=1)
    (folder / "inference/.coco_instances_results.json.1.tmp").write_text("half")
    train("run", resume=True, eval_only=True)
    assert [path.name for path in (folder / "inference").iterdir()] == ["coco_instances_results.json"]


@pytest.mark.parametrize("detector", DETECTORS)
def test_two_processes_take_the_steps_of_one(detector, drawn_coco, train, tmp_path):
    """With gloo on CPUs: the same losses and weights as one process with the same batch, up to rounding."""
    same = {
        **DETECTORS[detector],
        "MODEL__DETR__DROPOUT": 0.0,
        "MODEL__BACKBONE__NORM": "GN",
        "MODEL__POSITION__NORM": "SyncBN",
        "TEST__EVAL_PERIOD": 3,
    }
    config = tmp_path / "empty.yaml"
    config.write_text("VERSION: 2\n")
    train("one", **same)
    words = ["train", "--num-gpus", "0", "--config-file", config, "--runner", "builtin"]
    ended = run_group(tmp_path / "printed", [*words, *overrides(drawn_coco.files, tmp_path / "two", **same)])
    assert [one.code for one in ended] == [0, 0], ended
    assert losses_of(tmp_path / "one") == pytest.approx(losses_of(tmp_path / "two"), rel=1e-4)
    one, two = (json.loads((tmp_path / name / "results.json").read_text())["bbox"] for name in ("one", "two"))
    assert one.keys() == two.keys()
    files = [json.loads((tmp_path / name / "inference/coco_instances_results.json").read_text()) for name in ("one", "two")]
    assert [found["image_id"] for found in files[0]] == [found["image_id"] for found in files[1]]


def test_a_checkpoint_is_written_by_the_clock_too(drawn_coco, tmp_path):
    """Looked at in every ``LOG_PERIOD``; an hour has not passed, and a billionth of a minute has."""
    for name, minutes, expected in (("hour", 60.0, []), ("now", 1e-9, ["model_0000001", "model_0000003"])):
        more = {"SOLVER__CHECKPOINT_MINUTES": minutes, "SOLVER__LOG_PERIOD": 2, "SOLVER__MAX_ITER": 5, "DATASETS__TEST": ()}
        run(load_cfg("", overrides(drawn_coco.files, tmp_path / name, SOLVER__CHECKPOINT_PERIOD=100, **more)))
        assert sorted(path.stem for path in (tmp_path / name).glob("model_0*.pth")) == expected


def test_a_run_keeps_its_id_while_one_of_its_torchruns_is_there(tmp_path, monkeypatch):
    """A lost machine is replaced by another; all new ones are a new run, and so are processes without a torchrun."""
    ours = [["a:1", "b:1"], ["a:1", "c:2"], ["d:1", "e:1"], ["", ""]]
    (tmp_path / "run_id").write_text("first")
    for number, agents in enumerate(ours):
        monkeypatch.setattr(setup.distributed, "gather_objects", lambda value, agents=agents: agents)
        if number == 0:
            setup.record_agents(tmp_path, "first")
        assert (setup.choose_run_id(tmp_path) == "first") is (number < 2)
