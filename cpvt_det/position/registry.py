# SPDX-License-Identifier: Apache-2.0
"""The contract of position encodings, and the registry of their names.

A new encoding is one class or function registered under its name; the contract tests find it through the registry.
``builders/detector.py`` passes it the options of ``MODEL.POSITION`` as keywords.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from cpvt_det import defaults
from cpvt_det.registry import PartRegistry
from cpvt_det.structures import Size

POSITION_REGISTRY = PartRegistry("POSITION", "position encoding", chosen=frozenset({"additive", "peg"}))
"""Name -> what builds the encoding. It is called with keywords: its own options, and those of ``channels``, ``num_levels`` and
``num_layers`` that it names."""


class PositionEncoding(nn.Module):
    """The contract, and the encoding that does nothing.

    The encoder asks two things, always with the *projected* features and one padding mask per level (DETR has one level), so
    that an encoding may condition on what it encodes.
    """

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor] | None:
        """The additive embedding for queries and keys of every encoder layer.

        Args:
            features: maps of the levels, (B, C, H_l, W_l) float each.
            padding_masks: masks of the levels, (B, H_l, W_l) bool each, True = padded.

        Returns:
            Over levels, (B, C, H_l, W_l) in the features' dtype; or ``None``, which saves a product in every layer.
        """
        return None

    def inject(self, tokens: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        """Act on the tokens: called before the first encoder layer (``layer == -1``) and after every one.

        Args:
            tokens: (B, N, C) float, the levels one after another, each row by row.
            padding_mask: (B, N) bool, True = padded.
            level_shapes: (H_l, W_l) of each level.
            layer: the index of the layer that has just run.

        Returns:
            (B, N, C); padded tokens unchanged.
        """
        return tokens


def register_position(name: str) -> Callable:
    """Register a class or function under a name that need not be a Python one, as in ``sine+peg``."""
    return POSITION_REGISTRY.register_as(name)


def build_position(name: str, channels: int, num_levels: int = 1, num_layers: int = defaults.LAYERS, **options) -> PositionEncoding:
    """Build a registered encoding.

    Args:
        name: a registered name.
        channels: C.
        num_levels: feature levels of the encoder.
        num_layers: layers of the encoder.
        options: further keywords of the encoding's constructor.

    Raises:
        UnknownNameError: a name that is not registered, or an option that this encoding does not take.
        ValueError: options that the encoding refuses.
    """
    facts = {"channels": channels, "num_levels": num_levels, "num_layers": num_layers}
    return POSITION_REGISTRY.build(name, facts, options)


register_position("none")(PositionEncoding)
