# SPDX-License-Identifier: Apache-2.0
"""``MODEL.CLASSIFIER.TEACHER``: a trained classifier, ours or one of timm's, that a student learns from."""

from collections.abc import Callable
from pathlib import Path

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from cpvt_det.builders.parts import build_device
from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.checkpoint.trained import load_trained
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError, WeightsError, first_line
from cpvt_det.models import Classifier
from cpvt_det.models.backbones.contract import load_all

Teacher = Callable[[Tensor], Tensor]
"""(B, 3, h, w) float, RGB from 0 to 255 -> (B,) int64 in [0, K), the class with the highest score for each image."""


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
