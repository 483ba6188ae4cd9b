# SPDX-License-Identifier: Apache-2.0
"""``train FOLDER --start``: which detector a run starts from, the rule by which it is fine-tuned, and what it says of both."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_folders as layouts
import torch
import yaml
from click.testing import CliRunner
from test_starts import served  # noqa: F401
from tiny import save_random

from cpvt_det.builders import build_detector
from cpvt_det.builders.trained import load_trained
from cpvt_det.checkpoint import fetch
from cpvt_det.checkpoint.fetch import STARTER, Place, Start, starts
from cpvt_det.checkpoint.files import sha256_of
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.checkpoint.load import load_weights, nearly_named
from cpvt_det.checkpoint.weights import read_weights
from cpvt_det.cli import main
from cpvt_det.common.class_names import COCO_CLASSES, COCO_ROWS, Classes
from cpvt_det.common.errors import ConfigError, WeightsError
from cpvt_det.config import load_cfg
from cpvt_det.predict import Predictor
from cpvt_det.training import choose, tuning
from cpvt_det.training.recipe import DataFacts, MachineFacts, Pace, Plan, first_plan, length_choices

WORDS = ("--num-gpus", "0", "--runner", "builtin", "INPUT.MIN_SIZE_TEST", "48", "INPUT.MAX_SIZE_TEST", "64", "SOLVER.EPOCHS", "1")
CELLS = DataFacts(images=205, val_images=87, most_objects=28, sides=(0.17, 0.197), short_side=480, elongation=1.33)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """``train FOLDER WORDS`` on six images, after one measured step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choose, "WARM_UP", 0)
    monkeypatch.setattr(choose, "STEPS", 1)
    layouts.write_labelimg_yolo(tmp_path / "mine")

    def call(*words):
        done = CliRunner().invoke(main, ["train", "mine", *map(str, words), *WORDS])
        chosen = tmp_path / "output/mine/chosen.yaml"
        return done, yaml.safe_load(chosen.read_text()) if chosen.is_file() else None

    return call


def quick(monkeypatch):
    """Measuring and the run replaced: the choice is what is tested."""
    monkeypatch.setattr(choose, "measure", lambda cfg, datasets, processes: Pace(0.2, 0.1))
    monkeypatch.setattr("cpvt_det.cli.train.run_config", lambda *words: {})


