# SPDX-License-Identifier: Apache-2.0
"""Linear layers, attention and transformer layers that use the kernels of this package. For a packed batch, they compute only the
valid tokens.

torch passes float32 matrix products to MKL, and convolutions to oneDNN. On AMD processors, MKL uses only AVX2, whereas oneDNN
also uses AVX-512 and is about twice as fast. So on such processors, the product of a linear layer is written as a 1x1 convolution.
If AVX-512 runs in halves, products with gradients do not gain reliably.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.structures import Levels, has_padding
from cpvt_det.fast.dropout import FastDropout, dropout
from cpvt_det.fast.packing import Packing
from cpvt_det.layers.attention import Attention, DeformableAttention, Place
from cpvt_det.models.deformable_detr import DeformableDecoderLayer, DeformableEncoderLayer
from cpvt_det.models.detr import DecoderLayer
from cpvt_det.models.encoder import EncoderLayer, FeedForward
from cpvt_det.ops import routes
from cpvt_det.ops.deformable_attention import ms_deform_attn

SMALL = 1 << 15  # numbers in the input; torch gives convolutions of smaller inputs to a slow kernel of its own
SMALL_PRODUCT = 1 << 23  # number of multiplications below which a convolution's overhead outweighs the gain
SMALL_IN_HALVES = 1 << 25  # the same where AVX-512 runs in halves


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: (..., C) float, (C', C) and (C',) to (..., C')."""
    if not routes.takes("linear", x) or x.numel() < SMALL or x.numel() * len(weight) < SMALL_PRODUCT:
        return F.linear(x, weight, bias)
    if routes.instructions() == routes.IN_HALVES and (torch.is_grad_enabled() or x.numel() * len(weight) < SMALL_IN_HALVES):
        return F.linear(x, weight, bias)
    rows = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (..., C) -> (1, C, rows, 1), channels last
    out = F.conv2d(rows, weight[:, :, None, None], bias, dilation=2)  # dilated, as in convolution.py
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


class FastLinear(nn.Linear):
    """``nn.Linear`` computed by :func:`linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C')."""
        return linear(x, self.weight, self.bias)


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """``F.scaled_dot_product_attention``. On a CPU with dropout, its steps are computed one by one, as in torch, but with our
    faster dropout.
    """
    if not dropout_p or not routes.is_plain(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1)
    if attn_mask is not None and attn_mask.dtype == torch.bool and not attn_mask.any(-1).all():  # an image without a valid key
        weights = weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0)
    return dropout(weights, dropout_p) @ v


class FastAttention(Attention):
    """Attention that also accepts a :class:`Packing` instead of a padding mask; packed images attend only to themselves."""

    _linear = staticmethod(linear)
    _attend = staticmethod(attend)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        padding_mask: Tensor | Packing | None = None,
        attention_mask: Tensor | None = None,
        place: Place | None = None,
    ) -> Tensor:
        """(B, Q, C), or packed like the inputs, (1, T, C)."""
        if isinstance(padding_mask, Packing):
            # (1, M, T_i, C / M) of each image
            images = zip(*(padding_mask.images(x, 2) for x in self.project(queries, keys, values)), strict=True)
            attended = [self._attend(*image, dropout_p=self.dropout * self.training).transpose(1, 2) for image in images]
            return self.out_proj(torch.cat(attended, dim=1).flatten(2))
        if padding_mask is not None and not has_padding(padding_mask):
            padding_mask = None
        return super().forward(queries, keys, values, padding_mask, attention_mask, place)


@dataclass
class PackedLevels(Levels):
    """The layout of packed tokens.

    Attributes:
        packing: positions of the tokens in the batch.
    """

    packing: Packing

    def to_level_coordinates(self, points: Tensor) -> Tensor:
        """(B, N, 2) points of all tokens -> (1, T, L, 2) of the packed ones, relative to every level's padded map."""
        return self.packing.pack(super().to_level_coordinates(points))


class FastDeformableAttention(DeformableAttention):
    """Deformable attention that also accepts :class:`PackedLevels`, with packed queries, points and tokens."""

    def forward(self, queries: Tensor, reference_points: Tensor, tokens: Tensor, levels: Levels) -> Tensor:
        """(B, Q, C), or packed like the queries, (1, T, C)."""
        if not isinstance(levels, PackedLevels):
            return super().forward(queries, reference_points, tokens, levels)
        packing, heads = levels.packing, self.samples[0]
        values = packing.unpack(self.value_proj(tokens)).unflatten(-1, (heads, -1))
        sampled = (packing.images(x) for x in self.sample(queries, reference_points, levels))
        images = zip(values.split(1), *sampled, strict=True)
        attended = [ms_deform_attn(value, levels.shapes, *image, self.implementation) for value, *image in images]
        return self.output_proj(torch.cat(attended, dim=1))


class FastFeedForward(FeedForward):
    """A feed-forward network whose ReLU and dropout together store only their output for the backward pass."""

    def feed_forward(self, first: nn.Linear, second: nn.Linear, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The two-layer network, (..., C) -> (..., C)."""
        if self.activation is not F.relu or type(self.dropout) is not FastDropout or routes.is_watched(self.dropout):
            return super().feed_forward(first, second, x)
        return second(dropout(first(x), self.dropout.p, self.dropout.training, rectify=True))


class FastEncoderLayer(FastFeedForward, EncoderLayer):
    """Faster :class:`EncoderLayer`."""


class FastDecoderLayer(FastFeedForward, DecoderLayer):
    """Faster :class:`DecoderLayer`."""


class FastDeformableEncoderLayer(FastFeedForward, DeformableEncoderLayer):
    """Faster :class:`DeformableEncoderLayer`."""


class FastDeformableDecoderLayer(FastFeedForward, DeformableDecoderLayer):
    """Faster :class:`DeformableDecoderLayer`."""
