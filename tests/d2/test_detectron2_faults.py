# SPDX-License-Identifier: Apache-2.0
"""The detectron2 runner on bad days, at its seams: step, save, evaluation, backbone, folder; what goes through them is shared."""

import json

import pytest
import torch
from faults.checkpoints import FINAL, SHORT, full_disk
from faults.drawn import call_on, draw
from faults.processes import held
from tiny import overrides

from cpvt_det.common.errors import ConfigError
from cpvt_det.training.guard import RunGuard

pytestmark = pytest.mark.detectron2


@pytest.fixture
def train(tmp_path):
    """``cpvt-det train --runner detectron2`` on a drawn data set; the ending, and the names of the checkpoints."""
    drawn = draw(tmp_path / "data", lambda _: None)

    def call(*words, **more):
        ending = call_on(drawn, "train", *words, runner="detectron2", **{**SHORT, **more})
        return ending, sorted(path.name for path in (tmp_path / "out").glob("model_*.pth"))

    return call


@pytest.fixture
def trained(train, tmp_path):
    """The weights of a short run."""
    ending, _ = train()
    assert ending.code == 0, ending.text
    return torch.load(tmp_path / "out" / FINAL, weights_only=True)["model"]


def test_bad_steps_end_the_run_with_a_checkpoint_of_before_them(train, tmp_path):
    """The first step makes weights huge, so every later one is bad; metrics.json has only numbers."""
    ending, saved = train(SOLVER__BASE_LR=1e30, SOLVER__MAX_ITER=12, SOLVER__MAX_BAD_STEPS=3)
    assert ending.code == 1
    assert "Iteration 1 is skipped: the predictions are not finite for images" in ending.text
    assert "stopped: 3 steps in a row were not finite (SOLVER.MAX_BAD_STEPS 3; the log names their images); " in ending.text
    assert "the last checkpoint, of iteration 0, is good" in ending.text
    assert saved == ["model_0000000.pth"]
    lines = (tmp_path / "out/metrics.json").read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=pytest.fail)
    assert len(lines) > 0


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path):
    ending = full_disk(tmp_path, "detectron2")
    assert ending.code == 1
    assert "model_0000000.pth: File too large" in ending.text
    assert list((tmp_path / "out").glob("*.pth")) + list((tmp_path / "out").glob(".*.tmp")) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda weight: weight.fill_(torch.nan), "the weights are not finite (class_embed.weight) and are not evaluated"),
        (lambda weight: weight.sign_().mul_(3e38), "the detections of image id 1: "),
    ],
)
def test_weights_or_scores_that_are_not_finite_are_not_evaluated(train, trained, tmp_path, spoil, message):
    spoil(trained["class_embed.weight"])
    torch.save(trained, tmp_path / "spoilt.pth")
    more = {"MODEL__WEIGHTS": tmp_path / "spoilt.pth", "DATASETS__TEST": ("drawn",), "OUTPUT_DIR": tmp_path / "eval"}
    ending, _ = train("--eval-only", **more)
    assert ending.code == 1
    assert message in ending.text
    assert not (tmp_path / "eval/results.json").exists()


def test_an_error_between_two_steps_finds_the_last_one_saved(train, monkeypatch):
    calls = []
    monkeypatch.setattr(RunGuard, "obey_signals", lambda guard: calls.append(1) or len(calls) < 5 or 1 / 0)
    ending, saved = train(SOLVER__MAX_ITER=9, SOLVER__CHECKPOINT_PERIOD=9)
    assert ending.code == 1
    assert "Iteration 4 is saved; --resume continues after it" in ending.text
    assert saved == ["model_0000004.pth"]


def test_a_backbone_that_cannot_mask_its_padding_is_refused(train):
    """A ViT has no name in detectron2's registry but what a user gives it."""
    from detectron2.modeling import BACKBONE_REGISTRY
    from detectron2.modeling.backbone.vit import ViT

    if "a_vit" not in BACKBONE_REGISTRY:
        BACKBONE_REGISTRY._do_register("a_vit", lambda cfg, shape: ViT(img_size=64, embed_dim=24, depth=1, num_heads=2))
    ending, _ = train(MODEL__BACKBONE__NAME="a_vit", MODEL__BACKBONE__STAGES=(4,), MODEL__BACKBONE__NORM="FrozenBN")
    assert ending.code == 2
    assert "backbone a_vit of detectron2 cannot keep the padding out of its features: " in ending.text
    assert "set MODEL.BACKBONE.MASK_PADDING to False" in ending.text


def test_nothing_is_written_into_the_folder_of_a_run_that_lives(tmp_path):
    """Not even the JSON that a data set of detectron2's catalogs is written to."""
    from detectron2.data import DatasetCatalog, MetadataCatalog
    from detectron2.structures import BoxMode

    from cpvt_det.d2.run import load_cfg, run

    drawn = draw(tmp_path / "data", lambda _: None)
    box = {"bbox": [1, 1, 9, 9], "bbox_mode": BoxMode.XYWH_ABS, "category_id": 0}
    image = {"file_name": str(drawn.path(1)), "image_id": 1, "height": 40, "width": 60, "annotations": [box]}
    DatasetCatalog.register("by_function", lambda: [image])
    MetadataCatalog.get("by_function").thing_classes = ["x"]
    path = tmp_path / "out/datasets/by_function.json"
    path.parent.mkdir(parents=True)
    path.write_text("of the living run")
    with held(tmp_path / "out"):
        cfg = load_cfg("", overrides(drawn.files, tmp_path / "out", **{**SHORT, "DATASETS__TRAIN": ("by_function",)}))
        with pytest.raises(ConfigError, match="another run, process"):
            run(cfg)
    DatasetCatalog.remove("by_function")
    assert path.read_text() == "of the living run"
    assert [one.name for one in path.parent.iterdir()] == ["by_function.json"]
