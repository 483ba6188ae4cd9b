# SPDX-License-Identifier: Apache-2.0
"""What all detectors share: from images to the maps of a backbone.

On the road of one image: after ``structures.PaddedBatch``; a subclass turns the maps into predictions.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.models.parts import freeze, in_part
from cpvt_det.ops.linear import Linear
from cpvt_det.structures import PaddedBatch, Predictions, require_bool


class Detector(nn.Module):
    """A backbone, and whatever a subclass does with its maps.

    Args:
        backbone: a module with ``strides``, ``channels``, ``size_divisibility`` and
            ``forward(images, padding_mask) -> list of maps``.
        num_queries: Q.
        pixel_mean, pixel_std: of the channels, in pixel values from 0 to 255.

    Raises:
        ValueError: no queries.
    """

    def __init__(self, backbone: nn.Module, num_queries: int, pixel_mean: Sequence[float], pixel_std: Sequence[float]):
        super().__init__()
        if num_queries < 1:
            raise ValueError(f"num_queries must be at least 1, got {num_queries}")
        self.backbone = backbone.to(memory_format=torch.channels_last)  # 1.1 to 1.4 times as fast on a CPU
        self.num_queries = num_queries
        self.frozen: tuple[str, ...] = ()
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean)[:, None, None], persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std)[:, None, None], persistent=False)

    def freeze(self, parts: Sequence[str]) -> None:
        """Keep parts as they are: without gradients, and in evaluation mode, so that statistics of norms stay too.

        Args:
            parts: names, as of :func:`cpvt_det.models.parts.in_part`: ``backbone``, ``encoder``, ``class_embed``.

        Raises:
            UnknownNameError: a name of no part.
        """
        freeze(self, parts)
        self.frozen = (*self.frozen, *parts)
        self.train(self.training)

    def train(self, mode: bool = True) -> "Detector":
        """Set the mode; what is frozen stays in evaluation."""
        super().train(mode)
        for name, module in self.named_modules():
            if any(in_part(name, part) for part in self.frozen):
                module.eval()
        return self

    @property
    def size_divisibility(self) -> int:
        """Canvases are padded to a multiple of this: the largest stride, or what the backbone needs."""
        return self.backbone.size_divisibility

    def preprocess(self, images: Sequence[Tensor]) -> PaddedBatch:
        """Images as the mapper gives them -> one normalised, padded batch on the detector's device.

        Args:
            images: each (3, h, w), RGB in [0, 255], any dtype.
        """
        return PaddedBatch.from_images(images, self.size_divisibility, self.pixel_mean, self.pixel_std)

    def forward(self, images: Tensor, padding_mask: Tensor) -> Predictions:
        """Detect.

        Args:
            images: (B, 3, H, W) float, normalised; what lies under the padding does not matter.
            padding_mask: (B, H, W) bool, True = padded.

        Returns:
            Logits (D, B, Q, K') and boxes (D, B, Q, 4), cxcywh in [0, 1] of the unpadded image, in float32 at least.

        Raises:
            TypeError: a mask that is not bool.
            ValueError: a mask of another shape.
        """
        require_bool(padding_mask)
        if padding_mask.shape != (images.shape[0], *images.shape[2:]):
            raise ValueError(f"images {tuple(images.shape)} need a padding_mask (B, H, W), got {tuple(padding_mask.shape)}")
        images = images.masked_fill(padding_mask[:, None], 0).contiguous(memory_format=torch.channels_last)
        return self._detect(self.backbone(images, padding_mask), padding_mask)

    def _detect(self, maps: list[Tensor], padding_mask: Tensor) -> Predictions:
        """Maps of the backbone, over levels (B, C_l, H_l, W_l), and the images' padding mask -> predictions."""
        raise NotImplementedError


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        channels: the width before, between and after the layers.
    """

    def __init__(self, *channels: int):
        super().__init__()
        self.layers = nn.ModuleList(Linear(a, b) for a, b in itertools.pairwise(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(..., first width) -> (..., last width)."""
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


def class_head(channels: int, num_logits: int, prior_probability: float | None) -> nn.Linear:
    """A linear head that starts, where it is a head of sigmoids, with every class at ``prior_probability``.

    So the many negatives do not swamp the first steps.
    """
    head = Linear(channels, num_logits)
    if prior_probability is not None:
        nn.init.constant_(head.bias, math.log(prior_probability / (1 - prior_probability)))
    return head


def box_head(channels: int, log_size: float) -> MLP:
    """A box head that starts with no correction of the centre and ``log_size`` before the sigmoid for both sides."""
    head = MLP(channels, channels, channels, 4)
    nn.init.zeros_(head.layers[-1].weight)
    nn.init.zeros_(head.layers[-1].bias)
    nn.init.constant_(head.layers[-1].bias[2:], log_size)
    return head


def flatten_levels(maps: Sequence[Tensor]) -> Tensor:
    """(B, C, H_l, W_l) over levels -> (B, N, C), the levels one after another, each row by row."""
    tokens = [level.flatten(2).transpose(1, 2) for level in maps]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1)


def full_precision(x: Tensor) -> Tensor:
    """``x`` in float32 at least: in half precision a 4-pixel box has a GIoU of 0.4 at best."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
