# SPDX-License-Identifier: Apache-2.0
"""Accuracy of image classification: how often the true class is ranked first, or among the first five."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate
from torch import Tensor

from cpvt_det.data.records import ImageRecord
from cpvt_det.evaluation.evaluator import Evaluator

BEST = 5
"""How many of the best classes are stored for each image."""
LISTED = 20
"""Largest number of classes, or of pairs of classes, in a table in the log."""


class ClassEvaluator(Evaluator):
    """Collects the best classes image by image, then computes accuracies.

    Images that are never added count as wrong.

    Args:
        records: images of the test set, each with its class as the first label.
        names: name of each of the K classes.
    """

    def __init__(self, records: Sequence[ImageRecord], names: Sequence[str]):
        self.names = names
        self._files = {record.image_id: record.file_name for record in records}
        self._labels = {record.image_id: int(record.labels[0]) for record in records}
        super().__init__(self._labels)

    def add(self, image_id: int, scores: Tensor) -> None:
        """Add the scores of one image.

        Args:
            image_id: id of the image in the test set.
            scores: (K,) float.

        Raises:
            ValueError: the image is unknown or was already added, the number of scores is wrong, or scores are not finite (NaN
                cannot be sorted).
        """
        self.check_new(image_id)
        if scores.shape != (len(self.names),) or not scores.isfinite().all():
            wanted = f"{len(self.names)} finite scores"
            raise ValueError(
                f"image id {image_id!r} needs {wanted}, got {tuple(scores.shape)}, {int(scores.isfinite().sum())} finite"
            )
        best = scores.topk(min(BEST, len(scores)))
        self._found[int(image_id)] = best.indices.tolist(), best.values.tolist()

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Compare the answers with the classes.

        Returns:
            ``{"classes": metrics}`` in percent: ``top1``, ``top1_class_mean`` (the mean of ``top1`` over the classes), ``top5``,
            and ``top1-<class name>`` for each class, NaN for a class without images.
        """
        labels = np.array([*self._labels.values()])
        best = [self._found.get(image_id, ([], []))[0] for image_id in self._labels]
        first = np.array([label in found[:1] for label, found in zip(labels, best, strict=True)])
        among = np.array([label in found for label, found in zip(labels, best, strict=True)])
        by_class = [_percent(first[labels == label]) for label in range(len(self.names))]
        known = [value for value in by_class if not math.isnan(value)]
        mean = sum(known) / len(known) if known else math.nan
        figures = {"top1": _percent(first), "top1_class_mean": mean, "top5": _percent(among)}
        figures |= {f"top1-{name}": value for name, value in zip(self.names, by_class, strict=True)}
        return {"classes": figures}

    def confusion(self) -> np.ndarray:
        """(K, K) int64: number of images by true class (rows) and predicted class (columns). Images that were never added are
        left out.
        """
        counts = np.zeros((len(self.names), len(self.names)), dtype=np.int64)
        for image_id, (best, _) in self._found.items():
            counts[self._labels[image_id], best[0]] += 1
        return counts

    def answers(self) -> list[dict[str, Any]]:
        """The id, file and class of each image, and the names and scores of the best classes, in the order of the test set."""
        names, rows = self.names, []
        for image_id in self._labels:
            best, scores = self._found.get(image_id, ([], []))
            found = [{"name": names[label], "score": score} for label, score in zip(best, scores, strict=True)]
            place = {"image_id": image_id, "file_name": self._files[image_id], "class": names[self._labels[image_id]]}
            rows.append({**place, "found": found})
        return rows


def format_accuracies(results: Mapping[str, Mapping[str, float]]) -> str:
    """The metrics of :meth:`ClassEvaluator.evaluate` as text. If there are many classes, only the classes with the lowest
    accuracies are shown.
    """
    figures = results["classes"]
    classes = [(name.partition("-")[2], value) for name, value in figures.items() if name.startswith("top1-")]
    several = [name for name in figures if not name.startswith("top1-")]
    tables = [tabulate([[_text(figures[name]) for name in several]], several, tablefmt="pipe", disable_numparse=True)]
    worst = sorted(classes, key=lambda pair: (pair[1] != pair[1], pair[1]))[:LISTED] if len(classes) > LISTED else classes
    title = "class" if len(worst) == len(classes) else f"class ({LISTED} lowest of {len(classes)})"
    tables.append(
        tabulate([(name, _text(value)) for name, value in worst], [title, "top1"], tablefmt="pipe", disable_numparse=True)
    )
    return "\n\n".join(tables)


def write_confusion(counts: np.ndarray, names: Sequence[str], path: Path) -> None:
    """Write a confusion matrix, (K, K), as CSV with the class names."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["true class \\ found as", *names])
        writer.writerows([name, *row] for name, row in zip(names, counts.tolist(), strict=True))


def most_confused(counts: np.ndarray, names: Sequence[str]) -> list[tuple[str, str, int]]:
    """The pairs of classes (true, found) of :meth:`ClassEvaluator.confusion` that are confused most, with their counts."""
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:LISTED]
    pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
    return [(names[true], names[found], int(wrong[true, found])) for true, found in pairs if wrong[true, found]]


def _percent(right: np.ndarray) -> float:
    return 100 * float(right.mean()) if right.size else math.nan


def _text(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.2f}"
