# SPDX-License-Identifier: Apache-2.0
"""The report of an evaluation: curves, confusion matrix, thresholds and the worst images, as pictures, JSON, CSV and two pages.
The report of a classifier shows which classes are confused."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tabulate import tabulate

from cpvt_det.common.files import write_json
from cpvt_det.common.structures import Detections
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.images import read_image
from cpvt_det.data.records import ImageRecord
from cpvt_det.evaluation.coco import format_table
from cpvt_det.evaluation.matches import IOU, Matches
from cpvt_det.evaluation.thresholds import Curve, OperatingPoint, pooled_curve
from cpvt_det.evaluation.top_k import format_accuracies, most_confused, write_confusion
from cpvt_det.visualize.figures import new_figure, save_figure
from cpvt_det.visualize.pictures import draw_comparison, draw_panel, save_contact_sheet
from cpvt_det.visualize.report_page import write_report_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BACKGROUND = "background"
COLUMNS = 4
NAMED = 2
"""Number of best classes in the title above a classifier's image."""
COUNTED_CLASSES = 20
"""Largest number of classes at which the cells of the confusion matrix show their counts."""


def write_report(
    dataset: CocoDataset, matches: Matches, figures: dict[str, dict[str, float]], folder: Path, threshold: float, num_worst: int
) -> None:
    """Write ``report.md``, the files that it shows, and ``report.html``.

    Args:
        dataset: data set with the ground truth.
        matches: objects and detections of the data set.
        figures: result of :meth:`cpvt_det.evaluation.coco.CocoEvaluator.evaluate`.
        folder: folder to write to; created if missing.
        threshold: lowest score of the detections that the confusion matrix and the worst images count.
        num_worst: number of worst images to draw.

    Raises:
        BadInputError: a file cannot be written.
    """
    names = dataset.classes.names
    curves, matrix = matches.curves(len(names)), matches.confusion(len(names), threshold)
    worst = matches.worst(threshold, num_worst)
    save_figure(precision_recall_figure(curves, names), folder / "precision_recall.png")
    save_figure(confusion_figure(matrix, names), folder / "confusion.png")
    write_confusion(matrix, [*names, BACKGROUND], folder / "confusion.csv")
    drawn = _draw_worst(dataset, matches, worst, folder, threshold)
    content = _content(dataset, matches, curves, matrix, worst, threshold)
    write_json(content, folder / "report.json", indent=2)
    (folder / "report.md").write_text(_page(content, figures, curves, drawn), encoding="utf-8", errors="backslashreplace")
    write_report_page(dataset, matches, curves, figures, folder / "report.html", threshold)


def precision_recall_figure(curves: Sequence[Curve], names: Sequence[str]) -> "Figure":
    """Precision over recall, with one panel per class; a dot marks the threshold with the highest F1."""
    columns = min(len(curves), max(4, math.ceil(math.sqrt(len(curves)))))
    rows = math.ceil(len(curves) / columns)
    figure = new_figure(3 * columns, 3 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for panel, curve, name in zip(panels, curves, names, strict=False):
        precision = f"{100 * curve.average_precision():.1f}" if curve.num_objects else "n/a"
        panel.set(title=f"{_plain(name)}, AP50 {precision}", xlim=(0, 1.02), ylim=(0, 1.02))
        panel.grid(alpha=0.3)
        if curve.num_objects:
            panel.plot(curve.recall, curve.precision, linewidth=1.5)
        else:
            panel.text(0.5, 0.5, "no objects", ha="center")
        if (best := curve.best()) is not None:
            panel.plot(best.recall, best.precision, "o", color="black")
            panel.text(0.04, 0.05, f"F1 {best.f1:.2f} at score {best.threshold:.2f}", fontsize=8)
    for panel in panels[len(curves) :]:
        panel.set_axis_off()
    figure.supxlabel("recall")
    figure.supylabel(f"precision (IoU {IOU})")
    return figure


def confusion_figure(matrix: np.ndarray, names: Sequence[str]) -> "Figure":
    """The matrix of :meth:`cpvt_det.evaluation.matches.Matches.confusion`; the shade of a cell shows the cell's share of the row.

    A matrix of image classes, (K, K), has no background.
    """
    labels = [*map(_plain, names), BACKGROUND][: len(matrix)]
    counted = len(names) <= COUNTED_CLASSES
    side = min(max(5.0, (0.6 if counted else 0.2) * len(labels)), 40.0)
    figure = new_figure(side + 1.5, side)
    axes = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    ticks, size = range(len(labels)), 9 if counted else 7
    axes.set_xticks(ticks, labels, rotation=90, fontsize=size)
    axes.set_yticks(ticks, labels, fontsize=size)
    axes.set(xlabel="detected as", ylabel="true class", title="objects; shade: share of the row")
    if counted:
        for (row, column), count in np.ndenumerate(matrix):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=8)
    return figure


