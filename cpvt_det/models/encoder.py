# SPDX-License-Identifier: Apache-2.0
"""The encoder of DETR and of the vision transformers: full self-attention, with hooks for a position encoding.

Source: arXiv 2005.12872, section 3.2 and appendix A.3; names of parameters as in facebookresearch/detr.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from cpvt_det.common.errors import UnknownNameError
from cpvt_det.common.structures import Size
from cpvt_det.layers.attention import Attention, Place
from cpvt_det.layers.checkpointing import recomputed
from cpvt_det.position.encoding import PositionEncoding

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


class FeedForward(nn.Module):
    """The feed-forward network of every transformer layer: two linear layers with an activation and dropout between them."""

    dropout: nn.Dropout
    activation = staticmethod(F.relu)

    def feed_forward(
        self, first: Callable[[Tensor], Tensor], second: nn.Linear, x: Tensor, padding_mask: Tensor | None = None
    ) -> Tensor:
        """The two-layer network, (..., C) -> (..., C), for each token separately; a subclass may look at all valid tokens."""
        return second(self.dropout(self.activation(first(x))))


class EncoderLayer(FeedForward):
    """Self-attention and a feed-forward network, each with a residual and a norm.

    Args:
        channels: C.
        num_heads: M.
        ffn_channels: width of the feed-forward network.
        dropout: probability, in training.
        pre_norm: whether norms come before each part instead of after its residual.
        activation: activation of the feed-forward network, ``relu`` or ``gelu`` (exact).
        norm_eps: number that norms add to the variance.
        drop_path: probability, in training, that an image skips the attention of a layer. It skips the feed-forward network with
            the same probability, drawn separately. The other images are divided by the probability of keeping them
            (arXiv 1603.09382, per image as in DeiT).
        attention_bias: whether queries, keys and values have a bias.

    Raises:
        UnknownNameError: an unknown activation.
        ValueError: a probability outside its range.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        ffn_channels: int,
        dropout: float,
        pre_norm: bool,
        activation: str = "relu",
        norm_eps: float = 1e-5,
        drop_path: float = 0.0,
        attention_bias: bool = True,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise UnknownNameError("activation", activation, ACTIVATIONS)
        if not 0 <= drop_path < 1:
            raise ValueError(f"the probability of dropping a path must be at least 0 and below 1, got {drop_path}")
        self.pre_norm = pre_norm
        self.activation = ACTIVATIONS[activation]
        self.self_attn = Attention(channels, num_heads, dropout, attention_bias)
        self.linear1 = nn.Linear(channels, ffn_channels)
        self.linear2 = nn.Linear(ffn_channels, channels)
        self.norm1 = nn.LayerNorm(channels, norm_eps)
        self.norm2 = nn.LayerNorm(channels, norm_eps)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = StochasticDepth(drop_path, "row") if drop_path else nn.Identity()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        padding_mask: Tensor | None,
        place: Place | None = None,
        feed: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """One layer.

        Args:
            tokens: (B, N, C) float.
            positions: (B, N, C) float, added to queries and keys. With ``None``, one matrix product computes queries, keys and
                values.
            padding_mask: (B, N) bool, True = padded; ``None`` if nothing is padded.
            place: function of a position encoding that acts inside the attention, as in :class:`Attention`.
            feed: function of a position encoding that acts on the feed-forward network's inner channels, (B, N, F) -> the same.

        Returns:
            (B, N, C).
        """
        x = self.norm1(tokens) if self.pre_norm else tokens
        placed = x if positions is None else x + positions  # x itself, so that attention recognises its inputs as one tensor
        x = self.self_attn(placed, placed, x, padding_mask, None, place)
        tokens = tokens + self.dropout(self.drop_path(x))
        tokens = tokens if self.pre_norm else self.norm1(tokens)

        x = self.norm2(tokens) if self.pre_norm else tokens
        first = self.linear1 if feed is None else lambda x: feed(self.linear1(x))
        x = self.feed_forward(first, self.linear2, x, padding_mask)
        tokens = tokens + self.dropout(self.drop_path(x))
        return tokens if self.pre_norm else self.norm2(tokens)


class Encoder(nn.Module):
    """Encoder layers. The encoding's ``inject`` is called before the first layer and after each layer, and its ``place`` inside
    each layer.

    Args:
        num_layers: number of layers; 0 returns the tokens unchanged.
        pre_norm: as in :class:`EncoderLayer`; a final norm then follows the layers.
        channels, num_heads, ffn_channels, dropout, activation, norm_eps: as in :class:`EncoderLayer`.
        checkpointing: whether to recompute layers in the backward pass instead of storing their activations.
        drop_path: rate of the last layer, as in :class:`EncoderLayer`; it rises linearly from 0 in the first layer.
    """

    def __init__(
        self,
        num_layers: int,
        channels: int,
        num_heads: int,
        ffn_channels: int,
        dropout: float,
        pre_norm: bool,
        checkpointing: bool = False,
        activation: str = "relu",
        norm_eps: float = 1e-5,
        drop_path: float = 0.0,
    ):
        super().__init__()
        self.checkpointing = checkpointing
        shared = (channels, num_heads, ffn_channels, dropout, pre_norm, activation, norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(*shared, rate) for rate in rising_rates(drop_path, num_layers))
        self.norm = nn.LayerNorm(channels, norm_eps) if pre_norm else None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        padding_mask: Tensor | None,
        level_shapes: Sequence[Size],
        position: PositionEncoding,
    ) -> Tensor:
        """Encode.

        Args:
            tokens: (B, N, C) float.
            positions: (B, N, C) float, or ``None``.
            padding_mask: (B, N) bool, True = padded; ``None`` if nothing is padded.
            level_shapes: (H_l, W_l) of each level; N is the sum of their products.
            position: encoding that acts on the tokens and inside the attention.

        Returns:
            (B, N, C), the memory; its values at padded tokens are meaningless.
        """
        tokens = position.inject(tokens, padding_mask, level_shapes, -1)
        for index, layer in enumerate(self.layers):
            run_layer = partial(recomputed, layer) if self.checkpointing else layer
            inside = inside_layer(position, padding_mask=padding_mask, level_shapes=level_shapes, layer=index)
            tokens = run_layer(tokens, positions, padding_mask, *inside)
            tokens = position.inject(tokens, padding_mask, level_shapes, index)
        return tokens if self.norm is None else self.norm(tokens)


def inside_layer(position: PositionEncoding, **where: Any) -> tuple[Callable | None, Callable | None]:
    """The encoding's functions for a layer's attention and feed-forward network; ``None`` where it does nothing.

    Args:
        position: the encoding.
        where: the last three arguments of :meth:`PositionEncoding.place`.
    """
    place = partial(position.place, **where) if position.acts_in_attention else None
    return place, partial(position.feed, **where) if position.acts_in_ffn else None


def rising_rates(last: float, num_layers: int) -> list[float]:
    """A rate per layer, rising linearly from 0 in the first layer to ``last``."""
    return [last * index / max(1, num_layers - 1) for index in range(num_layers)]
