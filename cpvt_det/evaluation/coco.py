# SPDX-License-Identifier: Apache-2.0
"""Average precision as COCO defines it, for the detections and the ground truth of many images.

Place in the pipeline: after ``answers.py``, as the last step.

A backend matches detections and objects at ten IoU thresholds. The metrics are computed here from the backend's arrays, in one
function for all backends, because ``summarize`` of pycocotools returns -1 for AP with any limit other than 100 detections.
"""

import io
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from cpvt_det.common import distributed
from cpvt_det.common.errors import UnknownNameError
from cpvt_det.common.files import write_json
from cpvt_det.common.memory import no_garbage_collection
from cpvt_det.common.structures import Detections
from cpvt_det.data.records import Records
from cpvt_det.evaluation.evaluator import Evaluator
from cpvt_det.evaluation.matches import COUNTED, Matches, ground_truth_of
from cpvt_det.evaluation.thresholds import Thresholds, pooled_curve

AREA_SUFFIXES = ("s", "m", "l")  # area of a box: below 32^2 pixels, up to 96^2, larger
BACKENDS = {
    "faster_coco_eval": ("faster_coco_eval:COCO", "faster_coco_eval:COCOeval_faster"),
    "pycocotools": ("pycocotools.coco:COCO", "pycocotools.cocoeval:COCOeval"),
}
"""Name -> the library's classes for data and evaluation, which are imported only when used."""


