# SPDX-License-Identifier: Apache-2.0
"""Heads that turn decoded queries into logits and boxes, in full precision even under autocast."""

import contextlib
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cpvt_det.common.boxes import inverse_sigmoid
from cpvt_det.common.structures import Predictions


@dataclass
class Heads:
    """The class head and the box head of every decoder layer.

    This is not a module: the heads are registered in the detector, under their official names, and passed to the decoder in each
    call.

    Args:
        class_embed: one head for all layers, or a list. The list has one head per layer, or a single head for all layers.
        bbox_embed: box heads, in the same form.
        refine: whether the boxes of a layer are the references of the next layer.
    """

    class_embed: nn.Module
    bbox_embed: nn.Module
    refine: bool = False

    def __call__(self, decoded: Tensor, references: Tensor | None = None, layer: int = 0) -> Predictions:
        """Predict.

        Args:
            decoded: (..., Q, C) float, queries after a decoder layer, or after all of them.
            references: (..., Q, 2) points or (..., Q, 4) boxes in [0, 1], which the box head corrects. With ``None``, the box
                head predicts the boxes directly.
            layer: index of the decoder layer, used if layers have their own heads.

        Returns:
            Logits (..., Q, K') and boxes (..., Q, 4), at least float32.
        """
        decoded = full_precision(decoded)
        boxes = self.boxes(decoded, references, layer)
        with without_autocast(decoded):
            return Predictions(_of_layer(self.class_embed, layer)(decoded), boxes)

    def boxes(self, decoded: Tensor, references: Tensor | None = None, layer: int = 0) -> Tensor:
        """Predict the boxes only; arguments and shape are those of :meth:`__call__`."""
        with without_autocast(decoded):
            boxes = _of_layer(self.bbox_embed, layer)(full_precision(decoded))
            if references is not None:
                start = inverse_sigmoid(full_precision(references))
                if references.shape[-1] == 2:  # a point has no size yet
                    start = torch.cat((start, torch.zeros_like(start)), dim=-1)
                boxes = boxes + start
            return boxes.sigmoid()


def _of_layer(heads: nn.Module, layer: int) -> nn.Module:
    """The head of a layer; each layer may have its own."""
    return heads[min(layer, len(heads) - 1)] if isinstance(heads, nn.ModuleList) else heads


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        channels: widths before, between and after the layers.
    """

    def __init__(self, *channels: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(..., first width) -> (..., last width)."""
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


def class_head(channels: int, num_logits: int, prior_probability: float | None) -> nn.Linear:
    """A linear head. If ``prior_probability`` is given, as for sigmoids, every class starts at this probability.

    A low initial probability keeps the many negatives from dominating the first training steps.
    """
    head = nn.Linear(channels, num_logits)
    if prior_probability is not None:
        nn.init.constant_(head.bias, math.log(prior_probability / (1 - prior_probability)))
    return head


def box_head(channels: int, log_size: float, outputs: int = 4) -> MLP:
    """A box head whose outputs, before the sigmoid, start at 0 for the centre and at ``log_size`` for both sides.

    If the outputs are not the four numbers of a box, use a ``log_size`` of 0, so that all of them start at zero.
    """
    head = MLP(channels, channels, channels, outputs)
    nn.init.zeros_(head.layers[-1].weight)
    nn.init.zeros_(head.layers[-1].bias)
    nn.init.constant_(head.layers[-1].bias[2:], log_size)
    return head


def full_precision(x: Tensor) -> Tensor:
    """``x`` in at least float32, because in half precision a 4-pixel box reaches a GIoU of 0.4 at best."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Turn autocast off in the block, for the device of ``x``, so that results have the dtype of their inputs.

    If autocast is already off, this does nothing, because turning it off again would add a separate graph to an exported program,
    and tracing would take twice as long.
    """
    device = x.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_on else contextlib.nullcontext()
