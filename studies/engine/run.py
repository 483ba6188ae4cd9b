# SPDX-License-Identifier: Apache-2.0
"""Run a plan: train the runs without a record, measure them, and write a record of each."""

import contextlib
import io
import json
import math
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.origin import describe_origin
from cpvt_det.builders.trained import Trained, load_trained
from cpvt_det.common.class_names import require_same_classes
from cpvt_det.common.errors import MapSizeError, RunStoppedError, first_line
from cpvt_det.common.files import write_json
from cpvt_det.common.registry import import_inherited
from cpvt_det.data.shapes.dataset import draw_dataset
from cpvt_det.training.callbacks import Callback, TrainingRun
from cpvt_det.training.evaluate import evaluate
from cpvt_det.training.setup import describe_environment, stop_log
from cpvt_det.training.tasks.task import build_task, figure_of, flatten
from cpvt_det.training.train import run as train
from cpvt_det.visualize.curves import read_metrics
from studies.engine.plan import Plan, Run, load_plan
from studies.engine.probes import PROBES

WEIGHTS, BACKBONE, ATTEMPT = "model_final.pth", "backbone.pth", "attempt.json"
FAILED = "failed"
Record = dict[str, Any]


def run_study(path: Path, processes: int, groups: Sequence[str] = (), write_line: Callable[[str], None] = print) -> None:
    """Train and measure every run of a plan that has no record yet, group after group.

    An interrupted run resumes from its last checkpoint; a run whose plan has changed starts again. If only the measurements have
    changed, the trained weights are measured again. Runs that others start from are trained again if their weights are missing.

    Args:
        path: path of the plan.
        processes: number of runs at a time, with one thread each.
        groups: names of the groups to run, with the runs that they start from; all groups if empty.
        write_line: function that receives a line per finished run, which is also written to ``log.txt`` beside the plan, or a line
            that there is nothing to do.

    Raises:
        BadInputError: a plan that cannot be run, or data that cannot be drawn.
        RunStoppedError: some runs failed; the others were finished.
    """
    plan = load_plan(path)
    todo = missing_runs(plan, [plan.group(name).name for name in groups] or [group.name for group in plan.groups])
    if not todo:
        write_line("Nothing to do: every run has a record")
        return
    for data in plan.data:  # each is the ``val`` split of a shapes data set of its own
        draw_dataset(plan.data_root(data.name), 1, data.images, data.seed, data.spec)
    failed = []
    for group in plan.groups:
        names = [run.name for run in todo if run.group is group]
        for number, (name, outcome) in enumerate(_execute_all(path, names, processes), 1):
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {name}: {outcome} ({number}/{len(names)})"
            with (plan.folder / "log.txt").open("a", encoding="utf-8") as log:
                log.write(f"{line}\n")
            write_line(line)
            failed += [name] if outcome.startswith(FAILED) else []
    if failed:
        raise RunStoppedError(f"{len(failed)} runs failed: {', '.join(failed)}; log.txt beside the plan contains their errors")


def missing_runs(plan: Plan, groups: Sequence[str]) -> list[Run]:
    """The runs to do, in the plan's order: those of the groups without a record, and those they start from without weights."""
    todo = {run.name for run in plan.runs() if run.group.name in groups and not is_done(plan, run)}
    for run in reversed(list(plan.runs())):  # origins are of earlier groups
        if run.name in todo and not is_trained(plan, run):
            todo |= {name for name in plan.origins(run) if not is_trained(plan, plan.run(name))}
    return [run for run in plan.runs() if run.name in todo]


def is_done(plan: Plan, run: Run) -> bool:
    """Whether a run has a record that matches the current plan, with all its measurements."""
    record = read_record(plan, run)
    return bool(record) and record["measured"]["fingerprint"] == plan.measured_fingerprint(run.group)


def read_record(plan: Plan, run: Run) -> Record | None:
    """The record of a run; ``None`` if there is none, or if the plan has changed since."""
    path = plan.record_path(run.name)
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return record if record and record["fingerprint"] == plan.fingerprint(run) else None


def is_trained(plan: Plan, run: Run) -> bool:
    """Whether a run has a record and weights that other runs can start from."""
    return read_record(plan, run) is not None and (plan.output_of(run.name) / WEIGHTS).is_file()


