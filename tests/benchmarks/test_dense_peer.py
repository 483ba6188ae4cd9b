# SPDX-License-Identifier: Apache-2.0
"""FCOS beside our detector: what it is given, and what of its answers is measured."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from benchmarks import dense_peer
from cpvt_det.builders import build_detector
from cpvt_det.cli.folder import folder_config
from cpvt_det.common.structures import Targets
from cpvt_det.data.shapes.dataset import draw_dataset
from cpvt_det.models.backbones.resnet import ResNetBackbone
from cpvt_det.training.tasks.task import build_task

WORDS = "MODEL.BACKBONE.NAME resnet10 MODEL.BACKBONE.WIDTH 8 MODEL.BACKBONE.NORM GN MODEL.BACKBONE.FREEZE_AT 0"
WORDS += " MODEL.BACKBONE.STAGES (3,4,5) INPUT.RESIZE_CROP.ENABLED False DATALOADER.NUM_WORKERS 0"
SIZES = {"MIN_SIZE_TRAIN": [64], "MAX_SIZE_TRAIN": 96, "MIN_SIZE_TEST": 64, "MAX_SIZE_TEST": 96}
WORDS += " SOLVER.IMS_PER_BATCH 2 TEST.IMS_PER_BATCH 2"
SMALL = " ".join(f"INPUT.{name} {value}" for name, value in SIZES.items()).replace("[64]", "(64,)")
BUILD = dense_peer.build_peer


def small_peer(num_classes=2):
    backbone = ResNetBackbone("resnet10", stages=(3, 4, 5), norm="GN", width=8)
    backbone.pixel_mean, backbone.pixel_std = (127.5,) * 3, (64.0,) * 3
    return BUILD(backbone, num_classes)


def test_images_are_from_0_to_1_and_boxes_in_their_pixels():
    sample = {"image": torch.full((3, 40, 80), 255, dtype=torch.uint8)}
    sample["targets"] = Targets(torch.tensor([1]), torch.tensor([[0.5, 0.25, 0.5, 0.5]]))
    (image,), (target,) = dense_peer.as_inputs([sample])
    assert image.max() == 1 and target["labels"].tolist() == [1]
    assert target["boxes"].tolist() == [[20, 0, 60, 20]]


@pytest.mark.parametrize("training", [True, False])
def test_the_peer_normalises_as_the_backbone_wants_and_resizes_nothing(training):
    """torchvision's own option resizes nothing in training only; then AP is measured on images of 800 pixels."""
    model = small_peer().train(training)
    assert model.head.training == training and not any(part.training for part in model.backbone.backbone.modules())
    given, _ = model.transform([torch.full((3, 40, 80), 0.5)], None)
    assert given.image_sizes == [(40, 80)] and given.tensors.shape == (1, 3, 64, 96)
    assert given.tensors[0, :, :40, :80].abs().max() < 1e-6  # 0.5 is the mean
    assert [part for part, value in model.named_parameters() if part.startswith("backbone.backbone.") and value.requires_grad] == []


def test_boxes_are_measured_in_pixels_of_the_original_image():
    """The image has been resized by 1/2 in width and by 1/3 in height."""
    added = []
    found = {"boxes": torch.tensor([[5.0, 10.0, 15.0, 20.0]]), "scores": torch.ones(1), "labels": torch.zeros(1, dtype=torch.int64)}
    sample = {"image": torch.zeros(3, 40, 80, dtype=torch.uint8), "image_id": 7, "width": 160, "height": 120}
    task = SimpleNamespace(
        build_evaluator=lambda _: SimpleNamespace(add=lambda *pair: added.append(pair), evaluate=lambda: {"bbox": {"AP": 1.0}}),
        build_test_loader=lambda _: [[sample]],
    )
    model = torch.nn.Module()
    model.forward = lambda images: [found for _ in images]
    assert dense_peer.evaluate(model, task, None) == {"AP": 1.0}
    ((image_id, detections),) = added
    assert image_id == 7 and detections.boxes_xyxy.tolist() == [[10, 30, 30, 60]]


def test_a_run_has_sizes_and_cpu_seconds_of_ours_and_the_curve(tmp_path, monkeypatch):
    draw_dataset(tmp_path / "shapes", 4, 2, num_processes=1)
    seconds = [0.0]
    monkeypatch.setattr(dense_peer, "WORDS", WORDS)
    monkeypatch.setattr(dense_peer, "build_peer", lambda backbone, num_classes: small_peer(num_classes))
    monkeypatch.setattr(dense_peer, "load_backbone_weights", lambda *_: None)
    monkeypatch.setattr(dense_peer.time, "process_time", lambda: seconds.__setitem__(0, seconds[0] + 0.25) or seconds[0])
    like = tmp_path / "ours.json"
    like.write_text(json.dumps({"budget": "1m", "cpu_seconds": 10, "seed": 3, "chosen": {"INPUT": SIZES}}))
    words = ["shapes", str(tmp_path / "shapes"), "--like", str(like), "--busy", "--output", str(tmp_path)]
    result = CliRunner().invoke(dense_peer.main, words)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "shapes_1m_fcos_3.json").read_text())
    assert record["test_size"] == 64 and record["command"].startswith(
        "python benchmarks/dense_peer.py shapes FOLDER --like ours.json"
    )
    assert record["cpu_seconds"] == pytest.approx(10, abs=1) and len(record["curve"]) == 2
    assert list(record["curve"])[-1] == str(record["iterations"]) and record["iterations"] > dense_peer.TIMED
    assert 0.9 <= record["decay"] < 0.9998 and 0 <= record["AP"] <= record["AP50"]


def test_both_are_timed_on_the_same_images(tmp_path, monkeypatch):
    """One at a time, three times, of which the first does not count. The clock gives 2 seconds to ours and 3 to the peer."""
    draw_dataset(tmp_path / "shapes", 4, 4, num_processes=1)
    words = f"{WORDS} MODEL.META_ARCHITECTURE CPVTDetr MODEL.BACKBONE.STAGES (5,) MODEL.DETR.HIDDEN_DIM 16 MODEL.DETR.NHEADS 2"
    cfg, _ = folder_config(tmp_path / "shapes", tmp_path / "place", f"{words} MODEL.DETR.NUM_OBJECT_QUERIES 5 {SMALL}".split())
    task = build_task(cfg)
    _, tests = task.load_splits()
    detector, seen = build_detector(cfg).eval(), {"ours": [], "peer": []}
    detector.register_forward_pre_hook(lambda _, args: seen["ours"].append(args[0].shape[0]))
    peer = small_peer(cfg.MODEL.NUM_CLASSES)
    peer.register_forward_pre_hook(lambda _, args: seen["peer"].append(len(args[0])))
    monkeypatch.setattr(dense_peer, "TIMED_IMAGES", 3)
    ticks = itertools.accumulate(itertools.cycle([0.0, 2.0, 3.0]))
    monkeypatch.setattr(dense_peer.time, "process_time", lambda: next(ticks))
    found = dense_peer.time_inference(peer, SimpleNamespace(cfg=cfg, detector=detector), task, tests[0])
    assert seen == {"ours": [1] * 9, "peer": [1] * 9} and not peer.training
    assert found == {"ms": {"ours": 2000.0, "fcos": 3000.0}, "fcos over ours, quartiles": [1.5] * 3, "images": 3, "canvas": 64}
