# SPDX-License-Identifier: Apache-2.0
"""The rule of ``cpvt-det train FOLDER``, on made-up data and machines; the facts that it starts from, by hand."""

import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import save_random

from cpvt_det import builders
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import BadInputError, ConfigError
from cpvt_det.config import get_cfg
from cpvt_det.data.records import ImageRecord
from cpvt_det.training import choose
from cpvt_det.training.choose import choose_settings, config_of, describe_machine, write_choices
from cpvt_det.training.recipe import (
    CANVASES,
    FEWEST_STEPS,
    FEWEST_STEPS_TUNED,
    MANY_STEPS,
    MOST_EPOCHS,
    STEPS_TO_THAW,
    Choice,
    DataFacts,
    MachineFacts,
    Pace,
    Plan,
    describe_data,
    first_plan,
    format_seconds,
    length_choices,
    model_choices,
    next_plan,
    steps_in,
    threads_choices,
)
from cpvt_det.training.setup import setup_run, stop_log
from cpvt_det.training.tuning import open_start

FISH = DataFacts(images=448, val_images=127, most_objects=56, sides=(0.04, 0.0624), short_side=768, elongation=1.78)
CELLS = DataFacts(images=205, val_images=87, most_objects=28, sides=(0.17, 0.197), short_side=480, elongation=1.33)
LAPTOP, GPU = MachineFacts("cpu", 2), MachineFacts("cuda", 16, 2)


def chosen(plan, data=FISH, machine=LAPTOP):
    return {choice.key: choice.value for choice in model_choices(plan, data, machine)}


def test_facts_of_two_images_by_hand():
    boxes = np.array([[0, 0, 10, 40], [5, 5, 15, 15]], np.float32)  # sides 20 and 10
    tall = ImageRecord("a", 1, 200, 100, boxes, np.array([0, 1]))
    wide = ImageRecord("b", 2, 50, 60, boxes[1:], np.array([0]))
    empty = ImageRecord("c", 3, 50, 50, boxes[:0], np.array([], int))
    facts = describe_data([tall, wide, empty], [wide])
    assert (facts.images, facts.val_images, facts.most_objects, facts.short_side) == (3, 1, 2, 50)
    assert describe_data([wide], [tall]).most_objects == 2  # in a validation image
    np.testing.assert_allclose(facts.sides, np.percentile([0.2, 0.1, 0.2], (10, 25)), rtol=1e-6)
    assert facts.elongation == pytest.approx(np.percentile([2, 1.2, 1], 95))


@pytest.mark.parametrize(
    ("data", "machine", "canvas", "batch", "why"),
    [
        (FISH, LAPTOP, 320, 2, "small objects should have sides of 18"),  # 18 / 0.0624 = 288.5
        (CELLS, LAPTOP, 224, 2, "the smallest for photographs"),  # 18 / 0.197 = 91, but photographs have at least 224
        (replace(FISH, sides=(0.01, 0.02)), LAPTOP, 384, 2, "the largest for a CPU"),  # 900 pixels: as large as this machine may
        (replace(FISH, sides=(0.01, 0.02)), GPU, 640, 16, "the largest for a GPU"),  # 8 for each process
        (
            replace(FISH, short_side=300, sides=(0.01, 0.02)),
            GPU,
            256,
            16,
            "images have short sides of 300",
        ),  # never larger than the images
        (replace(CELLS, short_side=100), LAPTOP, 128, 2, "images have short sides of 100"),
    ],
)
def test_the_canvas_is_asked_for_by_the_objects_and_bounded_by_images_and_machine(data, machine, canvas, batch, why):
    plan = first_plan(data, machine)
    assert (plan.canvas, plan.batch) == (canvas, batch) and plan.canvas in CANVASES
    assert plan.why_canvas.startswith(f"{why}; a quarter of the objects then have sides of at most ")


