# SPDX-License-Identifier: Apache-2.0
"""detectron2's trainer with the parts that both runners share: loader, parameter groups, step, checkpoints, evaluator."""

import math
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, SimpleTrainer, TrainerBase, hooks
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, get_event_storage
from torch import Tensor, nn

from cpvt_det import builders, distributed
from cpvt_det.checkpoint.checkpointer import RunCheckpointer, RunState
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.d2.config import without_untouched
from cpvt_det.d2.meta_arch import register_detectors
from cpvt_det.data.loader import SampleLoader, dead_workers_named
from cpvt_det.data.mapper import Sample
from cpvt_det.errors import config_errors
from cpvt_det.runner.callbacks import Callback, RunCallbacks, TrainingRun
from cpvt_det.runner.guard import RunGuard
from cpvt_det.runner.metrics import step_means
from cpvt_det.runner.progress import LossWatch, RunEvaluations, none_yet
from cpvt_det.runner.train import is_due, require_rest
from cpvt_det.solver.step import TrainStep, wrap_for_processes
from cpvt_det.tasks.task import Results, Task, flatten


def build_detector(cfg: CfgNode) -> nn.Module:
    """detectron2's ``build_model`` for one of our detectors.

    Raises:
        ConfigError: another model, a device that is not there, or what :func:`cpvt_det.builders.build_detector` refuses.
    """
    builders.build_device(cfg)
    builders.DETECTOR_REGISTRY.find(cfg.MODEL.META_ARCHITECTURE)
    register_detectors()
    cfg = cfg.clone()
    cfg.MODEL.BACKBONE.WEIGHTS = ""  # load_initial_weights takes those, in a run that is not resumed
    with config_errors("MODEL"):
        return build_model(cfg)


