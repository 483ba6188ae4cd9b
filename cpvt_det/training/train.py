# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation, written to be read from top to bottom; the runner of detectron2 overrides steps of :class:`Engine`."""

import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from fvcore.common.config import CfgNode
from torch import nn

from cpvt_det import builders
from cpvt_det.builders.datasets import log_data
from cpvt_det.builders.trained import load_for_evaluation
from cpvt_det.checkpoint.checkpointer import BEST, BestSoFar, RunCheckpointer, RunState
from cpvt_det.checkpoint.exported import is_exported
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.checkpoint.resume import FINAL, choose_to_resume
from cpvt_det.common import distributed
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.registry import import_words
from cpvt_det.data.coco import describe_records
from cpvt_det.data.loader import dead_workers_named
from cpvt_det.solver.optimizer import TrainingSchedule
from cpvt_det.solver.step import wrap_for_processes
from cpvt_det.training.callbacks import Callback, RunCallbacks, TrainingRun, build_callbacks
from cpvt_det.training.evaluate import chosen_threshold, draw_run, evaluate, evaluate_sizes, measure
from cpvt_det.training.guard import RunGuard
from cpvt_det.training.metrics import MetricsWriter
from cpvt_det.training.setup import choose_run_id, choose_seed, describe_model, only_run_in, record_agents, setup_run, write_config
from cpvt_det.training.tasks.task import Results, build_task, figure_of, flatten, require_best_figure

logger = logging.getLogger("cpvt_det")


class Engine:
    """The steps in which the runners differ. The methods are those of the built-in runner, and detectron2's runner overrides
    them."""

    def prepare(self, cfg: CfgNode) -> None:
        """Change the config before it is read; this run has already reserved its folder."""

    def start(self, output: Path) -> None:
        """Called once the log of ``OUTPUT_DIR`` is open."""

    def build_detector(self, cfg: CfgNode) -> nn.Module:
        """The model with random weights, on its device."""
        return builders.build_detector(cfg).to(builders.build_device(cfg))

    def saved(self, cfg: CfgNode) -> CfgNode:
        """The config to write to the run's files; either runner can read it."""
        return cfg

    def take_steps(self, take_step: Callable[[int], dict[str, float]], calls: RunCallbacks) -> None:
        """Run the training loop.

        Args:
            take_step: function that takes the step of an iteration and does the work due after it; it returns the scalars of the
                log line, if any.
            calls: callbacks of the run; they know its first and last iteration, and may end it.
        """
        for iteration in range(calls.run.start, calls.run.max_iter):
            if calls.ends_before(iteration):
                break
            take_step(iteration)


def run(
    cfg: CfgNode,
    resume: bool = False,
    eval_only: bool = False,
    allow_partial: bool = False,
    sizes: Sequence[int] = (),
    callbacks: Sequence[Callback] = (),
    engine: Engine | None = None,
) -> Results:
    """Train and evaluate, or only evaluate.

    Args:
        cfg: the run's config; ``MODEL.NUM_CLASSES`` is filled in from the data.
        resume: whether to continue from the last checkpoint in ``OUTPUT_DIR``, if there is one.
        eval_only: whether to evaluate without training; the weights are ``MODEL.WEIGHTS`` or, with ``resume``, the last checkpoint.
        allow_partial: whether to evaluate even if the weights fit only a part of the model; the rest of the model then has random
            weights.
        sizes: test sizes in pixels to evaluate at, one after the other; empty for the config's test size.
        callbacks: callbacks in addition to those that ``CALLBACKS`` names.
        engine: runner; ``None`` for the built-in one.

    Returns:
        The results of the last evaluation.

    Raises:
        BadInputError: config, data or weights that cannot be used; a folder that another run is using.
        RunStoppedError: a run that cannot continue.
        InterruptedRun: SIGTERM or Ctrl-C during training; the last step is saved.
    """
    engine = engine or Engine()
    with only_run_in(cfg):
        engine.prepare(cfg)
        return evaluate_only(cfg, engine, resume, allow_partial, sizes) if eval_only else train(cfg, engine, resume, callbacks)


