# SPDX-License-Identifier: Apache-2.0
"""``report.html``: the report of an evaluation as one page, whose figures and images follow a slider of the score threshold.

The page counts in a browser what :mod:`cpvt_det.evaluation` counts at one threshold. Scores are cut to thousandths, which are the
steps of the slider, so that both count the same; of a very large data set to larger steps, so that its counts fit into the page.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.images import read_image
from cpvt_det.data.records import ImageRecord
from cpvt_det.evaluation.confusion import worst_images
from cpvt_det.evaluation.matching import ScoredImage
from cpvt_det.evaluation.outcomes import IGNORED, NOTHING, Outcomes, outcomes
from cpvt_det.evaluation.precision_recall import Curve, pooled_curve
from cpvt_det.files import atomic_file
from cpvt_det.visualize.page import build_page, embed_image, hex_color

STEPS = 1000
"""Steps of the slider from score 0 to 1."""
MOST_IMAGES = 500
"""Largest number of embedded images: those with most mistakes. The figures count all images."""
MOST_BYTES = 19_000_000
GRIDS = (1, 2, 5, 10, 20, 50, 100)
"""Distances of the slider's positions in steps: the first whose data leave half of the bytes to the images, else the last."""
SMALL, LARGE = 32**2, 96**2  # pixels: COCO's limits of the area of a medium object

Row = list[Any]


def write_report_page(
    dataset: CocoDataset,
    images: Sequence[ScoredImage],
    curves: Sequence[Curve],
    figures: dict[str, dict[str, float]],
    path: Path,
    threshold: float,
) -> None:
    """Write the page.

    Args:
        dataset: data set with the ground truth.
        images: its images with their detections.
        curves: the curve of each class.
        figures: result of :meth:`cpvt_det.evaluation.coco.CocoEvaluator.evaluate`.
        path: path of the file.
        threshold: threshold that the slider starts at.
    """
    found = {image.image_id: outcomes(image) for image in images}
    sizes = _sizes(dataset)
    records = {record.image_id: record for record in dataset.records}
    shown = _most_mistaken(images, threshold)
    content = _fitted(
        {
            "dataset": dataset.name,
            "images": len(images),
            "threshold": step_of(threshold),
            "best": _best_step(pooled_curve(curves)),
            "figures": _main_figures(figures),
            "classes": _classes(dataset, curves),
            **_counts(images, found, sizes, len(dataset.classes)),
            "shown": [_image(image, found[image.image_id], sizes[image.image_id], records[image.image_id]) for image in shown],
        }
    )
    left = max(0, MOST_BYTES - len(build_page("report.html", content)))
    for entry, image in zip(content["shown"], shown, strict=True):
        entry["src"] = embed_image(read_image(records[image.image_id].file_name), left / len(shown))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(build_page("report.html", content).encode(errors="backslashreplace"))


def step_of(score: float) -> int:
    """The highest step of the slider that a score passes; -1 for none, the score -1."""
    return max(-1, int(STEPS * score + 1e-6))  # 0.29 is 289.99999999999994 thousandths


