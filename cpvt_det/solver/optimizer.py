# SPDX-License-Identifier: Apache-2.0
"""Parameter groups for AdamW. The backbone and the sampling points can have their own learning rates, and norms, biases and
embeddings can have their own weight decays.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from cpvt_det.models.image_model import belongs_to_part, require_parts

POINTS = re.compile(r"(^|\.)(sampling_offsets|reference_points)\.")
NORM_MODULES = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


def parameter_groups(
    model: nn.Module,
    lr: float,
    backbone_lr: float,
    weight_decay: float,
    points_lr_multiplier: float = 0.1,
    norm_weight_decay: float | None = None,
    bias_weight_decay: float | None = None,
    embed_weight_decay: float | None = None,
    lr_multipliers: Sequence[tuple[str, float]] = (),
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Put trainable parameters into groups that each have one learning rate and weight decay.

    Args:
        model: a detector.
        lr: learning rate of all parameters outside ``model.backbone``.
        backbone_lr: learning rate of the parameters in ``model.backbone``.
        weight_decay: weight decay of all parameters, as in DETR, unless one of the next three applies.
        points_lr_multiplier: factor by which the learning rate is multiplied for Deformable-DETR's sampling offsets and reference
            points.
        norm_weight_decay: weight decay of norms, including norms in a PEG; ``None`` for no separate decay.
        bias_weight_decay: weight decay of biases, including the biases of norms; ``None`` for no separate decay.
        embed_weight_decay: weight decay of embeddings, which are queries, tokens, tables, and everything else that is neither a
            weight nor a bias; ``None`` for no separate decay.
        lr_multipliers: pairs (part, learning rate factor), with parts as in
            :func:`cpvt_det.models.image_model.belongs_to_part`; factors of nested parts are multiplied.
        layer_decay: factor by which the learning rate of a backbone parameter is multiplied once for each layer after it (arXiv
            2106.08254, appendix). A value other than 1 needs a backbone with ``layers_above``.

    Returns:
        Groups for ``torch.optim``, with ``params``, ``lr`` and ``weight_decay``.

    Raises:
        UnknownNameError: a factor is given for a part that the model does not have.
        ValueError: the layer decay is not above 0, or it is not 1 and the backbone has no ``layers_above``.
    """
    if layer_decay <= 0:
        raise ValueError(f"the decay per layer must be above 0, got {layer_decay}")
    if layer_decay != 1 and not hasattr(model.backbone, "layers_above"):
        raise ValueError(f"LAYER_DECAY is {layer_decay}, but the backbone does not define its layers; leave it at 1")
    require_parts(model, [part for part, _ in lr_multipliers], "learning rate")
    norm_decay = weight_decay if norm_weight_decay is None else norm_weight_decay
    norms = [module for module in model.modules() if isinstance(module, NORM_MODULES)]
    of_norms = {id(parameter) for module in norms for parameter in module.parameters()}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = backbone_lr if name.startswith("backbone.") else lr
            if layer_decay != 1 and name.startswith("backbone."):
                rate *= layer_decay ** model.backbone.layers_above(name.removeprefix("backbone."))
            rate = rate * points_lr_multiplier if POINTS.search(name) else rate
            rate *= math.prod(factor for part, factor in lr_multipliers if belongs_to_part(name, part))
            decay = norm_decay if id(parameter) in of_norms else weight_decay
            if name.endswith("bias"):
                decay = decay if bias_weight_decay is None else bias_weight_decay
            elif id(parameter) in embeddings or not name.endswith("weight"):
                decay = decay if embed_weight_decay is None else embed_weight_decay
            groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]
