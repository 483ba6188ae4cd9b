# SPDX-License-Identifier: Apache-2.0
"""Average precision as COCO defines it, for the detections and the ground truth of many images.

Place in the pipeline: after ``answers.py``, as the last step.

faster-coco-eval matches detections and objects at ten IoU thresholds. The metrics are computed here from its arrays, because its
``summarize`` has no place for a limit other than 100 detections.
"""

import io
import math
import os
from contextlib import redirect_stdout
from typing import Any

import numpy as np
from tabulate import tabulate

from cpvt_det.common.class_names import Classes
from cpvt_det.common.files import write_json
from cpvt_det.common.memory import no_garbage_collection
from cpvt_det.common.structures import Detections, Thresholds
from cpvt_det.data.records import Records
from cpvt_det.evaluation.evaluator import Evaluator
from cpvt_det.evaluation.matches import COUNTED, GroundTruth, Matches
from cpvt_det.evaluation.thresholds import pooled_curve

AREA_SUFFIXES = ("s", "m", "l")  # area of a box: below 32^2 pixels, up to 96^2, larger


class CocoEvaluator(Evaluator):
    """Collects detections image by image, then computes their average precision.

    Args:
        records: images of the test set.
        classes: ids and names of the labels.

    Attributes:
        max_detections: number of best detections that count, per class and image: 100, as in COCO, or ``None`` for all, if an image
            has more than 100 objects of one class.
    """

    def __init__(self, records: Records, classes: Classes):
        self.classes = classes
        self._ground_truth = GroundTruth(records.image_ids, *records.boxes())
        self.max_detections = self._ground_truth.counted
        self._limits = [1, 10, COUNTED, *([None] if self.max_detections is None else [])]
        self._image_ids = self._ground_truth.image_ids.tolist()
        self._matched: tuple[int, Matches | None] = (-1, None)  # number of images, and their matches; more may be added
        super().__init__(self._image_ids)

    def add(self, image_id: int, detections: Detections) -> None:
        """Add the detections of one image.

        Args:
            image_id: the id of the image in the ground truth.
            detections: detections with boxes in pixels of the original image; may be empty.

        Raises:
            ValueError: the image is unknown or was already added, or boxes, scores or labels are not finite or are out of range.
                NaN scores are refused because they cannot be sorted and could give a broken model an AP of 100.
        """
        self.check_new(image_id)
        where = f"the detections of image id {image_id!r}"
        boxes, scores = (values.detach().cpu().double().numpy() for values in (detections.boxes_xyxy, detections.scores))
        labels = detections.labels.cpu().numpy()
        for name, values in (("scores", scores[:, None]), ("boxes", boxes)):
            if bad := int((~np.isfinite(values)).any(axis=1).sum()):
                raise ValueError(f"{where}: {bad} of {len(scores)} {name} are not finite; the weights are probably broken")
        outside = labels[(labels < 0) | (labels >= len(self.classes))]
        if len(outside):
            raise ValueError(f"{where}: label {int(outside[0])} is not in [0, {len(self.classes)})")
        inverted = boxes[(boxes[:, 2:] < boxes[:, :2]).any(axis=1)]
        if len(inverted):
            raise ValueError(f"{where}: box {inverted[0].tolist()} is not xyxy: x2 is below x1, or y2 below y1")
        self._found[int(image_id)] = labels, np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), axis=1), scores

    def coco_results(self) -> list[dict[str, Any]]:
        """The detections in COCO's results format, with the category ids of the file and xywh boxes.

        They are in the order of the images in the ground truth, no matter which process added them.
        """
        image_ids, labels, boxes, scores = self._columns()
        columns = image_ids, np.array(self.classes.ids)[labels], boxes, scores
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [{"image_id": i, "category_id": c, "bbox": box, "score": score} for i, c, box, score in rows]

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
            "ARl" and "AP-<class name>" for each class; if all detections count, there is also "ARall". A metric is NaN if there is
            no ground truth for it, and 0 if there is ground truth but no detection.
        """
        precision, recall = self._match()

        def mean(values: np.ndarray) -> float:
            values = values[values > -1]
            return 100 * float(values.mean()) if values.size else math.nan

        figures = {"AP": mean(precision[..., 0, -1])}
        figures |= {f"AP{50 + 5 * i}": mean(precision[i, ..., 0, -1]) for i in (0, 5)}
        figures |= {f"AP{suffix}": mean(precision[..., a, -1]) for a, suffix in enumerate(AREA_SUFFIXES, start=1)}
        figures |= {f"AR{limit or 'all'}": mean(recall[..., 0, m]) for m, limit in enumerate(self._limits)}
        figures |= {f"AR{suffix}": mean(recall[..., a, -1]) for a, suffix in enumerate(AREA_SUFFIXES, start=1)}
        figures |= {f"AP-{name}": mean(precision[:, :, label, 0, -1]) for label, name in enumerate(self.classes.names)}
        return {"bbox": figures}

    def _match(self) -> tuple[np.ndarray, np.ndarray]:
        """Precision (10 IoUs, 101 recalls, K, 4 areas, limits) and recall (10, K, 4, limits); -1 means that there is no ground
        truth."""
        from faster_coco_eval import COCO, COCOeval_faster

        with no_garbage_collection(), redirect_stdout(io.StringIO()):
            detected = self.coco_results()
            for number, row in enumerate(detected, start=1):  # 0 means "no match"
                row |= {"id": number, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0}
            sections = {"images": [{"id": i} for i in self._image_ids], "categories": [{"id": i} for i in self.classes.ids]}
            sides = []
            for annotations in (self._ground_truth.annotations(self.classes.ids), detected):
                side = COCO()  # not loadRes, which gives every box a polygon too
                side.dataset = {**sections, "annotations": annotations}
                side.createIndex()
                sides.append(side)
            evaluation = COCOeval_faster(*sides, "bbox")
            evaluation.print_function = lambda *_: None
            evaluation.params.maxDets = [max(COUNTED + 1, len(detected)) if limit is None else limit for limit in self._limits]
            evaluation.evaluate()
            evaluation.accumulate()
        order = np.argsort(np.argsort(self.classes.ids))  # it orders classes by ascending id
        return np.asarray(evaluation.eval["precision"])[:, :, order], np.asarray(evaluation.eval["recall"])[:, order]

    def matches(self) -> Matches:
        """The detections added so far, matched with the objects. The matching is done only once, however often this is called."""
        if self._matched[0] < len(self._found):
            self._matched = len(self._found), Matches(self._ground_truth, *self._columns(), self.max_detections)
        return self._matched[1]

    def thresholds(self) -> Thresholds:
        """The score thresholds with the highest F1, for each class and for all classes together."""
        curves = self.matches().curves(len(self.classes))
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
