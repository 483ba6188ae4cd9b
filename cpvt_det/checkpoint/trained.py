# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint that contains its config and its classes into a detector that is ready to use, or into a student's teacher
(``MODEL.CLASSIFIER.TEACHER``), which may also be one of timm's classifiers."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from cpvt_det.builders.datasets import set_classes
from cpvt_det.builders.detector import build_detector
from cpvt_det.builders.parts import build_device
from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.checkpoint.initial import require_shapes
from cpvt_det.checkpoint.load import load_weights
from cpvt_det.checkpoint.weights import Weights, read_weights
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError, UnknownNameError, WeightsError, first_line
from cpvt_det.common.structures import Thresholds
from cpvt_det.config import flat_items, get_cfg, load_cfg, merge_checked, merge_overrides, nested, parse_config
from cpvt_det.models import Classifier
from cpvt_det.models.backbones.contract import load_all

Teacher = Callable[[Tensor], Tensor]
"""(B, 3, h, w) float, RGB from 0 to 255 -> (B,) int64 in [0, K), the class with the highest score for each image."""


@dataclass
class Trained:
    """A detector with its trained weights.

    Attributes:
        cfg: config of the detector.
        detector: detector in evaluation mode, on its device.
        classes: classes that its labels stand for.
        thresholds: score thresholds of its last evaluation; ``None`` if its file contains none.
    """

    cfg: CfgNode
    detector: nn.Module
    classes: Classes
    thresholds: Thresholds | None = None


def config_to_use(weights: Weights, device: str | torch.device | None, config_file: str, overrides: Sequence[str]) -> CfgNode:
    """The config of weights, or the config that replaces it, with device and overrides; arguments as in :func:`load_trained`."""
    if config_file:
        cfg = load_cfg(config_file, overrides)
    else:
        cfg = config_of_weights(weights)
        merge_overrides(cfg, overrides)
    cfg.MODEL.DEVICE = "auto" if device is None else str(device)
    return cfg


def load_trained(
    path: str | os.PathLike[str], device: str | torch.device | None = None, config_file: str = "", overrides: Sequence[str] = ()
) -> Trained:
    """Build the detector of a checkpoint; no other file is needed.

    Args:
        path: any weights that ``MODEL.WEIGHTS`` accepts.
        device: device of the detector; ``None`` for a CUDA GPU if torch finds one, else the CPU.
        config_file: config that replaces the checkpoint's own. It is required for weights that contain no config.
        overrides: KEY VALUE words that change the config.

    Raises:
        WeightsError: weights that cannot be read, contain no config or no classes, or lack a part of the model.
        ConfigError: keys that cannot be used, or a device that does not exist.
    """
    weights = read_weights(path)
    cfg = config_to_use(weights, device, config_file, overrides)
    if weights.classes is None:
        raise WeightsError(
            f"{path} has no class head, or does not contain the names of its classes; make a model folder with a classes.json "
            "(docs/use.md)"
        )
    set_classes(cfg, weights.classes, str(path))
    target = build_device(cfg)
    cfg.MODEL.DEVICE = "auto"  # the config may next be used on another machine
    detector = build_detector(cfg)
    report = load_weights(detector, weights, weights.classes.names)
    require_shapes(report, str(path))
    if report.is_partial:
        raise WeightsError(
            f"{path} fits only part of the config's model: {report}; set the MODEL keys to the values that it was trained with"
        )
    return Trained(cfg, detector.to(target).eval(), weights.classes, weights.thresholds)


