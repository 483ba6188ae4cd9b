# SPDX-License-Identifier: Apache-2.0
"""Works through a plan: trains what is not trained yet, measures it, and leaves a record of each run."""

import contextlib
import io
import json
import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from cpvt_det import build
from cpvt_det.build import Trained, load_trained
from cpvt_det.data.shapes import draw_dataset
from cpvt_det.errors import ConfigError, RunStoppedError
from cpvt_det.evaluation.coco import write_json
from cpvt_det.evaluation.curves import read_metrics
from cpvt_det.runner.evaluate import evaluate
from cpvt_det.runner.setup import describe_environment, stop_log
from cpvt_det.runner.train import run as train
from cpvt_det.study.plan import Plan, Run, load_plan
from cpvt_det.study.probes import PROBES

logger = logging.getLogger("cpvt_det")
KEPT = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def run_study(path: Path, processes: int, groups: Sequence[str] = (), tell: Callable[[str], None] = print) -> None:
    """Train and measure every run of a plan that has no record yet, group after group.

    Args:
        path: the plan.
        processes: runs at once, each with one thread.
        groups: only these of the plan's.
        tell: is called with a line for each run that ends.

    Raises:
        ConfigError: a plan that cannot be run.
        RunStoppedError: a run failed; those beside it were finished.
    """
    plan = load_plan(path)
    chosen = [plan.group(name) for name in groups] or plan.groups
    draw_data(plan)
    for group in chosen:
        todo = [run for run in plan.runs() if run.group is group and not is_done(plan, run)]
        # A process for each run: nothing of one is left for the next.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
            futures = {pool.submit(execute, path, run.name): run for run in todo}
            for number, future in enumerate(as_completed(futures), 1):
                run = futures[future]
                if future.exception() is not None:
                    pool.shutdown(cancel_futures=True)
                    raise RunStoppedError(f"{run.name}: {future.exception()}") from future.exception()
                _tell(plan, future.result(), f"{number}/{len(todo)}", tell)


def _tell(plan: Plan, record: dict[str, Any], place: str, tell: Callable[[str], None]) -> None:
    """A line for a run that has ended, in ``log.txt`` beside the plan too."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {record['run']}: AP {record['AP']:.1f}, {record['seconds']:.0f} s ({place})"
    with (plan.folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"{line}\n")
    tell(line)


def draw_data(plan: Plan) -> None:
    """Draw the plan's data sets where they are not there yet; each is the ``val`` split of a shapes data set of its own."""
    for data in plan.data:
        draw_dataset(plan.data_root(data.name), 1, data.images, data.seed, data.spec)


def is_done(plan: Plan, run: Run) -> bool:
    """Whether there is a record of a run, and of the run that the plan describes now."""
    path = plan.record_path(run.name)
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["fingerprint"] == plan.fingerprint(run)


def execute(path: Path, name: str) -> dict[str, Any]:
    """Train and measure one run in this process; a run that was cut off goes on from its last checkpoint.

    Returns:
        The record, which is written beside the plan.
    """
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):  # of several runs at once; log.txt has it
        return _execute(load_plan(path), name)


def _execute(plan: Plan, name: str) -> dict[str, Any]:
    run = plan.run(name)
    for needed in plan.origins(run):
        if not is_done(plan, plan.run(needed)):
            raise ConfigError(f"it starts from {needed}, which has no record yet")
    cfg, start = plan.config_of(run), time.process_time()
    output = Path(cfg.OUTPUT_DIR)
    marker = output / "fingerprint"
    resume = marker.is_file() and marker.read_text(encoding="utf-8") == plan.fingerprint(run)
    output.mkdir(parents=True, exist_ok=True)
    marker.write_text(plan.fingerprint(run), encoding="utf-8")
    results = train(cfg, resume=resume)["bbox"]
    trained_in = time.process_time() - start
    stop_log()
    metrics = read_metrics(output / "metrics.json")
    trained = load_trained(output / "model_final.pth")
    save_backbone(trained, output / "backbone.pth")
    record = {
        "run": name,
        "fingerprint": plan.fingerprint(run),
        "environment": describe_environment(),
        **{key: _or_none(results[key]) for key in KEPT},
        "iterations": max(metrics) + 1,
        "seconds": round(trained_in, 1),  # of this process's CPU, evaluations included
        "curve": {iteration + 1: _or_none(line["bbox/AP"]) for iteration, line in metrics.items() if "bbox/AP" in line},
        "loss": {iteration + 1: round(line["total_loss"], 4) for iteration, line in list(metrics.items())[-1:]},
        "sweeps": {sweep: evaluate_sweep(plan, run, trained, sweep) for sweep in run.group.sweeps},
        "probes": {probe: PROBES[probe](trained) for probe in run.group.probes},
    }
    plan.record_path(name).parent.mkdir(parents=True, exist_ok=True)
    write_json(record, plan.record_path(name), indent=1)
    return record


def evaluate_sweep(plan: Plan, run: Run, trained: Trained, sweep: str) -> dict[str, float | None]:
    """AP on every data set of a sweep; ``None`` where the encoding refuses images of that size."""
    found = {}
    for name in plan.sweeps[sweep]:
        cfg = plan.config_of(run)
        cfg.DATASETS.TEST = [name]
        try:
            results = evaluate(cfg, trained.detector, build.load_tests(cfg), plan.output_of(run.name) / "sweeps" / name)
        except ValueError:
            found[name] = None
        else:
            found[name] = _or_none(results["bbox"]["AP"])
    return found


def _or_none(value: float) -> float | None:
    """JSON has no NaN, which is the AP of objects that there are none of."""
    return value if math.isfinite(value) else None


def save_backbone(trained: Trained, path: Path) -> None:
    """The backbone as ``MODEL.BACKBONE.WEIGHTS`` takes it: torchvision's names."""
    torch.save(trained.detector.backbone.body.state_dict(), path)
