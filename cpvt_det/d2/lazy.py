# SPDX-License-Identifier: Apache-2.0
"""LazyConfigs: one made of any YAML of ours, for detectron2's ``lazyconfig_train_net.py``; and a script of ours for them."""

import argparse
import builtins
import math
from collections.abc import Iterable, Sequence
from typing import Any

import detectron2.data.transforms as T
import torch
import yaml
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, LazyConfig, get_cfg, instantiate
from detectron2.config import LazyCall as L
from detectron2.data import DatasetMapper, build_detection_test_loader, build_detection_train_loader, get_detection_dataset_dicts
from detectron2.engine import AMPTrainer, SimpleTrainer, default_setup, default_writers, hooks
from detectron2.engine.defaults import create_ddp_model
from detectron2.evaluation import COCOEvaluator, inference_on_dataset, print_csv_format
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm
from fvcore.common.param_scheduler import ParamScheduler
from omegaconf import DictConfig, OmegaConf
from torch import nn

from cpvt_det.builders import build_schedule
from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.config import find_config, merge_checked
from cpvt_det.d2.config import add_cpvt_det_config, load_cfg, without_untouched
from cpvt_det.errors import ConfigError, first_line
from cpvt_det.solver.optimizer import parameter_groups
from cpvt_det.solver.schedule import LRSchedule, TrainingSchedule

COCO = 118_287
"""Images of COCO 2017's training set."""
_ABSENT = object()


def lazy_config(config_file: str, overrides: Sequence[str] = (), num_images: int = COCO) -> DictConfig:
    """The LazyConfig of a YAML config of a detector: the same network, optimiser and length; data by detectron2's own parts.

    ``model`` takes parts of the detector by keyword, which replace those of the YAML, as in ``cfg.model.backbone = L(...)(...)``.
    Keys that shape the model may be changed in ``cfg.model.yaml``.

    Args:
        config_file: YAML file, or its name in the package, such as ``coco/detr_r50_peg_50ep.yaml``.
        overrides: KEY VALUE words.
        num_images: number of training images, which gives the length of a run that counts epochs.

    Returns:
        A config with ``model``, ``dataloader``, ``optimizer``, ``lr_multiplier`` and ``train``.

    Raises:
        ConfigError: as :func:`cpvt_det.d2.config.load_cfg`; or keys of ours that detectron2's trainers have nothing for.
    """
    cfg = load_cfg(config_file, overrides)
    _refuse_ours_alone(cfg)
    solver, length = cfg.SOLVER, build_schedule(cfg, num_images)
    has_cuda = torch.cuda.is_available()
    return OmegaConf.create(
        {
            "model": L(build_model)(yaml=yaml.safe_load(without_untouched(cfg).dump())),
            "dataloader": _dataloader(cfg),
            "optimizer": L(ClippedAdamW)(
                # params.model is set by the script.
                params=L(parameter_groups)(
                    lr="${..lr}",
                    backbone_lr=solver.BACKBONE_LR,
                    weight_decay="${..weight_decay}",
                    points_lr_multiplier=solver.POINTS_LR_MULTIPLIER,
                    norm_weight_decay=solver.WEIGHT_DECAY_NORM,
                    peg_weight_decay=solver.WEIGHT_DECAY_PEG,
                    bias_weight_decay=solver.WEIGHT_DECAY_BIAS,
                    embed_weight_decay=solver.WEIGHT_DECAY_EMBED,
                    lr_multipliers=[list(pair) for pair in solver.LR_MULTIPLIERS],
                    layer_decay=solver.LAYER_DECAY,
                ),
                lr=solver.BASE_LR,
                weight_decay=solver.WEIGHT_DECAY,
                clip_norm=solver.CLIP_NORM,
            ),
            "lr_multiplier": L(LearningRateFactor)(
                kind=solver.SCHEDULE,
                gamma=solver.GAMMA,
                end=solver.COSINE_END,
                max_iter="${train.max_iter}",
                steps=list(length.steps),
                warmup=length.warmup,
            ),
            # What detectron2's lazyconfig_train_net.py reads beside these.
            "train": {
                "output_dir": cfg.OUTPUT_DIR,
                "init_checkpoint": cfg.MODEL.WEIGHTS,
                "seed": cfg.SEED,
                "max_iter": length.max_iter,
                "amp": {"enabled": solver.AMP.ENABLED},
                "ddp": {"broadcast_buffers": False} if has_cuda else {"broadcast_buffers": False, "device_ids": None},
                "checkpointer": {"period": solver.CHECKPOINT_PERIOD, "max_to_keep": 10},
                "eval_period": length.eval_period,
                "log_period": solver.LOG_PERIOD,
                "device": cfg.MODEL.DEVICE,
            },
        },
        flags={"allow_objects": True},
    )


