# SPDX-License-Identifier: Apache-2.0
"""Average precision as COCO defines it: the detections of many images against their ground truth.

On the road of one image: after ``postprocess.py``, the last stop.

A backend matches; the figures are read off its arrays here, in one function for all backends, because ``summarize`` of
pycocotools gives -1 for AP with any limit but 100 detections.
"""

import io
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from cpvt_det.errors import UnknownNameError
from cpvt_det.structures import Detections

AREA_SUFFIXES = ("s", "m", "l")  # of a box: below 32^2 pixels, up to 96^2, above


def _load_faster_coco_eval() -> tuple[type, type]:
    from faster_coco_eval import COCO, COCOeval_faster

    return COCO, COCOeval_faster


def _load_pycocotools() -> tuple[type, type]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return COCO, COCOeval


BACKENDS: dict[str, Callable[[], tuple[type, type]]] = {
    "faster_coco_eval": _load_faster_coco_eval,
    "pycocotools": _load_pycocotools,
}


class CocoEvaluator:
    """Collects detections image by image, then tells their average precision.

    Images that are never added count as images without detections. Every process of a distributed evaluation fills its
    own evaluator; one of them merges the ``state`` of the others.

    Args:
        ground_truth: COCO format: ``images``, ``annotations`` and ``categories``, with ids as in the file. ``iscrowd``
            and ``area`` may be missing: no crowd, and the area of the box. It is copied, not changed.
        class_ids: the category id in the file of each of the K classes.
        class_names: the name of each of the K classes.
        backend: "faster_coco_eval", or "pycocotools", which gives the same figures more slowly.
        max_detections: how many detections of a class count in one image, best first; COCO says 100.

    Raises:
        ValueError: ids and names that do not pair up, or ground truth that is not about them.
        UnknownNameError: a backend that does not exist.
    """

    def __init__(
        self,
        ground_truth: dict[str, Any],
        class_ids: Sequence[int],
        class_names: Sequence[str],
        backend: str = "faster_coco_eval",
        max_detections: int = 100,
    ):
        if backend not in BACKENDS:
            raise UnknownNameError("evaluator", backend, BACKENDS)
        if max_detections < 1:
            raise ValueError(f"max_detections must be at least 1, got {max_detections}")
        _check_classes(class_ids, class_names)
        self.class_ids = [int(class_id) for class_id in class_ids]
        self.class_names = list(class_names)
        self.backend = backend
        self.max_detections = [limit for limit in (1, 10) if limit < max_detections] + [max_detections]
        self._ground_truth = _lean_copy(ground_truth, self.class_ids)
        self._image_ids = {image["id"] for image in self._ground_truth["images"]}
        self._results: dict[int, list[dict[str, Any]]] = {}

    def add(self, image_id: int, detections: Detections) -> None:
        """Take the detections of one image.

        Args:
            image_id: the id of the image in the ground truth.
            detections: boxes in pixels of the original image; none is fine.

        Raises:
            ValueError: an image that is unknown or was added before; boxes, scores or labels that differ in number, are
                not finite or out of range. A NaN score would sort anywhere, and give an AP of 100 to a broken model.
        """
        self._check_new(image_id)
        boxes, scores, labels = (values.detach().cpu() for values in (detections.boxes_xyxy, detections.scores, detections.labels))
        _check_detections(image_id, boxes, scores, labels, len(self.class_ids))
        boxes = boxes.double()
        boxes_xywh = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)
        self._results[int(image_id)] = [
            {"image_id": int(image_id), "category_id": self.class_ids[label], "bbox": box, "score": score}
            for label, box, score in zip(labels.tolist(), boxes_xywh.tolist(), scores.double().tolist(), strict=True)
        ]

    def state(self) -> dict[str, list]:
        """What was added so far, in plain Python objects that can be sent to another process."""
        return {"image_ids": list(self._results), "results": self.coco_results()}

    def merge(self, state: dict[str, list]) -> None:
        """Take what another evaluator of the same ground truth has collected.

        Raises:
            ValueError: an image that is unknown or was added before.
        """
        for image_id in state["image_ids"]:
            self._check_new(image_id)
        self._results.update({image_id: [] for image_id in state["image_ids"]})
        for result in state["results"]:
            self._results[result["image_id"]].append(dict(result))

    def coco_results(self) -> list[dict[str, Any]]:
        """The detections in the results format of COCO: category ids as in the file, boxes xywh.

        They are in the order of the images in the ground truth, whichever process saw them.
        """
        return [dict(result) for image in self._ground_truth["images"] for result in self._results.get(image["id"], ())]

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Compare what was added with the ground truth.

        Returns:
            ``{"bbox": figures}`` in percent: "AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100" (the
            limits of AR follow ``max_detections``), "ARs", "ARm", "ARl" and "AP-<class name>" of each class. A figure
            is NaN if there is no ground truth for it, and 0 if there is some but no detection.
        """
        precision, recall = _match(self.backend, self._ground_truth, self.coco_results(), self.max_detections)
        return {"bbox": _figures(precision, recall, self.class_ids, self.class_names, self.max_detections)}

    def _check_new(self, image_id: int) -> None:
        if image_id not in self._image_ids:
            raise ValueError(f"image id {image_id!r} is not in the ground truth of {len(self._image_ids)} images")
        if image_id in self._results:
            raise ValueError(f"the detections of image id {image_id!r} were added before; add every image once")


def format_table(results: dict[str, dict[str, float]]) -> str:
    """The figures of ``CocoEvaluator.evaluate`` as text: precision, recall, and the AP of each class; "n/a" is NaN."""
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
    """Write figures as strict JSON, with ``null`` for NaN; the file is there complete or not at all."""
    _write_json(_strict(results), path, indent=2)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(part) for key, part in value.items()}
    return None if math.isnan(value) else value


def write_detections(results: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write ``CocoEvaluator.coco_results`` as strict JSON, which COCO's own tools and servers read."""
    _write_json(results, path, indent=None)


