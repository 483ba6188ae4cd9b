# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a training run: both runners call them when a run starts, after steps and evaluations, and when it ends.

This package has early stopping (``SOLVER.EARLY_STOPPING``), and the callbacks ``wandb`` (Weights & Biases) and ``mlflow``, which
send a run's numbers to a server. Each of these two needs the pip extra of the same name; server address and API key come from the
environment variables of its package.
"""

import contextlib
import importlib
import logging
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det.checkpoint.checkpointer import BestSoFar
from cpvt_det.common import distributed
from cpvt_det.common.errors import BadInputError, ConfigError, RunStoppedError, config_errors, counted, first_line
from cpvt_det.common.registry import PartRegistry
from cpvt_det.config import flat_items
from cpvt_det.training.tasks.task import Results, flatten

logger = logging.getLogger("cpvt_det")
SENT_FILES = ("config.yaml", "results.json", "pictures")
CALLBACK_REGISTRY = PartRegistry("CALLBACK", "callback")
"""Name in a config's ``CALLBACKS`` -> builder of a :class:`Callback`, whose keyword arguments are its options."""


@dataclass
class TrainingRun:
    """A run as its callbacks see it.

    Attributes:
        cfg: config of the run.
        output: ``OUTPUT_DIR``.
        run_id: id of the run; a resumed run keeps it.
        start: first iteration; above 0 in a resumed run.
        max_iter: number of iterations in the whole run.
        best: the best evaluation so far, and the number of evaluations since then.
        evaluated: the model that evaluations measure, with the moving average of the weights if there is one.
        reason: the reason why a callback wants to end the run; empty while the run continues.
    """

    cfg: CfgNode
    output: Path
    run_id: str
    start: int
    max_iter: int
    best: BestSoFar
    evaluated: nn.Module
    reason: str = ""

    def stop(self, reason: str) -> None:
        """End the run after the current step, with an evaluation and ``model_final.pth``; the log gives the reason.

        If called in ``on_start``, a new run ends after its first step, and a resumed run ends before its next step.

        Raises:
            ValueError: an empty reason.
        """
        if not reason:
            raise ValueError("to stop a run, give a reason for the log; got an empty one")
        self.reason = reason


