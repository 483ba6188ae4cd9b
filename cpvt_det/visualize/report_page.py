# SPDX-License-Identifier: Apache-2.0
"""``report.html``: the report of an evaluation as one page. A slider sets the score threshold, and the page's metrics and images
follow it.

At each threshold, the page counts in the browser in the same way as :mod:`cpvt_det.evaluation` counts at a single threshold. The
slider moves in steps of a thousandth and scores are rounded down to thousandths, so that both counts agree.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from cpvt_det.common.files import atomic_file
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.images import read_image
from cpvt_det.data.records import ImageRecord
from cpvt_det.evaluation.matches import IGNORED, NOTHING, Matches
from cpvt_det.evaluation.thresholds import Curve, pooled_curve
from cpvt_det.visualize.page import build_page, embed_image
from cpvt_det.visualize.pictures import hex_color

STEPS = 1000
"""Number of steps of the slider from score 0 to 1."""
MOST_IMAGES = 500
"""Largest number of embedded images, which are those with the most mistakes. The figures count all images."""
MOST_BYTES = 19_000_000
"""Size of the page up to which its images are scaled down to fit."""
SMALL, LARGE = 32**2, 96**2  # pixels: COCO's limits of the area of a medium object

Row = list[Any]


def write_report_page(
    dataset: CocoDataset,
    matches: Matches,
    curves: Sequence[Curve],
    figures: dict[str, dict[str, float]],
    path: Path,
    threshold: float,
) -> None:
    """Write the page.

    Args:
        dataset: data set with the ground truth.
        matches: objects and detections of the data set.
        curves: the curve of each class.
        figures: result of :meth:`cpvt_det.evaluation.coco.CocoEvaluator.evaluate`.
        path: path of the file.
        threshold: threshold at which the slider starts.
    """
    mistakes = matches.mistakes(threshold).sum(axis=1)
    shown = np.argsort(-mistakes, kind="stable")[:MOST_IMAGES].tolist()  # those with the most mistakes first, then the others by id
    records = [dataset.records[int(matches.record_of[index])] for index in shown]
    classes = []
    for label, (name, curve) in enumerate(zip(dataset.classes.names, curves, strict=True)):
        precision = 100 * curve.average_precision() if curve.num_objects else None
        classes.append({"name": name, "color": hex_color(label), "AP50": precision, "best": _best_step(curve)})
    content = {
        "dataset": dataset.name,
        "images": len(matches.image_ids),
        "threshold": int(step_of(threshold)),
        "best": _best_step(pooled_curve(curves)),
        "figures": {  # for all classes together; None if there is no ground truth for a figure
            name: None if math.isnan(value) else value for name, value in figures["bbox"].items() if not name.startswith("AP-")
        },
        "classes": classes,
        **_counts(matches, len(dataset.classes)),
        "shown": [_image(matches, index, record) for index, record in zip(shown, records, strict=True)],
    }
    left = max(0, MOST_BYTES - len(build_page("report.html", content)))
    for entry, record in zip(content["shown"], records, strict=True):
        entry["src"] = embed_image(read_image(record.file_name), left / len(shown))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(build_page("report.html", content).encode(errors="backslashreplace"))


def step_of(scores: float | np.ndarray) -> np.ndarray:
    """The highest step of the slider that each score passes; -1 for the score -1, which passes no step."""
    steps = STEPS * np.asarray(scores) + 1e-6  # in floating point, 0.29 is 289.99999999999994 thousandths
    return np.maximum(-1, steps.astype(int))


def _sizes(objects: np.ndarray) -> np.ndarray:
    """The size of each object: 0 small, 1 medium, 2 large."""
    return (objects["area"] >= SMALL).astype(int) + (objects["area"] > LARGE)


def _best_step(curve: Curve) -> int | None:
    best = curve.best()
    return None if best is None else int(step_of(best.threshold))


def _counts(matches: Matches, num_classes: int) -> dict[str, list[Row]]:
    """The counts over all images, by the highest step that a score passes. The step is -1 if the score passes none.

    Returns:
        Three tables. The rows of ``objects`` are class, size, step of the detection that finds the objects, and number of these
        objects. The rows of ``false`` are class, step, and number of detections without an object of their class. The rows of
        ``confusion`` are true class, detected class, step, and number; class K is the background.
    """
    objects, steps = matches.objects, step_of(matches.scores)
    is_false, is_counted = matches.same_class == NOTHING, matches.any_class != IGNORED
    true_classes = np.append(objects["label"], num_classes)[matches.any_class]  # NOTHING is the index of the last element
    columns = {
        "objects": (~objects["crowd"], objects["label"], _sizes(objects), step_of(matches.found_at)),
        "false": (is_false, matches.labels, steps),
        "confusion": (is_counted, true_classes, matches.labels, steps),
    }
    tables = {}
    for name, (taken, *values) in columns.items():
        rows, counts = np.unique(np.stack(values, axis=1)[taken], axis=0, return_counts=True)
        tables[name] = np.column_stack([rows, counts]).tolist()
    return tables


def _image(matches: Matches, index: int, record: ImageRecord) -> dict[str, Any]:
    """The data of an image without its pixels. Objects are [x, y, w, h, class, size, crowd, step of the detection that finds it].
    Detections are [x, y, w, h, class, step, index of the object of the same class, index of the object of any class].
    """
    own, found = matches.of_image(index)
    objects = matches.objects[own]
    about = objects["label"], _sizes(objects), objects["crowd"].astype(int), step_of(matches.found_at[own])
    pairs = [values[found] for values in (matches.same_class, matches.any_class)]
    pairs = [np.where(pair < 0, pair, pair - own.start) for pair in pairs]
    return {
        "id": record.image_id,
        "name": _base_name(record.file_name),
        "size": [record.width, record.height],
        "objects": _rows(objects["xywh"], *about),
        "found": _rows(matches.boxes[found], matches.labels[found], step_of(matches.scores[found]), *pairs),
    }


def _base_name(file_name: str) -> str:
    """The last part of a path or an address, because this part reveals nothing about the machine. The part after "?" is removed,
    because it may contain a key."""
    path = urlsplit(file_name).path if "://" in file_name else file_name
    return re.split(r"[\\/]", path)[-1]


def _rows(boxes_xywh: np.ndarray, *columns: np.ndarray) -> list[Row]:
    columns = (column.tolist() for column in columns)
    return [[*box, *rest] for box, *rest in zip(boxes_xywh.round(1).tolist(), *columns, strict=True)]