def evaluate_only(cfg: CfgNode, engine: Engine, resume: bool, allow_partial: bool, sizes: Sequence[int]) -> Results:
    """Evaluate weights; arguments and result as in :func:`run`."""
    task = build_task(cfg)
    tests = task.load_tests()
    if resume:
        cfg.MODEL.WEIGHTS = str(choose_to_resume(cfg.OUTPUT_DIR)[0])
    output = setup_run(cfg)
    engine.start(output)
    log_data(tests)
    if is_exported(cfg.MODEL.WEIGHTS):
        detector, kept = load_for_evaluation(cfg, tests[0].classes)
    else:
        detector = engine.build_detector(cfg)
        kept = load_initial_weights(cfg, detector, tests[0].classes, for_evaluation=True, allow_partial=allow_partial)
    write_config(engine.saved(cfg), replace=False)
    if sizes:
        return evaluate_sizes(task, detector, tests, sizes, output)
    results = evaluate(task, detector, tests, output)
    with chosen_threshold(cfg, kept):
        task.show_results(detector, tests, results, output)
    return results


def train(cfg: CfgNode, engine: Engine, resume: bool, callbacks: Sequence[Callback]) -> Results:
    """Train; arguments and result as in :func:`run`. The function is long so that a run can be read from top to bottom."""
    task = build_task(cfg)
    datasets, tests = task.load_splits()
    records = task.training_records(datasets)
    length = builders.build_schedule(cfg, len(records))
    all_callbacks = build_callbacks(cfg, tests, callbacks)
    require_best_figure(task, tests)
    output = setup_run(cfg)
    engine.start(output)
    log_data(datasets + tests)
    logger.info(length.arithmetic)

    config, seed, run_id = engine.saved(cfg).dump(), choose_seed(cfg), choose_run_id(output)
    best = BestSoFar(cfg.TEST.BEST_FIGURE or task.main_figure, next(iter(cfg.DATASETS.TEST), ""))
    state = RunState(datasets[0].classes, config, seed, run_id, describe_records(records), best=best)
    torch.manual_seed(state.seed)
    detector = engine.build_detector(cfg)
    model = wrap_for_processes(task.build_training_model(detector))
    state.ema = builders.build_ema(cfg, detector)
    step = builders.build_step(cfg, model, builders.build_optimizer(cfg, detector), length, state.seed, state.ema)
    checkpointer = RunCheckpointer(detector, output, cfg.SOLVER.CHECKPOINT_KEEP, step, state)

    start = checkpointer.begin(resume)
    require_rest(cfg, start, length)
    record_agents(output, state.run_id)
    if start == 0:
        load_initial_weights(cfg, detector, state.classes)
    step.seed = state.seed  # a resumed run keeps its own seed
    write_config(engine.saved(cfg))
    logger.info("Seed %d: iterations %d to %d of %s", state.seed, start, length.max_iter, describe_model(detector))
    evaluated = state.ema.module if state.ema else detector
    loader = task.build_train_loader(records, state.seed).from_iteration(start)
    results: Results = {}
    run_view = TrainingRun(cfg, output, state.run_id, start, length.max_iter, state.best, evaluated)
    with RunCallbacks(all_callbacks, run_view) as calls:
        with (
            MetricsWriter(output, start, length.max_iter, cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.LOG_PERIOD) as writer,
            RunGuard(cfg, checkpointer, step, start, length.max_iter) as guard,
            dead_workers_named(loader.dataset),  # exits before the guard saves, so no late report comes in between
        ):
            batches = writer.timed(guard.batches(loader))

            def take_step(iteration: int) -> dict[str, float]:
                losses = step(next(batches), iteration)
                if scalars := writer.put(iteration, losses, step.lr):
                    calls.step(iteration, scalars)
                guard.after_step(iteration)
                guard.obey_signals()
                if tests and (is_due(iteration, length) or calls.is_over):
                    evaluate_after(iteration)
                elif calls.is_over:
                    guard.save_final(iteration)
                return scalars

            def evaluate_after(iteration: int) -> None:
                nonlocal results
                with writer.clock_stopped():
                    with guard.evaluation():
                        results, state.thresholds = measure(task, evaluated, tests, output)
                        checkpointer.keep_best(figure_of(state.best.name, results), iteration)
                        writer.write(iteration, flatten(results))
                    calls.evaluation(iteration, results)
                if iteration + 1 == length.max_iter or calls.is_over:
                    guard.save_final(iteration)

            # A checkpoint is saved before its evaluation, and before the final checkpoint, which may both be missing.
            if tests and start > 0 and (is_due(start - 1, length) or calls.is_over):
                evaluate_after(start - 1)
            elif start == length.max_iter:
                guard.save_final(start - 1)
            engine.take_steps(take_step, calls)
        draw_run(output)
        if tests:
            with chosen_threshold(cfg, state.thresholds):
                task.show_results(evaluated, tests, results, output)
    log_next_steps(cfg, state, output)
    return results


