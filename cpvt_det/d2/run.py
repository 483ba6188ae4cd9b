# SPDX-License-Identifier: Apache-2.0
"""The detectron2 runner: the counterpart of ``runner/train.py``."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from cpvt_det import builders, distributed
from cpvt_det.builders.datasets import log_data
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.checkpoint.resume import last_checkpoint
from cpvt_det.d2.config import load_cfg, refuse_ignored, without_untouched
from cpvt_det.d2.data import describe_classes, find_registered
from cpvt_det.d2.trainer import Trainer, build_detector
from cpvt_det.runner.advice import log_advice, log_next_steps
from cpvt_det.runner.callbacks import Callback, build_callbacks
from cpvt_det.runner.evaluate import chosen_threshold, draw_run, evaluate
from cpvt_det.runner.setup import choose_run_id, choose_seed, describe_model, only_run_in, record_agents, setup_run, write_config
from cpvt_det.runner.sizes import evaluate_sizes
from cpvt_det.tasks.task import Results, build_task

__all__ = ["load_cfg", "run"]

logger = logging.getLogger("cpvt_det")


def run(
    cfg: CfgNode,
    resume: bool = False,
    eval_only: bool = False,
    allow_partial: bool = False,
    sizes: Sequence[int] = (),
    callbacks: Sequence[Callback] = (),
) -> Results:
    """Train and evaluate, or only evaluate, as :func:`cpvt_det.runner.train.run` does, with a config from :func:`load_cfg`."""
    if distributed.is_initialized() and "LOCAL_WORLD_SIZE" in os.environ:  # torchrun; detectron2's launch makes the group
        comm.create_local_process_group(int(os.environ["LOCAL_WORLD_SIZE"]))
    refuse_ignored(cfg)
    cfg.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR).expanduser())
    with only_run_in(cfg):
        find_registered(cfg)
        return _evaluate_only(cfg, resume, allow_partial, sizes) if eval_only else _train(cfg, resume, callbacks)


def _evaluate_only(cfg: CfgNode, resume: bool, allow_partial: bool, sizes: Sequence[int]) -> Results:
    task = build_task(cfg)
    tests = task.load_tests()
    if resume:
        cfg.MODEL.WEIGHTS = str(last_checkpoint(cfg.OUTPUT_DIR))
    output = _setup(cfg)
    for dataset in tests:
        describe_classes(dataset)
    log_data(tests)
    model = build_detector(cfg)
    kept = load_initial_weights(cfg, model, tests[0].classes, for_evaluation=True, allow_partial=allow_partial)
    write_config(without_untouched(cfg), replace=False)
    if sizes:
        return evaluate_sizes(task, model, tests, sizes, output)
    results = evaluate(task, model, tests, output)
    with chosen_threshold(cfg, kept):
        task.show_results(model, tests, results, output)
    return results


def _train(cfg: CfgNode, resume: bool, callbacks: Sequence[Callback]) -> Results:
    task = build_task(cfg)
    datasets, tests = task.load_splits()
    all_callbacks = build_callbacks(cfg, tests, callbacks)
    output = _setup(cfg)
    for dataset in datasets + tests:
        describe_classes(dataset)
    log_data(datasets + tests)
    records = task.training_records(datasets)
    length = builders.build_schedule(cfg, len(records))
    logger.info(length.arithmetic)
    log_advice(cfg, length, records)
    trainer = Trainer(task, datasets, tests, choose_seed(cfg), choose_run_id(output), all_callbacks)
    trainer.resume_or_load(resume)
    record_agents(output, trainer.state.run_id)
    write_config(without_untouched(cfg))
    logger.info(
        "Seed %d: iterations %d to %d of %s",
        trainer.state.seed,
        trainer.start_iter,
        trainer.max_iter,
        describe_model(trainer.model),
    )
    with trainer.run_callbacks:
        results = trainer.train()
        draw_run(output)
        if tests:
            with chosen_threshold(cfg, trainer.state.thresholds):
                task.show_results(trainer.evaluated, tests, results, output)
    log_next_steps(cfg, trainer.state, output)
    return results


def _setup(cfg: CfgNode) -> Path:
    output = setup_run(cfg)
    setup_logger(str(output / "log.txt"), distributed_rank=comm.get_rank())
    return output
