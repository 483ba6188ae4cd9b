# SPDX-License-Identifier: Apache-2.0
"""Deformable-DETR: several levels, attention to a few sampled points on each level, and learned or proposed queries.

Place in the pipeline: the encoder and decoder that ``models/detector.py`` calls.

Source: arXiv 2010.04159, sections 4 and A.4; names of parameters as in fundamentalvision/Deformable-DETR.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from cpvt_det.common import defaults
from cpvt_det.common.structures import Levels, Predictions, flatten_levels
from cpvt_det.layers.attention import Attention, DeformableAttention
from cpvt_det.layers.checkpointing import recomputed
from cpvt_det.layers.heads import Heads, box_head, class_head
from cpvt_det.models.detector import Detector, Memory
from cpvt_det.models.encoder import FeedForward
from cpvt_det.models.image_model import require_contract
from cpvt_det.models.necks import MultiLevelNeck
from cpvt_det.models.queries import LearnedQueries, ProposedQueries, Queries
from cpvt_det.position.encoding import PositionEncoding


class DeformableEncoderLayer(FeedForward):
    """Deformable self-attention and a feed-forward network, each with a residual and a norm after it.

    Args:
        channels: C.
        num_heads: M.
        ffn_channels: width of the feed-forward network.
        dropout: probability, in training.
        num_levels: L.
        num_points: P, sampling points per head and level.
        implementation: implementation of the attention's op, as in :func:`cpvt_det.ops.deformable_attention.ms_deform_attn`.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        ffn_channels: int,
        dropout: float,
        num_levels: int,
        num_points: int,
        implementation: str = "auto",
    ):
        super().__init__()
        self.self_attn = DeformableAttention(channels, num_heads, num_levels, num_points, implementation)
        self.norm1 = nn.LayerNorm(channels)
        self.linear1 = nn.Linear(channels, ffn_channels)
        self.linear2 = nn.Linear(ffn_channels, channels)
        self.norm2 = nn.LayerNorm(channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor, reference_points: Tensor, levels: Levels) -> Tensor:
        """One layer.

        Args:
            tokens: (B, N, C) float.
            positions: (B, N, C) float, added to the queries.
            reference_points: (B, N, L, 2) float.
            levels: layout of the tokens.

        Returns:
            (B, N, C).
        """
        attended = self.self_attn(tokens + positions, reference_points, tokens, levels)
        tokens = self.norm1(tokens + self.dropout(attended))
        return self.norm2(tokens + self.dropout(self.feed_forward(self.linear1, self.linear2, tokens)))


class DeformableEncoder(nn.Module):
    """Encoder layers, with the encoding's ``inject`` before the first and after each one.

    Args:
        num_layers: number of layers; 0 returns the tokens unchanged.
        layer: arguments of :class:`DeformableEncoderLayer`.
        checkpointing: whether to recompute layers in the backward pass instead of storing their activations.
    """

    def __init__(self, num_layers: int, *layer, checkpointing: bool = False):
        super().__init__()
        self.checkpointing = checkpointing
        self.layers = nn.ModuleList(DeformableEncoderLayer(*layer) for _ in range(num_layers))

    def forward(self, tokens: Tensor, positions: Tensor, levels: Levels, position: PositionEncoding) -> Tensor:
        """Encode.

        Args:
            tokens: (B, N, C) float.
            positions: (B, N, C) float.
            levels: layout of the tokens.
            position: encoding that acts on the tokens.

        Returns:
            (B, N, C), the memory; its values at padded tokens are meaningless.
        """
        reference_points = levels.to_level_coordinates(levels.centers())
        tokens = position.inject(tokens, levels.padding_mask, levels.shapes, -1)
        for index, layer in enumerate(self.layers):
            run_layer = partial(recomputed, layer) if self.checkpointing else layer
            tokens = run_layer(tokens, positions, reference_points, levels)
            tokens = position.inject(tokens, levels.padding_mask, levels.shapes, index)
        return tokens


