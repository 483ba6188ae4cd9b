# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det eval --sizes``: the figures of each size are those of an evaluation at that size."""

import json

import pytest
from click.testing import CliRunner
from image_classes import class_words, draw_folders
from tiny import save_random

from cpvt_det.cli import main
from cpvt_det.common.errors import ConfigError
from cpvt_det.config import load_cfg
from cpvt_det.training.evaluate import evaluate_sizes, sizes_table
from cpvt_det.training.tasks import DetectionTask, Task, build_task
from cpvt_det.training.train import run


def call(*words):
    return CliRunner().invoke(main, ["eval", *map(str, words)])


@pytest.mark.parametrize("kind", ["detector", "classifier"])
def test_a_size_in_the_table_is_an_evaluation_at_that_size(kind, tmp_path, tiny_run):
    """Without a config on the command line: it is in the weights."""
    if kind == "detector":
        weights, key, figure = tiny_run("detr").folder / "model_final.pth", "INPUT.MIN_SIZE_TEST", "AP"
        more = ["INPUT.MAX_SIZE_TEST", 80]  # twice the side, as in the run
    else:
        root = draw_folders(tmp_path / "data")
        run(load_cfg("", class_words(root, tmp_path / "run", SOLVER__MAX_ITER=2)))
        weights, key, figure, more = tmp_path / "run/model_final.pth", "INPUT.CLASSIFY.TEST_SIZE", "top1", []
    both = call(weights, "--runner", "builtin", "--sizes", "40,24", "OUTPUT_DIR", tmp_path / "both")
    assert both.exit_code == 0, both.output
    one = call(weights, "--runner", "builtin", key, 40, *more, "OUTPUT_DIR", tmp_path / "one")
    assert one.exit_code == 0, one.output
    found, expected = (json.loads((tmp_path / name).read_text()) for name in ("both/sizes.json", "one/results.json"))
    seconds = found["40"].pop("seconds")
    assert seconds > 0 and found["40"] == expected and list(found) == ["40", "24"]
    assert json.loads((tmp_path / "both/sizes/40/results.json").read_text()) == expected
    table = (tmp_path / "both/sizes.md").read_text().splitlines()
    assert len(table) == 4 and table[0].split()[1:4] == ["size", "|", figure]
    assert not (tmp_path / "both/results.json").exists() and not (tmp_path / "both/report").exists()


def test_a_size_that_the_model_cannot_take_is_named(drawn_coco, tmp_path):
    """A learned table of 5 cells of 8 pixels ends between the two sizes."""
    more = {"MODEL__POSITION__NAME": "learned", "MODEL__POSITION__TABLE_SIZE": 12}
    weights = save_random(tmp_path / "weights.pth", **more)
    triple = [["drawn", str(drawn_coco.files.annotations), str(drawn_coco.files.image_root)]]
    words = ["DATASETS.REGISTER", triple, "DATASETS.TEST", "drawn", "OUTPUT_DIR", tmp_path / "out"]
    done = call(weights, "--runner", "builtin", "--sizes", "32,160", *words)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out/sizes.md").read_text()
    assert "| 160    | n/a" in text and "| 32     | n/a" not in text and "160: " in text


def test_sizes_that_cannot_be_are_refused(tmp_path):
    weights = save_random(tmp_path / "weights.pth")
    for words, message in (
        (["--sizes", "160,x"], "--sizes '160,x' must be sides in pixels"),
        (["--sizes", "0"], "--sizes '0' must be sides in pixels"),
        (["--sizes", "32", "--report"], "--report works with one size only"),
    ):
        done = call(weights, *words)
        assert done.exit_code == 2 and message in done.output


def test_weights_without_a_config_need_one(tmp_path):
    import torch

    checkpoint = torch.load(save_random(tmp_path / "weights.pth"), weights_only=True)
    torch.save({"model": checkpoint["model"]}, tmp_path / "bare.pth")
    done = call(tmp_path / "bare.pth")
    assert done.exit_code == 2 and "contains no config; give its config with --config-file" in done.output


def test_a_size_below_a_patch_is_refused_before_any_evaluation(tmp_path):
    root = draw_folders(tmp_path / "data")
    vit = {"NAME": "cpvt_tiny", "EMBED_DIM": 16, "DEPTH": 1, "NUM_HEADS": 2, "PATCH_SIZE": 8, "STAGES": (3,)}
    more = {f"MODEL__BACKBONE__{key}": value for key, value in vit.items()}
    run(load_cfg("", class_words(root, tmp_path / "run", SOLVER__MAX_ITER=1, **more)))
    done = call(tmp_path / "run/model_final.pth", "--runner", "builtin", "--sizes", "32,7", "OUTPUT_DIR", tmp_path / "out")
    assert done.exit_code == 2
    assert "INPUT.CLASSIFY.TEST_SIZE allows images of 7 pixels, which is smaller than a patch (8 pixels)" in done.output
    assert not (tmp_path / "out/sizes").exists()
    done = call(tmp_path / "run/model_final.pth", "--runner", "builtin", "--sizes", "8", "OUTPUT_DIR", tmp_path / "out")
    assert done.exit_code == 0, done.output


def test_a_task_whose_images_have_no_size_is_refused(drawn_cfg, tmp_path):
    class Other(DetectionTask):
        set_test_size = Task.set_test_size

    with pytest.raises(ConfigError, match=r"the task 'detection' has no set_test_size"):
        evaluate_sizes(Other(drawn_cfg), None, [], [32], tmp_path)


def test_test_sizes_keep_the_proportion_of_the_sides(drawn_cfg):
    task = build_task(drawn_cfg)
    drawn_cfg.INPUT.MIN_SIZE_TEST, drawn_cfg.INPUT.MAX_SIZE_TEST = 800, 1333
    task.set_test_size(400)
    assert (drawn_cfg.INPUT.MIN_SIZE_TEST, drawn_cfg.INPUT.MAX_SIZE_TEST) == (400, 666)


def test_several_test_sets_have_columns_of_their_own():
    results = {"32": {"a": {"bbox": {"AP": 1.0}}, "b": {"bbox": {"AP": 2.0}}, "seconds": 3.0}}
    head, _, row = sizes_table(results, "bbox/AP", ("AP",)).splitlines()
    assert head.split("|")[2:4] == [" a AP   ", " b AP   "] and row.split()[3:8:2] == ["1.0", "2.0", "3.0"]