class Callback:
    """Methods that a run calls in its first process. A callback overrides the methods that it needs.

    A callback must not change weights or optimiser, because other processes would not see the change. An exception in ``on_start``
    ends the run before its first step. After any later exception, the run continues without that callback and logs a warning,
    because a server that is down must not end a training run. The callback's ``on_end`` is still called, so that it can close what
    it has opened, but errors of that call are not reported. A :class:`cpvt_det.common.errors.RunStoppedError` always ends the run.
    """

    def on_start(self, run: TrainingRun) -> None:
        """Called before the first step of a run, new or resumed."""

    def on_step(self, run: TrainingRun, iteration: int, scalars: dict[str, float]) -> None:
        """Called every ``SOLVER.LOG_PERIOD`` iterations.

        Args:
            run: the run.
            iteration: iteration of the last step.
            scalars: means of all losses, all metrics and ``grad_norm`` since the last call, which are NaN if all steps were
                skipped. Also the number of ``skipped`` steps, ``lr``, and times.
        """

    def on_evaluation(self, run: TrainingRun, iteration: int, results: Results) -> None:
        """Called after an evaluation; ``results`` are its metrics, as in ``results.json``, with NaN for undefined metrics."""

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Called when the run has ended and its files are written; ``error`` is the error or interruption that ended it, if any."""


def build_callbacks(cfg: CfgNode, tests: Sequence[Any], more: Sequence[Callback] = ()) -> list[Callback]:
    """Make the callbacks of a run: early stopping, the callbacks that ``CALLBACKS`` names, and the callbacks given in Python.

    Args:
        cfg: config of the run.
        tests: test sets of the run.
        more: callbacks given in Python.

    Raises:
        ConfigError: an invalid entry, an unknown name or option, a missing package, or a ``SOLVER.EARLY_STOPPING`` that this run
            cannot use.
        TypeError: an object in ``more`` that is not a callback.
    """
    callbacks: list[Callback] = build_early_stopping(cfg, tests)
    for entry in cfg.CALLBACKS:
        parts = list(entry) if isinstance(entry, (list, tuple)) else [entry]
        if [type(part) for part in parts] not in ([str], [str, dict]):
            raise ConfigError(f"CALLBACKS must contain names, or entries [name, {{option: value}}], got {entry!r}")
        name, *options = parts
        with config_errors(f"CALLBACKS {name}"):
            callbacks.append(CALLBACK_REGISTRY.build(name, {}, *options))
    for callback in (*callbacks, *more):
        if not isinstance(callback, Callback):
            raise TypeError(f"a callback must be an instance of cpvt_det.training.callbacks.Callback, got {callback!r}")
    return [*callbacks, *more]


class RunCallbacks:
    """The callbacks of one run, as a context manager: enter it before the first step and leave it at the end of the run. Every
    process must call its methods.

    Args:
        callbacks: callbacks, called in this order.
        run: the run.

    Attributes:
        is_over: whether a callback wants the run to end; the same in every process.
    """

    def __init__(self, callbacks: Sequence[Callback], run: TrainingRun):
        self.run = run
        self.is_over = False
        self._callbacks = list(callbacks) if distributed.rank() == 0 else []
        self._started: list[Callback] = []
        self._failed: list[Callback] = []

    def __enter__(self) -> "RunCallbacks":
        try:
            for callback in self._callbacks:
                self._started.append(callback)
                self._start(callback)
        except BaseException as error:
            self._failed.append(self._started.pop())
            self._end(error)
            raise
        self._agree(self.run.start - 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *more: object) -> None:
        self._end(error)

    def ends_before(self, iteration: int) -> bool:
        """Whether a callback ends the run before this iteration. A new run takes at least one step, so that it can be evaluated."""
        return self.is_over and iteration > 0

    def step(self, iteration: int, scalars: dict[str, float]) -> None:
        """Call ``on_step`` of all callbacks."""
        self._call("on_step", iteration, scalars)
        self._agree(iteration)

    def evaluation(self, iteration: int, results: Results) -> None:
        """Call ``on_evaluation`` of all callbacks."""
        self._call("on_evaluation", iteration, results)
        self._agree(iteration)

    def _start(self, callback: Callback) -> None:
        try:
            callback.on_start(self.run)
        except (BadInputError, RunStoppedError):
            raise
        except Exception as error:  # a user's callback may raise anything
            name = type(callback).__name__
            raise ConfigError(
                f"{name}.on_start failed: {type(error).__name__}: {first_line(error)}; to train without it, remove it from "
                "CALLBACKS"
            ) from error

    def _end(self, error: BaseException | None) -> None:
        """Call ``on_end`` of all callbacks that were started. Failed callbacks are included, because they may have something to
        close."""
        for callback in self._failed:
            with contextlib.suppress(Exception):
                callback.on_end(self.run, error)
        self._failed.clear()
        self._call("on_end", error)
        self._started.clear()

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in list(self._started):
            try:
                getattr(callback, event)(self.run, *arguments)
            except RunStoppedError:
                raise
            except Exception as error:  # a user's callback may raise anything
                self._started.remove(callback)
                self._failed.append(callback)
                logger.warning(
                    "%s.%s failed, so the callback is not called again in this run: %s: %s",
                    *(type(callback).__name__, event, type(error).__name__, first_line(error)),
                )

    def _agree(self, iteration: int) -> None:
        """Adopt the first process's decision to stop, and log once why the run ends."""
        before, self.is_over = self.is_over, bool(distributed.all_reduce_max(int(bool(self.run.reason))))
        if self.run.reason and not before:
            logger.info("Early stop after iteration %d: %s", iteration, self.run.reason)


class EarlyStopping(Callback):
    """A callback that ends a run after ``patience`` evaluations in a row without a new best. The run's checkpoints store the count,
    so a resumed run continues it.
    """

    def __init__(self, patience: int):
        self.patience = patience

    def on_evaluation(self, run: TrainingRun, iteration: int, results: Results) -> None:
        self.on_start(run)

    def on_start(self, run: TrainingRun) -> None:
        best = run.best
        if best.waited >= self.patience:
            higher = best.name
            if best.figure is not None:
                higher = f"a higher {best.name} than the {best.figure:.4g} of iteration {best.iteration}"
            run.stop(f"{counted(best.waited, 'evaluation')} without {higher} (SOLVER.EARLY_STOPPING {self.patience})")