def _plain(name: str) -> str:
    return name.replace("$", r"\$")  # matplotlib would read it as a formula


def _draw_worst(dataset: CocoDataset, matches: Matches, worst: Sequence[int], folder: Path, threshold: float) -> list[str]:
    """Draw one picture per image, with the ground truth next to the detections. Return the file names relative to the folder."""
    for old in (folder / "worst").glob("*.png"):
        old.unlink()
    drawn = []
    for place, index in enumerate(worst, start=1):
        record, (_, of_image) = dataset.records[int(matches.record_of[index])], matches.of_image(index)
        boxes, scores, labels = (torch.from_numpy(values[of_image]) for values in (matches.boxes, matches.scores, matches.labels))
        found = Detections(torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1), scores, labels)
        picture = draw_comparison(read_image(record.file_name), truth_of(record), found, dataset.classes.names, threshold)
        drawn.append(f"worst/{place:02d}_image_{record.image_id}.png")
        save_contact_sheet([picture], folder / drawn[-1])
    return drawn


def truth_of(record: ImageRecord) -> Detections:
    """The objects of a record, in the form of detections, for drawing."""
    boxes, labels = torch.from_numpy(record.boxes_xyxy), torch.from_numpy(record.labels)
    return Detections(boxes, torch.ones(len(labels)), labels)


def _content(
    dataset: CocoDataset, matches: Matches, curves: Sequence[Curve], matrix: np.ndarray, worst: Sequence[int], threshold: float
) -> dict[str, Any]:
    """The content of ``report.json``."""
    classes = [
        {
            "id": class_id,
            "name": name,
            "objects": curve.num_objects,
            "AP50": 100 * curve.average_precision() if curve.num_objects else None,
            "best": _point(curve.best()),
        }
        for class_id, name, curve in zip(dataset.classes.ids, dataset.classes.names, curves, strict=True)
    ]
    mistakes = matches.mistakes(threshold)[worst].tolist()
    records = (dataset.records[int(matches.record_of[index])] for index in worst)
    return {
        "dataset": dataset.name,
        "images": len(dataset.records),
        "iou": IOU,
        "classes": classes,
        "best_for_all": _point(pooled_curve(curves).best()),
        "score_threshold": threshold,
        "confusion": {"labels": [*dataset.classes.names, BACKGROUND], "rows_are_the_truth": matrix.tolist()},
        "worst": [
            {"image_id": record.image_id, "missed": missed, "false": false, "file_name": record.file_name}
            for record, (missed, false) in zip(records, mistakes, strict=True)
        ],
        "best_score": float(matches.scores.max()) if len(matches.scores) else None,
    }


def _point(best: OperatingPoint | None) -> dict[str, float] | None:
    if best is None:
        return None
    return {"threshold": best.threshold, "precision": best.precision, "recall": best.recall, "F1": best.f1}


