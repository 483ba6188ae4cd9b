# SPDX-License-Identifier: Apache-2.0
"""DETR: one level, attention to all tokens, and learned queries. The transformer is batch-first and takes queries from any
source.

Place in the pipeline: the encoder and decoder that ``models/detector.py`` calls.

Source: arXiv 2005.12872, section 3.2 and appendix A.3; names of parameters as in facebookresearch/detr.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common import defaults
from cpvt_det.common.structures import Levels, Predictions, flatten_levels
from cpvt_det.layers.attention import Attention
from cpvt_det.layers.heads import MLP, Heads, class_head
from cpvt_det.models.detector import Detector, Memory
from cpvt_det.models.encoder import Encoder, FeedForward
from cpvt_det.models.image_model import require_contract
from cpvt_det.models.necks import ProjectionNeck
from cpvt_det.models.queries import Queries, QueryEmbedding
from cpvt_det.position.encoding import PositionEncoding


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
            query_positions: (B, Q, C) float, added to queries and keys of the self-attention and to the cross-attention's queries.
            memory: output of the encoder.
            padding_mask: (B, N) bool, True = padded.
            attention_mask: (Q, Q) float, for the self-attention; ``None`` lets every query see every other.

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
    """Decoder layers, and one norm, which all layers share, between the output of a layer and the heads.

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
            queries: output of a query source; references have no effect.
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

    :class:`Detector` relies on the contract of a transformer: it has ``encode``, and its ``decoder`` can be called like a
    :class:`Decoder`.

    Args:
        encoder_layers: layers of the encoder.
        decoder_layers: layers of the decoder, D.
        channels, num_heads, ffn_channels, dropout, pre_norm: as in :class:`cpvt_det.models.encoder.EncoderLayer`.
        checkpointing: recomputation in the encoder, as in :class:`cpvt_det.models.encoder.Encoder`.

    Attributes:
        decoder_position: encoding of the decoder's keys, set by :class:`DETR`; ``"same"`` uses the encoder's additive embedding,
            ``None`` uses no encoding.
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


class DETR(Detector):
    """DETR on the last map of a backbone.

    Args:
        backbone: module that meets the contract of :data:`cpvt_det.models.backbones.BACKBONE_REGISTRY`; only its last map is used.
        position: the encoder's position encoding.
        transformer: encoder and decoder for ``channels``.
        channels: C.
        num_queries: Q.
        num_logits: K', the number of logits that the classification needs for K classes.
        decoder_position: encoding of the decoder's keys; ``"same"`` uses the encoder's additive embedding, and ``None`` uses no
            encoding. Models built from a config use sines by default, because a PEG has no additive embedding.
        prior_probability: initial probability of every class if sigmoids are used; ``None`` for softmax.
        pixel_mean, pixel_std: mean and standard deviation per channel, in pixel values from 0 to 255.
        frozen: names of parts that are not trained, as in :meth:`Detector.freeze`.
        neck: neck; ``None`` for :class:`ProjectionNeck`.
        queries: query source, which the builder chooses by ``MODEL.QUERIES.NAME``; ``None`` for :class:`QueryEmbedding`.

    Raises:
        UnknownNameError: a name in ``frozen`` that matches no part.
        ValueError: no queries.

    Source: arXiv 2005.12872.
    """

    needs_references = False

    def __init__(
        self,
        backbone: nn.Module,
        position: PositionEncoding,
        transformer: Transformer,
        channels: int,
        num_queries: int,
        num_logits: int,
        decoder_position: PositionEncoding | str | None = "same",
        prior_probability: float | None = None,
        pixel_mean: Sequence[float] = defaults.PIXEL_MEAN,
        pixel_std: Sequence[float] = defaults.PIXEL_STD,
        frozen: Sequence[str] = (),
        neck: nn.Module | None = None,
        queries: nn.Module | None = None,
    ):
        neck = ProjectionNeck(backbone.channels, backbone.strides, channels) if neck is None else neck
        super().__init__(backbone, neck, position, transformer, pixel_mean, pixel_std)
        transformer.decoder_position = decoder_position
        self.query_embed = QueryEmbedding(channels, num_queries) if queries is None else queries
        require_contract(self.queries, "query source", "num_queries")
        self.class_embed = class_head(channels, num_logits, prior_probability)
        self.bbox_embed = MLP(channels, channels, channels, 4)
        self.freeze(frozen)

    @property
    def queries(self) -> nn.Module:
        """The query source; the official code registers it as ``query_embed``."""
        return self.query_embed
