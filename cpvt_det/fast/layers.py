# SPDX-License-Identifier: Apache-2.0
"""Linear layers, dropout, attention, transformer layers and encoders that use the kernels of this package and leave padded tokens
out.

torch passes float32 matrix products to MKL, and convolutions to oneDNN. On AMD processors, MKL uses only AVX2, whereas oneDNN
also uses AVX-512 and is about twice as fast. So on such processors, the product of a linear layer is written as a 1x1 convolution.
If AVX-512 runs in halves, products with gradients do not gain reliably.

An encoder's layers process every token separately, except in attention, and attention ignores padded tokens. So the valid tokens
do not depend on the padded tokens, which therefore need not be computed. The valid tokens of a padded batch are packed into one row
for all images.

Dropout takes less than half of torch's time on a CPU, because our own kernel draws the random numbers, from a seed that torch's
generator gives. On other devices, in compiled and exported programs, and without numba, torch's dropout is used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from cpvt_det.common.structures import Levels, Size, has_padding
from cpvt_det.layers.attention import Attention, DeformableAttention, Place
from cpvt_det.models.deformable_detr import DeformableDecoderLayer, DeformableEncoder, DeformableEncoderLayer
from cpvt_det.models.detr import DecoderLayer
from cpvt_det.models.encoder import Encoder, EncoderLayer, FeedForward
from cpvt_det.ops import routes
from cpvt_det.ops.deformable_attention import ms_deform_attn
from cpvt_det.position.encoding import PositionEncoding

SMALL_INPUT = 1 << 15  # numbers in the input; torch gives convolutions of smaller inputs to a slow kernel of its own
SMALL_PRODUCT = 1 << 23  # number of multiplications below which a convolution's overhead outweighs the gain
SMALL_IN_HALVES = 1 << 25  # the same where AVX-512 runs in halves
LEAST_SAVING = 0.1
"""Share of padded tokens below which packing is not worth its loop over images."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MOST_DROPOUT = 1 - 2**-17
"""Smallest probability that the kernel's 16 bits round to 1, which would drop everything."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: (..., C) float, (C', C) and (C',) to (..., C')."""
    if not routes.takes("linear", x) or x.numel() < SMALL_INPUT or x.numel() * len(weight) < SMALL_PRODUCT:
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


def dropout(x: Tensor, probability: float, training: bool = True, rectify: bool = False) -> Tensor:
    """``F.dropout`` of ``x``, or of its ReLU.

    Args:
        x: float, of any shape.
        probability: probability that an element becomes 0.
        training: whether to drop elements at all.
        rectify: whether to apply the ReLU first. Only the output is then stored for the backward pass.
    """
    is_for_kernel = training and routes.is_plain(x) and x.dtype in FLOATS and 0 < probability < MOST_DROPOUT
    if is_for_kernel and routes.is_on("dropout") and _dropout_kernel() is not None:
        return _KernelDropout.apply(x, probability, int(torch.randint(1 << 62, ())), rectify)
    return F.dropout(F.relu(x) if rectify else x, probability, training)


class FastDropout(nn.Dropout):
    """``nn.Dropout`` computed by :func:`dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Dropout of ``x``, of any shape."""
        return dropout(x, self.p, self.training)


class _KernelDropout(torch.autograd.Function):
    """:func:`dropout` by the kernel. The backward pass draws the same bits again. After a ReLU, it uses the output as the mask
    instead.
    """

    @staticmethod
    def forward(ctx, x, probability, seed, rectify):
        ctx.arguments = (probability, seed)
        out = _dropout_kernel().drop(x, probability, seed, rectify)
        ctx.save_for_backward(out if rectify else None)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        if out is None:
            return _KernelDropout.apply(grad, *ctx.arguments, False), None, None, None
        rectified = torch.ops.aten.threshold_backward(grad, out, 0)  # positive where the input was positive and kept
        return rectified.mul_(_dropout_kernel().keep_scale(ctx.arguments[0])), None, None, None


def _dropout_kernel() -> ModuleType | None:
    return routes.find_kernels("cpvt_det.fast.dropout_numba")