def _page(content: dict[str, Any], figures: dict[str, dict[str, float]], curves: Sequence[Curve], drawn: Sequence[str]) -> str:
    """The text of ``report.md``."""
    threshold, best = content["score_threshold"], content["best_for_all"]
    together = f"{best['threshold']:.3f} (F1 {best['F1']:.3f})" if best else "none, because no detection is correct"
    worst = [
        f"### {Path(one['file_name']).name} (id {one['image_id']}): {one['missed']} missed, {one['false']} false\n\n![]({name})"
        for one, name in zip(content["worst"], drawn, strict=True)
    ]
    parts = [
        f"# Evaluation on {content['dataset']}",
        f"{content['images']} images, {sum(curve.num_objects for curve in curves)} objects of {len(curves)} classes.",
        "## Average precision",
        format_table(figures),
        "## Thresholds",
        f"Per class, the score threshold of the highest F1 at IoU {IOU}, and its precision and recall. "
        f"For all classes together: {together}.",
        _thresholds(content["classes"]),
        "![Precision and recall](precision_recall.png)",
        "## Confusion",
        f"Detections with a score of at least {threshold:.3g} (`TEST.PICTURE_THRESHOLD`), matched at IoU {IOU}, whatever their "
        "class. Rows are the true classes; the last column counts missed objects, the last row detections on no object. "
        "Counts: confusion.csv.",
        "![Confusion matrix](confusion.png)",
        "## Worst images",
        f"Images with the most missed objects and false detections, matched per class, at a score of at least {threshold:.3g}.",
        *(worst or ["No image has a mistake."]),
    ]
    return "\n\n".join(parts) + "\n"


def _thresholds(classes: Sequence[dict[str, Any]]) -> str:
    headers = ("class", "objects", "AP50", "threshold", "precision", "recall", "F1")
    rows = []
    for one in classes:
        point = [f"{value:.3f}" for value in one["best"].values()] if one["best"] else ["n/a"] * 4
        rows.append([one["name"], one["objects"], "n/a" if one["AP50"] is None else f"{one['AP50']:.1f}", *point])
    alignment = ["left", *["right"] * 6]
    return tabulate(rows, headers, tablefmt="pipe", colalign=alignment, disable_numparse=True)


def draw_answers(answers: Sequence[Mapping[str, Any]], count: int, path: Path) -> None:
    """Draw images, spread over a test set, each under its true class and the predicted classes.

    Args:
        answers: result of :meth:`cpvt_det.evaluation.top_k.ClassEvaluator.answers`; at least one.
        count: largest number of images.
        path: path of the picture.
    """
    count = min(count, len(answers))
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    panels = []
    for answer in (answers[number * len(answers) // count] for number in range(count)):
        found = ", ".join(f"{one['name']} {one['score']:.2f}" for one in answer["found"][:NAMED])
        panels.append(draw_panel(read_image(answer["file_name"]), nothing, (), f"{answer['class']}: {found}"))
    save_contact_sheet(panels, path, COLUMNS)


def write_class_report(counts: np.ndarray, names: Sequence[str], figures: Mapping[str, Mapping[str, float]], folder: Path) -> None:
    """Write ``confusion.png``, and ``report.md`` with the metrics and the pairs of classes that are confused most often.

    Args:
        counts: result of :meth:`cpvt_det.evaluation.top_k.ClassEvaluator.confusion`.
        names: the name of each class.
        figures: result of :meth:`cpvt_det.evaluation.top_k.ClassEvaluator.evaluate`.
        folder: folder to write to; created if missing.

    Raises:
        BadInputError: a file cannot be written.
    """
    save_figure(confusion_figure(counts, names), folder / "confusion.png")
    pairs = tabulate(most_confused(counts, names), ("class", "found as", "images"), tablefmt="github", disable_numparse=True)
    parts = ["# Evaluation", format_accuracies(figures), "## Classes that are confused most", pairs, "![confusion](confusion.png)"]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8", errors="backslashreplace")
