# SPDX-License-Identifier: Apache-2.0
"""Evaluation and numbers of objects."""

from pathlib import Path

import torch

from cpvt_det.data.coco import load_coco
from cpvt_det.evaluation.coco import CocoEvaluator, format_table
from cpvt_det.structures import Detections
from faults.case import Case, Ending
from faults.drawn import Drawn, call_on, draw


def overflowing(folder: Path) -> Ending:
    """Train a little, make the weights of the class head finite but huge, and evaluate."""
    drawn = draw(folder / "data", lambda _: None)
    trained = call_on(drawn, "train", DATASETS__TEST=(), SOLVER__MAX_ITER=1)
    if trained.code:
        return trained
    checkpoint = torch.load(folder / "out/model_final.pth", weights_only=True)
    checkpoint["model"]["class_embed.weight"].sign_().mul_(3e38)  # infinity less infinity
    torch.save(checkpoint["model"], folder / "huge.pth")
    return call_on(drawn, "train", "--eval-only", OUTPUT_DIR=folder / "eval", MODEL__WEIGHTS=folder / "huge.pth")


def infinite(folder: Path) -> Ending:
    """A class that can never be found: its score is 0, and no detection shows anything."""
    drawn = draw(folder / "data", lambda _: None)
    trained = call_on(drawn, "train", DATASETS__TEST=(), SOLVER__MAX_ITER=1)
    if trained.code:
        return trained
    weights = torch.load(folder / "out/model_final.pth", weights_only=True)["model"]
    weights["class_embed.bias"][0] = -torch.inf
    torch.save(weights, folder / "infinite.pth")
    return call_on(drawn, "train", "--eval-only", OUTPUT_DIR=folder / "eval", MODEL__WEIGHTS=folder / "infinite.pth")


def detected(boxes: list, scores: list):
    """Detections of one image, given to the evaluator."""

    def run(folder: Path) -> Ending:
        dataset = load_coco(draw(folder / "data", lambda _: None).files)
        evaluator = CocoEvaluator(dataset.ground_truth, dataset.classes.ids, dataset.classes.names)
        try:
            evaluator.add(1, Detections(torch.tensor(boxes), torch.tensor(scores), torch.zeros(len(scores), dtype=torch.long)))
        except ValueError as error:
            return Ending(1, str(error))
        return Ending(0, "")

    return run


def no_detections(folder: Path) -> Ending:
    """Evaluate a model that finds nothing, through the evaluator."""
    dataset = load_coco(draw(folder / "data", lambda _: None).files)
    evaluator = CocoEvaluator(dataset.ground_truth, dataset.classes.ids, dataset.classes.names)
    for record in dataset.records:
        evaluator.add(record.image_id, Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long)))
    return Ending(0, format_table(evaluator.evaluate()))


def train(make, **more):
    """Two epochs and an evaluation on a drawn data set after a change."""
    return lambda folder: call_on(draw(folder / "data", make), "train", SOLVER__MAX_ITER=4, **more)


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


TABLE = "Evaluation on drawn:"

CASES = [
    Case("scores that overflow", overflowing, "the detections of image id 1: ... scores are not finite", 1),
    Case("a weight that is infinite", infinite, "stopped: the weights are not finite (class_embed.bias) and are not evaluated", 1),
    Case("a score that is NaN", detected([[0.0, 0, 9, 9]], [float("nan")]), "image id 1: 1 of 1 scores are not finite", 1),
    Case("a box that is NaN", detected([[0, 0, float("nan"), 9]], [0.5]), "image id 1: 1 of 1 boxes are not finite", 1),
    Case("an infinite box", detected([[0, 0, float("inf"), 9]], [0.5]), "image id 1: 1 of 1 boxes are not finite", 1),
    Case(
        "a box whose right lies before its left",
        detected([[9.0, 0, 0, 9]], [0.5]),
        "image id 1: box [9.0, 0.0, 0.0, 9.0] is not xyxy",
        1,
    ),
    Case("no detections at all", no_detections, "0.000", 0),
    Case("batches without any object", train(objects_in(1)), TABLE, 0),
    Case("one object an image", train(one_object), TABLE, 0),
    Case("two objects an image, one query", train(objects_in(1, 2, 3, 4), MODEL__DETR__NUM_OBJECT_QUERIES=1), TABLE, 0),
    Case("images of 1 x 1, 1 x 2000 and 2000 x 1 pixels", train(thin), TABLE, 0),
]
