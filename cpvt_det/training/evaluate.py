# SPDX-License-Identifier: Apache-2.0
"""Evaluate a model on its test sets, and write metrics and files. A model can also be evaluated at several test sizes, which are
then compared in one table."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from cpvt_det import builders
from cpvt_det.checkpoint.files import not_finite
from cpvt_det.common import distributed
from cpvt_det.common.errors import DataError, MapSizeError, RunStoppedError
from cpvt_det.common.files import remove_unfinished
from cpvt_det.common.structures import DEFAULT_THRESHOLD, Thresholds
from cpvt_det.data.loader import dead_workers_named
from cpvt_det.evaluation.answers import evaluation_mode
from cpvt_det.evaluation.coco import write_results
from cpvt_det.training.tasks.task import Results, Task, flatten, place_of
from cpvt_det.visualize.curves import draw_curves

logger = logging.getLogger("cpvt_det")
SECONDS = "seconds"


def evaluate(task: Task, detector: nn.Module, datasets: Sequence[Any], output: Path) -> Results:
    """As :func:`measure`, but return only the metrics."""
    return measure(task, detector, datasets, output)[0]


def measure(task: Task, detector: nn.Module, datasets: Sequence[Any], output: Path) -> tuple[Results, Thresholds | None]:
    """Evaluate on every test set and write ``results.json``, and the task's outputs to ``inference/``.

    Args:
        task: the run's task.
        detector: the model; its mode is restored afterwards.
        datasets: the task's test sets.
        output: ``OUTPUT_DIR``.

    Returns:
        The metrics, and the score thresholds from the first test set, which are ``None`` for a task without thresholds. For
        detection on one data set, the metrics are ``{"bbox": {"AP": ..., ...}}`` in percent; for several data sets, they are
        ``{name of the data set: metrics}``.

    Raises:
        RunStoppedError: weights that are not finite.
    """
    broken = not_finite(detector.state_dict())
    if broken:  # no score may show this, but the figures would be meaningless
        raise RunStoppedError(f"the weights are not finite ({broken}) and are not evaluated")
    distributed.share_buffers(detector)
    results: Results = {}
    thresholds = None
    for number, dataset in enumerate(datasets):
        folder = place_of(dataset, datasets, output / "inference")
        if distributed.rank() == 0:
            remove_unfinished(folder)  # from an evaluation that was killed; no other run uses this folder
        results[dataset.name], found = _evaluate_one(task, detector, dataset, folder, with_thresholds=number == 0)
        thresholds = found if number == 0 else thresholds
    merged = results[datasets[0].name] if len(datasets) == 1 else results
    if distributed.rank() == 0:
        write_results(merged, output / "results.json")
    if thresholds is not None:
        logger.info("Score threshold of the best F1: %s", thresholds.describe(datasets[0].classes.names))
    return merged, thresholds


@contextlib.contextmanager
def chosen_threshold(cfg: CfgNode, thresholds: Thresholds | None) -> Iterator[None]:
    """Set ``TEST.PICTURE_THRESHOLD`` within the block and log it. It is the config's value if there is one, otherwise the threshold
    with the best F1, and 0.5 if that is unknown.

    Classifiers need no threshold, so for them the block changes nothing.
    """
    if cfg.TEST.PICTURE_THRESHOLD is not None or builders.is_classifier(cfg):
        yield
        return
    kept = None if thresholds is None else thresholds.overall
    cfg.TEST.PICTURE_THRESHOLD = DEFAULT_THRESHOLD if kept is None else kept
    why = "the best F1" if kept is not None else "no threshold is known" if thresholds is None else "no detection was correct"
    logger.info("Pictures and report: scores from %.3g (%s; TEST.PICTURE_THRESHOLD sets another)", cfg.TEST.PICTURE_THRESHOLD, why)
    try:
        yield
    finally:
        cfg.TEST.PICTURE_THRESHOLD = None  # a later run with this config gets its own threshold


def _evaluate_one(
    task: Task, detector: nn.Module, dataset: Any, folder: Path, with_thresholds: bool
) -> tuple[Results, Thresholds | None]:
    """The metrics of one test set, and its thresholds if requested. The first process gathers the results of all processes."""
    evaluator, loader = task.build_evaluator(dataset), task.build_test_loader(dataset)
    is_first, total = distributed.rank() == 0, len(loader.dataset)
    bar = tqdm(total=total, desc="evaluating", unit="img", leave=False, disable=not is_first, mininterval=1.0, file=sys.stderr)
    with dead_workers_named(loader.dataset), evaluation_mode(detector), bar:
        for samples in loader:
            for sample, found in zip(samples, task.infer(detector, samples), strict=True):
                evaluator.add(sample["image_id"], found)
            bar.update(len(samples) * distributed.world_size())
    for state in distributed.gather_to_first(evaluator.state())[1:]:
        evaluator.merge(state)
    measured = None
    if is_first:
        results = evaluator.evaluate()
        task.write_outputs(evaluator, folder)
        logger.info("Evaluation on %s:\n%s", dataset.name, task.format_results(results))
        measured = results, evaluator.thresholds() if with_thresholds else None
    return distributed.broadcast_object(measured)


def draw_run(output: Path) -> None:
    """Draw the curves of a run, in the first process. If ``metrics.json`` was removed, nothing is drawn, but the run still
    finishes."""
    if distributed.rank() != 0:
        return
    try:
        draw_curves(output / "metrics.json", output / "pictures" / "curves.png")
    except DataError as error:
        logger.warning("No curves are drawn: %s", error)


def evaluate_sizes(task: Task, detector: nn.Module, datasets: Sequence[Any], sizes: Sequence[int], output: Path) -> Results:
    """Evaluate at every size. Write the files of :func:`evaluate` to ``sizes/<size>/``, and a table of all sizes.

    Args:
        task: the run's task; its config is restored afterwards.
        detector: the model.
        datasets: the task's test sets.
        sizes: test sizes in pixels.
        output: ``OUTPUT_DIR``; the table is ``sizes.md`` and ``sizes.json`` in it.

    Returns:
        Metrics by size, with the size as text; NaN at a size that the model cannot process.

    Raises:
        ConfigError: a task whose test size cannot be set, or a size smaller than a patch; raised before the first evaluation.
    """
    before, results, why = task.cfg.INPUT.clone(), {}, []
    for size in sizes:
        task.set_test_size(size)
        builders.require_patches(task.cfg)
        task.cfg.INPUT = before.clone()
    for size in sizes:
        task.set_test_size(size)
        start = time.perf_counter()
        try:
            results[str(size)] = evaluate(task, detector, datasets, output / "sizes" / str(size))
        except MapSizeError as error:
            results[str(size)] = {}
            why.append(f"{size}: {error}")
        results[str(size)] |= {SECONDS: time.perf_counter() - start}
        task.cfg.INPUT = before.clone()
    table = "\n\n".join([sizes_table(results, task.main_figure, task.figures), *why])
    if distributed.rank() == 0:
        write_results(results, output / "sizes.json")
        (output / "sizes.md").write_text(table + "\n", encoding="utf-8")
        logger.info("Test sizes (%s):\n%s", output / "sizes.md", table)
    return results


def sizes_table(results: Mapping[str, Results], main_figure: str, figures: Sequence[str]) -> str:
    """A table in GitHub's Markdown. It has a row for each size, with the metrics of each test set and the seconds that the
    evaluation took.

    Args:
        results: result of :func:`evaluate_sizes`.
        main_figure, figures: names of metrics, as in :class:`Task`.
    """
    group = main_figure.rpartition("/")[0]
    by_size = {size: flatten(found) for size, found in results.items()}
    known = dict.fromkeys(name for found in by_size.values() for name in found)
    names = [name for figure in figures for name in known if f"/{name}".endswith(f"/{group}/{figure}")]
    rows = []
    for size, found in by_size.items():
        values = [found.get(name, math.nan) for name in [*names, SECONDS]]
        rows.append([size, *("n/a" if math.isnan(value) else f"{value:.1f}" for value in values)])
    heads = [name.replace(f"{group}/", "").replace("/", " ") for name in names]
    return tabulate(rows, ["size", *heads, SECONDS], tablefmt="github", disable_numparse=True)
