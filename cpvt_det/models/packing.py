# SPDX-License-Identifier: Apache-2.0
"""When encoders leave padded tokens out (``layers/packing.py``), and how position encodings act on tokens all the same."""

from collections.abc import Sequence

from torch import Tensor, nn

from cpvt_det.layers.drop_path import DropPath
from cpvt_det.layers.packing import Packing
from cpvt_det.ops import routes
from cpvt_det.position.registry import PositionEncoding
from cpvt_det.structures import Size

LEAST_SAVING = 0.1
"""Share of padded tokens below which packing is not worth a loop over images."""


def packing_for(
    layers: nn.ModuleList,
    own: tuple[type[nn.Module], type[nn.Module]],
    tokens: Tensor,
    padding_mask: Tensor | None,
    position: PositionEncoding,
) -> Packing | None:
    """How an encoder packs the tokens of a batch; ``None``: it computes all.

    It computes all where little is padded, where the encoding looks at padded tokens or acts inside attention, where an image may
    skip a part of a layer, and where a layer is another one than ours, or is watched by a hook, which expects the batch.

    Args:
        layers: layers of the encoder.
        own: types of a layer and of its attention that take a packing.
        tokens: (B, N, C) float.
        padding_mask: (B, N) bool, True = padded; ``None``: nothing is.
        position: the encoding that acts on the tokens.
    """
    if padding_mask is None or not routes.is_plain(tokens) or not routes.is_on("packing"):
        return None
    if position.acts_in_attention or position.looks_at_padding or padding_mask.sum() <= LEAST_SAVING * padding_mask.numel():
        return None
    are_own = all((type(layer), type(layer.self_attn)) == own for layer in layers)
    return Packing.of(padding_mask) if are_own and not any(_needs_batch(part) for part in layers.modules()) else None


def _needs_batch(part: nn.Module) -> bool:
    return routes.is_watched(part) or (isinstance(part, DropPath) and part.training)


def inject(
    position: PositionEncoding,
    tokens: Tensor,
    packing: Packing | None,
    padding_mask: Tensor | None,
    level_shapes: Sequence[Size],
    layer: int,
) -> Tensor:
    """:meth:`PositionEncoding.inject` on tokens that may be packed, (B, N, C) or (1, T, C) -> the same; others as there."""
    if packing is None:
        return position.inject(tokens, padding_mask, level_shapes, layer)
    if not position.acts_after(layer):
        return tokens
    return packing.pack(position.inject(packing.unpack(tokens), padding_mask, level_shapes, layer))
