# SPDX-License-Identifier: Apache-2.0
"""One model at several test sizes, without training it again: one table, in both runners."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate
from torch import nn

from cpvt_det import builders, distributed
from cpvt_det.errors import MapSizeError
from cpvt_det.evaluation.coco import write_results
from cpvt_det.position.table import TableEncoding
from cpvt_det.runner.evaluate import evaluate
from cpvt_det.tasks.task import Results, Task, flatten

logger = logging.getLogger("cpvt_det")
SECONDS = "seconds"


def evaluate_sizes(task: Task, detector: nn.Module, datasets: Sequence[Any], sizes: Sequence[int], output: Path) -> Results:
    """Evaluate at every size; write ``sizes/<size>/`` as :func:`cpvt_det.runner.evaluate.evaluate` does, and the table.

    Args:
        task: the run's task; its config is the same afterwards.
        detector: the model.
        datasets: the task's test sets.
        sizes: test sizes in pixels.
        output: ``OUTPUT_DIR``; the table is ``sizes.md`` and ``sizes.json`` in it. Of a model with
            learned tables of positions it says how these are interpolated.

    Returns:
        Figures by size, as text; NaN at a size that the model cannot take.

    Raises:
        ConfigError: a task whose images have no size to set; a size below that of a patch, before the first evaluation.
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
    table = "\n\n".join([sizes_table(results, task.main_figure, task.figures), *_interpolation(detector), *why])
    if distributed.rank() == 0:
        write_results(results, output / "sizes.json")
        (output / "sizes.md").write_text(table + "\n", encoding="utf-8")
        logger.info("Test sizes (%s):\n%s", output / "sizes.md", table)
    return results


def sizes_table(results: Mapping[str, Results], main_figure: str, figures: Sequence[str]) -> str:
    """A row for each size, with the figures of each test set and the seconds that the evaluation took, as GitHub's Markdown.

    Args:
        results: result of :func:`evaluate_sizes`.
        main_figure, figures: names of figures, as a task has them.
    """
    group = main_figure.rpartition("/")[0]
    by_size = {size: flatten(found) for size, found in results.items()}
    known = dict.fromkeys(name for found in by_size.values() for name in found)
    names = [name for figure in figures for name in known if f"/{name}".endswith(f"/{group}/{figure}")]
    rows = [(size, *(_text(found.get(name, math.nan)) for name in [*names, SECONDS])) for size, found in by_size.items()]
    heads = [name.replace(f"{group}/", "").replace("/", " ") for name in names]
    return tabulate(rows, ["size", *heads, SECONDS], tablefmt="github", disable_numparse=True)


def _interpolation(detector: nn.Module) -> list[str]:
    """How the learned tables of a model are stretched over other grids; nothing without one."""
    tables = [part for part in detector.modules() if isinstance(part, TableEncoding)]
    ways = {"timm's way, antialiased" if table.antialias else "DeiT's way" for table in tables}
    return [f"Learned tables are interpolated in {way} (bicubic; `POSITION.ANTIALIAS`)." for way in sorted(ways)]


def _text(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.1f}"