def config_of_weights(weights: Weights) -> CfgNode:
    """The config that weights were trained with.

    Raises:
        WeightsError: weights whose config is unknown or belongs to a different version.
    """
    if weights.config is None:
        origin = "" if weights.source is None else f"comes from another project ({weights.source}) and "
        raise WeightsError(
            f"{weights.origin} {origin}contains no config; give one with --config-file, for example "
            "--config-file coco/detr_r50_sine_50ep.yaml"
        )
    cfg, source = get_cfg(), f"the config in {weights.origin}"
    stored = parse_config(weights.config, source)
    known = dict(flat_items(cfg))  # other keys, such as detectron2's training keys, change no detection
    used = nested((key, value) for key, value in flat_items(stored) if key in known or key.startswith(("MODEL.", "INPUT.")))
    try:
        merge_checked(cfg, used, source)
    except UnknownNameError as error:
        raise WeightsError(
            f"{error}; the config may be from another version, or for detectron2 (use its DefaultPredictor then); --config-file "
            "replaces it"
        ) from error
    return cfg


def load_teacher(cfg: CfgNode, classes: Classes) -> Teacher:
    """The teacher of a config, on the device of the run.

    Args:
        cfg: config of the run.
        classes: the student's classes. A checkpoint of this package may have more classes, in a different order. A timm network
            must have as many classes as the student, in the same order. If the student's classes are ImageNet's folders, this is
            ImageNet's order.

    Raises:
        WeightsError: weights that cannot be read, do not belong to a classifier, or lack a class of the student.
        ConfigError: an unknown network, or a timm network without timm installed.
    """
    name, device = cfg.MODEL.CLASSIFIER.TEACHER, build_device(cfg)
    if name.startswith("timm/"):
        return _timm_teacher(cfg, len(classes), device)
    trained = load_trained(name, str(device))
    if not isinstance(trained.detector, Classifier):
        raise WeightsError(f"MODEL.CLASSIFIER.TEACHER {name} is not a classifier but a {type(trained.detector).__name__}")
    missing = sorted(set(classes.names) - set(trained.classes.names))
    if missing:
        raise WeightsError(f"MODEL.CLASSIFIER.TEACHER {name} does not know these classes of the data: {', '.join(missing[:10])}")
    rows = torch.tensor([trained.classes.names.index(own) for own in classes.names], device=device)
    model = trained.detector.requires_grad_(False)

    @torch.no_grad()
    def teach(images: Tensor) -> Tensor:
        batch = model.preprocess(list(images))
        return model(batch.images, batch.padding_mask).scores()[:, rows].argmax(-1)

    return teach


def _timm_teacher(cfg: CfgNode, num_classes: int, device: torch.device) -> Teacher:
    weights = cfg.MODEL.CLASSIFIER.TEACHER_WEIGHTS
    name = cfg.MODEL.CLASSIFIER.TEACHER.removeprefix("timm/")
    try:
        import timm
    except ImportError as error:
        raise ConfigError(f"MODEL.CLASSIFIER.TEACHER timm/{name} needs timm: pip install 'cpvt-det[timm]'") from error
    if not weights:
        raise WeightsError("a teacher without weights teaches nothing: set MODEL.CLASSIFIER.TEACHER_WEIGHTS to a file or DEFAULT")
    try:
        model: nn.Module = timm.create_model(name, pretrained=weights == "DEFAULT")
        if weights != "DEFAULT":
            found = state_dict_of(read_checkpoint(Path(weights).expanduser()), weights)
            heads = model.pretrained_cfg["classifier"]  # a distilled network has several
            head = f"{heads if isinstance(heads, str) else heads[0]}.weight"
            model.reset_classifier(len(found[head]) if head in found else model.num_classes)
            load_all(model, found, f"{weights} does not fit MODEL.CLASSIFIER.TEACHER timm/{name}")
    except WeightsError:
        raise
    except Exception as error:  # errors of timm and its download have no common base
        raise WeightsError(f"MODEL.CLASSIFIER.TEACHER timm/{name} with weights {weights}: {first_line(error)}") from error
    if model.num_classes != num_classes:
        raise WeightsError(f"MODEL.CLASSIFIER.TEACHER timm/{name} has {model.num_classes} classes, but the data have {num_classes}")
    model = model.to(device).eval().requires_grad_(False)
    mean, std = (255 * torch.tensor(model.pretrained_cfg[key], device=device)[:, None, None] for key in ("mean", "std"))
    return torch.no_grad()(lambda images: model((images - mean) / std).argmax(-1))
