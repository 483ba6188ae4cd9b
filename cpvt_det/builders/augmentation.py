# SPDX-License-Identifier: Apache-2.0
"""Build augmentations from ``INPUT.AUGMENTATIONS``, and try them out before the run."""

import inspect
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from fvcore.common.config import CfgNode

from cpvt_det.common import distributed
from cpvt_det.common.errors import ConfigError, config_errors
from cpvt_det.data.augmentation import AUGMENTATION_REGISTRY, AugmentationStep, Scene
from cpvt_det.data.augmentation.step import GROUPS, as_scene, augmentation_errors
from cpvt_det.data.mapper import other_generators_seeded
from cpvt_det.data.records import Records

logger = logging.getLogger("cpvt_det")
KEY = "INPUT.AUGMENTATIONS"


def build_augmentations(cfg: CfgNode) -> list[AugmentationStep]:
    """Build the steps of ``INPUT.AUGMENTATIONS``, in the same order.

    Raises:
        ConfigError: an entry that is not a name or [name, options]; options that the augmentation does not take or cannot use;
            ``INPUT.MIN_VISIBLE`` outside [0, 1].
        UnknownNameError: an unknown augmentation or option.
    """
    min_visible = cfg.INPUT.MIN_VISIBLE
    if not 0 <= min_visible <= 1:
        raise ConfigError(f"INPUT.MIN_VISIBLE must be a fraction from 0 to 1, got {min_visible}")
    return [_build(entry, min_visible) for entry in cfg.INPUT.AUGMENTATIONS]


def closing_epoch(cfg: CfgNode, steps: Sequence[AugmentationStep], num_images: int) -> float:
    """The first epoch, counted from 0, in which images are no longer mixed; infinity if ``INPUT.CLOSE_EPOCHS`` is 0.

    Raises:
        ConfigError: a negative number of epochs, or a number above 0 although no augmentation mixes images.
    """
    last, solver = cfg.INPUT.CLOSE_EPOCHS, cfg.SOLVER
    if last < 0:
        raise ConfigError(f"INPUT.CLOSE_EPOCHS must be at least 0, got {last}")
    if last and not any(step.mixes for step in steps):
        raise ConfigError(
            f"INPUT.CLOSE_EPOCHS is {last}, but no augmentation of {KEY} mixes images; set it to 0, or add one that does"
        )
    epochs = solver.EPOCHS if solver.EPOCHS > 0 else solver.MAX_ITER * solver.IMS_PER_BATCH / max(1, num_images)
    return math.floor(epochs - last) if last else math.inf


def check_augmentations(cfg: CfgNode, records: Records) -> None:
    """Try the augmentations, each with probability 1, on a black image as large as the narrowest training image, once with boxes
    and once without.

    Each augmentation is tried twice: once after all augmentations that precede it, and once after only the preceding ones that are
    applied to every image. Afterwards, the random number generators continue as if nothing had been drawn.

    Raises:
        ConfigError: as for :func:`build_augmentations` and :func:`closing_epoch`; an augmentation that fails.
    """
    entries = cfg.INPUT.AUGMENTATIONS
    if closing_epoch(cfg, build_augmentations(cfg), len(records)) <= 0 and distributed.rank() == 0:
        logger.warning("INPUT.CLOSE_EPOCHS %g covers the whole run, so no images are mixed", cfg.INPUT.CLOSE_EPOCHS)
    if not entries or not records:
        return
    record = records[int(records.sizes.min(axis=1).argmin())]
    image = torch.zeros(3, record.height, record.width, dtype=torch.uint8)
    with torch.random.fork_rng(devices=[]), other_generators_seeded():
        for end in (None, 0):
            most = least = as_scene(image, record.boxes_xyxy[:end], torch.from_numpy(record.labels[:end]))
            for entry in entries:
                most, after = _try(entry, most, cfg.INPUT.MIN_VISIBLE), _try(entry, least, cfg.INPUT.MIN_VISIBLE)
                least = after if _is_sure(entry) else least


def _is_sure(entry: Any) -> bool:
    """Whether an entry is applied to every image, because it has no probability p or because p is 1. ``RandomChoice`` always is:
    its p has a different meaning."""
    name, options = _name_and_options(entry)
    parameter = inspect.signature(AUGMENTATION_REGISTRY.find(name)).parameters.get("p")
    return name == "RandomChoice" or parameter is None or options.get("p", parameter.default) == 1


def _try(entry: Any, scene: Scene, min_visible: float) -> Scene:
    """Apply an entry to a scene, with probability 1."""
    name, options = _name_and_options(entry)
    if name in GROUPS:
        found = scene
        for part in _parts(entry):
            found = _try(part, scene if name == "RandomChoice" else found, min_visible)
        return found
    sure = {"p": 1} if "p" in AUGMENTATION_REGISTRY.parameters(name) else {}
    step = _build([name, {**options, **sure}], min_visible)
    with augmentation_errors(name, scene, "a black image"):
        return step(*scene, lambda: scene) if step.mixes else step(*scene)


def _build(entry: Any, min_visible: float, in_group: str = "") -> AugmentationStep:
    name, options = _name_and_options(entry)
    if name in GROUPS:
        parts = [_build(part, min_visible, in_group=name) for part in _parts(entry)]
        options = {**options, "transforms": parts}
    chance = options.get("p")
    if chance is not None and name != "RandomChoice" and not (type(chance) in (int, float) and 0 <= chance <= 1):
        raise ConfigError(f"{KEY}: p of {name!r} must be a probability from 0 to 1, got {chance!r}")
    with config_errors(f"{KEY}: {name!r}"):
        builder = AUGMENTATION_REGISTRY.with_options(name, options)
        takes_it = "min_visible" in inspect.signature(builder).parameters
        augment = builder(min_visible=min_visible) if takes_it else builder()
    step = AugmentationStep(name, augment, min_visible)
    if step.mixes and in_group:
        raise ConfigError(
            f"{KEY}: {name!r} mixes images, so it cannot be inside {in_group!r}; put it directly into {KEY}, with its own p"
        )
    return step


def _parts(entry: Any) -> list[Any]:
    """The entries of a group."""
    name, options = _name_and_options(entry)
    parts = options.get("transforms")
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ConfigError(f"{KEY}: {name!r} needs transforms, a list in the same form as {KEY}, got {parts!r}")
    return list(parts)


def _name_and_options(entry: Any) -> tuple[str, dict[str, Any]]:
    name, options = entry if isinstance(entry, (list, tuple)) and len(entry) == 2 else (entry, {})
    if not isinstance(name, str) or not isinstance(options, dict):
        raise ConfigError(f"{KEY} must contain names and [name, {{option: value}}] pairs, got {entry!r}")
    return name, options