def test_a_run_starts_from_a_name_and_its_yaml_repeats_it(served, train, tmp_path):  # noqa: F811
    model = served("dino_r50")
    done, chosen = train("--start", "dino_r50")
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "home/dino_r50").glob("*.pth")
    assert f"start: dino_r50 (50.6 AP on COCO, of IDEA-Research/detrex, SHA-256 {sha256_of(path)})" in done.output
    assert (chosen["MODEL"]["WEIGHTS"], chosen["MODEL"]["WEIGHTS_SHA256"]) == ("dino_r50", sha256_of(path))
    assert chosen["MODEL"]["QUERIES"]["DENOISING"] == 100 and chosen["MODEL"]["DETR"]["NUM_OBJECT_QUERIES"] == model.num_queries
    assert (chosen["SOLVER"]["BASE_LR"], chosen["SOLVER"]["BACKBONE_LR"]) == (1e-4, 1e-5)
    assert "LR_MULTIPLIERS" not in chosen["SOLVER"] and "classes that these weights already know: 2 of 2\n" in done.output
    words = ["train", "--config-file", "output/mine/chosen.yaml", "--num-gpus", "0", "--runner", "builtin", "OUTPUT_DIR", "again"]
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 0, again.output
    first, second = (torch.load(folder / "model_final.pth")["model"] for folder in (tmp_path / "output/mine", tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.save({**torch.load(path), "epoch": 1}, path)  # another file with the same weights
    changed = CliRunner().invoke(main, [*words[:-1], "third"])
    assert changed.exit_code == 2 and "dino_r50 does not have the SHA-256 in MODEL.WEIGHTS_SHA256" in changed.output


def test_a_run_starts_from_a_file_and_from_the_folder_of_a_run(train, tmp_path, monkeypatch):
    quick(monkeypatch)
    (tmp_path / "old").mkdir()
    rates = {"SOLVER__BASE_LR": 7e-4, "SOLVER__BACKBONE_LR": 7e-5}
    weights = save_random(tmp_path / "old/model_best.pth", TEST__NMS=0.6, **rates)
    for word in ("old/model_best.pth", "old"):
        shutil.rmtree(tmp_path / "output", ignore_errors=True)
        done, chosen = train("--start", word)
        assert done.exit_code == 0, done.output
        assert chosen["MODEL"]["WEIGHTS"] == word and chosen["MODEL"]["BACKBONE"]["NAME"] == "resnet10"
        assert (
            chosen["MODEL"]["WEIGHTS_SHA256"] == sha256_of(weights)
            and "classes that these weights already know: 0 of 2; new: " in done.output
        )
        assert (chosen["SOLVER"]["BASE_LR"], chosen["SOLVER"]["BACKBONE_LR"]) == (7e-4, 7e-5)
        assert "LR_MULTIPLIERS" not in chosen["SOLVER"] and chosen["TEST"]["NMS"] == 0.6
    shutil.rmtree(tmp_path / "output")
    done, same = train("MODEL.WEIGHTS", "old")
    assert done.exit_code == 0 and same["MODEL"] == chosen["MODEL"] and same["SOLVER"] == chosen["SOLVER"]
    done, _ = train("--start", "old", "MODEL.WEIGHTS", "old")
    assert done.exit_code == 2 and "--start and MODEL.WEIGHTS set the same thing" in done.output


def test_rates_are_those_of_a_detector_of_ours_and_of_others_those_of_fine_tuning(tmp_path):
    """Heads of classes that another project's detector does not know learn ten times as fast."""
    rates = {"SOLVER__BASE_LR": 14e-4, "SOLVER__BACKBONE_LR": 14e-5, "SOLVER__IMS_PER_BATCH": 8}
    start = tuning.open_start(str(save_random(tmp_path / "old.pth", **rates)), print)
    found = {}
    for is_ours in (True, False):
        one = replace(start, is_ours=is_ours)
        choices = tuning.tuning_choices(one, Plan(224, 2), replace(CELLS, most_objects=3), MachineFacts("cpu", 2), ["new"], {})
        found[is_ours] = {choice.key.removeprefix("SOLVER."): choice.value for choice in choices}
    keys = ("BASE_LR", "BACKBONE_LR", "LR_MULTIPLIERS")
    assert [found[True].get(key) for key in keys] == [7e-4, 7e-5, None]
    assert [found[False].get(key) for key in keys] == [1e-4, 1e-5, [["class_embed", 10.0]]]


def test_without_a_network_a_start_is_refused_before_the_data_are_read(train, tmp_path, monkeypatch):
    monkeypatch.setenv(fetch.HOME, str(tmp_path / "home"))
    monkeypatch.setattr("cpvt_det.cli.folder._read", None)
    monkeypatch.setitem(starts(), "detr_r50", Start("detr_r50", places=(Place("http://127.0.0.1:9/detr.pth", "0" * 64),)))
    done, _ = train("--start", "detr_r50")
    assert done.exit_code == 2 and "cannot fetch http://127.0.0.1:9/detr.pth" in done.output and "put it at" in done.output


def test_nothing_is_fetched_unasked(served, train, monkeypatch, tmp_path):  # noqa: F811
    """The start of the device is taken where it is on this machine, and else named."""
    quick(monkeypatch)
    served("dino_r50")
    told = []
    assert tuning.choose_start(None, "cuda", [], told.append).word == STARTER
    assert told[:-1] == [
        "--start auto fetches dino_r50, a detector trained on COCO, which needs fewer steps",
        "starter_lite0 is on this machine, so the run starts from it; --start none starts from ImageNet weights",
    ]
    assert not (tmp_path / "home").exists()
    assert tuning.choose_start("none", "cuda", [], told.append) is None and len(told) == 3
    assert tuning.choose_start("auto", "cuda", [], told.append).word == "dino_r50"
    assert tuning.choose_start(None, "cuda", ["MODEL.DEVICE"], told.append).word == "dino_r50"
    assert told[-2] == "dino_r50 is on this machine, so the run starts from it; --start none starts from ImageNet weights"
    assert tuning.choose_start(None, "cuda", ["MODEL.DETR.ENC_LAYERS"], told.append) is None


# The detector in the package


def test_a_run_on_a_cpu_starts_from_the_detector_in_the_package(train, monkeypatch):
    quick(monkeypatch)
    for words in ((), ("--start", "auto"), ("--start", STARTER)):
        done, chosen = train(*words, "OUTPUT_DIR", "output/mine")
        assert done.exit_code == 0 and "start: starter_lite0 (SHA-256 " in done.output, done.output
        assert chosen["MODEL"]["WEIGHTS"] == STARTER and chosen["MODEL"]["BACKBONE"]["NAME"] == "timm/tf_efficientnet_lite0"
        assert chosen["MODEL"]["DETR"]["NUM_OBJECT_QUERIES"] == 50 and chosen["SOLVER"]["BASE_LR"] == 1.06e-3
    for words in (("--start", "none"), ("MODEL.POSITION.NAME", "peg")):
        done, chosen = train(*words, "OUTPUT_DIR", "output/mine")
        assert done.exit_code == 0 and "start:" not in done.output and not chosen["MODEL"].get("WEIGHTS")


def test_without_timm_a_run_does_not_start_from_it_and_says_so(monkeypatch):
    monkeypatch.setattr(tuning.importlib.util, "find_spec", lambda name: None)
    told = []
    assert tuning.choose_start(None, "cpu", [], told.append) is None
    assert told == [f"the run cannot start from the detector that comes with the package, as timm is not installed: {tuning.PIP}"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"most_objects": 151},
            "starter_lite0 has too few queries for 151 objects in an image, so the run starts as with --start none",
        ),
        (
            {"sides": (0.29, 0.4)},
            "starter_lite0 has a map for small objects, but the objects are large, and steps without it are faster, so the run "
            "starts as with ",
        ),
        ({"sides": (0.28, 0.4)}, ""),  # 0.28 * 224 = 62.7 pixels
    ],
)
def test_data_that_it_does_not_suit_are_for_a_new_detector_unless_the_user_names_it(monkeypatch, changed, said):
    monkeypatch.setattr(choose, "measure", lambda cfg, datasets, processes: Pace(0.2, 0.1))
    monkeypatch.setattr("cpvt_det.training.recipe.describe_data", lambda *records: replace(CELLS, **changed))
    monkeypatch.setattr(choose, "_refuse_early", lambda *words: None)
    data = SimpleNamespace(classes=Classes((1,), ("cell",)), records=[])

    def values(word):
        told, start = [], tuning.choose_start(word, "cpu", [], print)
        choices = choose.choose_settings([], [], [data, data], MachineFacts("cpu", 2), 600.0, told.append, start)
        return told, {choice.key: choice.value for choice in choices}

    told, chosen = values(None)
    assert told[0].startswith(said or "classes that these weights already know") and (chosen.get("MODEL.WEIGHTS") == STARTER) == (
        not said
    )
    if "most_objects" in changed:
        with pytest.raises(ConfigError, match="choose another --start, or --start none"):
            values(STARTER)
    else:
        assert values(STARTER)[1]["MODEL.WEIGHTS"] == STARTER


