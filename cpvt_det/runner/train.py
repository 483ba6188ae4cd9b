# SPDX-License-Identifier: Apache-2.0
"""The built-in runner: training and evaluation without detectron2, to be read from top to bottom."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det import builders
from cpvt_det.builders.datasets import log_data
from cpvt_det.checkpoint.checkpointer import RunCheckpointer, RunState, TrainerState
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.checkpoint.resume import last_checkpoint
from cpvt_det.class_names import Classes
from cpvt_det.data.loader import dead_workers_named
from cpvt_det.errors import ConfigError
from cpvt_det.runner.advice import log_advice, log_next_steps
from cpvt_det.runner.callbacks import Callback, RunCallbacks, TrainingRun, build_callbacks
from cpvt_det.runner.evaluate import chosen_threshold, draw_run, evaluate
from cpvt_det.runner.guard import RunGuard
from cpvt_det.runner.metrics import MetricsWriter
from cpvt_det.runner.progress import LossWatch, RunEvaluations, none_yet
from cpvt_det.runner.setup import choose_run_id, choose_seed, describe_model, only_run_in, record_agents, setup_run, write_config
from cpvt_det.runner.sizes import evaluate_sizes
from cpvt_det.solver.schedule import TrainingSchedule
from cpvt_det.solver.step import wrap_for_processes
from cpvt_det.tasks.task import Results, Task, build_task, flatten

logger = logging.getLogger("cpvt_det")


def run(
    cfg: CfgNode,
    resume: bool = False,
    eval_only: bool = False,
    allow_partial: bool = False,
    sizes: Sequence[int] = (),
    callbacks: Sequence[Callback] = (),
) -> Results:
    """Train and evaluate, or only evaluate.

    Args:
        cfg: the run's config; ``MODEL.NUM_CLASSES`` is filled in from the data.
        resume: go on from the last checkpoint in ``OUTPUT_DIR``, where there is one.
        eval_only: evaluate ``MODEL.WEIGHTS``, or with ``resume`` the last checkpoint.
        allow_partial: evaluate also weights that fit the model in part; the rest of it is random.
        sizes: test sizes in pixels to evaluate at, one after the other; empty: at that of the config.
        callbacks: what watches the training beside the callbacks that ``CALLBACKS`` names.

    Returns:
        The results of the last evaluation.

    Raises:
        BadInputError: config, data or weights that cannot be used; a folder that another run is using.
        RunStoppedError: a run that cannot go on.
        InterruptedRun: SIGTERM or Ctrl-C during training; the last step is saved.
    """
    with only_run_in(cfg):
        return evaluate_only(cfg, resume, allow_partial, sizes) if eval_only else train(cfg, resume, callbacks)


def evaluate_only(cfg: CfgNode, resume: bool = False, allow_partial: bool = False, sizes: Sequence[int] = ()) -> Results:
    """Evaluate weights; arguments and result as in :func:`run`."""
    task = build_task(cfg)
    tests = task.load_tests()
    if resume:
        cfg.MODEL.WEIGHTS = str(last_checkpoint(cfg.OUTPUT_DIR))
    output = setup_run(cfg)
    log_data(tests)
    detector = builders.build_detector(cfg).to(builders.build_device(cfg))
    kept = load_initial_weights(cfg, detector, tests[0].classes, for_evaluation=True, allow_partial=allow_partial)
    write_config(cfg, replace=False)
    if sizes:
        return evaluate_sizes(task, detector, tests, sizes, output)
    results = evaluate(task, detector, tests, output)
    with chosen_threshold(cfg, kept):
        task.show_results(detector, tests, results, output)
    return results


def train(cfg: CfgNode, resume: bool = False, callbacks: Sequence[Callback] = ()) -> Results:
    """Train; arguments and result as in :func:`run`. Long, so that a run can be read from top to bottom."""
    task = build_task(cfg)
    datasets, tests = task.load_splits()
    records, classes = task.training_records(datasets), datasets[0].classes
    length = builders.build_schedule(cfg, len(records))
    all_callbacks = build_callbacks(cfg, tests, callbacks)
    output = setup_run(cfg)
    log_data(datasets + tests)
    logger.info(length.arithmetic)
    log_advice(cfg, length, records)

    detector, trainer, state = build_run(cfg, task, records, classes, length, output)
    checkpointer = RunCheckpointer(detector, output, cfg.SOLVER.CHECKPOINT_KEEP, trainer=trainer, cpvt_det=state)
    evaluations, losses = RunEvaluations(cfg, task, records, tests, checkpointer), LossWatch(cfg, length.max_iter)
    start = begin(cfg, resume, checkpointer, trainer, length)
    evaluated = state.ema.module if state.ema else detector
    loader = task.build_train_loader(records, state.seed).from_iteration(start)
    results: Results = {}
    run_view = TrainingRun(cfg, output, state.run_id, start, length.max_iter, state.best, evaluated)
    with RunCallbacks(all_callbacks, run_view) as run_callbacks:
        with (
            MetricsWriter(output, start, length.max_iter, cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.LOG_PERIOD) as writer,
            RunGuard(cfg, checkpointer, trainer.step, start, length.max_iter) as guard,
            dead_workers_named(loader.dataset),  # before the guard saves, so that no late news of it comes in between
        ):

            def evaluate_after(iteration: int) -> Results:
                with writer.clock_stopped():
                    with guard.evaluation():
                        results = evaluations.evaluate(evaluated, iteration, output)
                        writer.write(iteration, flatten(results))
                    run_callbacks.evaluation(iteration, results)
                if iteration + 1 == length.max_iter or run_callbacks.is_over:
                    guard.save_final(iteration)
                return results

            # A checkpoint is older than its evaluation, and than the final one.
            if tests and start > 0 and (is_due(start - 1, length) or run_callbacks.is_over):
                results = evaluate_after(start - 1)
            elif start == length.max_iter:
                guard.save_final(start - 1)
            for iteration, samples in zip(range(start, length.max_iter), writer.timed(guard.batches(loader)), strict=False):
                if run_callbacks.is_over and iteration > 0:  # a new run takes one step, so that there is something to evaluate
                    break
                trainer.iteration = iteration
                scalars = writer.put(iteration, trainer.step(samples, iteration), trainer.step.lr)
                if scalars:
                    losses.put(iteration, scalars)
                    run_callbacks.step(iteration, scalars)
                guard.after_step(iteration)
                guard.obey_signals()
                if tests and (is_due(iteration, length) or run_callbacks.is_over):
                    results = evaluate_after(iteration)
                elif run_callbacks.is_over:
                    guard.save_final(iteration)
        draw_run(output)
        if tests:
            with chosen_threshold(cfg, state.thresholds):
                task.show_results(evaluated, tests, results, output)
    log_next_steps(cfg, state, output)
    return results


def build_run(
    cfg: CfgNode, task: Task, records: Sequence[Any], classes: Classes, length: TrainingSchedule, output: Path
) -> tuple[nn.Module, TrainerState, RunState]:
    """The model, the trainer whose step changes it, and what else a checkpoint keeps of a run.

    Args:
        cfg: config of the run.
        task: task of the run.
        records: images to train on.
        classes: classes of the data.
        length: schedule of the run.
        output: ``OUTPUT_DIR``.
    """
    state = RunState(classes, cfg.dump(), choose_seed(cfg), choose_run_id(output), task.describe(records), best=none_yet(cfg, task))
    torch.manual_seed(state.seed)
    detector = builders.build_detector(cfg).to(builders.build_device(cfg))
    model = wrap_for_processes(task.build_training_model(detector))
    state.ema = builders.build_ema(cfg, detector)
    step = builders.build_step(cfg, model, builders.build_optimizer(cfg, detector), length, state.seed, state.ema)
    return detector, TrainerState(step), state


def begin(cfg: CfgNode, resume: bool, checkpointer: RunCheckpointer, trainer: TrainerState, length: TrainingSchedule) -> int:
    """Load what a run begins with, and write its config.

    Args:
        cfg: config of the run.
        resume: go on from the last checkpoint, where there is one.
        checkpointer: checkpointer of the run.
        trainer: trainer of the run, whose step takes the seed of a resumed one.
        length: schedule of the run.

    Returns:
        The first iteration.

    Raises:
        ConfigError: a run that has more iterations than the config asks for.
    """
    state: RunState = checkpointer.checkpointables["cpvt_det"]
    start = checkpointer.begin(resume)
    require_rest(cfg, start, length)
    record_agents(Path(checkpointer.save_dir), state.run_id)
    if start == 0:
        load_initial_weights(cfg, checkpointer.model, state.classes)
    trainer.step.seed = state.seed
    write_config(cfg)
    logger.info("Seed %d: iterations %d to %d of %s", state.seed, start, length.max_iter, describe_model(checkpointer.model))
    return start


def require_rest(cfg: CfgNode, start: int, length: TrainingSchedule) -> None:
    """Refuse to resume a run that has more iterations than the config asks for; one that has as many is evaluated again.

    Args:
        cfg: config of the run.
        start: iterations that the run has.
        length: schedule of the run.

    Raises:
        ConfigError: such a run.
    """
    if start > length.max_iter:
        by_epochs = cfg.SOLVER.EPOCHS > 0
        key, batch = ("SOLVER.EPOCHS", ", or a smaller SOLVER.IMS_PER_BATCH,") if by_epochs else ("SOLVER.MAX_ITER", "")
        raise ConfigError(
            f"the run to resume in {cfg.OUTPUT_DIR} has {start} iterations already, and the config asks for {length.max_iter} "
            f"({length.arithmetic}): nothing is left to train. A larger {key}{batch} trains longer, --eval-only --resume evaluates "
            "what there is, and another OUTPUT_DIR starts a new run"
        )


def is_due(iteration: int, length: TrainingSchedule) -> bool:
    """Whether an evaluation follows this iteration: every ``eval_period``, and at the end."""
    done = iteration + 1
    return done == length.max_iter or (length.eval_period > 0 and done % length.eval_period == 0)