@dataclass(frozen=True)
class Packing:
    """The positions of a batch's valid tokens.

    Attributes:
        places: (T,) int64, ascending indices of the valid tokens among the B * N tokens of the batch.
        counts: number of valid tokens of each of the B images; they sum to T.
        shape: (B, N).
    """

    places: Tensor
    counts: list[int]
    shape: tuple[int, int]

    @classmethod
    def of(cls, padding_mask: Tensor) -> "Packing":
        """The packing for a mask (B, N) bool, True = padded."""
        valid = ~padding_mask
        return cls(valid.flatten().nonzero()[:, 0], valid.sum(1).tolist(), tuple(padding_mask.shape))

    def pack(self, whole: Tensor) -> Tensor:
        """(B or 1, N, ...) -> (1, T, ...)."""
        whole = whole.expand(self.shape[0], *whole.shape[1:])
        return _Pack.apply(whole.flatten(0, 1), self.places)[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """(1, T, ...) -> (B, N, ...), zero at padded tokens."""
        whole = packed.new_zeros(self.shape[0] * self.shape[1], *packed.shape[2:])
        return whole.index_copy_(0, self.places, packed[0]).unflatten(0, self.shape)

    def images(self, packed: Tensor, dim: int = 1) -> Sequence[Tensor]:
        """Split a tensor with T tokens along ``dim`` into one tensor per image."""
        return packed.split(self.counts, dim)


class _Pack(torch.autograd.Function):
    """(R, ...) -> (T, ...), the rows at the given places. Torch itself would add the gradients of the rows, which takes longer."""

    @staticmethod
    def forward(ctx, rows, places):
        ctx.save_for_backward(places)
        ctx.count = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, *ctx.saved_tensors, grad), None


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


def packing_for(
    encoder: Encoder | DeformableEncoder,
    own: tuple[type[nn.Module], type[nn.Module]],
    tokens: Tensor,
    padding_mask: Tensor | None,
    position: PositionEncoding,
) -> Packing | None:
    """The packing of a batch's tokens for an encoder; ``None`` if the encoder should compute all tokens.

    All tokens are computed if packing is switched off, if there is little padding, or if the encoding looks at padded tokens or
    acts inside layers. They are also computed if an image may skip a part of a layer, or if a layer is not from this package or
    has a hook, because hooks expect the whole batch.

    Args:
        encoder: the encoder.
        own: types of a layer and of its attention that accept a packing.
        tokens: (B, N, C) float.
        padding_mask: (B, N) bool, True = padded; ``None`` if nothing is padded.
        position: the encoding that acts on the tokens.
    """
    if padding_mask is None or not routes.is_plain(tokens) or not routes.is_on("packing"):
        return None
    acts_inside = position.acts_in_attention or position.acts_in_ffn
    if acts_inside or position.looks_at_padding or padding_mask.sum() <= LEAST_SAVING * padding_mask.numel():
        return None
    are_own = all((type(layer), type(layer.self_attn)) == own for layer in encoder.layers)
    for part in encoder.modules():  # hooks, parts that may skip images, and parts that are not ours and may look across tokens
        skips = isinstance(part, StochasticDepth) and part.training
        if part is not encoder and (skips or routes.is_watched(part) or not routes.is_known(part)):
            return None
    return Packing.of(padding_mask) if are_own else None


@dataclass(frozen=True)
class PackedEncoding:
    """A position encoding for packed tokens, with the methods that an encoder calls.

    Attributes:
        position: the encoding; it gets the tokens of the whole batch.
        packing: positions of the valid tokens in the batch.
        padding_mask: (B, N) bool, True = padded.
    """

    position: PositionEncoding
    packing: Packing
    padding_mask: Tensor
    acts_in_attention = acts_in_ffn = False

    def inject(self, tokens: Tensor, padding_mask: Tensor | Packing, level_shapes: Sequence[Size], layer: int) -> Tensor:
        """:meth:`PositionEncoding.inject`, (1, T, C) -> the same."""
        if not self.position.acts_after(layer):
            return tokens
        return self.packing.pack(self.position.inject(self.packing.unpack(tokens), self.padding_mask, level_shapes, layer))


class FastEncoder(Encoder):
    """Faster :class:`Encoder`."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        padding_mask: Tensor | None,
        level_shapes: Sequence[Size],
        position: PositionEncoding,
    ) -> Tensor:
        """The memory (B, N, C), zero at padded tokens if these were left out."""
        packing = packing_for(self, (FastEncoderLayer, FastAttention), tokens, padding_mask, position)
        if packing is None:
            return super().forward(tokens, positions, padding_mask, level_shapes, position)
        positions = None if positions is None else packing.pack(positions)
        encoding = PackedEncoding(position, packing, padding_mask)
        return packing.unpack(super().forward(packing.pack(tokens), positions, packing, level_shapes, encoding))


class FastDeformableEncoder(DeformableEncoder):
    """Faster :class:`DeformableEncoder`."""

    def forward(self, tokens: Tensor, positions: Tensor, levels: Levels, position: PositionEncoding) -> Tensor:
        """The memory (B, N, C), zero at padded tokens if these were left out."""
        own = (FastDeformableEncoderLayer, FastDeformableAttention)
        if (packing := packing_for(self, own, tokens, levels.padding_mask, position)) is None:
            return super().forward(tokens, positions, levels, position)
        encoding = PackedEncoding(position, packing, levels.padding_mask)
        packed = PackedLevels(**vars(levels), packing=packing)
        return packing.unpack(super().forward(packing.pack(tokens), packing.pack(positions), packed, encoding))
