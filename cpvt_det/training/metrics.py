# SPDX-License-Identifier: Apache-2.0
"""Write the numbers of a run to ``metrics.json`` (JSON lines with detectron2's keys), TensorBoard, log and progress bar."""

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from cpvt_det.common import distributed
from cpvt_det.training.setup import METRICS_LOGGER

logger = logging.getLogger(METRICS_LOGGER)


class MetricsWriter(contextlib.AbstractContextManager):
    """A writer that collects scalars on the device and writes their means every ``period`` iterations, so that the device is
    synchronised only once per line.

    Args:
        output: folder of the run.
        start_iter: first iteration.
        max_iter: number of iterations in the whole run.
        images_per_iter: images per iteration, over all processes.
        period: iterations between lines.
    """

    def __init__(self, output: Path, start_iter: int, max_iter: int, images_per_iter: int, period: int):
        self.period = period
        self.max_iter = max_iter
        self.images_per_iter = images_per_iter
        self._records: list[dict[str, Tensor]] = []
        self._last_time = time.perf_counter()
        self._waited = 0.0
        self._writes = distributed.rank() == 0
        if self._writes:
            self._json = (output / "metrics.json").open("a", encoding="utf-8")
            self._tensorboard = SummaryWriter(str(output), purge_step=start_iter or None)
            interval = 0.5 if sys.stderr.isatty() else 20.0
            self.bar = tqdm(total=max_iter, initial=start_iter, desc="training", unit="it", mininterval=interval, file=sys.stderr)

    def timed(self, batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Pass batches on and measure the seconds that a step waits for its batch; ``data_time`` is the time of the slowest
        process."""
        start = time.perf_counter()
        for batch in batches:
            self._waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def put(self, iteration: int, record: dict[str, Tensor], lr: float) -> dict[str, float]:
        """Collect the scalars of one iteration; if a line is due, write it and return its content."""
        scalars = {}
        self._records.append(record)
        if (iteration + 1) % self.period == 0 or iteration + 1 == self.max_iter:
            scalars = step_means(self._records)
            elapsed, self._last_time = time.perf_counter() - self._last_time, time.perf_counter()
            per_iter = elapsed / len(self._records)
            scalars |= {"lr": lr, "time": per_iter, "images_per_second": self.images_per_iter / per_iter}
            scalars["data_time"] = distributed.all_reduce_max(self._waited) / len(self._records)
            self._waited = 0.0
            scalars["eta_seconds"] = per_iter * (self.max_iter - iteration - 1)
            self._records.clear()
            self.write(iteration, scalars)
            if self._writes:
                loss, speed = f"{scalars['total_loss']:.3g}", f"{scalars['images_per_second']:.0f}"
                self.bar.set_postfix({"loss": loss, "lr": f"{lr:.1e}", "img/s": speed}, refresh=False)
        if self._writes:
            self.bar.update()
        return scalars

    def write(self, iteration: int, scalars: dict[str, float]) -> None:
        """Write scalars of an iteration; NaN and infinities become null in JSON."""
        if not self._writes:
            return
        clean = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._json.write(json.dumps({"iteration": iteration, **clean}, sort_keys=True) + "\n")
        self._json.flush()
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, iteration)
        logger.info("iteration %d: %s", iteration, ", ".join(f"{name} {value:.4g}" for name, value in scalars.items()))

    @contextlib.contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Exclude the time of this block, such as an evaluation, from the speed."""
        start = time.perf_counter()
        yield
        self._last_time += time.perf_counter() - start

    def __exit__(self, *error: object) -> None:
        if self._writes:
            self.bar.close()
            self._json.close()
            self._tensorboard.close()


def step_means(records: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Means over steps and all processes, without skipped steps; ``skipped`` is the number of skipped steps.

    Args:
        records: results of the steps, scalars on the device; at least one step.
    """
    names = sorted(records[0])
    values = torch.stack([torch.stack([record[name].double() for name in names]) for record in records])
    skipped = values[:, names.index("skipped")]
    taken = (skipped == 0)[:, None]
    means = torch.where(taken, values, 0).sum(0) / taken.sum()  # NaN if all steps were skipped
    means[names.index("skipped")] = skipped.sum()
    means = distributed.all_reduce_sum(means) / distributed.world_size()
    return dict(zip(names, means.tolist(), strict=True))
