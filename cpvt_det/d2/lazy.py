# SPDX-License-Identifier: Apache-2.0
"""Make a LazyConfig from any of our YAML configs, for detectron2's ``lazyconfig_train_net.py``."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import detectron2.data.transforms as T
import torch
import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.config import LazyCall as L
from detectron2.data import DatasetMapper, build_detection_test_loader, build_detection_train_loader, get_detection_dataset_dicts
from detectron2.evaluation import COCOEvaluator
from detectron2.modeling import META_ARCH_REGISTRY
from fvcore.common.param_scheduler import ParamScheduler
from omegaconf import DictConfig, OmegaConf
from torch import nn

from cpvt_det.builders import build_schedule
from cpvt_det.common.errors import ConfigError
from cpvt_det.config import merge_checked
from cpvt_det.d2.config import add_cpvt_det_config, load_cfg, without_untouched
from cpvt_det.solver.optimizer import parameter_groups
from cpvt_det.solver.schedule import LRSchedule, TrainingSchedule

COCO = 118_287
"""Number of images in COCO 2017's training set."""


def lazy_config(config_file: str, overrides: Sequence[str] = (), num_images: int = COCO) -> DictConfig:
    """Make a LazyConfig from a detector's YAML config: the same network, optimiser and length, but detectron2's own data loading.

    ``model`` takes parts of the detector by keyword, which replace those of the YAML, as in ``cfg.model.backbone = L(...)(...)``.
    Keys that shape the model may be changed in ``cfg.model.yaml``.

    Args:
        config_file: YAML file, or its name in the package, such as ``coco/detr_r50_peg_50ep.yaml``.
        overrides: KEY VALUE words.
        num_images: number of training images, to convert a length in epochs to iterations.

    Returns:
        A config with ``model``, ``dataloader``, ``optimizer``, ``lr_multiplier`` and ``train``.

    Raises:
        ConfigError: as in :func:`cpvt_det.d2.config.load_cfg`; or keys of ours that detectron2's trainers do not support.
    """
    cfg = load_cfg(config_file, overrides)
    _refuse_ours_alone(cfg)
    solver, length = cfg.SOLVER, build_schedule(cfg, num_images)
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
            # Further settings that detectron2's lazyconfig_train_net.py reads.
            "train": {
                "output_dir": cfg.OUTPUT_DIR,
                "init_checkpoint": cfg.MODEL.WEIGHTS,
                "seed": cfg.SEED,
                "max_iter": length.max_iter,
                "amp": {"enabled": solver.AMP.ENABLED},
                "ddp": {"broadcast_buffers": False} | ({} if torch.cuda.is_available() else {"device_ids": None}),
                "checkpointer": {"period": solver.CHECKPOINT_PERIOD, "max_to_keep": 10},
                "eval_period": length.eval_period,
                "log_period": solver.LOG_PERIOD,
                "device": cfg.MODEL.DEVICE,
            },
        },
        flags={"allow_objects": True},
    )


def _refuse_ours_alone(cfg: CfgNode) -> None:
    solver = cfg.SOLVER
    ours = {
        "SOLVER.ACCUMULATE": solver.ACCUMULATE > 1,
        "SOLVER.EMA.ENABLED": solver.EMA.ENABLED,
        "SOLVER.AMP.DTYPE": solver.AMP.ENABLED and solver.AMP.DTYPE != "float16",
        "INPUT.AUGMENTATIONS": cfg.INPUT.AUGMENTATIONS,
        "TEST.TILES.SIZE": cfg.TEST.TILES.SIZE > 0,
    }
    key = next((key for key, is_set in ours.items() if is_set), None)
    if key:
        raise ConfigError(f"{key}: detectron2's trainers for LazyConfigs do not support it; leave it at its default")
    if len(cfg.DATASETS.TEST) != 1:
        raise ConfigError(f"DATASETS.TEST: a LazyConfig evaluates on one data set, got {list(cfg.DATASETS.TEST)}")


def _dataloader(cfg: CfgNode) -> DictConfig:
    """Data loading with DETR's augmentation, built from detectron2's parts: a flip, a resize and crop for half of the images, and a
    resize to a random short side."""

    def loader(build: Callable, names: Sequence[str], augmentations: list, filter_empty: bool = False, **more: Any) -> DictConfig:
        dataset = L(get_detection_dataset_dicts)(names=list(names), filter_empty=filter_empty)
        is_train = build is build_detection_train_loader
        mapper = L(DatasetMapper)(is_train=is_train, augmentations=augmentations, image_format=given.FORMAT)
        return L(build)(dataset=dataset, mapper=mapper, num_workers=cfg.DATALOADER.NUM_WORKERS, **more)

    def resize(sizes: Any, **more: Any) -> DictConfig:
        return L(T.ResizeShortestEdge)(short_edge_length=sizes, **more)

    given, crop = cfg.INPUT, cfg.INPUT.RESIZE_CROP
    cropping = L(T.RandomCrop)(crop_type="absolute_range", crop_size=list(crop.RANGE))
    cropped = L(T.AugmentationList)(augs=[resize(list(crop.SIZES), sample_style="choice"), cropping])
    augmentations = [L(T.RandomFlip)(horizontal=True)] * (given.RANDOM_FLIP == "horizontal")
    augmentations += [L(T.RandomApply)(tfm_or_aug=cropped, prob=0.5)] * bool(crop.ENABLED)
    augmentations += [resize(list(given.MIN_SIZE_TRAIN), sample_style="choice", max_size=given.MAX_SIZE_TRAIN)]
    filter_empty, batch = cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS, cfg.SOLVER.IMS_PER_BATCH
    train = loader(build_detection_train_loader, cfg.DATASETS.TRAIN, augmentations, filter_empty, total_batch_size=batch)
    test_resize = resize(given.MIN_SIZE_TEST, max_size=given.MAX_SIZE_TEST)
    test = loader(build_detection_test_loader, cfg.DATASETS.TEST, [test_resize])
    evaluator = L(COCOEvaluator)(dataset_name="${..test.dataset.names[0]}")
    return OmegaConf.create({"train": train, "test": test, "evaluator": evaluator}, flags={"allow_objects": True})


def build_model(yaml: DictConfig, **parts: Any) -> nn.Module:
    """Build the meta architecture from the content of a YAML config.

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


class LearningRateFactor(ParamScheduler):
    """Our learning-rate schedule as a function of the completed fraction of the run.

    Args:
        kind, gamma, end: as in :class:`LRSchedule`.
        max_iter, steps, warmup: as in :class:`TrainingSchedule`.
    """

    def __init__(self, kind: str, gamma: float, end: float, max_iter: int, steps: Sequence[int], warmup: int):
        self.schedule = LRSchedule(TrainingSchedule(max_iter, tuple(steps), warmup, 0, ""), kind, gamma, end)

    def __call__(self, where: float) -> float:
        return self.schedule.factor(round(where * self.schedule.schedule.max_iter))


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips the norm of all gradients together before every step, because detectron2's trainers have no other place for
    this.

    Args:
        params: parameters, or groups of parameters.
        clip_norm: largest norm; 0 for no clipping.
        options: further arguments of ``torch.optim.AdamW``. ``fused`` is refused because, with a gradient scaler, the gradients
            would still be scaled when they are clipped.

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