class DeformableDecoderLayer(FeedForward):
    """Self-attention among queries, deformable attention to the memory, and a feed-forward network.

    Args:
        channels, num_heads, ffn_channels, dropout, num_levels, num_points, implementation: as in
            :class:`DeformableEncoderLayer`.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        ffn_channels: int,
        dropout: float,
        num_levels: int,
        num_points: int | Sequence[int],
        implementation: str = "auto",
    ):
        super().__init__()
        self.cross_attn = DeformableAttention(channels, num_heads, num_levels, num_points, implementation)
        self.norm1 = nn.LayerNorm(channels)
        self.self_attn = Attention(channels, num_heads, dropout)
        self.norm2 = nn.LayerNorm(channels)
        self.linear1 = nn.Linear(channels, ffn_channels)
        self.linear2 = nn.Linear(ffn_channels, channels)
        self.norm3 = nn.LayerNorm(channels)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        queries: Tensor,
        positions: Tensor,
        reference_points: Tensor,
        memory: Tensor,
        levels: Levels,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """One layer.

        Args:
            queries: (B, Q, C) float.
            positions: (B, Q, C) float, added to the queries of both attentions and to the keys of the self-attention.
            reference_points: (B, Q, L, 2 or 4) float.
            memory: (B, N, C) float.
            levels: layout of the memory's tokens.
            attention_mask: (Q, Q) float, for the self-attention; ``None`` lets every query see every other.

        Returns:
            (B, Q, C).
        """
        placed = queries + positions
        attended = self.self_attn(placed, placed, queries, attention_mask=attention_mask)
        queries = self.norm2(queries + self.dropout(attended))
        attended = self.cross_attn(queries + positions, reference_points, memory, levels)
        queries = self.norm1(queries + self.dropout(attended))
        return self.norm3(queries + self.dropout(self.feed_forward(self.linear1, self.linear2, queries)))


class DeformableDecoder(nn.Module):
    """Decoder layers, each followed by the heads.

    Args:
        num_layers: D, at least 1.
        layer: arguments of :class:`DeformableDecoderLayer`.
        look_forward_twice: whether the loss of a layer also trains the previous layer's boxes, from which the layer starts (arXiv
            2203.03605, section 3.5). Otherwise, the loss trains only the layer's own corrections. This has no effect without box
            refinement.
        final_norm: whether there is one norm, shared by all layers, before the heads, as in DINO. The queries and boxes that a
            layer passes to the next are computed without it.
        eval_layers: number of layers, counted from the first, that run in evaluation; 0 for all.

    Raises:
        ValueError: no layer, or fewer layers than ``eval_layers``.
    """

    def __init__(self, num_layers: int, *layer, look_forward_twice: bool = False, final_norm: bool = False, eval_layers: int = 0):
        super().__init__()
        self.eval_layers = layers_in_evaluation(num_layers, eval_layers)
        self.layers = nn.ModuleList(DeformableDecoderLayer(*layer) for _ in range(num_layers))
        self.look_forward_twice = look_forward_twice
        self.norm = nn.LayerNorm(layer[0]) if final_norm else nn.Identity()
        self.final_norm = final_norm

    def forward(self, queries: Queries, memory: Memory, levels: Levels, heads: Heads) -> Predictions:
        """Decode.

        Args:
            queries: output of a query source, with references.
            memory: output of the encoder.
            levels: layout of the memory's tokens.
            heads: the heads of all layers.

        Returns:
            Logits (D, B, Q, K') and boxes (D, B, Q, 4).
        """
        decoded, positions, outputs = queries.content, queries.positions, []
        references = start = queries.references  # the places where a layer looks, and the boxes that it corrects
        for index, layer in enumerate(self.layers if self.training else self.layers[: self.eval_layers]):
            if index and heads.refine:
                # With ``twice``, the loss of this layer also trains the boxes of the layer before, but none earlier: they are
                # computed again from detached ``references``, since those in ``outputs`` would pass the gradient on. With a final
                # norm they are computed again too, because those in ``outputs`` come from normed queries.
                twice = self.look_forward_twice and self.training
                start = heads.boxes(decoded, references, index - 1) if self.final_norm or twice else outputs[-1].boxes
                references = start.detach()
                start = start if twice else references
                positions = positions if queries.embed_boxes is None else queries.embed_boxes(references, decoded)
            points = levels.to_level_coordinates(references)
            decoded = layer(decoded, positions, points, memory.tokens, levels, queries.attention_mask)
            outputs.append(heads(self.norm(decoded), start, index))
        return Predictions(torch.stack([output.logits for output in outputs]), torch.stack([output.boxes for output in outputs]))


def layers_in_evaluation(num_layers: int, eval_layers: int) -> int:
    """The number of a decoder's layers that run in evaluation: ``eval_layers``, or all for 0.

    Raises:
        ValueError: no layer, or fewer layers than ``eval_layers``.
    """
    if num_layers < 1:
        raise ValueError(f"a decoder needs at least one layer, got {num_layers}")
    if not 0 <= eval_layers <= num_layers:
        raise ValueError(f"eval_layers must be from 0 (all) to the decoder's {num_layers} layers, got {eval_layers}")
    return eval_layers or num_layers


class DeformableTransformer(nn.Module):
    """The encoder, the decoder and the level embedding under the official names.

    Args:
        encoder_layers: layers of the encoder.
        decoder_layers: layers of the decoder, D.
        channels, num_heads, ffn_channels, dropout, num_levels, implementation: as in :class:`DeformableEncoderLayer`.
        encoder_points, decoder_points: P in the encoder and in the decoder.
        checkpointing: recomputation in the encoder, as in :class:`DeformableEncoder`.
        look_forward_twice, final_norm, eval_layers: as in :class:`DeformableDecoder`.
    """

    def __init__(
        self,
        encoder_layers: int = defaults.LAYERS,
        decoder_layers: int = defaults.LAYERS,
        channels: int = defaults.CHANNELS,
        num_heads: int = defaults.HEADS,
        ffn_channels: int = 1024,
        dropout: float = defaults.DROPOUT,
        num_levels: int = defaults.LEVELS,
        encoder_points: int = defaults.POINTS,
        decoder_points: int = defaults.POINTS,
        implementation: str = "auto",
        checkpointing: bool = False,
        look_forward_twice: bool = False,
        final_norm: bool = False,
        eval_layers: int = 0,
    ):
        super().__init__()
        shared = (channels, num_heads, ffn_channels, dropout, num_levels)
        self.encoder = DeformableEncoder(encoder_layers, *shared, encoder_points, implementation, checkpointing=checkpointing)
        decoder = (decoder_layers, *shared, decoder_points, implementation)
        options = {"look_forward_twice": look_forward_twice, "final_norm": final_norm, "eval_layers": eval_layers}
        self.decoder = DeformableDecoder(*decoder, **options)
        self.level_embed = nn.Parameter(torch.empty(num_levels, channels))
        nn.init.normal_(self.level_embed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        for module in self.modules():
            if isinstance(module, DeformableAttention):
                module.reset_parameters()

    def encode(self, features: Sequence[Tensor], levels: Levels, position: PositionEncoding) -> Memory:
        """Encode.

        Args:
            features: maps of the levels, (B, C, H_l, W_l) float each.
            levels: layout of their tokens.
            position: the encoder's position encoding.
        """
        additive = position(features, levels.masks)
        cells = [height * width for height, width in levels.shapes]
        positions = torch.cat([embed.expand(count, -1) for embed, count in zip(self.level_embed, cells, strict=True)])[None]
        if additive is not None:
            positions = flatten_levels(additive) + positions
        tokens = self.encoder(flatten_levels(features), positions, levels, position)
        return Memory(tokens, tokens)


class DeformableDETR(Detector):
    """DETR over several levels, with deformable attention.

    Args:
        backbone: module that meets the contract of :data:`cpvt_det.models.backbones.BACKBONE_REGISTRY`; all its maps are used.
        position: the encoder's position encoding.
        transformer: encoder and decoder for ``channels`` and ``num_levels``.
        channels: C.
        num_queries: Q.
        num_logits: K', the number of logits that the classification needs for K classes.
        num_levels: L. If there are more levels than backbone maps, a strided convolution makes each further level from the
            previous level.
        box_refinement: whether every decoder layer corrects the previous layer's boxes, with its own heads.
        two_stage: whether the queries are the encoder's best proposals.
        mask_padding: whether padded cells are left out of the projections' norms; ``False`` includes them, as in the official code.
        prior_probability: initial probability of every class if sigmoids are used; ``None`` for softmax.
        pixel_mean, pixel_std: mean and standard deviation per channel, in pixel values from 0 to 255.
        frozen: names of parts that are not trained, as in :meth:`Detector.freeze`.
        neck: neck; ``None`` for :class:`MultiLevelNeck`.
        queries: query source, which the builder chooses by ``MODEL.QUERIES.NAME``; ``None`` for :class:`LearnedQueries`, or
            :class:`ProposedQueries` for two stages.

    Raises:
        UnknownNameError: a name in ``frozen`` that matches no part.
        ValueError: there are no queries or fewer levels than maps, the transformer has a different number of levels, or the
            encoding acts inside dense attention. Also if there are two stages without box refinement, or with channels that are
            not a multiple of 4.

    Source: arXiv 2010.04159.
    """

    def __init__(
        self,
        backbone: nn.Module,
        position: PositionEncoding,
        transformer: DeformableTransformer,
        channels: int,
        num_queries: int,
        num_logits: int,
        num_levels: int = defaults.LEVELS,
        box_refinement: bool = False,
        two_stage: bool = False,
        mask_padding: bool = True,
        prior_probability: float | None = None,
        pixel_mean: Sequence[float] = defaults.PIXEL_MEAN,
        pixel_std: Sequence[float] = defaults.PIXEL_STD,
        frozen: Sequence[str] = (),
        neck: nn.Module | None = None,
        queries: nn.Module | None = None,
    ):
        if neck is None:
            neck = MultiLevelNeck(backbone.channels, backbone.strides, channels, num_levels, mask_padding)
        if len(transformer.level_embed) != len(neck.strides):
            raise ValueError(f"num_levels is {len(neck.strides)}, but the transformer has {len(transformer.level_embed)}")
        if position.acts_in_attention or position.acts_in_ffn:
            acting = getattr(position, "additive", None) or position  # beside a PEG
            where = "on the product of queries and keys, which deformable attention does not compute"
            where = (
                where if position.acts_in_attention else "inside layers, where it needs a single grid, but there are several levels"
            )
            raise ValueError(
                f"{type(acting).__name__} acts {where}; use an encoding that is added or acts on the tokens, or the model "
                "CPVTDetr or CPVTRealTimeDetr"
            )
        if two_stage and not box_refinement:
            raise ValueError("two_stage needs box_refinement, because the proposals are boxes for the decoder to correct")
        super().__init__(backbone, neck, position, transformer, pixel_mean, pixel_std)
        self.refine_boxes = box_refinement
        # Without refinement, one pair of heads serves all layers.
        heads = range(len(transformer.decoder.layers) if box_refinement else 1)
        self.class_embed = nn.ModuleList(class_head(channels, num_logits, prior_probability) for _ in heads)
        # A first guess made from a point starts small; one made from a proposal starts with the proposal's size.
        self.bbox_embed = nn.ModuleList(box_head(channels, 0.0 if two_stage or n else -2.0) for n in heads)
        if queries is None and two_stage:
            queries = ProposedQueries(channels, num_queries, num_logits, prior_probability)
        self.queries = LearnedQueries(channels, num_queries) if queries is None else queries
        require_contract(self.queries, "query source", "num_queries")
        self.freeze(frozen)
