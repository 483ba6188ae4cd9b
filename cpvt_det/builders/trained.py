# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint that contains its config and its classes, or an exported program, into a detector that is ready to use; or turn
a checkpoint or one of timm's classifiers into a student's teacher (``MODEL.CLASSIFIER.TEACHER``)."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from cpvt_det.builders.datasets import set_classes
from cpvt_det.builders.detector import build_detector
from cpvt_det.builders.parts import build_device
from cpvt_det.checkpoint.exported import ExportedModel, is_exported, read_program
from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.checkpoint.initial import require_shapes
from cpvt_det.checkpoint.load import load_weights
from cpvt_det.checkpoint.weights import Weights, config_of_weights, read_weights
from cpvt_det.common.class_names import Classes, require_same_classes
from cpvt_det.common.errors import ConfigError, WeightsError, first_line
from cpvt_det.common.structures import Thresholds
from cpvt_det.config import flat_items, load_cfg, merge_overrides
from cpvt_det.models import Classifier
from cpvt_det.models.backbones.contract import load_all

FIXED = re.compile(r"TEST\.(DETECTIONS_PER_IMAGE|NMS)$|MODEL\.(?!(.*\.)?(DEVICE|WEIGHTS|WEIGHTS_SHA256|NUM_CLASSES)$)")
"""Keys that cannot be changed once a program is written."""


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


def load_model(
    path: str | os.PathLike[str], device: str | torch.device | None = None, config_file: str = "", overrides: Sequence[str] = ()
) -> Trained:
    """Load a model with :func:`load_trained`, or an exported program.

    Args:
        path, config_file, overrides: as in ``load_trained``; the path may also be that of an exported program.
        device: as in ``load_trained``; programs run on the CPU.

    Raises:
        WeightsError: weights or a program that cannot be read.
        ConfigError: keys that cannot be used, or that are fixed in the program; a device that does not exist.
    """
    if not is_exported(path):
        return load_trained(path, device, config_file, overrides)
    stored, weights, model = read_program(path)
    cfg = config_to_use(weights, device, config_file, overrides)
    _require_fitting(cfg, stored, model.origin)
    return Trained(cfg, model.eval(), weights.classes, weights.thresholds)


def load_for_evaluation(cfg: CfgNode, classes: Classes) -> tuple[ExportedModel, Thresholds | None]:
    """Load the program in ``MODEL.WEIGHTS`` and its score thresholds, for a run that evaluates it.

    Args:
        cfg: config of the run.
        classes: classes of the data.

    Raises:
        WeightsError: a program that cannot be read.
        DataError: other classes than those of the program.
        ConfigError: keys that are fixed in the program, or a device that is not a CPU.
    """
    stored, weights, model = read_program(cfg.MODEL.WEIGHTS)
    _require_fitting(cfg, stored, model.origin)
    require_same_classes(weights.classes, classes, f"{model.origin} and the data")
    return model.eval(), weights.thresholds


def _require_fitting(cfg: CfgNode, stored: CfgNode, origin: str) -> None:
    """Refuse a config whose model differs from the program's or whose device is a GPU. Keys that only one of the configs has are
    ignored."""
    written, used = dict(flat_items(stored)), dict(flat_items(cfg))
    for key in sorted(written.keys() & used.keys()):
        before, now = (list(value) if isinstance(value, tuple) else value for value in (written[key], used[key]))
        if FIXED.match(key) and before != now:
            raise ConfigError(
                f"{origin} is an exported program, in which {key} is fixed; leave this key unchanged, or set it when you run "
                "cpvt-det export"
            )
    if cfg.MODEL.DEVICE != "auto" and build_device(cfg).type != "cpu":
        raise ConfigError(f"{origin} is an exported program, which runs on the CPU here; leave out the device, or set it to cpu")
    cfg.MODEL.DEVICE = "auto"


def load_teacher(cfg: CfgNode, classes: Classes) -> Callable[[Tensor], Tensor]:
    """The teacher of a config, on the device of the run: a :data:`cpvt_det.losses.class_training.Teacher`.

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
    if missing := sorted(set(classes.names) - set(trained.classes.names)):
        raise WeightsError(f"MODEL.CLASSIFIER.TEACHER {name} does not know these classes of the data: {', '.join(missing[:10])}")
    rows = torch.tensor([trained.classes.names.index(own) for own in classes.names], device=device)
    model = trained.detector.requires_grad_(False)

    @torch.no_grad()
    def teach(images: Tensor) -> Tensor:
        batch = model.preprocess(list(images))
        return model(batch.images, batch.padding_mask).scores()[:, rows].argmax(-1)

    return teach


def _timm_teacher(cfg: CfgNode, num_classes: int, device: torch.device) -> Callable[[Tensor], Tensor]:
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
