# SPDX-License-Identifier: Apache-2.0
"""Recording what happens inside a detector, by hooks: the layers contain no code for it, and their results do not change, but by
rounding where they leave padded tokens out otherwise: a layer with a hook gets the whole batch.

Attention layers keep no attention weights, as fused kernels do not produce them; here they are computed from the layers' inputs.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.layers.attention import Attention, DeformableAttention, Place
from cpvt_det.position.encoding import PositionEncoding
from cpvt_det.structures import Levels, Size


def record_inputs(modules: Mapping[str, nn.Module]) -> contextlib.AbstractContextManager[dict[str, tuple[Any, ...]]]:
    """Within the block, record the arguments that modules are called with.

    Args:
        modules: name -> module.

    Returns:
        Context of: name -> positional arguments of the module's last call; no entry before its first call.
    """
    return _record(modules, lambda module, keep: module.register_forward_pre_hook(lambda _, args: keep(args)))


def record_outputs(modules: Mapping[str, nn.Module]) -> contextlib.AbstractContextManager[dict[str, Any]]:
    """Within the block, record what modules return; arguments and result as of :func:`record_inputs`."""
    return _record(modules, lambda module, keep: module.register_forward_hook(lambda _, args, out: keep(out)))


@contextlib.contextmanager
def _record(modules: Mapping[str, nn.Module], hook: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """``hook(module, keep)`` makes a module call ``keep`` with what is recorded of it."""
    kept: dict[str, Any] = {}
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(hook(module, partial(kept.__setitem__, name)))
        yield kept


def attention_weights(
    attention: Attention,
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None = None,
    padding_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    place: Place | None = None,
    chosen: Sequence[int] | None = None,
) -> Tensor:
    """The attention weights of a layer, computed from its inputs.

    Args:
        attention: the layer.
        queries, keys, values, padding_mask, attention_mask, place: arguments of its call; values have no effect.
        chosen: indices of the queries that are asked for; ``None``: all.

    Returns:
        (B, M, Q, N) float, of the chosen queries; they sum to 1 over N.
    """
    channels = queries.shape[-1]
    biases = (None, None) if attention.in_proj_bias is None else attention.in_proj_bias.split(channels)
    q, k = (
        F.linear(x, weight, bias).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)  # (B, N, C) -> (B, M, N, C / M)
        for x, weight, bias in zip((queries, keys), attention.in_proj_weight.split(channels), biases, strict=False)
    )
    if place is not None:
        q, k, attention_mask = place(q, k)
    rows = slice(None) if chosen is None else list(chosen)
    scores = q[:, :, rows] @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if attention_mask is not None:
        scores = scores + attention_mask.expand(*q.shape[:-1], -1)[:, :, rows]
    if padding_mask is not None:
        scores = scores.masked_fill(padding_mask[:, None, None], -math.inf)
    return scores.softmax(-1)


@dataclass
class Samples:
    """The sampling points of queries in deformable attention.

    Attributes:
        locations: (B, Q, M, L, P, 2) float, xy in [0, 1] of the padded map; beyond it zeros are read.
        weights: (B, Q, M, L, P) float; they sum to 1 over L and P.
    """

    locations: Tensor
    weights: Tensor


def sampling_points(attention: DeformableAttention, queries: Tensor, reference_points: Tensor, levels: Levels) -> Samples:
    """The sampling points of a deformable attention layer, computed from its inputs.

    Args:
        attention: the layer.
        queries: (B, Q, C) float, all queries or some of them.
        reference_points: (B, Q, L, 2 or 4) float, xy or cxcywh in [0, 1] of the padded map.
        levels: layout of the tokens.

    Source: arXiv 2010.04159, equation 3 and section A.4 (offsets from boxes).
    """
    heads, num_levels, points = attention.samples
    offsets = F.linear(queries, attention.sampling_offsets.weight, attention.sampling_offsets.bias)
    offsets = offsets.unflatten(-1, (heads, num_levels, points, 2))
    logits = F.linear(queries, attention.attention_weights.weight, attention.attention_weights.bias)
    weights = logits.unflatten(-1, (heads, -1)).softmax(-1).unflatten(-1, (num_levels, points))
    centers, sizes = reference_points[:, :, None, :, None, :2], reference_points[:, :, None, :, None, 2:]
    steps = offsets / levels.sizes[:, None] if not sizes.numel() else offsets / points * sizes / 2
    return Samples(centers + steps, weights)


@dataclass
class Added:
    """What a position encoding adds at one place.

    Attributes:
        layer: index of the encoder layer before this place, -1 for before the first; ``None``: added to queries and keys of every
            layer.
        maps: (B, C, H_l, W_l) float per level.
    """

    layer: int | None
    maps: list[Tensor]

    @property
    def where(self) -> str:
        """The place in words."""
        if self.layer is None:
            return "to queries and keys"
        return "before the first layer" if self.layer < 0 else f"after layer {self.layer}"

    @property
    def seen_by(self) -> int:
        """The first layer whose attention sees it."""
        return 0 if self.layer is None else self.layer + 1


@contextlib.contextmanager
def record_added(position: PositionEncoding) -> Iterator[list[Added]]:
    """Within the block, record what an encoding adds, to queries and keys or to the tokens.

    Yields:
        One entry per place, in the order of the calls.
    """
    added: list[Added] = []

    def note_additive(_: nn.Module, args: tuple[Any, ...], maps: list[Tensor] | None) -> None:
        if maps is not None:
            added.append(Added(None, list(maps)))

    def inject(tokens: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        out = type(position).inject(position, tokens, padding_mask, level_shapes, layer)
        if out is not tokens:
            added.append(Added(layer, _to_maps(out - tokens, level_shapes)))
        return out

    with position.register_forward_hook(note_additive):
        position.inject = inject  # on this object alone: the encoder calls its method
        try:
            yield added
        finally:
            del position.inject


def _to_maps(tokens: Tensor, level_shapes: Sequence[Size]) -> list[Tensor]:
    parts = tokens.split([height * width for height, width in level_shapes], dim=1)
    return [part.unflatten(1, shape).permute(0, 3, 1, 2) for part, shape in zip(parts, level_shapes, strict=True)]
