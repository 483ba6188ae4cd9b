# SPDX-License-Identifier: Apache-2.0
"""The contract that position encodings meet, and the registry of their names.

To add an encoding, register a class or function under a name; the contract tests find it through the registry.
``builders/parts.py`` passes it the options of ``MODEL.POSITION`` as keywords.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from cpvt_det.common import defaults
from cpvt_det.common.registry import PartRegistry, options_of
from cpvt_det.common.structures import Size

FACTS = ("channels", "num_levels", "num_layers", "num_heads", "ffn_channels")


class PositionRegistry(PartRegistry):
    """Encodings by name. A name of the form ``<one>+<PEG>``, such as ``table+peg_plain``, stands for the sum of any encoding and
    a PEG. The options of each of the two are then given under its own name: ``{"table": {"grid": (7, 7)}}``.
    """

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or self._is_sum(name)

    def find(self, name: str) -> Callable[..., nn.Module]:
        """Find the builder of a registered encoding, or of a sum of two.

        Raises:
            UnknownNameError: a name that is neither registered nor a sum of two registered names.
        """
        return functools.partial(self._build_sum, *name.split("+")) if self._is_sum(name) else super().find(name)

    def parameters(self, name: str) -> set[str]:
        """The keywords that the builder found under a name accepts."""
        return {*name.split("+"), *FACTS} if self._is_sum(name) else super().parameters(name)

    def _is_sum(self, name: str) -> bool:
        parts = name.split("+")
        known = len(parts) == 2 and all(super(PositionRegistry, self).__contains__(part) for part in parts)
        return known and ["additive" in inspect.signature(self.get(part)).parameters for part in parts] == [False, True]

    def _build_sum(self, one: str, peg: str, /, **given: Any) -> nn.Module:
        facts = {fact: given[fact] for fact in FACTS}
        additive = self.build(one, facts, options_of(given.get(one, {})))
        build_peg = self.with_options(peg, options_of(given.get(peg, {})), FACTS)
        taken = self.parameters(peg)
        return build_peg(additive=lambda channels: additive, **{fact: value for fact, value in facts.items() if fact in taken})


POSITION_REGISTRY = PositionRegistry("POSITION", "position encoding", chosen=frozenset({"additive", "peg"}))
"""Name -> builder of the encoding. It is called with its own options and with whichever of :data:`FACTS` its signature names."""


class PositionEncoding(nn.Module):
    """The contract of encodings. This base class is itself an encoding, which does nothing.

    The encoder calls :meth:`forward` and :meth:`inject` with the *projected* features and one padding mask per level (DETR has one
    level), so that an encoding may depend on the features. If attention compares queries with keys, the encoder also calls
    :meth:`place` and :meth:`feed` inside its layers. Encodings see only an image's tokens, not class and distillation tokens.

    Attributes:
        acts_in_attention: whether :meth:`place` does anything. Encoders whose attention does not multiply queries by keys refuse
            encodings for which it does.
        acts_in_ffn: whether :meth:`feed` does anything. Deformable encoders refuse encodings for which it does.
    """

    acts_in_attention = acts_in_ffn = False

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor] | None:
        """Compute the embedding that is added to the queries and keys of every encoder layer.

        Args:
            features: maps of the levels, (B, C, H_l, W_l) float each.
            padding_masks: masks of the levels, (B, H_l, W_l) bool each, True = padded.

        Returns:
            A map (B, C, H_l, W_l) per level in the features' dtype. ``None`` adds nothing, and saves a matrix product in every
            layer.
        """
        return None

    def inject(self, tokens: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        """Act on the tokens; called before the first encoder layer (``layer == -1``) and after every layer.

        Args:
            tokens: (B, N, C) float, the levels one after another, each row by row.
            padding_mask: (B, N) bool, True = padded.
            level_shapes: (H_l, W_l) of each level.
            layer: the index of the layer that has just run.

        Returns:
            (B, N, C), with padded tokens unchanged.
        """
        return tokens

    def place(
        self, queries: Tensor, keys: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Act inside the self-attention of a layer: rotate its queries and keys, or bias their products. Optional.

        Args:
            queries, keys: (B, M, N, C / M) float, projected, of the tokens in the order of :meth:`inject`.
            padding_mask: (B, N) bool, True = padded.
            level_shapes: (H_l, W_l) of each level.
            layer: the index of the layer.

        Returns:
            Queries and keys in their original shape and dtype, and a bias that is added to their scaled products. The bias is
            float, in a shape that broadcasts to (B, M, N, N), or ``None``.
        """
        return queries, keys, None

    def feed(self, hidden: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        """Act inside the feed-forward network of a layer, before its activation. Optional.

        Args:
            hidden: (B, N, F) float, the network's inner channels for the tokens in the order of :meth:`inject`.
            padding_mask: (B, N) bool, True = padded.
            level_shapes: (H_l, W_l) of each level.
            layer: the index of the layer.

        Returns:
            (B, N, F); values at padded tokens are meaningless.
        """
        return hidden

    def acts_after(self, layer: int) -> bool:
        """Whether :meth:`inject` does anything after this layer; -1 means before the first layer. Encoders that leave out padded
        tokens call this.
        """
        return type(self).inject is not PositionEncoding.inject

    @property
    def looks_at_padding(self) -> bool:
        """Whether the result of :meth:`inject` for valid tokens depends on padded tokens. If not, an encoder need not compute the
        padded tokens. An encoding of your own that ignores padded tokens may return ``False``.
        """
        return type(self).inject is not PositionEncoding.inject

    def __init_subclass__(cls, **named: Any):
        super().__init_subclass__(**named)
        cls.acts_in_attention = cls.place is not PositionEncoding.place
        cls.acts_in_ffn = cls.feed is not PositionEncoding.feed


def require_one_level(level_shapes: Sequence[Size]) -> Size:
    """Return the shape of the only level, for encodings that act inside layers.

    Raises:
        ValueError: there is more than one level. Several levels are refused because their cells have no common grid.
    """
    if len(level_shapes) != 1:
        raise ValueError(f"an encoding inside layers needs one level, whose cells are one grid, got {len(level_shapes)}")
    return level_shapes[0]


def channels_per_head(channels: int, num_heads: int, multiple: int = 1) -> int:
    """The channels per head, C / M.

    Raises:
        ValueError: the channels are not a multiple of the number of heads, or the channels per head are not a multiple of
            ``multiple``.
    """
    if num_heads < 1 or channels % (num_heads * multiple):
        divisor = f"{multiple} times the number of heads" if multiple > 1 else "the number of heads"
        raise ValueError(f"channels must be a multiple of {divisor}, got {channels} channels and {num_heads} heads")
    return channels // num_heads


def register_position(name: str) -> Callable:
    """Register a class or function under a name that need not be a Python identifier, as in ``sine+peg``."""
    return POSITION_REGISTRY.register_as(name)


def build_position(
    name: str,
    channels: int,
    num_levels: int = 1,
    num_layers: int = defaults.LAYERS,
    num_heads: int = defaults.HEADS,
    ffn_channels: int = defaults.FFN_CHANNELS,
    **options,
) -> PositionEncoding:
    """Build a registered encoding.

    Args:
        name: a registered name.
        channels: C.
        num_levels: feature levels of the encoder.
        num_layers: layers of the encoder.
        num_heads: M, heads of the encoder's attention.
        ffn_channels: F, inner channels of the encoder's feed-forward networks.
        options: further keywords of the encoding's constructor.

    Raises:
        UnknownNameError: an unknown name, or an option that this encoding does not have.
        ValueError: options that the encoding rejects.
    """
    facts = dict(zip(FACTS, (channels, num_levels, num_layers, num_heads, ffn_channels), strict=True))
    return POSITION_REGISTRY.build(name, facts, options)


register_position("none")(PositionEncoding)