@pytest.mark.parametrize(
    ("plan", "steps", "expected"),
    [
        (Plan(384, 2), FEWEST_STEPS, Plan(384, 2)),
        (Plan(384, 2), FEWEST_STEPS / 2, Plan(256, 2)),  # 384 / root of 2 = 271
        (Plan(384, 2), 1, Plan(224, 2, freeze_at=5)),
        (Plan(384, 2), STEPS_TO_THAW / 2, Plan(224, 2)),  # there 2,939 fit
        (Plan(384, 2, typed_test=True), FEWEST_STEPS / 2, Plan(384, 2, typed_test=True)),
        (Plan(384, 2, typed_test=True), 1, Plan(384, 2, freeze_at=5, typed_test=True)),
        (Plan(224, 2), STEPS_TO_THAW - 1, Plan(224, 2, freeze_at=5)),
        (Plan(224, 2, freeze_at=5), 1, Plan(224, 2, freeze_at=5)),  # nothing smaller helps
        (Plan(128, 2), STEPS_TO_THAW, Plan(128, 2)),
        (Plan(320, 2, tunes=True), FEWEST_STEPS_TUNED, Plan(320, 2, freeze_at=5, tunes=True)),
        (Plan(320, 2, tunes=True), 784, Plan(256, 2, freeze_at=5, tunes=True)),  # 320 * root of 784 / 1200 = 259
        (Plan(320, 2, tunes=True), 400, Plan(224, 2, freeze_at=5, tunes=True)),  # 185, but 224 is the smallest
        (Plan(384, 2), MANY_STEPS, Plan(384, 4)),
        (Plan(384, 2), 2 * MANY_STEPS, Plan(384, 4, encoder_layers=2)),
        (Plan(640, 8), 2 * MANY_STEPS, Plan(640, 16, encoder_layers=2)),
        (Plan(384, 4, typed_batch=True), 10 * MANY_STEPS, Plan(384, 4, typed_batch=True)),
    ],
)
def test_few_steps_mean_a_smaller_canvas_and_many_a_larger_batch(plan, steps, expected):
    found = next_plan(plan, steps, replace(FISH, images=10**6))
    assert replace(found, why_canvas="", why_batch="") == expected
    assert (found == plan) == (expected == plan)


@pytest.mark.parametrize(
    ("steps", "images", "settled", "many"),
    [
        (8_149, 205, None, True),
        (8_149, 400, None, False),  # 41 epochs
        (501, 20, None, True),  # where the time is short, too
        (500, 20, None, False),
        (8_149, 205, 50, False),
        (100, 10**6, 51, True),
    ],
)
def test_of_many_epochs_colours_are_varied(steps, images, settled, many):
    found = next_plan(Plan(224, 2), steps, replace(CELLS, images=images), settled)
    assert found.many_epochs == many
    assert chosen(found, CELLS).get("INPUT.AUGMENTATIONS") == (["RandomPhotometricDistort"] if many else None)


def test_small_objects_get_the_fine_map_and_many_objects_more_queries():
    cells, cards = chosen(Plan(224, 2), CELLS), chosen(Plan(224, 2), replace(CELLS, sides=(0.287, 0.346)))
    assert (cells["MODEL.BACKBONE.STAGES"], cells["MODEL.DETECTOR.NUM_LEVELS"]) == ([3, 4, 5], 3)
    assert (cards["MODEL.BACKBONE.STAGES"], cards["MODEL.DETECTOR.NUM_LEVELS"]) == ([4, 5], 2)
    queries = {
        most: chosen(Plan(256, 2), replace(FISH, most_objects=most))["MODEL.DETR.NUM_OBJECT_QUERIES"] for most in (1, 56, 200, 500)
    }
    assert queries == {1: 50, 56: 120, 200: 400, 500: 600}
    pairs = {
        most: chosen(Plan(256, 2), replace(FISH, most_objects=most)).get("MODEL.QUERIES.DENOISING") for most in (1, 56, 100, 101)
    }
    assert pairs == {1: 50, 56: 100, 100: 100, 101: None}
    kept = {
        most: chosen(Plan(256, 2), replace(FISH, most_objects=most)).get("TEST.DETECTIONS_PER_IMAGE") for most in (56, 91, 500, 900)
    }
    assert kept == {56: None, 91: 190, 500: 600, 900: 990}


def test_sizes_are_around_the_canvas_and_rates_follow_the_batch():
    two, four = chosen(Plan(256, 2)), chosen(Plan(256, 4))
    assert two["INPUT.MIN_SIZE_TRAIN"] == [224, 240, 256, 272, 288] and two["INPUT.MIN_SIZE_TEST"] == 272
    assert two["INPUT.MAX_SIZE_TEST"] == 512 and chosen(Plan(256, 2), replace(FISH, elongation=9.0))["INPUT.MAX_SIZE_TEST"] == 544
    assert chosen(Plan(256, 2, typed_test=True))["INPUT.MIN_SIZE_TEST"] == 256
    assert (four["SOLVER.BASE_LR"], four["SOLVER.BACKBONE_LR"]) == (1e-3, 1e-4)
    assert two["SOLVER.BASE_LR"] == pytest.approx(1e-3 / 2**0.5, rel=1e-3)


