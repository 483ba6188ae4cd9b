# SPDX-License-Identifier: Apache-2.0
"""The contract of a task, and the registry of tasks."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from cpvt_det.errors import ConfigError, UnknownNameError
from cpvt_det.registry import PartRegistry

TASK_REGISTRY = PartRegistry("TASK", "task")
"""``TASK`` of a config -> builder of a task, called with ``cfg``; further keywords are options, keys of ``TASK_OPTIONS``. Both
runners, ``study``, ``check-data``, ``show data`` and the checkpoints of a run ask it.

The contract of a task, that of :class:`cpvt_det.tasks.DetectionTask`:

- ``main_figure``: name in the metrics of the figure that decides which checkpoint is the best, higher is better: ``group/name``, as
  :func:`flatten` makes it of the results. Curves and comparisons draw the first two names of every group, in alphabetical order:
  the main figure comes first;
- ``figures``: names in the group of ``main_figure`` of the figures that a study records, the main one first;
- read: ``load_splits``, ``load_tests``, ``training_records``. A data set has ``name``, ``classes`` (ids and names), ``records`` and
  ``issues`` (what a check found). ``check_data(decode, examples)``: both splits with their faults, whatever ``DATASETS.ON_BAD`` is,
  as :class:`cpvt_det.data.validation.check.CheckedData`;
- feed: ``build_train_loader``, ``build_test_loader``: batches of samples, dicts with ``image`` and ``image_id``, in training also
  ``targets``, whose ``to`` moves them to a device;
- compare: ``build_training_model``: a module with ``detector``, called with samples, that returns :class:`cpvt_det.losses.Losses`;
  its ``normalizers(samples)`` is what it is also called with where the samples are a part of a step;
- measure: ``build_evaluator`` (with ``add``, ``state``, ``merge`` and ``evaluate``), ``infer``, ``format_results`` and
  ``write_outputs``;
- show: ``describe``, ``show_results``;
- optional: ``baseline(records, dataset)``: figures by name, as in the metrics, of an answer that is the same for every image; a run
  below it is warned. ``constant``: what that answer is, for the log. ``thresholds()`` of the evaluator:
  :class:`cpvt_det.evaluation.thresholds.Thresholds`, which checkpoints keep; its ``evaluate_together()``: the figures, in process
  0, where several processes share the work and all call it. ``set_test_size(size)``, for ``cpvt-det eval
  --sizes``: changes ``INPUT`` of the config so that test images have this size in pixels.
"""

Results = dict[str, Any]
"""Figures by group, ``{"bbox": {"AP": ...}}``; of several test sets, these by the name of the set."""


def build_task(cfg: CfgNode) -> Any:
    """The task of a config.

    Raises:
        UnknownNameError: a name that is not registered, or an option that the task does not take.
    """
    return TASK_REGISTRY.build(cfg.TASK, {"cfg": cfg}, {key.lower(): value for key, value in cfg.TASK_OPTIONS.items()})


def flatten(results: Results) -> dict[str, float]:
    """Results as scalars by their path: ``bbox/AP``, or ``<data set>/bbox/AP`` where there are several sets."""
    scalars: dict[str, float] = {}
    for name, value in results.items():
        parts = flatten(value) if isinstance(value, dict) else {"": value}
        scalars |= {f"{name}/{rest}".rstrip("/"): number for rest, number in parts.items()}
    return scalars


def main_value(task: Any, results: Results) -> float:
    """The main figure of the first test set; NaN where there is no ground truth for it.

    Raises:
        KeyError: results without it; the best checkpoint could not be chosen.
    """
    try:
        return figure_of(task.main_figure, results)
    except UnknownNameError as error:
        names = ", ".join(flatten(results))
        raise KeyError(f"the results have no {task.main_figure!r}, the task's main figure; they have {names}") from error


def figure_of(figure: str, results: Results) -> float:
    """A figure by its name in the metrics, or by the end of that: ``AP50`` is ``bbox/AP50``, of the first test set.

    Raises:
        UnknownNameError: results without it.
    """
    scalars = flatten(results)
    for name, value in scalars.items():
        if f"/{name}".endswith(f"/{figure}"):
            return value
    raise UnknownNameError("figure of the evaluation (TEST.BEST_FIGURE)", figure, scalars)


def require_figure(figure: str, task: Any, datasets: Sequence[Any]) -> None:
    """Refuse a figure that evaluations will not have: those of no answers at all have the same names.

    Raises:
        UnknownNameError: a name that no evaluation has.
        ConfigError: a figure that is not defined, because the test set has no objects for it.
    """
    results = {dataset.name: task.build_evaluator(dataset).evaluate() for dataset in datasets}
    if math.isnan(figure_of(figure, results[datasets[0].name] if len(datasets) == 1 else results)):
        raise ConfigError(f"TEST.BEST_FIGURE {figure}: {datasets[0].name} has no objects that it measures; choose another figure")


def place_of(dataset: Any, datasets: Sequence[Any], folder: Path) -> Path:
    """Where the files of one of the test sets go: ``folder``, or where there are several its part of that name."""
    return folder if len(datasets) == 1 else folder / dataset.name