class CocoEvaluator(Evaluator):
    """Collects detections image by image, then computes their average precision.

    Args:
        ground_truth: records of the test set, or a COCO dict with ``images``, ``annotations`` and ``categories``, as in
            :func:`cpvt_det.evaluation.matches.ground_truth_of`. The dict is copied, not changed.
        class_ids: category id of each of the K classes in the file.
        class_names: name of each of the K classes.
        backend: "faster_coco_eval", or "pycocotools", which computes the same metrics more slowly.
        max_detections: number of best detections that count, per class and image. ``None`` means 100, as in COCO, unless an
            image of the ground truth has more than 100 objects of one class; then all detections count.

    Raises:
        ValueError: ids and names differ in number or are not unique, or the ground truth has other ids.
        UnknownNameError: a backend that does not exist.

    Attributes:
        max_detections: number of detections that count; ``None`` for all.
    """

    def __init__(
        self,
        ground_truth: Records | dict[str, Any],
        class_ids: Sequence[int],
        class_names: Sequence[str],
        backend: str = "faster_coco_eval",
        max_detections: int | None = None,
    ):
        if backend not in BACKENDS:
            raise UnknownNameError("evaluator", backend, BACKENDS)
        if max_detections is not None and max_detections < 1:
            raise ValueError(f"max_detections must be at least 1, got {max_detections}")
        if len(class_ids) == 0 or len(class_ids) != len(class_names):
            raise ValueError(f"expected one name for each class id, got {len(class_ids)} ids and {len(class_names)} names")
        for kind, values in (("id", list(class_ids)), ("name", list(class_names))):
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise ValueError(f"class {kind} {twice[0]!r} occurs more than once; each class needs its own")
        self.class_ids = [int(class_id) for class_id in class_ids]
        self.class_names = list(class_names)
        self.backend = backend
        self._ground_truth = ground_truth_of(ground_truth, self.class_ids)
        self.max_detections = max_detections or self._ground_truth.counted
        limits = [limit for limit in (1, 10) if self.max_detections is None or limit < self.max_detections]
        self._limits = limits + ([COUNTED, None] if self.max_detections is None else [self.max_detections])
        self._image_ids = self._ground_truth.image_ids.tolist()
        self._matched: tuple[int, Matches | None] = (-1, None)  # number of images, and their matches; more may be added
        super().__init__(self._image_ids)

    def add(self, image_id: int, detections: Detections) -> None:
        """Add the detections of one image.

        Args:
            image_id: the id of the image in the ground truth.
            detections: detections with boxes in pixels of the original image; may be empty.

        Raises:
            ValueError: the image is unknown or was already added, or boxes, scores or labels differ in number, are not finite or
                are out of range. NaN scores are refused because they cannot be sorted and could give a broken model an AP of 100.
        """
        self.check_new(image_id)
        boxes, scores, labels = _checked_arrays(image_id, detections, len(self.class_ids))
        self._found[int(image_id)] = labels, np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), axis=1), scores

    def coco_results(self) -> list[dict[str, Any]]:
        """The detections in COCO's results format, with the category ids of the file and xywh boxes.

        They are in the order of the images in the ground truth, no matter which process added them.
        """
        return list(self._rows(self._columns()))

    def _rows(self, columns: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        """All or some of the detections of ``_columns``, in COCO's results format."""
        image_ids, labels, boxes, scores = columns
        ids = np.array(self.class_ids)[labels]
        rows = zip(*(column.tolist() for column in (image_ids, ids, boxes, scores)), strict=True)
        return ({"image_id": i, "category_id": c, "bbox": box, "score": score} for i, c, box, score in rows)

    def _columns(self) -> list[np.ndarray]:
        """Image id, label, box xywh and score of every detection, in the order of the images in the ground truth."""
        image_ids = [image_id for image_id in self._image_ids if image_id in self._found]
        found = [(np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0)), *(self._found[image_id] for image_id in image_ids)]
        columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        counts = np.array([len(part) for part, *_ in found[1:]], np.int64)
        return [np.repeat(np.array(image_ids, np.int64), counts), *columns]

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Compare the detections with the ground truth.

        Returns:
            ``{"bbox": metrics}`` in percent: "AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm",
            "ARl" and "AP-<class name>" for each class. The limits in the names of AR follow ``max_detections``; if all detections
            count, there is also "ARall". A metric is NaN if there is no ground truth for it, and 0 if there is ground truth but
            no detection.
        """
        precision, recall = self._match_classes(range(len(self.class_ids)), self._columns())
        return {"bbox": _figures(precision, recall, self.class_names, self._limits)}

    def evaluate_together(self) -> dict[str, dict[str, float]]:
        """The same metrics for process 0's detections. The classes are divided among all processes, so every process must call
        this.

        Returns:
            The metrics on process 0, and an empty dict on the other processes. If a subclass overrides :meth:`evaluate`, the work
            is not divided.
        """
        if type(self).evaluate is not CocoEvaluator.evaluate:
            return super().evaluate_together()
        rank, number, columns = distributed.rank(), distributed.world_size(), self._columns()
        shares = [range(first, len(self.class_ids), number) for first in range(number)]
        own = [[column[np.isin(columns[1], share)] for column in columns] for share in shares] if rank == 0 else []
        matched = distributed.gather_to_first(self._match_classes(shares[rank], distributed.scatter_from_first(own)))
        if rank != 0:
            return {}
        order = np.argsort([label for share in shares for label in share])
        precision, recall = (np.concatenate(parts, axis=-3)[..., order, :, :] for parts in zip(*matched, strict=True))
        return {"bbox": _figures(precision, recall, self.class_names, self._limits)}

    def _match_classes(self, labels: Sequence[int], columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The result of ``_match`` for some classes and their detections; empty arrays for no class."""
        if not labels:
            return np.zeros((10, 101, 0, 4, len(self._limits))), np.zeros((10, 0, 4, len(self._limits)))
        with no_garbage_collection():
            detected = list(self._rows(columns))
            for number, row in enumerate(detected, start=1):
                row |= {"id": number, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0}
            class_ids = [self.class_ids[label] for label in labels]
            sections = {"images": [{"id": i} for i in self._image_ids], "categories": [{"id": i} for i in class_ids]}
            annotations = self._ground_truth.annotations(self.class_ids, labels)
            most = np.unique(columns[0], return_counts=True)[1].max(initial=0)  # in one image, so no class in it has more
            limits = [max(COUNTED + 1, int(most)) if limit is None else limit for limit in self._limits]
            precision, recall = _match(self.backend, sections, annotations, detected, limits)
        order = np.argsort(np.argsort(class_ids))  # the backends order classes by ascending id
        return precision[:, :, order], recall[:, order]

    def matches(self) -> Matches:
        """The detections added so far, matched with the objects. The matching is done only once, however often this is called."""
        if self._matched[0] < len(self._found):
            self._matched = len(self._found), Matches(self._ground_truth, *self._columns(), self.max_detections)
        return self._matched[1]

    def thresholds(self) -> Thresholds:
        """The score thresholds with the highest F1, for each class and for all classes together."""
        curves = self.matches().curves(len(self.class_ids))
        overall, *classes = (curve.best() for curve in (pooled_curve(curves), *curves))
        return Thresholds(overall and overall.threshold, tuple(best and best.threshold for best in classes))


def format_table(results: dict[str, dict[str, float]]) -> str:
    """The metrics of ``CocoEvaluator.evaluate`` as text: precision, recall, and the AP of each class; NaN is shown as "n/a"."""
    figures = {name: "n/a" if math.isnan(value) else f"{value:.3f}" for name, value in results["bbox"].items()}
    classes = [(name.removeprefix("AP-"), text) for name, text in figures.items() if name.startswith("AP-")]
    tables = []
    for kind in ("AP", "AR"):
        names = [name for name in figures if name.startswith(kind) and not name.startswith("AP-")]
        tables.append(_table([[figures[name] for name in names]], names, ["right"] * len(names)))
    columns = min(3, len(classes))
    rows = [sum(classes[start : start + columns], ()) for start in range(0, len(classes), columns)]
    rows[-1] += ("",) * (2 * columns - len(rows[-1]))
    tables.append(_table(rows, ["class", "AP"] * columns, ["left", "right"] * columns))
    return "\n\n".join(tables)