@pytest.mark.parametrize("machine", [LAPTOP, GPU, replace(LAPTOP, pretrained=False)])
def test_what_is_chosen_is_a_detector_that_can_be_built(machine):
    plan = first_plan(FISH, machine)
    cfg = config_of([*model_choices(plan, FISH, machine), *length_choices(plan, FISH, Pace(0.2, 0.1), 1800)])
    cfg.MODEL.NUM_CLASSES = 7
    if machine.pretrained:
        pytest.importorskip("timm")
    detector = builders.build_detector(cfg)
    trained = sum(parameter.numel() for parameter in detector.parameters() if parameter.requires_grad)
    assert detector.num_queries == 120 and trained > 1e6
    is_frozen = any(not parameter.requires_grad for parameter in detector.backbone.parameters())
    assert is_frozen == machine.pretrained
    assert builders.build_schedule(cfg, 448).max_iter == round(cfg.SOLVER.EPOCHS * 448 / plan.batch)


def test_the_length_fills_the_budget():
    """1,710 of 1,800 s; 5 evaluations of 12.7 s; so 8,232 steps of 0.2 s: 36.75 epochs of 224 steps."""
    values = {choice.key: choice.value for choice in length_choices(Plan(256, 2), FISH, Pace(0.2, 0.1), 1800)}
    assert values["SOLVER.EPOCHS"] == pytest.approx((0.95 * 1800 - 5 * 12.7) / 0.2 * 2 / 448, rel=0.01)
    assert values["TEST.EVAL_EPOCHS"] == pytest.approx(values["SOLVER.EPOCHS"] / 5, rel=0.01)
    assert values["SOLVER.EMA.DECAY"] == pytest.approx(1 - 30 / 8232, abs=2e-4)
    assert steps_in(1800, Pace(0.2, 0.1), FISH) == pytest.approx((0.95 * 1800 - 12.7) / 0.2)


def test_evaluations_take_a_twentieth_of_the_budget_at_most_beside_the_last():
    """A budget of 1,200 s has room for two of 25.4 s more than the last."""
    choices = {choice.key: choice for choice in length_choices(Plan(256, 2), FISH, Pace(0.5, 0.2), 1200)}
    assert choices["TEST.EVAL_EPOCHS"].value == pytest.approx(choices["SOLVER.EPOCHS"].value / 3, rel=0.01)


def test_a_large_budget_stops_at_the_most_epochs_and_a_small_one_has_a_step():
    """50 epochs of 1,000 images; of 20 images, 500 epochs of 10 steps."""
    few = replace(CELLS, images=20, val_images=5)
    for data, epochs in ((replace(CELLS, images=1000), MOST_EPOCHS), (few, 500)):
        most = {choice.key: choice for choice in length_choices(Plan(224, 2), data, Pace(0.1, 0.1), 36_000)}["SOLVER.EPOCHS"]
        assert most.value == epochs and "the longest run that is planned" in most.reason
    quick = {choice.key: choice.reason for choice in length_choices(Plan(224, 2), few, Pace(0.1, 0.01), 600)}
    assert quick["TEST.EVAL_EPOCHS"] == "an evaluation takes less than a second"
    least = {choice.key: choice.value for choice in length_choices(Plan(224, 2), FISH, Pace(9.0, 9.0), 1)}
    assert least["SOLVER.EPOCHS"] > 0 and least["SOLVER.EMA.DECAY"] == 0.9


def test_what_is_written_is_what_was_chosen_with_the_reasons():
    choices = [
        Choice("OUTPUT_DIR", "a: b"),
        Choice("MODEL.DETR.NHEADS", 4, "because"),
        Choice("DATASETS.REGISTER", [["a", "b", "c"]]),
    ]
    text = write_choices(choices, ["how", "why"])
    assert text.splitlines() == [
        "# how",
        "# why",
        "OUTPUT_DIR: 'a: b'",
        "MODEL:",
        "  DETR:",
        "    NHEADS: 4  # because",
        "DATASETS:",
        "  REGISTER: [[a, b, c]]",
    ]