class StepTrainer(SimpleTrainer):
    """detectron2's inner trainer, taking our steps.

    Args:
        step: training step of the whole run.
        loader: batches of samples; the trainer sets its first iteration.

    Attributes:
        batches: batches of the loader, as the run takes them.
        records: scalars of the steps since the last call of ``on_step``.
    """

    batches: Iterator[list[Sample]]

    def __init__(self, step: TrainStep, loader: SampleLoader):
        super().__init__(step.training_model.detector, loader, step.optimizer)
        self.step = step
        self.records: list[dict[str, Tensor]] = []

    def run_step(self) -> None:
        """Take the step of iteration ``iter`` and record its scalars, with one synchronisation."""
        start = time.perf_counter()
        samples = next(self.batches)
        data_time = time.perf_counter() - start
        record = self.step(samples, self.iter)
        self.records.append(record)
        values = torch.stack([value.double() for value in record.values()])
        means = dict(zip(record, distributed.all_reduce_mean(values).tolist(), strict=True))
        storage = get_event_storage()
        storage.put_scalars(**{name: value for name, value in means.items() if math.isfinite(value)}, data_time=data_time)
        storage.put_scalar("lr", self.step.lr, smoothing_hint=False)

    def state_dict(self) -> dict[str, Any]:
        return {**TrainerBase.state_dict(self), **self.step.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        TrainerBase.load_state_dict(self, state_dict)
        self.step.load_state_dict(state_dict)


class EvaluationHook(hooks.EvalHook):
    """detectron2's, which also evaluates after the step that a callback ends the run with."""

    def after_step(self) -> None:
        super().after_step()
        if self.trainer.run_callbacks.is_over and not is_due(self.trainer.iter, self.trainer.length):
            self._do_eval()


class Trainer(DefaultTrainer):
    """``DefaultTrainer`` whose run can be continued by the built-in runner, and continues one of its runs.

    Args:
        task: the run's task.
        datasets: its training sets.
        tests: its test sets.
        seed: seed of the run; a resumed run keeps its own.
        run_id: id of the run; a resumed run keeps its own.
        callbacks: what watches the run.

    Attributes:
        run_callbacks: the calls of the callbacks, to be entered before :meth:`train`; there after :meth:`resume_or_load`.

    Raises:
        ConfigError: what the config asks for cannot be had.
    """

    def __init__(
        self, task: Task, datasets: Sequence[Any], tests: Sequence[Any], seed: int, run_id: str, callbacks: Sequence[Callback] = ()
    ):
        TrainerBase.__init__(self)
        self._callbacks = callbacks
        self.task = task
        self.cfg = cfg = task.cfg
        self.tests = tests
        self.results: Results = {}
        self._records = task.training_records(datasets)
        length = builders.build_schedule(cfg, len(self._records))
        self.start_iter, self.max_iter, self.length = 0, length.max_iter, length
        torch.manual_seed(seed)
        detector = build_detector(cfg)
        config, data = without_untouched(cfg).dump(), task.describe(self._records)
        ema = builders.build_ema(cfg, detector)
        self.state = RunState(datasets[0].classes, config, seed, run_id, data, ema, none_yet(cfg, task))
        model = wrap_for_processes(task.build_training_model(detector))
        optimizer = builders.build_optimizer(cfg, detector)
        step = builders.build_step(cfg, model, optimizer, length, seed, self.state.ema)
        self._trainer = StepTrainer(step, task.build_train_loader(self._records, seed))
        self.checkpointer = RunCheckpointer(
            detector, cfg.OUTPUT_DIR, cfg.SOLVER.CHECKPOINT_KEEP, trainer=weakref.proxy(self), cpvt_det=self.state
        )
        self.evaluations = RunEvaluations(cfg, task, self._records, tests, self.checkpointer)
        self.losses = LossWatch(cfg, self.max_iter)
        self.register_hooks(self.build_hooks())

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated: the moving average where there is one."""
        return self.state.ema.module if self.state.ema else self.model

    def resume_or_load(self, resume: bool = True) -> None:
        """Go on from the last checkpoint, or else load the initial weights.

        Raises:
            ConfigError: a run that has more iterations than the config asks for.
            WeightsError: as :meth:`RunCheckpointer.begin` and :func:`cpvt_det.checkpoint.initial.load_initial_weights`.
        """
        self.start_iter = self.checkpointer.begin(resume)
        require_rest(self.cfg, self.start_iter, self.length)
        if self.start_iter == 0:
            load_initial_weights(self.cfg, self.model, self.state.classes)
        self._trainer.step.seed = self.state.seed
        loader = self.task.build_train_loader(self._records, self.state.seed)
        self._trainer.data_loader = loader.from_iteration(self.start_iter)
        output, best = Path(self.cfg.OUTPUT_DIR), self.state.best
        run_view = TrainingRun(self.cfg, output, self.state.run_id, self.start_iter, self.max_iter, best, self.evaluated)
        self.run_callbacks = RunCallbacks(self._callbacks, run_view)

    def build_hooks(self) -> list[hooks.HookBase | None]:
        """detectron2's hooks; the step itself sets the learning rate."""
        main = comm.is_main_process()
        period = self.cfg.SOLVER.LOG_PERIOD
        return [
            hooks.IterationTimer(warmup_iter=0),  # else the printer fails when a callback ends the run in its first steps
            hooks.CallbackHook(after_step=lambda trainer: trainer.losses.put(trainer.iter, _latest(trainer.storage))),
            hooks.CallbackHook(after_step=lambda trainer: trainer.call_on_step()),
            hooks.CallbackHook(after_step=lambda trainer: trainer.guard.after_step(trainer.iter)),
            EvaluationHook(self.length.eval_period, self._test_and_keep_best) if self.tests else None,
            hooks.PeriodicWriter(self.build_writers(), period=period) if main else None,
        ]

    def train(self) -> dict[str, Any]:
        """Train; the results of the last evaluation.

        detectron2's loop, less its log of the traceback and less what it does after a failure: evaluate.

        Raises:
            RunStoppedError, InterruptedRun: as :class:`RunGuard`.
        """
        self.iter = self.start_iter
        self.guard = RunGuard(self.cfg, self.checkpointer, self._trainer.step, self.start_iter, self.max_iter)
        self._trainer.batches = self.guard.batches(self._trainer.data_loader)
        watched = dead_workers_named(self._trainer.data_loader.dataset)
        with EventStorage(self.start_iter) as self.storage, self.guard, watched:  # the guard saves after all news of a worker
            self.before_train()
            due = is_due(self.start_iter - 1, self.length) or self.run_callbacks.is_over
            if self.tests and 0 < self.start_iter < self.max_iter and due:
                missed = self._test_and_keep_best(self.start_iter - 1)  # the checkpoint is older than its evaluation
                self.storage.put_scalars(**flatten(missed), smoothing_hint=False)
            elif not self.tests and self.start_iter == self.max_iter:
                self.guard.save_final(self.start_iter - 1)
            while self.iter < self.max_iter:
                if self.run_callbacks.is_over and self.iter > 0:  # a new run takes one step
                    self.iter -= 1  # the last step that was taken, which hooks look at
                    if not self.tests and self.iter >= self.start_iter:
                        self.guard.save_final(self.iter)
                    break
                self.before_step()
                self.run_step()
                self.after_step()
                self.guard.obey_signals()
                self.iter += 1
            self.after_train()
        return self.results

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "iteration": min(self.iter, self.max_iter - 1)}  # after training it is one more

    def call_on_step(self) -> None:
        """Call ``on_step`` of the callbacks with the means of the last steps, every ``SOLVER.LOG_PERIOD`` iterations."""
        if (self.iter + 1) % self.cfg.SOLVER.LOG_PERIOD == 0 or self.iter + 1 == self.max_iter:
            inner = self._trainer
            means = step_means(inner.records)
            inner.records.clear()
            self.run_callbacks.step(self.iter, {**means, "lr": inner.step.lr})

    def _test_and_keep_best(self, done: int | None = None) -> dict[str, Any]:
        done = min(self.iter, self.max_iter - 1) if done is None else done
        with self.guard.evaluation():
            self.results = self.evaluations.evaluate(self.evaluated, done, Path(self.cfg.OUTPUT_DIR))
        self.run_callbacks.evaluation(done, self.results)
        if done + 1 == self.max_iter or self.run_callbacks.is_over:
            self.guard.save_final(done)
        return _without_nan(self.results)  # metrics.json would not be JSON


def _latest(storage: EventStorage) -> dict[str, float]:
    """The scalars of the last step; none for one that was skipped."""
    return {name: value for name, (value, iteration) in storage.latest().items() if iteration == storage.iter}


def _without_nan(results: dict[str, Any]) -> dict[str, Any]:
    parts = {name: _without_nan(value) if isinstance(value, dict) else value for name, value in results.items()}
    return {name: value for name, value in parts.items() if value == value}
