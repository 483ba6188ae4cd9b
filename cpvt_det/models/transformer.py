# SPDX-License-Identifier: Apache-2.0
"""DETR's transformer, batch first. It does not know where queries come from.

Source: arXiv 2005.12872, section 3.2 and appendix A.3; names of parameters as in facebookresearch/detr.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cpvt_det import defaults
from cpvt_det.layers.attention import Attention
from cpvt_det.layers.heads import Heads
from cpvt_det.models.encoder import Encoder, FeedForward
from cpvt_det.models.queries import Queries
from cpvt_det.position.encoding import PositionEncoding
from cpvt_det.structures import Levels, Predictions, flatten_levels


@dataclass
class Memory:
    """What the encoder leaves to the decoder.

    Attributes:
        tokens: (B, N, C) float, the values of the decoder's attention to the image.
        keys: (B, N, C) float, the tokens with positions added; the same object as ``tokens`` where there are none.
    """

    tokens: Tensor
    keys: Tensor


class DecoderLayer(FeedForward):
    """Self-attention among queries, attention to the memory, and a feed-forward network.

    Args:
        channels, num_heads, ffn_channels, dropout, pre_norm: as in :class:`cpvt_det.models.encoder.EncoderLayer`.
    """

    def __init__(self, channels: int, num_heads: int, ffn_channels: int, dropout: float, pre_norm: bool):
        super().__init__()
        self.pre_norm = pre_norm
        self.self_attn = Attention(channels, num_heads, dropout)
        self.multihead_attn = Attention(channels, num_heads, dropout)
        self.linear1 = nn.Linear(channels, ffn_channels)
        self.linear2 = nn.Linear(ffn_channels, channels)
        self.norm1 = nn.LayerNorm(channels)
        self.norm2 = nn.LayerNorm(channels)
        self.norm3 = nn.LayerNorm(channels)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, queries: Tensor, query_positions: Tensor, memory: Memory, padding_mask: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """One layer.

        Args:
            queries: (B, Q, C) float.
            query_positions: (B, Q, C) float, added to queries and keys of the self-attention and to queries of the other.
            memory: output of the encoder.
            padding_mask: (B, N) bool, True = padded.
            attention_mask: (Q, Q) float, of the self-attention; ``None``: every query sees every other.

        Returns:
            (B, Q, C).
        """
        x = self.norm1(queries) if self.pre_norm else queries
        placed = x + query_positions
        queries = queries + self.dropout(self.self_attn(placed, placed, x, attention_mask=attention_mask))
        queries = queries if self.pre_norm else self.norm1(queries)

        placed = (self.norm2(queries) if self.pre_norm else queries) + query_positions
        queries = queries + self.dropout(self.multihead_attn(placed, memory.keys, memory.tokens, padding_mask))
        queries = queries if self.pre_norm else self.norm2(queries)

        x = self.norm3(queries) if self.pre_norm else queries
        queries = queries + self.dropout(self.feed_forward(self.linear1, self.linear2, x))
        return queries if self.pre_norm else self.norm3(queries)


class Decoder(nn.Module):
    """Decoder layers whose every output, through one shared norm, is an answer.

    Args:
        num_layers: D, at least 1.
        channels, num_heads, ffn_channels, dropout, pre_norm: as in :class:`cpvt_det.models.encoder.EncoderLayer`.

    Raises:
        ValueError: no layer.
    """

    def __init__(self, num_layers: int, channels: int, num_heads: int, ffn_channels: int, dropout: float, pre_norm: bool):
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"a decoder needs at least one layer, got {num_layers}")
        self.layers = nn.ModuleList(DecoderLayer(channels, num_heads, ffn_channels, dropout, pre_norm) for _ in range(num_layers))
        self.norm = nn.LayerNorm(channels)

    def forward(self, queries: Queries, memory: Memory, levels: Levels, heads: Heads) -> Predictions:
        """Decode.

        Args:
            queries: what a query source made; references have no effect.
            memory: output of the encoder.
            levels: layout of the memory's tokens.
            heads: one class head and one box head for all layers.

        Returns:
            Logits (D, B, Q, K') and boxes (D, B, Q, 4).
        """
        decoded, outputs = queries.content, []
        for layer in self.layers:
            decoded = layer(decoded, queries.positions, memory, levels.padding_mask, queries.attention_mask)
            outputs.append(self.norm(decoded))
        return heads(torch.stack(outputs))


class Transformer(nn.Module):
    """The encoder and the decoder under the official names.

    The contract of a transformer, which :class:`Detector` relies on: ``encode``, and ``decoder`` with the call of :class:`Decoder`.

    Args:
        encoder_layers: layers of the encoder.
        decoder_layers: layers of the decoder, D.
        channels, num_heads, ffn_channels, dropout, pre_norm: as in :class:`cpvt_det.models.encoder.EncoderLayer`.
        checkpointing: recomputation in the encoder, as in :class:`cpvt_det.models.encoder.Encoder`.

    Attributes:
        decoder_position: encoding of the decoder's keys, set by :class:`DETR`; ``"same"`` takes the encoder's additive embedding,
            ``None`` none.
    """

    def __init__(
        self,
        encoder_layers: int = defaults.LAYERS,
        decoder_layers: int = defaults.LAYERS,
        channels: int = defaults.CHANNELS,
        num_heads: int = defaults.HEADS,
        ffn_channels: int = defaults.FFN_CHANNELS,
        dropout: float = defaults.DROPOUT,
        pre_norm: bool = False,
        checkpointing: bool = False,
    ):
        super().__init__()
        self.decoder_position: PositionEncoding | str | None = "same"
        shared = (channels, num_heads, ffn_channels, dropout, pre_norm)
        self.encoder = Encoder(encoder_layers, *shared, checkpointing)
        self.decoder = Decoder(decoder_layers, *shared)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def encode(self, features: Sequence[Tensor], levels: Levels, position: PositionEncoding) -> Memory:
        """Encode.

        Args:
            features: one map (B, C, H, W) float, in a list.
            levels: layout of its tokens.
            position: the encoder's position encoding.
        """
        additive = position(features, levels.masks)
        if self.decoder_position == "same":
            decoder_additive = additive
        else:
            decoder_additive = None if self.decoder_position is None else self.decoder_position(features, levels.masks)
        positions = None if additive is None else flatten_levels(additive)
        tokens = self.encoder(flatten_levels(features), positions, levels.padding_mask, levels.shapes, position)
        return Memory(tokens, tokens if decoder_additive is None else tokens + flatten_levels(decoder_additive))