def _table(rows: list, headers: list[str], alignment: list[str]) -> str:
    # class names may look like numbers, which tabulate would otherwise format
    return tabulate(rows, headers, tablefmt="pipe", colalign=alignment, disable_numparse=True)


def _write_json(value: Any, path: str | os.PathLike[str], indent: int | None) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=indent, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_classes(class_ids: Sequence[int], class_names: Sequence[str]) -> None:
    if len(class_ids) == 0 or len(class_ids) != len(class_names):
        raise ValueError(f"expected one name for each class id, got {len(class_ids)} ids and {len(class_names)} names")
    for kind, values in (("id", list(class_ids)), ("name", list(class_names))):
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise ValueError(f"class {kind} {twice[0]!r} is given to more than one class")


def _check_detections(image_id: int, boxes: Tensor, scores: Tensor, labels: Tensor, num_classes: int) -> None:
    """Refuse detections that cannot be scored, naming their image."""
    where = f"the detections of image id {image_id!r}"
    count = scores.numel()
    if scores.ndim != 1 or boxes.shape != (count, 4) or labels.shape != (count,):
        shapes = ", ".join(str(tuple(values.shape)) for values in (boxes, scores, labels))
        raise ValueError(f"{where}: expected boxes (n, 4), scores (n,) and labels (n,), got {shapes}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{where}: labels must be integers, got {labels.dtype}")
    for name, values in (("scores", scores), ("boxes", boxes)):
        bad = int((~values.isfinite()).reshape(count, -1).any(dim=1).sum()) if count else 0
        if bad:
            raise ValueError(f"{where}: {bad} of {count} {name} are not finite; the weights are probably broken")
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise ValueError(f"{where}: label {int(outside[0])} is not in [0, {num_classes})")
    inverted = boxes[(boxes[:, 2:] < boxes[:, :2]).any(dim=1)]
    if len(inverted):
        raise ValueError(f"{where}: box {inverted[0].tolist()} is not xyxy, its right or bottom lies before its start")