def records(count):
    boxes = np.array([[4, 4, 30, 30]], np.float32)
    return [ImageRecord(f"{number}.png", number, 64, 96, boxes, np.array([0])) for number in range(count)]


@pytest.fixture
def paces(monkeypatch):
    """Measuring replaced: each call takes the next pace, and its config is kept."""
    measured, seen = [], []

    def measure(cfg, datasets, processes):
        seen.append(cfg)
        return measured.pop(0)

    monkeypatch.setattr("cpvt_det.training.choose.measure", measure)
    return measured, seen


class Data:
    classes = Classes((1,), ("cell",))

    def __init__(self, count, short_side=480):
        self.records = [replace(record, height=short_side, width=short_side) for record in records(count)]


def test_what_the_user_typed_wins_and_is_measured(paces):
    measured, seen = paces
    measured.append(Pace(0.1, 0.01))
    words = ["SOLVER.EPOCHS", "3", "MODEL.DETR.DEC_LAYERS", "2", "TEST.PICTURES", "0"]
    lines = []
    choices = choose_settings([Choice("SEED", 0)], words, [Data(400), Data(8)], LAPTOP, 600, lines.append)
    by_key = {choice.key: choice for choice in choices}
    assert by_key["SOLVER.EPOCHS"] == ("SOLVER.EPOCHS", 3.0, "from the command line")
    assert by_key["TEST.PICTURES"].value == 0 and by_key["MODEL.DETR.DEC_LAYERS"].value == 2
    assert seen[0].MODEL.DETR.DEC_LAYERS == 2 and seen[0].SOLVER.EPOCHS == 3
    assert config_of(choices) == config_of(choices, words)
    assert lines[0].startswith("measured: 0.10 s for a step of 2 images")


def test_what_follows_from_a_typed_batch_size_and_length_follows(paces):
    """Eight images: a rate of sqrt(2) times that of four, steps of eight in the budget; sizes around 320; 3 % of 40 epochs."""
    measured, seen = paces
    measured += [Pace(0.1, 0.01)] * 2
    words = ["SOLVER.IMS_PER_BATCH", "8", "INPUT.MIN_SIZE_TEST", "320"]
    values = {choice.key: choice.value for choice in choose_settings([], words, [Data(1600), Data(80)], LAPTOP, 600)}
    assert values["SOLVER.BASE_LR"] == pytest.approx(1e-3 * 2**0.5, rel=1e-3)
    assert values["INPUT.MIN_SIZE_TRAIN"] == [280, 304, 320, 336, 360]
    assert values["SOLVER.EPOCHS"] == pytest.approx((0.95 * 600 - 5 * 0.8) / 0.1 * 8 / 1600, rel=0.01)
    assert {cfg.SOLVER.IMS_PER_BATCH for cfg in seen} == {8} and {cfg.INPUT.MIN_SIZE_TEST for cfg in seen} == {320}
    measured[:] = [Pace(0.1, 0.01)] * 2
    values = {
        choice.key: choice.value for choice in choose_settings([], ["SOLVER.EPOCHS", "40"], [Data(400), Data(80)], LAPTOP, 600)
    }
    assert (values["SOLVER.EPOCHS"], values["SOLVER.WARMUP_EPOCHS"], values["TEST.EVAL_EPOCHS"]) == (40, 1.2, 8)
    measured[:] = [Pace(0.1, 0.01)] * 2
    choices = choose_settings([], ["SOLVER.MAX_ITER", "77"], [Data(400), Data(80)], LAPTOP, 600)
    cfg = config_of([choice for choice in choices if not choice.key.startswith("DATASETS")])
    assert builders.build_schedule(cfg, 400).max_iter == 77


@pytest.mark.parametrize(("words", "test"), [([], 688), (["INPUT.MIN_SIZE_TEST", "400"], 400)])
def test_longest_sides_follow_typed_sizes(paces, words, test):
    """Of 480, 640 and 800 the test size is a little above the middle; sides of twice the short one fit."""
    measured, _ = paces
    measured += [Pace(0.1, 0.01)] * 2
    typed = ["INPUT.MIN_SIZE_TRAIN", "(480, 800, 640)", *words]
    values = {choice.key: choice.value for choice in choose_settings([], typed, [Data(1600), Data(80)], LAPTOP, 600)}
    assert tuple(values["INPUT.MIN_SIZE_TRAIN"]) == (480, 800, 640) and 800 <= values["INPUT.MAX_SIZE_TRAIN"] <= 1600
    assert values["INPUT.MIN_SIZE_TEST"] == test <= values["INPUT.MAX_SIZE_TEST"] <= 2 * test + 32


