# SPDX-License-Identifier: Apache-2.0
"""AdamW over groups of parameters: backbone, sampling points and rest, with keys for norms and PEG."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cpvt_det.models.parts import in_part, require_parts
from cpvt_det.position.peg import PEGDetection

POINTS = re.compile(r"(^|\.)(sampling_offsets|reference_points)\.")
NORM_MODULES = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


def parameter_groups(
    model: nn.Module,
    lr: float,
    backbone_lr: float,
    weight_decay: float,
    points_lr_multiplier: float = 0.1,
    norm_weight_decay: float | None = None,
    peg_weight_decay: float | None = None,
    lr_multipliers: Sequence[tuple[str, float]] = (),
) -> list[dict[str, Any]]:
    """Trainable parameters with one learning rate and weight decay a group.

    Args:
        model: a detector; what lies in its ``backbone`` takes ``backbone_lr``.
        lr: of all else.
        backbone_lr: of the backbone.
        weight_decay: of all parameters, as in DETR, but for those of the last two.
        points_lr_multiplier: on ``lr``, for Deformable-DETR's sampling offsets and reference points.
        norm_weight_decay: of norms, those in a PEG included; ``None`` for ``weight_decay``.
        peg_weight_decay: of a PEG's other parameters; ``None`` for ``weight_decay``.
        lr_multipliers: parts, as of :func:`cpvt_det.models.parts.in_part`, and a factor on their learning rate; where parts are
            in parts, all factors count.

    Returns:
        Groups for ``torch.optim``, with ``params``, ``lr`` and ``weight_decay``.

    Raises:
        UnknownNameError: a factor for no part.
    """
    require_parts(model, [part for part, _ in lr_multipliers], "learning rate")
    decay_of: dict[int, float] = {}
    for kind, decay in ((PEGDetection, peg_weight_decay), (NORM_MODULES, norm_weight_decay)):
        if decay is None:
            continue
        modules = (module for module in model.modules() if isinstance(module, kind))
        decay_of.update({id(parameter): decay for module in modules for parameter in module.parameters()})
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = backbone_lr if name.startswith("backbone.") else lr
            rate = rate * points_lr_multiplier if POINTS.search(name) else rate
            rate *= math.prod(factor for part, factor in lr_multipliers if in_part(name, part))
            groups.setdefault((rate, decay_of.get(id(parameter), weight_decay)), []).append(parameter)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def make_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW, fused: one pass over the parameters."""
    return torch.optim.AdamW(groups, fused=True)