def test_its_file_is_small_and_every_tensor_of_it_is_used():
    weights = read_weights(STARTER)
    assert weights.path.stat().st_size < 10e6
    floats = [tensor for tensor in weights.state_dict.values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {torch.float16} and all(tensor.isfinite().all() for tensor in floats)
    trained = load_trained(STARTER, "cpu")
    norms = [module for module in trained.detector.modules() if hasattr(module, "running_var")]
    assert norms and all((norm.running_var >= 0).all() and norm.eps == 1e-3 for norm in norms), "a variance of 0 divides by no 0"
    assert "CC BY 4.0" in weights.path.with_name("README.md").read_text(encoding="utf-8"), "the licences of its data"
    assert Predictor.from_pretrained(STARTER, "cpu").classes == trained.classes
    done = CliRunner().invoke(main, ["weights", STARTER])
    assert done.exit_code == 0 and Path(done.output.strip()) / "model.safetensors" == weights.path


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("detr_r50", ("MODEL.DETR.NUM_OBJECT_QUERIES", "5"), "NUM_OBJECT_QUERIES 5: detr_r50 has 8 trained queries; leave it out"),
        ("dino_r50", ("MODEL.DETR.NUM_OBJECT_QUERIES", "9"), "NUM_OBJECT_QUERIES 9: dino_r50 has at most 8 trained queries"),
        ("dino_r50", ("MODEL.DETR.NUM_OBJECT_QUERIES", "7"), ""),
    ],
)
def test_queries_are_those_of_the_start_or_its_first(served, train, monkeypatch, name, words, said):  # noqa: F811
    quick(monkeypatch)
    served(name)
    done, chosen = train("--start", name, *words)
    assert done.exit_code == (2 if said else 0) and said in done.output, done.output
    if not said:
        assert chosen["MODEL"]["DETR"]["NUM_OBJECT_QUERIES"] == 7