@pytest.mark.parametrize("typed", ["('a', 3)", "(0,)", "(2.5,)"])
def test_sizes_that_are_none_are_refused_before_anything_is_measured(paces, typed):
    with pytest.raises(ConfigError, match="INPUT.MIN_SIZE_TRAIN must contain sizes in pixels, got"):
        choose_settings([], ["INPUT.MIN_SIZE_TRAIN", typed], [Data(1600), Data(80)], LAPTOP, 600)


def test_no_evaluation_comes_just_before_the_last():
    """Five of them, at every length: a period that is rounded down would make a sixth."""
    for images in range(20, 2000, 7):
        facts = replace(FISH, images=images, val_images=10)
        values = {choice.key: choice.value for choice in length_choices(Plan(224, 2), facts, Pace(0.1, 0.001), 1800)}
        cfg = get_cfg()
        cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.EPOCHS, cfg.TEST.EVAL_EPOCHS = 2, values["SOLVER.EPOCHS"], values["TEST.EVAL_EPOCHS"]
        length = builders.build_schedule(cfg, images)
        assert -(-length.max_iter // length.eval_period) == 5, images


def test_it_measures_again_only_where_the_plan_changed(paces):
    measured, seen = paces
    measured += [Pace(1.0, 0.01), Pace(0.5, 0.01), Pace(0.1, 0.1)]
    choose_settings([], [], [Data(400), Data(80)], replace(LAPTOP, pretrained=False), 2000)
    assert [cfg.INPUT.MIN_SIZE_TEST for cfg in seen] == [416, 240] and len(measured) == 1
    assert seen[1].MODEL.BACKBONE.NAME == "resnet10" and seen[1].MODEL.BACKBONE.WEIGHTS == ""


def test_a_start_sets_the_canvas_by_its_sizes_in_training(paces, tmp_path):
    """Its larger test size would make the canvas grow from run to run. A typed test size is the middle of the training sizes."""
    measured, _ = paces
    sizes = {"INPUT__MIN_SIZE_TRAIN": (256, 192, 224), "INPUT__MIN_SIZE_TEST": 240}
    start = open_start(str(save_random(tmp_path / "old.pth", **sizes)), print)
    for words, middle in (([], 224), (["INPUT.MIN_SIZE_TEST", "240"], 240)):
        measured[:] = 2 * [Pace(0.2, 0.0001)]  # so few steps that the smallest canvas is taken
        choices = choose_settings([], words, [Data(400), Data(8)], LAPTOP, 60, start=start)
        by_key = {choice.key: choice for choice in choices}
        assert sorted(by_key["INPUT.MIN_SIZE_TRAIN"].value)[2] == middle and by_key["INPUT.MIN_SIZE_TEST"].value == 240
        assert by_key["INPUT.MIN_SIZE_TRAIN"].reason != "from the command line"


def test_the_quickest_number_of_threads_is_taken_and_measured_once(paces):
    measured, seen = paces
    measured += [Pace(0.3, 0.01, {8: 0.5, 4: 0.3, 2: 0.4}), Pace(0.1, 0.01)]
    choices = choose_settings([], [], [Data(400), Data(80)], LAPTOP, 300)
    assert [cfg.SOLVER.THREADS for cfg in seen] == [0, 4]
    (found,) = (choice for choice in choices if choice.key == "SOLVER.THREADS")
    assert found == ("SOLVER.THREADS", 4, "a step takes 0.30 s, and 0.50 s with 8, 0.40 s with 2")
    assert threads_choices(Pace(0.3, 0.01, {1: 0.3})) == [("SOLVER.THREADS", 1, "")]
    measured.append(Pace(0.1, 0.01))
    assert not [choice for choice in choose_settings([], [], [Data(400), Data(8)], LAPTOP, 600) if choice.key == "SOLVER.THREADS"]


@pytest.mark.parametrize(
    ("most", "least", "seconds", "expected"),
    [
        (8, 1, {8: 5.0, 4: 3.0, 2: 4.0, 1: 1.0}, [8, 4, 2]),  # on the way down, fewer than 2 are not tried
        (6, 1, {6: 5.0, 3: 3.0, 1: 2.0}, [6, 3, 1]),
        (2, 1, {2: 1.0, 1: 2.0}, [2, 1]),
        (1, 1, {1: 1.0}, [1]),
        (4, 4, {4: 1.0}, [4]),  # nothing to choose
    ],
)
def test_numbers_of_threads_are_halved_while_steps_become_quicker(most, least, seconds, expected):
    before = torch.get_num_threads()
    try:
        tried = choose._try_threads(most, least, lambda: seconds[torch.get_num_threads()])
    finally:
        torch.set_num_threads(before)
    assert list(tried.items()) == [(number, seconds[number]) for number in expected]


def test_missing_weights_are_told_with_their_price(paces):
    paces[0].append(Pace(0.1, 0.01))
    lines = []
    choose_settings([], [], [Data(400, 200), Data(8, 200)], replace(LAPTOP, pretrained=False), 600, lines.append)
    assert "pip install 'cpvt-det[pretrained]'" in lines[-1] and "AP50 after ten minutes was" in lines[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("SOLVER.EPOCHS 0", "there is nothing to train; omit SOLVER.EPOCHS and SOLVER.MAX_ITER"),
        ("SOLVER.MAX_ITER 0", "there is nothing to train"),
        ("SOLVER.IMS_PER_BATCH 0", r"SOLVER\.IMS_PER_BATCH must be at least 1, got 0"),
        ("CALLBACKS wandbb", "wandbb"),
        ("SOLVER.EARLY_STOPPING -1", r"SOLVER\.EARLY_STOPPING must be at least 0"),
        ("SOLVER.EARLY_STOPPING 2 TEST.EVAL_EPOCHS 0", "evaluated at its end only"),
    ],
)
def test_what_the_run_would_refuse_is_refused_before_steps_are_measured(words, message, paces):
    with pytest.raises(BadInputError, match=message):
        choose_settings([], words.split(), [Data(400, 200), Data(8, 200)], LAPTOP, 600)
    assert not paces[1]