def write_results(results: dict[str, dict[str, float]], path: str | os.PathLike[str]) -> None:
    """Write metrics as strict JSON, with ``null`` for NaN; the file is either complete or not written."""
    write_json(_strict(results), path, indent=2)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(part) for key, part in value.items()}
    return None if math.isnan(value) else value


def _table(rows: list, headers: list[str], alignment: list[str]) -> str:
    # class names may look like numbers, which tabulate would otherwise format
    return tabulate(rows, headers, tablefmt="pipe", colalign=alignment, disable_numparse=True)


def _match(
    backend: str,
    sections: dict[str, list[dict[str, Any]]],
    truth: list[dict[str, Any]],
    detected: list[dict[str, Any]],
    max_detections: list[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Precision (10 IoUs, 101 recalls, K, 4 areas, limits) and recall (10, K, 4, limits), with classes by ascending id.

    -1 means that there is no ground truth. Objects and detections are given as annotations with ids from 1. The backends modify
    these annotations.
    """
    coco_class, eval_class = map(resolve_name, BACKENDS[backend])
    sides = []
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pycocotools on numpy 2
        for annotations in (truth, detected):
            # not loadRes, which fails on an empty list in pycocotools
            side = coco_class()
            side.dataset = {**sections, "annotations": annotations}
            side.createIndex()
            sides.append(side)
        evaluation = eval_class(*sides, "bbox")
        evaluation.print_function = lambda *_: None
        evaluation.params.maxDets = max_detections
        evaluation.evaluate()
        evaluation.accumulate()
    return np.asarray(evaluation.eval["precision"]), np.asarray(evaluation.eval["recall"])


def _figures(precision: np.ndarray, recall: np.ndarray, class_names: list[str], limits: Sequence[int | None]) -> dict[str, float]:
    """The metrics of ``CocoEvaluator.evaluate`` from the arrays of ``_match``, with classes by label."""

    def mean(values: np.ndarray) -> float:
        values = values[values > -1]
        return 100 * float(values.mean()) if values.size else math.nan

    figures = {"AP": mean(precision[..., 0, -1])}
    figures |= {f"AP{50 + 5 * i}": mean(precision[i, ..., 0, -1]) for i in (0, 5)}
    figures |= {f"AP{suffix}": mean(precision[..., a, -1]) for a, suffix in enumerate(AREA_SUFFIXES, start=1)}
    figures |= {f"AR{limit or 'all'}": mean(recall[..., 0, m]) for m, limit in enumerate(limits)}
    figures |= {f"AR{suffix}": mean(recall[..., a, -1]) for a, suffix in enumerate(AREA_SUFFIXES, start=1)}
    figures |= {f"AP-{name}": mean(precision[:, :, label, 0, -1]) for label, name in enumerate(class_names)}
    return figures


def _checked_arrays(image_id: int, detections: Detections, num_classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes xyxy (n, 4) float64, scores (n,) float64 and labels (n,) int64 of detections that can be evaluated.

    Raises:
        ValueError: a tensor has the wrong shape, labels are not integers or not in [0, K), scores or boxes are not finite, or a
            box is not xyxy.
    """
    where = f"the detections of image id {image_id!r}"
    boxes, scores, labels = detections.boxes_xyxy, detections.scores, detections.labels
    if scores.ndim != 1 or boxes.shape != (len(scores), 4) or labels.shape != scores.shape:
        shapes = ", ".join(str(tuple(values.shape)) for values in (boxes, scores, labels))
        raise ValueError(f"{where}: expected boxes (n, 4), scores (n,) and labels (n,), got {shapes}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{where}: labels must be integers, got {labels.dtype}")
    boxes, scores = (values.detach().cpu().double().numpy() for values in (boxes, scores))
    labels = labels.cpu().long().numpy()
    for name, values in (("scores", scores[:, None]), ("boxes", boxes)):
        bad = int((~np.isfinite(values)).any(axis=1).sum())
        if bad:
            raise ValueError(f"{where}: {bad} of {len(scores)} {name} are not finite; the weights are probably broken")
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise ValueError(f"{where}: label {int(outside[0])} is not in [0, {num_classes})")
    inverted = boxes[(boxes[:, 2:] < boxes[:, :2]).any(axis=1)]
    if len(inverted):
        raise ValueError(f"{where}: box {inverted[0].tolist()} is not xyxy: x2 is below x1, or y2 below y1")
    return boxes, scores, labels
