# SPDX-License-Identifier: Apache-2.0
"""Encoders that leave padded tokens out (``fast/packing.py``), and position encodings for the remaining tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from cpvt_det.common.structures import Levels, Size
from cpvt_det.fast.layers import FastAttention, FastDeformableAttention, FastDeformableEncoderLayer, FastEncoderLayer, PackedLevels
from cpvt_det.fast.packing import Packing
from cpvt_det.models.deformable_detr import DeformableEncoder
from cpvt_det.models.encoder import Encoder
from cpvt_det.ops import routes
from cpvt_det.position.encoding import PositionEncoding

LEAST_SAVING = 0.1
"""Share of padded tokens below which packing is not worth its loop over images."""


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
        packing = packing_for(self, own, tokens, levels.padding_mask, position)
        if packing is None:
            return super().forward(tokens, positions, levels, position)
        encoding = PackedEncoding(position, packing, levels.padding_mask)
        packed = PackedLevels(**vars(levels), packing=packing)
        return packing.unpack(super().forward(packing.pack(tokens), packing.pack(positions), packed, encoding))