@pytest.mark.parametrize("words", ["SOLVER.EARLY_STOPPING 2", "SOLVER.EARLY_STOPPING 2 SOLVER.MAX_ITER 90"])
def test_early_stopping_waits_for_the_evaluations_that_are_chosen(words, paces):
    paces[0].append(Pace(0.1, 0.01))
    assert config_of(choose_settings([], words.split(), [Data(400, 200), Data(8, 200)], LAPTOP, 600)).TEST.EVAL_EPOCHS > 0


def test_a_typed_period_of_evaluations_is_the_only_one(paces):
    paces[0].append(Pace(0.1, 0.01))
    cfg = config_of(choose_settings([], ["TEST.EVAL_PERIOD", "20"], [Data(400, 200), Data(8, 200)], LAPTOP, 600))
    assert (cfg.TEST.EVAL_PERIOD, cfg.TEST.EVAL_EPOCHS) == (20, 0.0)
    assert builders.build_schedule(cfg, 40).eval_period == 20


RESNET18, LITE2 = "MODEL.BACKBONE.NAME resnet18", "MODEL.BACKBONE.NAME timm/tf_efficientnet_lite2"
STARTS = {
    "": ("timm/tf_efficientnet_lite0", "pip", "FrozenBN", 3, 0.1, ""),
    LITE2: ("timm/tf_efficientnet_lite2", "pip", "FrozenBN", 3, 0.1, ""),
    "MODEL.BACKBONE.WEIGHTS ''": ("resnet10", "", "GN", 0, 0.5, "starts from random weights"),
    f"{LITE2} MODEL.BACKBONE.WEIGHTS ''": ("timm/tf_efficientnet_lite2", "", "BN", 0, 0.5, "starts from random weights"),
    "MODEL.BACKBONE.NAME timm/convnext_atto": ("timm/convnext_atto", "", "BN", 0, 0.5, "starts from random weights"),
    RESNET18: ("resnet18", "", "GN", 0, 0.5, "starts from random weights"),
    f"{RESNET18} MODEL.BACKBONE.WEIGHTS mine.pth": ("resnet18", "mine.pth", "FrozenBN", 2, 0.1, ""),
}
"""Typed words -> name, weights, norm, frozen stages, the backbone's share of the learning rate, what is said."""