def _execute_all(path: Path, names: Sequence[str], processes: int) -> Iterator[tuple[str, str]]:
    """(name, outcome) of runs as they end; each in a process of its own, so that no state passes from one run to the next."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1)
    try:
        futures = {pool.submit(_outcome_of, path, name): name for name in names}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _outcome_of(path: Path, name: str) -> str:
    """Call :func:`execute` and describe the outcome in a line; also for errors, as not all of them can be pickled."""
    try:
        import_inherited()
        with contextlib.redirect_stderr(io.StringIO()):  # mixed from several runs; each run's log.txt has its own
            plan = load_plan(path)
            record = execute(plan, name)
    except (Exception, KeyboardInterrupt) as error:
        return f"{FAILED}: {type(error).__name__}: {first_line(error)}"
    main = plan.figures_of(plan.run(name).group)[0]
    return f"{main} {record[main]:.1f}, {record['cpu_seconds']:.0f} s"


def execute(plan: Plan, name: str) -> Record:
    """Train and measure one run in this process, as far as it is not done yet.

    Returns:
        The record, which is also written beside the plan.

    Raises:
        BadInputError, RunStoppedError: as :func:`cpvt_det.training.train.run`.
        RunStoppedError: a run with a record was trained again for the runs that start from it, and its results differ.
    """
    torch.set_num_threads(1)
    run = plan.run(name)
    record = read_record(plan, run)
    if not is_trained(plan, run):
        trained = _train(plan, run)
        figures = plan.figures_of(run.group)
        if record is not None and any(trained[figure] != record[figure] for figure in figures):
            shutil.rmtree(plan.output_of(name))  # no run may start from it
            raise RunStoppedError(
                f"trained again, its {figures[0]} is {trained[figures[0]]}, but {record[figures[0]]} in its record: "
                "the code or the machine has changed; "
                "runs that start from it could not be compared with earlier ones; remove its record and theirs to start again"
            )
        record = trained
    record["measured"] = _measure(plan, run)
    plan.record_path(name).parent.mkdir(parents=True, exist_ok=True)
    write_json(record, plan.record_path(name), indent=1)
    return record


def _train(plan: Plan, run: Run) -> Record:
    """Train, from the last checkpoint of an earlier attempt at the same run if there is one."""
    cfg, fingerprint = plan.config_of(run), plan.fingerprint(run)
    cfg.SOLVER.THREADS = 1  # whatever is in a chosen.yaml that the plan starts from
    output = Path(cfg.OUTPUT_DIR)
    attempt = output / ATTEMPT
    earlier = json.loads(attempt.read_text(encoding="utf-8")) if attempt.is_file() else {}
    if earlier.get("fingerprint") != fingerprint:
        shutil.rmtree(output, ignore_errors=True)
        earlier = {"fingerprint": fingerprint, "cpu_seconds": 0.0}
        output.mkdir(parents=True)
    spent = CpuTime(attempt, **earlier)
    try:
        results = flatten(train(cfg, resume=(output / "last_checkpoint").is_file(), callbacks=[spent]))
    finally:
        stop_log()
        spent.keep()
    metrics = read_metrics(output / "metrics.json")
    main = build_task(cfg).main_figure
    if any(group.backbone == run.name for group in plan.groups):
        body = load_trained(output / WEIGHTS).detector.backbone.body
        torch.save(body.state_dict(), output / BACKBONE)  # as MODEL.BACKBONE.WEIGHTS takes it
    return {
        "run": run.name,
        "fingerprint": fingerprint,
        "environment": describe_environment(),
        **describe_origin(),
        **{figure: _or_none(results[f"{main.rpartition('/')[0]}/{figure}"]) for figure in plan.figures_of(run.group)},
        "iterations": max(metrics) + 1,
        "ms_per_step": round(1000 * float(np.median([line["time"] for line in metrics.values() if "time" in line])), 2),
        "cpu_seconds": round(spent.seconds, 1),  # over all attempts, with evaluations
        "curve": {iteration + 1: _or_none(line[main]) for iteration, line in metrics.items() if main in line},
    }


class CpuTime(Callback):
    """The CPU time of all attempts at a run, kept every ``SOLVER.LOG_PERIOD`` steps, so that of a killed one little is lost.

    Args:
        attempt: file that keeps it.
        fingerprint: fingerprint of the run.
        cpu_seconds: time of earlier attempts.
    """

    def __init__(self, attempt: Path, fingerprint: str, cpu_seconds: float):
        self.attempt, self.fingerprint = attempt, fingerprint
        self.start = time.process_time() - cpu_seconds
        self.keep()

    def on_step(self, run: TrainingRun, iteration: int, scalars: dict[str, float]) -> None:
        self.keep()

    def keep(self) -> None:
        """Write the file."""
        self.seconds = time.process_time() - self.start
        write_json({"fingerprint": self.fingerprint, "cpu_seconds": self.seconds}, self.attempt)


def _measure(plan: Plan, run: Run) -> Record:
    before, trained = time.process_time(), load_trained(plan.output_of(run.name) / WEIGHTS)
    sweeps = {sweep: evaluate_sweep(plan, run, trained, sweep) for sweep in run.group.sweeps}
    probes = {probe: PROBES[probe](trained) for probe in run.group.probes}
    seconds = round(time.process_time() - before, 1)
    return {
        "fingerprint": plan.measured_fingerprint(run.group),
        "cpu_seconds": seconds,
        "sweeps": sweeps,
        "probes": probes,
    }


def evaluate_sweep(plan: Plan, run: Run, trained: Trained, sweep: str) -> dict[str, float | None]:
    """The main figure on every data set of a sweep; ``None`` where the encoding refuses images of that size.

    Raises:
        BadInputError: data that cannot be read, or whose classes are not those of the model.
    """
    found = {}
    for name in plan.sweeps[sweep]:
        task = build_task(plan.swept_config_of(run, name))
        tests = task.load_tests()
        require_same_classes(trained.classes, tests[0].classes, f"{run.name} and {name}")
        try:
            with tempfile.TemporaryDirectory() as folder:  # for the detections, some MB
                found[name] = figure_of(task.main_figure, evaluate(task, trained.detector, tests, Path(folder)))
        except MapSizeError:
            found[name] = math.nan
    return {name: _or_none(value) for name, value in found.items()}


def _or_none(value: float) -> float | None:
    """The value, or ``None`` for NaN, which JSON does not have: the AP of a kind without objects is NaN."""
    return value if math.isfinite(value) else None