def _fitted(content: dict[str, Any]) -> dict[str, Any]:
    """The data of the page with ``grid``, at whose multiples the slider stands and the counts are kept; those are exact there."""
    for grid in GRIDS:
        tables = {name: _on_grid(content[name], grid) for name in ("objects", "false", "confusion")}
        starts = {name: content[name] and content[name] // grid * grid for name in ("threshold", "best")}
        fitted = {**content, **tables, **starts, "grid": grid}
        if len(build_page("report.html", fitted)) <= MOST_BYTES / 2:
            break
    return fitted


def _on_grid(rows: Sequence[Row], grid: int) -> list[Row]:
    """Rows that end with a step and a count, the steps lowered to multiples of the grid; -1 stays below all of them."""
    counts: Counter = Counter()
    for *key, step, count in rows:
        counts[(*key, step // grid * grid)] += count
    return [[*key, count] for key, count in counts.items()]


def _most_mistaken(images: Sequence[ScoredImage], threshold: float) -> list[ScoredImage]:
    """The images to embed, those with most mistakes first, then the others by id."""
    order = {one.image_id: place for place, one in enumerate(worst_images(images, threshold, len(images)))}
    return sorted(images, key=lambda image: (order.get(image.image_id, len(order)), image.image_id))[:MOST_IMAGES]


def _sizes(dataset: CocoDataset) -> dict[int, list[int]]:
    """Image id -> the size of each object in the order of the ground truth: 0 small, 1 medium, 2 large."""
    sizes: dict[int, list[int]] = {record.image_id: [] for record in dataset.records}
    image_of, boxes = dataset.records.boxes()
    for image_id, area in zip(dataset.records.image_ids[image_of].tolist(), boxes["area"].tolist(), strict=True):
        sizes[image_id].append(int(area >= SMALL) + int(area > LARGE))
    return sizes


def _main_figures(figures: dict[str, dict[str, float]]) -> dict[str, float | None]:
    """Figures of all classes together; ``None`` where there is no ground truth for one."""
    pairs = figures["bbox"].items()
    return {name: None if math.isnan(value) else value for name, value in pairs if not name.startswith("AP-")}


def _classes(dataset: CocoDataset, curves: Sequence[Curve]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "color": hex_color(label),
            "AP50": 100 * curve.average_precision() if curve.num_objects else None,
            "best": _best_step(curve),
        }
        for label, (name, curve) in enumerate(zip(dataset.classes.names, curves, strict=True))
    ]


def _best_step(curve: Curve) -> int | None:
    best = curve.best()
    return None if best is None else step_of(best.threshold)


def _counts(
    images: Sequence[ScoredImage], found: dict[int, Outcomes], sizes: dict[int, list[int]], num_classes: int
) -> dict[str, list[Row]]:
    """Counts over all images, by the step that a score passes, -1 for none.

    Returns:
        ``objects``: rows of class, size, the step of the detection that finds them, and their number; ``false``: class, step and
        number of detections without an object of their class; ``confusion``: true class, detected class, step and number, where
        class K is the background.
    """
    objects: Counter = Counter()
    false: Counter = Counter()
    confusion: Counter = Counter()
    for image in images:
        one, steps = found[image.image_id], [step_of(score) for score in image.scores]
        for label, size, score, crowd in zip(image.object_labels, sizes[image.image_id], one.found_at, image.crowd, strict=True):
            if not crowd:
                objects[int(label), size, step_of(score)] += 1
        for label, step, same, other in zip(image.found_labels, steps, one.same_class, one.any_class, strict=True):
            if same == NOTHING:
                false[int(label), step] += 1
            if other != IGNORED:
                true_class = num_classes if other == NOTHING else int(image.object_labels[other])
                confusion[true_class, int(label), step] += 1
    tables = {"objects": objects, "false": false, "confusion": confusion}
    return {name: [[*key, count] for key, count in sorted(table.items())] for name, table in tables.items()}


def _image(image: ScoredImage, found: Outcomes, sizes: Sequence[int], record: ImageRecord) -> dict[str, Any]:
    """An image without its pixels: objects are [x, y, w, h, class, size, crowd, step of the detection that finds it], detections
    [x, y, w, h, class, step, index of the object of the same class, of any class].
    """
    found_at, steps = ([step_of(score) for score in scores] for scores in (found.found_at, image.scores))
    objects = image.object_labels.tolist(), sizes, image.crowd.astype(int).tolist(), found_at
    detections = image.found_labels.tolist(), steps, found.same_class.tolist(), found.any_class.tolist()
    return {
        "id": image.image_id,
        "name": _base_name(record.file_name),
        "size": [record.width, record.height],
        "objects": _rows(image.objects, *objects),
        "found": _rows(image.found, *detections),
    }


def _base_name(file_name: str) -> str:
    """The last part of a path or an address, without anything of the machine; what follows "?" in an address may be a key."""
    path = urlsplit(file_name).path if "://" in file_name else file_name
    return re.split(r"[\\/]", path)[-1]


def _rows(boxes_xywh: np.ndarray, *columns: Sequence[int]) -> list[Row]:
    return [[*box, *rest] for box, *rest in zip(boxes_xywh.round(1).tolist(), *columns, strict=True)]