def test_a_packaged_backbone_without_its_package_is_trained_as_a_whole(paces):
    paces[0].append(Pace(0.1, 0.01))
    words, lines = ["MODEL.BACKBONE.NAME", "timm/tf_efficientnet_lite1"], []
    machine = replace(LAPTOP, pretrained=False)
    found = config_of(choose_settings([], words, [Data(400, 200), Data(8, 200)], machine, 600, lines.append)).MODEL.BACKBONE
    assert (found.WEIGHTS, found.NORM, found.FREEZE_AT) == ("", "BN", 0)
    assert "The backbone starts from random weights" in lines[-1]


def test_a_typed_file_of_weights_is_a_start_without_the_packages_too(paces):
    paces[0].append(Pace(0.1, 0.01))
    words, lines = ["MODEL.BACKBONE.WEIGHTS", "mine.pth"], []
    choose_settings([], words, [Data(400, 200), Data(8, 200)], replace(LAPTOP, pretrained=False), 600, lines.append)
    assert len(lines) == 1 and "random weights" not in lines[0]


@pytest.mark.parametrize("typed", STARTS)
def test_a_backbone_starts_from_its_weights_or_is_trained_as_a_whole(typed, paces):
    paces[0].append(Pace(0.1, 0.01))
    words, lines = shlex.split(typed), []
    cfg = config_of(choose_settings([], words, [Data(400, 200), Data(8, 200)], LAPTOP, 600, lines.append))
    *expected, share, said = STARTS[typed]
    assert [cfg.MODEL.BACKBONE[key] for key in ("NAME", "WEIGHTS", "NORM", "FREEZE_AT")] == expected
    assert cfg.SOLVER["BACKBONE_LR"] == pytest.approx(share * cfg.SOLVER["BASE_LR"], rel=1e-3)
    assert any(said in line for line in lines) and (said or len(lines) == 1)


def test_an_evaluation_that_leaves_no_time_is_told_with_a_budget_that_does(paces):
    """8 images of 10 s are 80 s, of a budget of 60 s; ten times that is 14 minutes."""
    paces[0].extend(3 * [Pace(0.1, 10.0)])
    lines = []
    for budget in (60, 600):  # the first one is measured twice: so few steps that the backbone is frozen
        choose_settings([], [], [Data(400, 200), Data(8, 200)], LAPTOP, budget, lines.append)
    assert [line.partition(" ")[0] for line in lines] == ["measured:", "measured:", "the", "measured:"]
    assert lines[2].startswith(
        "the evaluation of 8 images alone takes 80s, too large a part of 60s: the run will train for 1 step only"
    )
    assert "--budget 14m leaves most of the time" in lines[2]


def test_an_override_that_cannot_be_used_is_refused_before_anything_is_measured(paces):
    with pytest.raises(ConfigError, match=r"MODEL\.NHEADS"):
        choose_settings([], ["MODEL.NHEADS", "2"], [Data(4), Data(2)], LAPTOP, 600)
    assert paces[1] == []


def test_the_facts_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert describe_machine(None).device == "cuda" and describe_machine(4).processes == 4
    assert describe_machine(0, "cpu").device == "cpu" and describe_machine(None, "cpu").device == "cpu"
    assert describe_machine(None, "cuda:1").device == "cuda"
    assert describe_machine(0).cores >= 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "timm" else object())
    assert not describe_machine(0).pretrained


def test_times_are_written_as_they_are_read():
    assert [format_seconds(value) for value in (45, 90, 1800, 5400, 7200)] == ["45s", "90s", "30m", "90m", "2h"]


def test_a_run_takes_its_number_of_threads(tmp_path):
    before = torch.get_num_threads()
    try:
        for number in (3, 1):
            setup_run(config_of([], ["OUTPUT_DIR", str(tmp_path), "SOLVER.THREADS", str(number)]))
            assert torch.get_num_threads() == number
        setup_run(config_of([], ["OUTPUT_DIR", str(tmp_path)]))  # torch's choice, which here is what it had
        assert torch.get_num_threads() == 1
        setup_run(config_of([], ["OUTPUT_DIR", str(tmp_path), "SOLVER.THREADS", "2", "MODEL.DEVICE", "meta"]))  # no CPU
        assert torch.get_num_threads() == 1
    finally:
        stop_log()
        torch.set_num_threads(before)
    assert "CPU, 3 threads" in (tmp_path / "log.txt").read_text()
