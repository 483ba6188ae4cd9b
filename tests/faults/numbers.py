# SPDX-License-Identifier: Apache-2.0
"""Evaluation and numbers of objects.

The figures are pycocotools' for the saved detections, except where an image has more than 100 objects of a class; there all
detections count. Faults that our detectors cannot produce are tested by Python calls of `CocoEvaluator`.
"""

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tiny import DEFORMABLE
from torch import Tensor

from cpvt_det.common.structures import Detections
from cpvt_det.data.coco import load_coco
from cpvt_det.evaluation.coco import CocoEvaluator, format_table
from cpvt_det.predict import Predictor
from cpvt_det.training.tasks.detection import DetectionTask
from faults.case import Case, Cut, Ending
from faults.drawn import Drawn, call_on, draw


def evaluated(name: str, spoil: Callable[[Tensor], object], **more: object) -> Callable[[Path], Ending]:
    """Train a little, spoil a weight, and evaluate: ``cpvt-det eval``."""

    def run(folder: Path) -> Ending:
        drawn = draw(folder / "data", lambda _: None)
        trained = call_on(drawn, "train", DATASETS__TEST=(), SOLVER__MAX_ITER=1, **more)
        if trained.code:
            return trained
        weights = torch.load(folder / "out/model_final.pth", weights_only=True)["model"]
        spoil(weights[name])
        torch.save(weights, folder / "spoilt.pth")
        return call_on(drawn, "eval", folder / "spoilt.pth", OUTPUT_DIR=folder / "eval", **more)

    return run


def overflow(weight: Tensor) -> None:
    """Finite, but products with it are infinite with both signs, and their sum is NaN."""
    weight.sign_().mul_(3e38)


def never(bias: Tensor) -> None:
    """A class that can never be found: its score is 0, and no detection shows anything."""
    bias[0] = -torch.inf


def detected(boxes: list, scores: list):
    """Detections of one image, given to the evaluator."""

    def run(folder: Path) -> Ending:
        dataset = load_coco(draw(folder / "data", lambda _: None).files)
        evaluator = CocoEvaluator(dataset.records, dataset.classes)
        try:
            evaluator.add(1, Detections(torch.tensor(boxes), torch.tensor(scores), torch.zeros(len(scores), dtype=torch.long)))
        except ValueError as error:
            return Ending(type(error).__name__, str(error))
        return Ending("none", "")

    return run


def no_detections(folder: Path) -> Ending:
    """Evaluate a model that finds nothing."""
    dataset = load_coco(draw(folder / "data", lambda _: None).files)
    evaluator = CocoEvaluator(dataset.records, dataset.classes)
    for record in dataset.records:
        evaluator.add(record.image_id, Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long)))
    return Ending("none", format_table(evaluator.evaluate()))


def train(make, **more):
    """Two epochs and an evaluation on a drawn data set after a change; see that all steps are taken and the figures hold."""

    def run(folder: Path) -> Ending:
        drawn = draw(folder / "data", lambda drawn: (make(drawn), centre(drawn)))
        ending = call_on(drawn, "train", SOLVER__MAX_ITER=4, **more)
        if ending.code == 0:
            steps = [json.loads(line) for line in (folder / "out/metrics.json").read_text().splitlines() if "total_loss" in line]
            assert [step["skipped"] for step in steps] == [0] * 4
            assert all(math.isfinite(step["total_loss"]) for step in steps)
            figures_hold(drawn, folder / "out", ending.text)
        return ending

    return run


def centre(drawn: Drawn) -> None:
    """Move all objects to where a detector that has learned nothing looks for them, so that not all figures are 0."""
    size_of = {image["id"]: (image["width"], image["height"]) for image in drawn.content["images"]}
    for entry in drawn.content["annotations"]:
        width, height = size_of[entry["image_id"]]
        entry |= {"bbox": [width / 4, height / 4, width / 2, height / 2], "area": width * height / 4}


