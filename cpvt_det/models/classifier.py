# SPDX-License-Identifier: Apache-2.0
"""Image classification: a backbone, one vector per image, a linear head.

Place in the pipeline: after ``structures.PaddedBatch``, before ``losses/criterion.py``.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common import defaults
from cpvt_det.common.errors import UnknownNameError
from cpvt_det.common.structures import ClassLogits, Targets, level_padding_mask
from cpvt_det.layers.heads import full_precision, without_autocast
from cpvt_det.models.image_model import ImageModel, require_contract

POOLS = ("token", "mean")
INITIAL_STD = 0.02  # standard deviation of the head's initial weights, as in DeiT


class Classifier(ImageModel):
    """A classifier on any backbone.

    Args:
        backbone: module that meets the contract of :data:`cpvt_det.models.backbones.BACKBONE_REGISTRY`. If it has ``tokens``, the
            tokens are classified; otherwise, its last map is classified. The head is as wide as the last map.
        num_classes: K.
        pool: what is classified. ``token`` is the class token; if there is a distillation token, it gets a second head. ``mean``
            is the mean over the unpadded cells of the last map, or over the unpadded patch tokens. Empty means ``token`` if the
            backbone has a class token, and otherwise ``mean``.
        pixel_mean, pixel_std: mean and standard deviation per channel, in pixel values from 0 to 255.
        frozen: names of parts that are not trained, as in :meth:`ImageModel.freeze`.

    Raises:
        TypeError: a backbone that lacks an attribute its contract requires.
        UnknownNameError: an unknown ``pool``, or a name in ``frozen`` that matches no part.
        ValueError: ``token`` for a backbone that has no class token.

    Source: arXiv 2012.12877 (class and distillation token); arXiv 2102.10882, section 3.4 (mean of the patch tokens).
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        pool: str = "",
        pixel_mean: Sequence[float] = defaults.PIXEL_MEAN,
        pixel_std: Sequence[float] = defaults.PIXEL_STD,
        frozen: Sequence[str] = (),
    ):
        super().__init__(backbone, pixel_mean, pixel_std)
        self.strides = [backbone.strides[-1]]
        self.size_divisibility = math.lcm(max(backbone.strides), backbone.size_divisibility)
        if hasattr(backbone, "tokens"):
            require_contract(backbone, "backbone with tokens", "num_tokens")
        num_special, channels = getattr(backbone, "num_tokens", 0), backbone.channels[-1]
        if pool not in ("", *POOLS):
            raise UnknownNameError("MODEL.CLASSIFIER.POOL", pool, POOLS)
        if pool == "token" and not num_special:
            raise ValueError("MODEL.CLASSIFIER.POOL is 'token', but the backbone has no class token; set it to mean")
        self.pool = pool or ("token" if num_special else "mean")
        self.class_embed = _head(channels, num_classes)
        self.distilled_embed = _head(channels, num_classes) if self.pool == "token" and num_special > 1 else None
        self.freeze(frozen)

    def forward(self, images: Tensor, padding_mask: Tensor, targets: Sequence[Targets] | None = None) -> ClassLogits:
        """Classify.

        Args:
            images: (B, 3, H, W) float, normalised; values under the padding do not matter.
            padding_mask: (B, H, W) bool, True = padded.
            targets: an argument of detectors, which is accepted but not used here.

        Raises:
            TypeError: a mask that is not bool, or weights in half precision.
            ValueError: a mask of the wrong shape.
        """
        images = self.without_padding(images, padding_mask)
        if hasattr(self.backbone, "tokens"):
            special, tokens, mask = self.backbone.tokens(images, padding_mask)
        else:
            tokens = self.backbone(images, padding_mask)[-1].flatten(2).transpose(1, 2)  # (B, C, H, W) -> (B, N, C)
            mask = level_padding_mask(padding_mask, self.strides[0]).flatten(1)
        if self.pool == "token":
            pooled = special.unbind(1)
        else:
            pooled = [tokens.masked_fill(mask[..., None], 0).sum(1) / (~mask).sum(1, keepdim=True).to(tokens.dtype)]
        heads = [self.class_embed] if self.distilled_embed is None else [self.class_embed, self.distilled_embed]
        with without_autocast(images):
            logits = [head(full_precision(vector)) for head, vector in zip(heads, pooled, strict=False)]
        return ClassLogits(torch.stack(logits))


def _head(channels: int, num_classes: int) -> nn.Linear:
    head = nn.Linear(channels, num_classes)
    nn.init.trunc_normal_(head.weight, std=INITIAL_STD)
    nn.init.zeros_(head.bias)
    return head
