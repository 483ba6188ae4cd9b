# SPDX-License-Identifier: Apache-2.0
"""Our models with LazyConfigs (``configs/lazy/``): functions that such a config needs, and the training script."""

import argparse
import builtins
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyConfig, instantiate
from detectron2.engine import AMPTrainer, SimpleTrainer, default_setup, default_writers, hooks
from detectron2.engine.defaults import create_ddp_model
from detectron2.evaluation import inference_on_dataset, print_csv_format
from detectron2.utils import comm
from omegaconf import DictConfig, OmegaConf
from torch import nn

from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.checkpoint.load import load_backbone_weights
from cpvt_det.config import config_root
from cpvt_det.errors import ConfigError, first_line
from cpvt_det.models import ResNetBackbone

_ABSENT = object()


def load_lazy_config(config_file: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Load a LazyConfig and apply ``key=value`` words.

    detectron2's own loading replaces Python's import function while it runs, and does not restore it if the config fails; this
    function does.

    Args:
        config_file: path of the config, or its name below ``configs/lazy``.
        overrides: words such as ``train.max_iter=100``; a ``+`` before the key adds a new key.

    Raises:
        ConfigError: a file that does not exist or cannot be run, or a word with an unknown key.
    """
    ours = config_root() / "lazy" / config_file
    path = str(ours) if ours.is_file() and not Path(config_file).is_file() else config_file
    imported = builtins.__import__
    try:
        cfg = LazyConfig.load(path)
        for word in overrides:
            key = word.partition("=")[0]
            if not word.startswith("+") and OmegaConf.select(cfg, key, default=_ABSENT) is _ABSENT:
                raise KeyError(f"unknown key {key}; to add it, write +{word}")
        return LazyConfig.apply_overrides(cfg, list(overrides))
    except Exception as error:  # a config is code
        raise ConfigError(f"LazyConfig {config_file}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        builtins.__import__ = imported


def pretrained_resnet(name: str, weights: str, **options: Any) -> ResNetBackbone:
    """A :class:`ResNetBackbone` with trained weights.

    Args:
        name: name of the ResNet, such as ``resnet50``.
        weights: name of torchvision weights (``IMAGENET1K_V1``), or path of a file; empty for random weights.
        options: further arguments of :class:`ResNetBackbone`.

    Raises:
        WeightsError: weights that cannot be read or downloaded, or that do not fit.
    """
    backbone = ResNetBackbone(name, **options)
    if weights:
        load_backbone_weights(backbone, weights, name)
    return backbone


class SafeCheckpointer(DetectionCheckpointer):
    """detectron2's checkpointer with our reader: it runs no code from a file, not even from a ``.pkl``, and finds damage."""

    def _load_file(self, filename: str) -> dict[str, Any]:
        read = read_checkpoint(filename)
        if isinstance(read, dict) and "model" in read:
            return read
        return {"model": state_dict_of(read, filename)}


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips the norm of all gradients together before every step; detectron2's trainers have no other place for it.

    Args:
        params: parameters, or groups of parameters.
        clip_norm: largest norm; 0 for no clipping.
        options: further arguments of ``torch.optim.AdamW``, except ``fused``: with a gradient scaler, scaled gradients would be
            clipped.

    Raises:
        ValueError: a negative norm, or ``fused``.
    """

    def __init__(self, params: Iterable, clip_norm: float = 0.1, **options: Any):
        if clip_norm < 0 or options.get("fused"):
            raise ValueError(
                f"clip_norm must be at least 0 (0 for no clipping), and fused must not be set; got {clip_norm}, {options}"
            )
        super().__init__(params, **options)
        self.clip_norm = clip_norm

    def step(self, closure: Any = None) -> Any:
        """Clip the gradients, then update the parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self.clip_norm or math.inf)
        return super().step(closure)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, or evaluate, in this process.

    Args:
        args: parsed arguments of detectron2's ``default_argument_parser``.

    Raises:
        ConfigError: as in :func:`load_lazy_config`.
        WeightsError: weights that cannot be read without running code.
    """
    cfg = load_lazy_config(args.config_file, args.opts)
    default_setup(cfg, args)
    model = instantiate(cfg.model).to(cfg.train.device)
    if args.eval_only:
        SafeCheckpointer(model).load(cfg.train.init_checkpoint)
        return evaluate(cfg, model)
    return train(cfg, model, args.resume)


def train(cfg: DictConfig, model: nn.Module, resume: bool = False) -> dict[str, Any]:
    """Train as detectron2's ``lazyconfig_train_net.py`` does; the results of the last evaluation."""
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    wrapped = create_ddp_model(model, **cfg.train.ddp)
    trainer = (AMPTrainer if cfg.train.amp.enabled else SimpleTrainer)(wrapped, instantiate(cfg.dataloader.train), optimizer)
    checkpointer = SafeCheckpointer(wrapped, cfg.train.output_dir, trainer=trainer)
    results: dict[str, Any] = {}

    def test() -> dict[str, Any]:
        results.update(evaluate(cfg, wrapped))
        return results

    main = comm.is_main_process()
    writers = default_writers(cfg.train.output_dir, cfg.train.max_iter) if main else []
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer) if main else None,
            hooks.EvalHook(cfg.train.eval_period, test),
            hooks.PeriodicWriter(writers, period=cfg.train.log_period) if main else None,
        ]
    )
    checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=resume)
    start = trainer.iter + 1 if resume and checkpointer.has_checkpoint() else 0
    trainer.train(start, cfg.train.max_iter)
    return results


def evaluate(cfg: DictConfig, model: nn.Module) -> dict[str, Any]:
    """Evaluate with ``dataloader.test`` and ``dataloader.evaluator``."""
    results = inference_on_dataset(model, instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator))
    print_csv_format(results)
    return results
