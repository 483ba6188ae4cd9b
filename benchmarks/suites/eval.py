# SPDX-License-Identifier: Apache-2.0
"""COCO evaluation of boxes: 100 detections in each of 5,000 images, 80 classes, to the 12 figures.

The data is drawn from a fixed seed, and similar to COCO in everything that takes time: 7 objects per image, of a few classes, 1 %
of them crowds; about a fifth of the detections lie near an object, the others anywhere, most of them with a class in the image.

Two cases. ``whole path`` starts with a model's tensors and ground truth as read from JSON; ``evaluate`` starts when all detections
are collected, in the form that the contender uses, with the ground truth indexed if the contender does that earlier.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import ROUNDS, Case, Contender, Plan, Work
from benchmarks.peers import detectron2_coco_eval
from benchmarks.suites import Options
from cpvt_det.common.class_names import Classes
from cpvt_det.common.structures import Detections
from cpvt_det.data.records import BOX, IMAGE, Records, Table
from cpvt_det.evaluation.coco import CocoEvaluator

TITLE = "COCO evaluation"
PLANS = {"quick": Plan(warm_up=0, rounds=3, most_rounds=3), "full": Plan(warm_up=0, rounds=ROUNDS, most_rounds=ROUNDS)}

IMAGES = {"quick": 250, "default": 5000, "all": 5000}
TINY = 4
CLASSES, DETECTIONS, OBJECTS = 80, 100, 7.3
HEIGHT, WIDTH = 480, 640
CASES = ("whole path", "evaluate")
FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Inputs:
    """Ground truth as read from JSON, and by image id what a model found; label k is category k + 1."""

    ground_truth: dict[str, list[dict[str, Any]]]
    found: dict[int, Detections]


def cases(options: Options) -> list[Case]:
    images = IMAGES[options.size]
    return [
        Case(
            name=name,
            about={"part": name, "images": images},
            build=partial(make_work, name, images, options),
            memory=options.size != "quick" and name == CASES[0],
            warm=partial(make_work, name, TINY, options),
            left_out="evaluation runs on the CPU: --device cpu" if options.device != "cpu" else "",
        )
        for name in CASES
    ]


@cache
def make_inputs(images: int) -> Inputs:
    """Images, objects and detections, drawn from a fixed seed."""
    rng = np.random.default_rng(0)
    annotations: list[dict[str, Any]] = []
    found = {}
    popularity = 1 / np.arange(1, CLASSES + 1) ** 0.8
    popularity = rng.permutation(popularity / popularity.sum())
    for image_id in range(1, images + 1):
        count = min(40, int(rng.geometric(1 / (OBJECTS + 1))) - 1)
        present = rng.choice(CLASSES, max(1, min(3, count)), p=popularity)  # an image contains few classes
        boxes, labels = draw_boxes(rng, count), rng.choice(present, count)
        crowd = rng.random(count) < 0.01
        fill = rng.uniform(0.5, 0.9, count)
        for box, label, is_crowd, share in zip(boxes.tolist(), labels.tolist(), crowd.tolist(), fill.tolist(), strict=True):
            area = share * box[2] * box[3]
            place = {"id": len(annotations) + 1, "image_id": image_id, "category_id": label + 1}
            annotations.append({**place, "bbox": box, "area": area, "iscrowd": int(is_crowd)})
        found[image_id] = draw_detections(rng, boxes, labels, present)
    truth = {
        "images": [{"id": image_id, "height": HEIGHT, "width": WIDTH} for image_id in range(1, images + 1)],
        "annotations": annotations,
        "categories": [{"id": label + 1, "name": str(label)} for label in range(CLASSES)],
    }
    return Inputs(truth, found)


def draw_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    """(count, 4) xywh in pixels, of all sizes, inside the image."""
    sides = np.exp(rng.normal(4.2, 0.9, (count, 1)) + rng.normal(0, 0.3, (count, 2))).clip(4, (WIDTH - 1, HEIGHT - 1))
    return np.concatenate((rng.random((count, 2)) * ((WIDTH, HEIGHT) - sides), sides), axis=1).round(2)


def draw_detections(rng: np.random.Generator, boxes: np.ndarray, labels: np.ndarray, present: np.ndarray) -> Detections:
    """Detections of one image: up to 3 near each object, with falling quality and score, and others anywhere with low scores."""
    near = np.repeat(np.arange(len(boxes)), 3)[: DETECTIONS // 2]
    error = rng.gamma(1.5, 0.06, (len(near), 1))
    moved = boxes[near] + rng.normal(0, 1, (len(near), 4)) * error * boxes[near][:, [2, 3, 2, 3]]
    far = DETECTIONS - len(near)
    xywh = np.concatenate((moved, draw_boxes(rng, far)))
    xywh[:, 2:] = xywh[:, 2:].clip(1)
    right = rng.random(len(near)) < 0.8
    of_near = np.where(right, labels[near], rng.integers(CLASSES, size=len(near)))
    of_far = np.where(rng.random(far) < 0.6, rng.choice(present, far), rng.integers(CLASSES, size=far))
    scores = np.concatenate(((0.9 - 2 * error[:, 0] + rng.normal(0, 0.15, len(near))).clip(0.01, 0.99), rng.beta(1, 12, far)))
    order = np.argsort(-scores)
    xyxy = np.concatenate((xywh[:, :2], xywh[:, :2] + xywh[:, 2:]), axis=1)
    parts = (xyxy.astype(np.float32), scores.astype(np.float32), np.concatenate((of_near, of_far)))
    return Detections(*(torch.from_numpy(part[order].copy()) for part in parts))


def make_work(name: str, images: int, options: Options) -> Work:
    """All contenders; the first one is pycocotools, which is always installed.

    ``faster_coco_eval`` is what we call, used directly, with the classes that its README puts in the place of pycocotools': the
    difference from ``cpvt_det`` is what our layer around it costs or saves.
    """
    from faster_coco_eval import COCO as FasterCOCO
    from faster_coco_eval import COCOeval_faster
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    inputs, left_out = make_inputs(images), {}
    make = whole_path if name == CASES[0] else evaluate_step
    classes = {"pycocotools": (COCO, COCOeval), "faster_coco_eval": (FasterCOCO, COCOeval_faster)}
    compiled = detectron2_coco_eval() if "detectron2" in options.peers else None
    if compiled is not None:
        classes["detectron2 COCOeval_opt"] = (COCO, compiled)
    else:
        left_out["detectron2 COCOeval_opt"] = "detectron2 with its compiled part is not installed"
    contenders = [Contender(shown, partial(quietly, make(inputs, *pair)), peer=True) for shown, pair in classes.items()]
    ours = partial(our_whole_path, inputs) if name == CASES[0] else partial(our_evaluate, filled(inputs))
    contenders.append(Contender("cpvt_det", ours))
    return Work(contenders, TOLERANCE, left_out)


Figures = dict[str, Tensor]


def our_whole_path(inputs: Inputs) -> Figures:
    return our_evaluate(filled(inputs))


def filled(inputs: Inputs) -> CocoEvaluator:
    names = tuple(str(label) for label in range(CLASSES))
    evaluator = CocoEvaluator(records_of(inputs.ground_truth), Classes(tuple(range(1, CLASSES + 1)), names))
    for image_id, detections in inputs.found.items():
        evaluator.add(image_id, detections)
    return evaluator


def records_of(ground_truth: dict[str, list[dict[str, Any]]]) -> Records:
    """The ground truth, whose annotations are in the order of their images, as our evaluator takes it."""
    keys = ("bbox", "area", "id", "category_id", "iscrowd")
    boxes = np.array([tuple(one[key] for key in keys) for one in ground_truth["annotations"]], dtype=BOX)
    boxes["label"] -= 1
    images = np.zeros(len(ground_truth["images"]), dtype=IMAGE)
    images["id"] = [image["id"] for image in ground_truth["images"]]
    images["count"] = np.bincount([one["image_id"] for one in ground_truth["annotations"]], minlength=len(images) + 1)[1:]
    images["first"] = np.cumsum(images["count"]) - images["count"]
    return Records([(Table(images, np.zeros(0, dtype=np.uint8), boxes), Path())])


def our_evaluate(evaluator: CocoEvaluator) -> Figures:
    figures = evaluator.evaluate()["bbox"]
    return _figures([figures[name] / 100 for name in FIGURES])


def whole_path(inputs: Inputs, coco_class: type, eval_class: type) -> Callable[[], Figures]:
    return lambda: run_coco_eval(indexed(inputs, coco_class), as_results(inputs.found), eval_class)


def evaluate_step(inputs: Inputs, coco_class: type, eval_class: type) -> Callable[[], Figures]:
    with contextlib.redirect_stdout(io.StringIO()):
        truth, results = indexed(inputs, coco_class), as_results(inputs.found)
    return lambda: run_coco_eval(truth, results, eval_class)


def indexed(inputs: Inputs, coco_class: type) -> Any:
    """The ground truth in a ``COCO`` of pycocotools or of a package with the same interface."""
    truth = coco_class()
    truth.dataset = inputs.ground_truth
    truth.createIndex()
    return truth


def as_results(found: dict[int, Detections]) -> list[dict[str, Any]]:
    """The detections as pycocotools is usually given them: a list of dicts, image by image."""
    results = []
    for image_id, detections in found.items():
        boxes = detections.boxes_xyxy.double()
        boxes[:, 2:] -= boxes[:, :2]
        for box, score, label in zip(boxes.tolist(), detections.scores.tolist(), detections.labels.tolist(), strict=True):
            results.append({"image_id": image_id, "category_id": label + 1, "bbox": box, "score": score})
    return results


def run_coco_eval(truth: Any, results: list[dict[str, Any]], eval_class: type) -> Figures:
    evaluation = eval_class(truth, truth.loadRes(results), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return _figures(evaluation.stats[: len(FIGURES)])


def quietly(call: Callable[[], Figures]) -> Figures:
    """pycocotools prints, and on numpy 2 it warns."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return call()


def _figures(values: Sequence[float]) -> Figures:
    return {name: torch.tensor(float(value), dtype=torch.float64) for name, value in zip(FIGURES, values, strict=True)}
