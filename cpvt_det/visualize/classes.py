# SPDX-License-Identifier: Apache-2.0
"""Answers of a classifier to look at: images under their class and the best classes found, and a page with what is confused."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from cpvt_det.data.images import read_image
from cpvt_det.evaluation.top_k import format_accuracies, most_confused
from cpvt_det.structures import Detections
from cpvt_det.visualize.curves import save_figure
from cpvt_det.visualize.pictures import draw_panel, save_contact_sheet
from cpvt_det.visualize.report import confusion_figure

COLUMNS = 4
NAMED = 2
"""Best classes that stand above an image."""


def draw_answers(answers: Sequence[Mapping[str, Any]], count: int, path: Path) -> None:
    """Draw images, spread over a test set, under their class and what was found.

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
    """Write ``report.md`` with the figures and the pairs of classes that are confused most, and ``confusion.png``.

    Args:
        counts: result of :meth:`cpvt_det.evaluation.top_k.ClassEvaluator.confusion`.
        names: the name of each class.
        figures: result of :meth:`cpvt_det.evaluation.top_k.ClassEvaluator.evaluate`.
        folder: folder to write to; created if missing.

    Raises:
        BadInputError: matplotlib is not installed, or a file cannot be written.
    """
    save_figure(confusion_figure(counts, names), folder / "confusion.png")
    pairs = tabulate(most_confused(counts, names), ("class", "found as", "images"), tablefmt="github", disable_numparse=True)
    parts = ["# Evaluation", format_accuracies(figures), "## Classes that are confused most", pairs, "![confusion](confusion.png)"]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8", errors="backslashreplace")