def build_early_stopping(cfg: CfgNode, tests: Sequence[Any]) -> list[Callback]:
    """A list with the callback of ``SOLVER.EARLY_STOPPING``, or an empty list for 0.

    Raises:
        ConfigError: a negative number, or a run that is not evaluated before its end.
    """
    patience, test = cfg.SOLVER.EARLY_STOPPING, cfg.TEST
    by_epochs = cfg.SOLVER.EPOCHS > 0 and test.EVAL_EPOCHS > 0  # otherwise EVAL_EPOCHS is not used
    if patience < 0:
        raise ConfigError(f"SOLVER.EARLY_STOPPING must be at least 0 (0 for no early stopping), got {patience}")
    if patience and not tests:
        raise ConfigError(
            f"SOLVER.EARLY_STOPPING is {patience}, but nothing is evaluated: name a test set in DATASETS.TEST, or leave the key out"
        )
    if patience and not (test.EVAL_PERIOD > 0 or by_epochs):
        raise ConfigError(
            f"SOLVER.EARLY_STOPPING is {patience}, but the run is evaluated at its end only; set TEST.EVAL_EPOCHS or EVAL_PERIOD"
        )
    return [EarlyStopping(patience)] if patience else []


def _require(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"CALLBACKS {package}: the package is not installed: pip install 'cpvt-det[{package}]'") from error


@CALLBACK_REGISTRY.register_as("wandb")
class Wandb(Callback):
    """A callback that sends config, scalars and metrics to Weights & Biases; a resumed run continues the same run there.

    Args:
        project: project of the run.
        name: name of the run; ``None`` for a generated name.
        mode: ``online``, ``offline`` or ``disabled``; ``None`` for the value of ``WANDB_MODE``.
    """

    def __init__(self, project: str = "cpvt_det", name: str | None = None, mode: str | None = None):
        self.wandb, self.options = _require("wandb"), {"project": project, "name": name, "mode": mode}

    def on_start(self, run: TrainingRun) -> None:
        self.run = self.wandb.init(**self.options, id=run.run_id, resume="allow", config=dict(flat_items(run.cfg)), dir=run.output)
        self.run.define_metric("*", step_metric="iteration")  # wandb's own step cannot go back, but a resumed run does

    def on_step(self, run: TrainingRun, iteration: int, scalars: dict[str, float]) -> None:
        self.run.log({"iteration": iteration, **scalars})

    def on_evaluation(self, run: TrainingRun, iteration: int, results: Results) -> None:
        self.run.log({"iteration": iteration, **flatten(results)})

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        self.run.finish(exit_code=int(error is not None))


@CALLBACK_REGISTRY.register_as("mlflow")
class Mlflow(Callback):
    """A callback that sends config, scalars, metrics and pictures to MLflow; a resumed run continues the same run there.

    Args:
        experiment: experiment of the run.
        name: name of the run; ``None`` for a generated name.
        uri: address of the server or folder; ``None`` for the value of ``MLFLOW_TRACKING_URI``.
    """

    def __init__(self, experiment: str = "cpvt_det", name: str | None = None, uri: str | None = None):
        self.mlflow, self.options = _require("mlflow"), (experiment, name, uri)

    def on_start(self, run: TrainingRun) -> None:
        self.run, (experiment, name, uri), tag = "", self.options, "cpvt_det.run_id"
        if uri is not None:
            self.mlflow.set_tracking_uri(uri)
        self.client = self.mlflow.MlflowClient()  # does not touch an active run of this process
        known = self.client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else self.client.create_experiment(experiment)
        found = self.client.search_runs([place], f"tags.`{tag}` = '{run.run_id}'")
        tags = self.mlflow.tracking.context.registry.resolve_tags({tag: run.run_id})
        self.run = (found[0] if found else self.client.create_run(place, tags=tags, run_name=name)).info.run_id
        self.client.update_run(self.run, status="RUNNING")
        if not found:  # MLflow's parameters cannot change, but a resumed run's config may
            config = [self.mlflow.entities.Param(key, str(value)) for key, value in flat_items(run.cfg)]
            self.client.log_batch(self.run, params=config)

    def on_step(self, run: TrainingRun, iteration: int, scalars: dict[str, float]) -> None:
        defined = {re.sub(r"[^/\w.\- ]", "_", key): value for key, value in scalars.items() if math.isfinite(value)}
        now = int(1000 * time.time())
        self.client.log_batch(self.run, [self.mlflow.entities.Metric(key, value, now, iteration) for key, value in defined.items()])

    def on_evaluation(self, run: TrainingRun, iteration: int, results: Results) -> None:
        self.on_step(run, iteration, flatten(results))

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        if not self.run:  # it did not start
            return
        try:
            for path in (run.output / name for name in SENT_FILES if (run.output / name).exists()):
                self.client.log_artifact(self.run, str(path))  # the path may be a folder
        finally:
            self.client.set_terminated(self.run, "FAILED" if error else "FINISHED")