def _lean_copy(ground_truth: dict[str, Any], class_ids: list[int]) -> dict[str, list[dict[str, Any]]]:
    """What box evaluation needs, for the backends to write into; numbered from 1, as id 0 means "no match" to them."""
    image_ids = [image["id"] for image in ground_truth["images"]]
    known_images, known_classes = set(image_ids), set(class_ids)
    if not image_ids or len(known_images) < len(image_ids) or not all(isinstance(key, int) for key in image_ids):
        raise ValueError(f"the ground truth needs images with distinct integer ids, got {image_ids[:3]}")
    annotations = []
    for number, annotation in enumerate(ground_truth["annotations"], start=1):
        image_id, class_id, area = annotation["image_id"], annotation["category_id"], annotation.get("area")
        if image_id not in known_images or class_id not in known_classes:
            raise ValueError(
                f"annotation id {annotation.get('id')!r} has image id {image_id!r} and category id {class_id!r}; "
                "the first must be in the ground truth and the second in class_ids"
            )
        box = [float(value) for value in annotation["bbox"]]
        area = box[2] * box[3] if area is None else float(area)
        copied = {"id": number, "image_id": image_id, "category_id": class_id, "bbox": box, "area": area}
        annotations.append({**copied, "iscrowd": int(annotation.get("iscrowd") or 0)})
    return {
        "images": [{"id": image_id} for image_id in image_ids],
        "annotations": annotations,
        "categories": [{"id": class_id} for class_id in class_ids],
    }


def _match(
    backend: str, ground_truth: dict[str, list], results: list[dict[str, Any]], max_detections: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Precision (10 IoUs, 101 recalls, K, 4 areas, limits) and recall (10, K, 4, limits), classes by rising id.

    -1 stands where there is no ground truth.
    """
    coco_class, eval_class = BACKENDS[backend]()
    for number, result in enumerate(results, start=1):
        result.update(id=number, area=result["bbox"][2] * result["bbox"][3], iscrowd=0)
    sides = []
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pycocotools on numpy 2
        for annotations in (ground_truth["annotations"], results):
            # not by loadRes, which fails on an empty list in pycocotools
            side = coco_class()
            side.dataset = {**ground_truth, "annotations": annotations}
            side.createIndex()
            sides.append(side)
        evaluation = eval_class(*sides, "bbox")
        evaluation.print_function = lambda *_: None
        evaluation.params.maxDets = max_detections
        evaluation.evaluate()
        evaluation.accumulate()
    return np.asarray(evaluation.eval["precision"]), np.asarray(evaluation.eval["recall"])


def _figures(
    precision: np.ndarray, recall: np.ndarray, class_ids: list[int], class_names: list[str], max_detections: list[int]
) -> dict[str, float]:
    """The figures of ``CocoEvaluator.evaluate`` from the arrays of ``_match``."""

    def mean(values: np.ndarray) -> float:
        values = values[values > -1]
        return 100 * float(values.mean()) if values.size else math.nan

    figures = {"AP": mean(precision[..., 0, -1])}
    figures |= {f"AP{50 + 5 * i}": mean(precision[i, ..., 0, -1]) for i in (0, 5)}
    figures |= {f"AP{suffix}": mean(precision[..., a, -1]) for a, suffix in enumerate(AREA_SUFFIXES, start=1)}
    figures |= {f"AR{limit}": mean(recall[..., 0, m]) for m, limit in enumerate(max_detections)}
    figures |= {f"AR{suffix}": mean(recall[..., a, -1]) for a, suffix in enumerate(AREA_SUFFIXES, start=1)}
    ranks = np.argsort(np.argsort(class_ids))
    figures |= {f"AP-{name}": mean(precision[:, :, k, 0, -1]) for k, name in zip(ranks, class_names, strict=True)}
    return figures