def _refuse_ours_alone(cfg: CfgNode) -> None:
    solver, given = cfg.SOLVER, cfg.INPUT
    ours = {
        "SOLVER.ACCUMULATE": solver.ACCUMULATE > 1,
        "SOLVER.EMA.ENABLED": solver.EMA.ENABLED,
        "SOLVER.AMP.DTYPE": solver.AMP.ENABLED and solver.AMP.DTYPE != "float16",
        "INPUT.AUGMENTATIONS": bool(given.AUGMENTATIONS),
        "TEST.TILES.SIZE": cfg.TEST.TILES.SIZE > 0,
    }
    for key, is_set in ours.items():
        if is_set:
            raise ConfigError(f"{key}: detectron2's trainers of LazyConfigs have nothing for it; leave it at its default")
    if len(cfg.DATASETS.TEST) != 1:
        raise ConfigError(f"DATASETS.TEST: a LazyConfig evaluates on one data set, got {list(cfg.DATASETS.TEST)}")


def _dataloader(cfg: CfgNode) -> DictConfig:
    """DETR's augmentation from detectron2's parts: flip; resize and crop half of the images; a random short side."""
    given, crop = cfg.INPUT, cfg.INPUT.RESIZE_CROP
    resize = L(T.ResizeShortestEdge)(
        short_edge_length=list(given.MIN_SIZE_TRAIN), sample_style="choice", max_size=given.MAX_SIZE_TRAIN
    )
    cropped = [
        L(T.ResizeShortestEdge)(short_edge_length=list(crop.SIZES), sample_style="choice"),
        L(T.RandomCrop)(crop_type="absolute_range", crop_size=list(crop.RANGE)),
    ]
    augmentations = [L(T.RandomFlip)(horizontal=True)] * (given.RANDOM_FLIP == "horizontal")
    augmentations += [L(T.RandomApply)(tfm_or_aug=L(T.AugmentationList)(augs=cropped), prob=0.5)] * bool(crop.ENABLED)
    test_resize = L(T.ResizeShortestEdge)(short_edge_length=given.MIN_SIZE_TEST, max_size=given.MAX_SIZE_TEST)
    workers = cfg.DATALOADER.NUM_WORKERS
    return OmegaConf.create(
        {
            "train": L(build_detection_train_loader)(
                dataset=L(get_detection_dataset_dicts)(
                    names=list(cfg.DATASETS.TRAIN), filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
                ),
                mapper=L(DatasetMapper)(is_train=True, augmentations=[*augmentations, resize], image_format=given.FORMAT),
                total_batch_size=cfg.SOLVER.IMS_PER_BATCH,
                num_workers=workers,
            ),
            "test": L(build_detection_test_loader)(
                dataset=L(get_detection_dataset_dicts)(names=list(cfg.DATASETS.TEST), filter_empty=False),
                mapper=L(DatasetMapper)(is_train=False, augmentations=[test_resize], image_format=given.FORMAT),
                num_workers=workers,
            ),
            "evaluator": L(COCOEvaluator)(dataset_name="${..test.dataset.names[0]}"),
        },
        flags={"allow_objects": True},
    )


def build_model(yaml: DictConfig, **parts: Any) -> nn.Module:
    """The meta architecture of a YAML's content.

    Args:
        yaml: keys and values, nested.
        parts: arguments of the detector that replace those of the YAML, such as ``backbone`` or ``position``.

    Raises:
        ConfigError: keys or values that cannot be used.
    """
    cfg = get_cfg()
    add_cpvt_det_config(cfg)
    merge_checked(cfg, CfgNode(OmegaConf.to_container(yaml)), "model.yaml")
    return META_ARCH_REGISTRY.get(cfg.MODEL.META_ARCHITECTURE)(cfg, **parts)


def load_lazy_config(config_file: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Load a LazyConfig, or make one of a YAML file, and apply ``key=value`` words.

    detectron2's own loading replaces Python's import function while it runs, and does not restore it if the config fails; this
    function does.

    Args:
        config_file: path of the config; a YAML may be one of the package, by its name.
        overrides: words such as ``train.max_iter=100``; a ``+`` before the key adds a new key.

    Raises:
        ConfigError: a file that does not exist or cannot be run, or a word with an unknown key.
    """
    imported = builtins.__import__
    try:
        is_yaml = config_file.endswith((".yaml", ".yml"))
        cfg = lazy_config(config_file) if is_yaml else LazyConfig.load(config_file)
        for word in overrides:
            key = word.partition("=")[0]
            if not word.startswith("+") and OmegaConf.select(cfg, key, default=_ABSENT) is _ABSENT:
                raise KeyError(f"unknown key {key}; to add it, write +{word}")
        return LazyConfig.apply_overrides(cfg, list(overrides))
    except ConfigError:
        raise
    except Exception as error:  # a config is code
        raise ConfigError(f"LazyConfig {config_file}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        builtins.__import__ = imported


class LearningRateFactor(ParamScheduler):
    """Our schedule of the learning rate, by the part of the run that is done.

    Args:
        kind, gamma, end: as in :class:`LRSchedule`.
        max_iter, steps, warmup: as in :class:`TrainingSchedule`.
    """

    def __init__(self, kind: str, gamma: float, end: float, max_iter: int, steps: Sequence[int], warmup: int):
        self.schedule = LRSchedule(TrainingSchedule(max_iter, tuple(steps), warmup, 0, ""), kind, gamma, end)

    def __call__(self, where: float) -> float:
        return self.schedule.factor(round(where * self.schedule.schedule.max_iter))


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
    args.config_file = str(find_config(args.config_file))
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