def test_options_of_a_folder_are_refused_beside_a_config():
    done = CliRunner().invoke(main, ["train", "--config-file", "coco/detr_r50_peg_50ep.yaml", "--start", "detr_r50"])
    assert done.exit_code == 2 and "--start need a FOLDER" in done.output


# The rule


def test_the_rule_by_hand():
    """The canvas is at least 384 where images have it; the warm-up has 100 to 300 steps, or a fifth of a short run."""
    machine = MachineFacts("cuda", 16)
    assert first_plan(CELLS, machine).canvas == 224 and first_plan(CELLS, machine, 384).canvas == 384
    for steps, expected in ((200, 40), (1000, 100), (5000, 150), (40_000, 300)):
        plan = Plan(384, 2, tunes=True)
        epochs = steps * 2 / CELLS.images
        values = {choice.key: choice.value for choice in length_choices(plan, CELLS, Pace(0.2, 0.1), 10**6, epochs)}
        assert values["SOLVER.WARMUP_EPOCHS"] * CELLS.images / 2 == pytest.approx(expected, rel=0.01)
        share_of_warm_up = values["SOLVER.EMA.DECAY"] ** (steps - expected)
        assert share_of_warm_up < 1e-6, "the moving average at the end is one of what came after the warm-up"


# Classes


def test_names_that_are_nearly_the_same_are_suggested_and_not_taken():
    known = COCO_ROWS.names
    asked = ["Person", "cars", "car ", "traffic-light", "TV", "buses", "helmet", "person"]
    near = {"Person": "person", "cars": "car", "car ": "car", "traffic-light": "traffic light", "TV": "tv", "buses": "bus"}
    assert nearly_named(asked[:-1], known) == near
    cfg = load_cfg("", ["MODEL.NUM_CLASSES", "1", "MODEL.BACKBONE.NAME", "resnet10", "MODEL.DETR.HIDDEN_DIM", "16"])
    model = build_detector(cfg)
    node = {"classes": {"ids": [1], "names": ["person"]}}
    report = load_weights(model, {"model": model.state_dict(), "cpvt_det": node}, ["Person"])
    assert report.rows_by_name == {"Person": None} and "but person is (the same class?)" in report.table()


# PEG


@pytest.mark.parametrize("name", ["detr_r50", "deformable_detr_r50_two_stage", "dino_r50"])
def test_a_zero_peg_on_a_start_changes_no_bit(served, name):  # noqa: F811
    model, start = served(name), starts()[name]
    encoding = load_cfg(start.config, start.overrides).MODEL.POSITION.NAME
    words = ("MODEL.POSITION.NAME", f"{encoding}+peg", "MODEL.POSITION.PEG", "{'ZERO_INIT': True}", "MODEL.WEIGHTS", name)
    cfg = load_cfg(start.config, (*start.overrides, *words))
    cfg.MODEL.NUM_CLASSES = start.rows if start.rows == 80 else 91
    with_peg, classes = build_detector(cfg).eval(), COCO_CLASSES if start.rows == 80 else COCO_ROWS
    load_initial_weights(cfg, with_peg, classes)
    batch = model.preprocess([torch.rand(3, 64, 96) * 255, torch.rand(3, 72, 40) * 255])
    with torch.no_grad():
        first, second = (one(batch.images, batch.padding_mask) for one in (model, with_peg))
    assert torch.equal(first.logits, second.logits) and torch.equal(first.boxes, second.boxes)


def test_a_file_with_another_hash_is_refused_for_training_alone(tmp_path):
    weights = save_random(tmp_path / "weights.pth")
    cfg = load_cfg("", ["MODEL.WEIGHTS", str(weights), "MODEL.WEIGHTS_SHA256", "f" * 64])
    with pytest.raises(WeightsError, match=r"weights\.pth does not have the SHA-256 in MODEL\.WEIGHTS_SHA256, ffff"):
        load_initial_weights(cfg, None, Classes((1,), ("red",)))