def require_rest(cfg: CfgNode, start: int, length: TrainingSchedule) -> None:
    """Refuse to resume a run with more iterations than the config asks for. A run with exactly as many is evaluated again.

    Args:
        cfg: config of the run.
        start: number of iterations that the run has already taken.
        length: schedule of the run.

    Raises:
        ConfigError: a run with more iterations than the config asks for.
    """
    if start > length.max_iter:
        by_epochs = cfg.SOLVER.EPOCHS > 0
        key, batch = ("SOLVER.EPOCHS", ", or a smaller SOLVER.IMS_PER_BATCH,") if by_epochs else ("SOLVER.MAX_ITER", "")
        raise ConfigError(
            f"the run to resume in {cfg.OUTPUT_DIR} has {start} iterations already, and the config asks for {length.max_iter} "
            f"({length.arithmetic}): nothing is left to train. A larger {key}{batch} trains longer, --eval-only --resume evaluates "
            "the last checkpoint, and another OUTPUT_DIR starts a new run"
        )


def is_due(iteration: int, length: TrainingSchedule) -> bool:
    """Whether an evaluation follows this iteration, as it does every ``eval_period`` iterations and at the end."""
    done = iteration + 1
    return done == length.max_iter or (length.eval_period > 0 and done % length.eval_period == 0)


def log_next_steps(cfg: CfgNode, state: RunState, output: Path) -> None:
    """Log the best checkpoint of a finished run, its iteration, and the commands to use next.

    Args:
        cfg: config of the run.
        state: state of the run, with its best evaluation.
        output: ``OUTPUT_DIR``.
    """
    best = state.best
    if best.figure is None:
        weights, which = output / f"{FINAL}.pth", "Final checkpoint (nothing was evaluated)"
    else:
        weights, which = output / f"{BEST}.pth", f"Best checkpoint, of iteration {best.iteration} ({best.name} {best.figure:.4g})"
    longer = f"SOLVER.EPOCHS {2 * cfg.SOLVER.EPOCHS:g}" if cfg.SOLVER.EPOCHS > 0 else f"SOLVER.MAX_ITER {2 * cfg.SOLVER.MAX_ITER}"
    if 0 < cfg.SOLVER.EARLY_STOPPING <= best.waited:
        longer += " SOLVER.EARLY_STOPPING 0"
    config, report, best_file = (shlex.quote(str(path)) for path in (output / "config.yaml", output / "eval", weights))
    own, processes = import_words(), distributed.world_size()
    gpus = f" --num-gpus {processes}" if processes > 1 else ""  # the batch is divided among them
    commands = [
        f"cpvt-det predict{own} {best_file} --input IMAGES --output found",
        f"cpvt-det eval{own} {best_file} --config-file {config} --report OUTPUT_DIR {report}",
        f"cpvt-det train{own}{gpus} --config-file {config} --resume {longer}",
    ]
    logger.info("%s: %s. Next: predict, report, train longer:\n  %s", which, weights, "\n  ".join(commands))
