# SPDX-License-Identifier: Apache-2.0
"""The detectron2 runner: the run of ``training/train.py`` with detectron2's config, data sets, model, loop and hooks."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import HookBase, TrainerBase
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from detectron2.utils.logger import setup_logger
from torch import distributed as dist
from torch import nn

from cpvt_det import builders
from cpvt_det.common.errors import config_errors
from cpvt_det.d2.config import load_cfg, refuse_ignored, without_untouched
from cpvt_det.d2.data import find_registered
from cpvt_det.d2.meta_arch import register_detectors
from cpvt_det.training import train
from cpvt_det.training.callbacks import RunCallbacks

__all__ = ["build_detector", "load_cfg", "run"]


def run(cfg: CfgNode, *arguments: Any, hooks: Sequence[HookBase] = (), **more: Any) -> dict[str, Any]:
    """Train and evaluate, or only evaluate.

    Args:
        cfg: config from :func:`load_cfg`.
        arguments, more: further arguments of :func:`cpvt_det.training.train.run`; result and errors are also the same.
        hooks: detectron2's hooks, called around every step. detectron2's event storage gets scalars only in steps with a log line.
    """
    if dist.is_initialized() and "LOCAL_WORLD_SIZE" in os.environ:  # torchrun; detectron2's launch makes the group
        comm.create_local_process_group(int(os.environ["LOCAL_WORLD_SIZE"]))
    refuse_ignored(cfg)
    return train.run(cfg, *arguments, **more, engine=Trainer(hooks))


class Trainer(TrainerBase, train.Engine):
    """detectron2's trainer with our training steps.

    Args:
        hooks: detectron2's hooks.
    """

    def __init__(self, hooks: Sequence[HookBase] = ()):
        super().__init__()
        self.register_hooks(list(hooks))

    def prepare(self, cfg: CfgNode) -> None:
        find_registered(cfg)

    def start(self, output: Path) -> None:
        setup_logger(str(output / "log.txt"), distributed_rank=comm.get_rank())

    def build_detector(self, cfg: CfgNode) -> nn.Module:
        return build_detector(cfg)

    def saved(self, cfg: CfgNode) -> CfgNode:
        return without_untouched(cfg)

    def take_steps(self, take_step: Callable[[int], dict[str, float]], calls: RunCallbacks) -> None:
        """Run detectron2's loop, but if it fails, do not log the traceback and do not call the hooks' ``after_train``."""
        self.start_iter, self.max_iter = calls.run.start, calls.run.max_iter
        with EventStorage(self.start_iter) as self.storage:
            self.before_train()
            for iteration in range(self.start_iter, self.max_iter):
                if calls.ends_before(iteration):
                    break
                self.iter = iteration
                self.before_step()
                scalars = take_step(iteration)
                self.storage.put_scalars(**{name: value for name, value in scalars.items() if math.isfinite(value)})
                self.after_step()
            self.after_train()


def build_detector(cfg: CfgNode) -> nn.Module:
    """detectron2's ``build_model`` for one of our detectors.

    Raises:
        ConfigError: a model that is not ours, a missing device, or a config that :func:`cpvt_det.builders.build_detector` refuses.
    """
    builders.build_device(cfg)
    builders.DETECTOR_REGISTRY.find(cfg.MODEL.META_ARCHITECTURE)
    register_detectors()
    cfg = cfg.clone()
    cfg.MODEL.BACKBONE.WEIGHTS = ""  # load_initial_weights loads them, in a run that is not resumed
    with config_errors("MODEL"):
        return build_model(cfg)