def figures_hold(drawn: Drawn, out: Path, text: str) -> None:
    """The figures are pycocotools' own, and the text holds them."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(drawn.files.annotations)
        evaluation = COCOeval(truth, truth.loadRes(str(out / "inference/coco_instances_results.json")), "bbox")
        for step in (evaluation.evaluate, evaluation.accumulate, evaluation.summarize):
            step()
    names = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
    wanted = {name: math.nan if value < 0 else 100 * value for name, value in zip(names, evaluation.stats, strict=True)}
    assert wanted["AP"] > 0 and wanted["AR100"] > 0, wanted
    written = json.loads((out / "results.json").read_text())["bbox"]
    for name, value in wanted.items():
        assert written[name] is None if math.isnan(value) else math.isclose(written[name], value, abs_tol=1e-9), name
    for part in (names[:6], names[6:]):
        row = [("n/a" if math.isnan(wanted[name]) else f"{wanted[name]:.3f}") for name in part]
        assert row in [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()], (row, text)


def many_found(folder: Path) -> Ending:
    """A detector that finds every object, 120 of a class in each image: figures, threshold, report, and what predict shows."""
    drawn = draw(folder / "data", crowd)
    boxes = torch.tensor([entry["bbox"] for entry in drawn.content["annotations"][:120]]).float()  # of each image
    scores = torch.linspace(0.9, 0.2, 120)
    found = Detections(torch.cat((boxes[:, :2], boxes[:, :2] + boxes[:, 2:]), 1), scores, torch.zeros(120, dtype=torch.long))
    more = {"MODEL__DETR__NUM_OBJECT_QUERIES": 130, "TEST__DETECTIONS_PER_IMAGE": 130, "SOLVER__MAX_ITER": 1, "TEST__REPORT": True}
    with mock.patch.object(DetectionTask, "infer", lambda self, detector, samples: [found] * len(samples)):
        ending = call_on(drawn, "train", **more)
    if ending.code:
        return ending
    figures = json.loads((folder / "out/results.json").read_text())["bbox"]
    assert all(math.isclose(figures[name], 100) for name in ("AP", "AP50", "ARall")), figures
    assert math.isclose(figures["AR100"], 100 * 100 / 120), figures
    (cell, _) = json.loads((folder / "out/report/report.json").read_text())["classes"]
    assert math.isclose(cell["AP50"], 100) and cell["objects"] == 480, cell
    threshold = Predictor.from_checkpoint(folder / "out/model_best.pth", "cpu").threshold
    shown = int((scores >= threshold).sum())
    assert shown == 120, f"at the threshold of the best F1, {threshold}, {shown} of 120 are shown"
    return ending


def crowd(drawn: Drawn) -> None:
    """The same 120 objects of a class in each image."""
    boxes = [(image_id, [3 * (number % 12), 3 * (number // 12), 3, 3]) for image_id in (1, 2, 3, 4) for number in range(120)]
    drawn.content["annotations"] = [
        {"id": number, "image_id": image_id, "category_id": 3, "bbox": box, "area": 9, "iscrowd": 0}
        for number, (image_id, box) in enumerate(boxes, start=1)
    ]


def objects_in(*image_ids: int):
    """Leave the objects of these images only."""

    def make(drawn: Drawn) -> None:
        drawn.content["annotations"] = [entry for entry in drawn.content["annotations"] if entry["image_id"] in image_ids]

    return make


def one_object(drawn: Drawn) -> None:
    drawn.content["annotations"] = drawn.content["annotations"][::2]


def thin(drawn: Drawn) -> None:
    from faults.images import picture

    for image_id, size in ((1, (1, 1)), (2, (1, 2000)), (3, (2000, 1))):
        drawn.replace_image(image_id, picture(size=size), f"{image_id}_thin.png")


TABLE = "Evaluation on drawn:...AR100"
FINITE = Cut("evaluation/coco.py", "if bad := int(", "if False and int(")
NOT_FINITE = "the detections of image id 1: ...{} are not finite; the weights are probably broken"

CASES = [
    Case("scores that overflow", evaluated("class_embed.weight", overflow), NOT_FINITE.format("scores"), 1, FINITE),
    Case(
        "scores that overflow, of a sigmoid",
        evaluated("class_embed.1.weight", overflow, **DEFORMABLE),
        NOT_FINITE.format("scores"),
        1,
        FINITE,
    ),
    Case("boxes that overflow", evaluated("bbox_embed.layers.0.weight", overflow), NOT_FINITE.format("boxes"), 1, FINITE),
    Case(
        "a weight that is infinite",
        evaluated("class_embed.bias", never),
        "stopped: the weights are not finite (class_embed.bias) and are not evaluated",
        1,
        Cut("training/evaluate.py", "if broken:", "if False:"),
    ),
    Case(
        "`CocoEvaluator.add`: an infinite box",
        detected([[0, 0, float("inf"), 9]], [0.5]),
        "image id 1: 1 of 1 boxes are not finite",
        "ValueError",
        FINITE,
    ),
    Case(
        "`CocoEvaluator.add`: a box whose right lies before its left",
        detected([[9.0, 0, 0, 9]], [0.5]),
        "image id 1: box [9.0, 0.0, 0.0, 9.0] is not xyxy",
        "ValueError",
        Cut("evaluation/coco.py", "if len(inverted):", "if False:"),
    ),
    Case(
        "`CocoEvaluator.evaluate`: no detections at all",
        no_detections,
        "0.000",
        "none",
        "no detections go the way of some",
    ),
    Case(
        "batches without any object",
        train(objects_in(1)),
        TABLE,
        0,
        Cut("losses/criterion.py", "total_boxes = total_boxes.clamp(min=1)", "pass"),
    ),
    Case(
        "120 objects of a class an image, all found",
        many_found,
        "an image has more than 100 objects of a class, so all detections count, not only the best 100 per class and image as on "
        "COCO",
        0,
        Cut("evaluation/matches.py", "return COUNTED if most_of_a_class <= COUNTED else None", "return COUNTED"),
    ),
    Case("one object an image", train(one_object), TABLE, 0, "one object goes the way of several"),
    Case(
        "two objects an image, one query",
        train(objects_in(1, 2, 3, 4), MODEL__DETR__NUM_OBJECT_QUERIES=1),
        TABLE,
        0,
        "the assignment pairs as many as there are on the shorter side, whichever it is",
    ),
    Case(
        "images of 1 x 1, 1 x 2000 and 2000 x 1 pixels",
        train(thin),
        TABLE,
        0,
        Cut(
            "data/mapper.py",
            "[max(1, round(height * scale)), max(1, round(width * scale))]",
            "[round(height * scale), round(width * scale)]",
        ),
    ),
]
