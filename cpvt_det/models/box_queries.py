# SPDX-License-Identifier: Apache-2.0
"""Queries that stand for boxes, which are learned, as in DAB-DETR, or the encoder's best proposals, as in DINO. Their positions are
computed from the boxes.

Place in the pipeline: after the encoder, before the decoder; a query source like those of ``models/queries.py``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common.boxes import inverse_sigmoid
from cpvt_det.common.structures import Levels, Predictions, Targets
from cpvt_det.layers.heads import MLP, full_precision, without_autocast
from cpvt_det.models.queries import QUERY_REGISTRY, ProposedQueries, Queries, at_least_one, sines_of_boxes

FARTHEST_LOGIT = 3.0  # limit of the initial logits of learned boxes, whose coordinates start between 0.05 and 0.95


class BoxPositions:
    """A mixin for query sources whose positions are computed from their boxes.

    Source: arXiv 2201.12329, sections 4.2 and 4.3.
    """

    def add_position_heads(self, channels: int, scaled_positions: bool, position_sines: bool = True) -> None:
        """Register the networks.

        Args:
            channels: C, a multiple of 4.
            scaled_positions: whether positions are multiplied by a function of the output of the previous decoder layer.
            position_sines: whether positions are computed from sines and cosines of the boxes' coordinates. ``False`` computes
                them from the coordinates themselves.

        Raises:
            ValueError: channels that are not a multiple of 4.
        """
        if channels % 4:
            raise ValueError(
                "position encodings of boxes need channels in multiples of 4, because each of four numbers is encoded; got "
                f"{channels}"
            )
        self.ref_point_head = MLP(2 * channels, channels, channels) if position_sines else MLP(4, 2 * channels, channels)
        self.position_sines = position_sines
        self.query_scale = MLP(channels, channels, channels) if scaled_positions else None

    def embed_boxes(self, boxes: Tensor, decoded: Tensor | None = None) -> Tensor:
        """Compute the positions of queries.

        Args:
            boxes: (B, Q, 4) float, cxcywh in [0, 1] of the unpadded image.
            decoded: (B, Q, C) float, output of the previous decoder layer; ``None`` before the first layer.

        Returns:
            (B, Q, C).
        """
        if self.position_sines:
            x, y, width, height = boxes.unbind(-1)  # y comes before x, as in DAB-DETR's code
            channels = self.ref_point_head.layers[-1].out_features
            boxes = sines_of_boxes(torch.stack((y, x, width, height), -1), channels // 2)
        positions = self.ref_point_head(boxes)
        return positions if decoded is None or self.query_scale is None else self.query_scale(decoded) * positions


@QUERY_REGISTRY.register_as("anchors")
class AnchorQueries(BoxPositions, nn.Module):
    """Learned boxes with learned content embeddings, the same for every image. After each layer, the positions are computed from
    the new boxes.

    Args:
        channels: C, a multiple of 4.
        num_queries: Q.
        scaled_positions: whether positions are multiplied by a function of the output of the previous decoder layer.
        denoising: module that puts training-only queries before the others, such as
            :class:`cpvt_det.models.denoising.ContrastiveDenoising` (in a config, its number of pairs per image); ``None`` for no
            such queries.

    Raises:
        ValueError: no queries, or channels that are not a multiple of 4.

    Source: arXiv 2201.12329, section 4; with deformable attention as in IDEA-Research/detrex ``projects/dab_deformable_detr``.
    """

    def __init__(self, channels: int, num_queries: int, scaled_positions: bool = False, denoising: nn.Module | None = None):
        super().__init__()
        self.num_queries = at_least_one(num_queries)
        self.add_position_heads(channels, scaled_positions)
        self.query_embed = nn.Embedding(num_queries, channels)
        self.refpoint_embed = nn.Embedding(num_queries, 4)
        nn.init.zeros_(self.query_embed.weight)
        with torch.no_grad():
            numbers = inverse_sigmoid(torch.rand_like(self.refpoint_embed.weight))
            self.refpoint_embed.weight.copy_(numbers.clamp(-FARTHEST_LOGIT, FARTHEST_LOGIT))
        self.denoising = denoising

    def forward(self, memory: Tensor, levels: Levels, targets: Sequence[Targets] | None = None) -> Queries:
        """The queries, preceded by denoising queries if there are targets. Only the batch size of the memory matters."""
        batch = memory.shape[0]  # not len, which would become a constant in an exported program
        with without_autocast(memory):
            boxes = full_precision(self.refpoint_embed.weight).sigmoid().expand(batch, -1, -1)
        content = self.query_embed.weight.expand(batch, -1, -1)
        queries = Queries(content, self.embed_boxes(boxes), boxes, embed_boxes=self.embed_boxes)
        learning = self.training and targets is not None and self.denoising is not None
        return self.denoising(queries, targets, self.embed_boxes) if learning else queries


@QUERY_REGISTRY.register_as("mixed")
class MixedQueries(BoxPositions, ProposedQueries):
    """Boxes of the encoder's best proposals, with learned content embeddings that are the same for every image.

    The token of a proposal may cover a part of an object, or several objects. Therefore, by default, only the proposal's box is
    used, and not the token's features.

    Args:
        channels, num_queries, num_logits, prior_probability, nms_threshold, class_proposals, hybrid, denoising: as
            in :class:`ProposedQueries`.
        shared_content: whether all queries share one content embedding, so that the number of queries of a trained model can be
            changed. ``False`` learns one embedding for each query; the best proposal gets the first of them.
        refined_positions: whether a network computes the queries' positions anew from the refined boxes at every decoder layer.
            ``False`` keeps the positions of the proposals in all layers.
        scaled_positions: whether refined positions are multiplied by a function of the output of the previous decoder layer.
        token_content: whether the queries' contents are the features of the proposals' tokens, without gradient. Otherwise, the
            contents are learned.
        position_sines: whether refined positions are computed from sines and cosines of the boxes' coordinates. ``False``
            computes them from the coordinates themselves, as in RT-DETR.

    Positions are relative to the unpadded image. In DINO's code, positions are relative to the padded map of the finest level, so
    that a prediction depends on the rest of its batch. Without padding, both are the same.

    Raises:
        ValueError: as in :class:`ProposedQueries`. Also if ``scaled_positions`` is set, or ``position_sines`` is False, without
            ``refined_positions``, and if ``shared_content`` and ``token_content`` are both set.

    Source: arXiv 2203.03605, section 3.4, and IDEA-Research/DINO ``deformable_transformer.py``; without refined positions,
    HDETR/H-Deformable-DETR. Refined positions follow arXiv 2201.12329, section 4.2; scaled positions and token contents follow the
    two-stage model of IDEA-Research/detrex ``projects/dab_deformable_detr``.
    """

    def __init__(
        self,
        channels: int,
        num_queries: int,
        num_logits: int,
        prior_probability: float | None,
        nms_threshold: float = 1.0,
        class_proposals: bool = False,
        hybrid: int = 0,
        denoising: nn.Module | None = None,
        shared_content: bool = False,
        refined_positions: bool = False,
        scaled_positions: bool = False,
        token_content: bool = False,
        position_sines: bool = True,
    ):
        if scaled_positions and not refined_positions:
            raise ValueError("scaled_positions needs refined_positions; without it, the positions remain those of the proposals")
        if not (position_sines or refined_positions):
            raise ValueError(
                "position_sines=False requires refined_positions=True: positions that are not refined are computed from sines"
            )
        if shared_content and token_content:
            raise ValueError("shared_content needs learned content embeddings, but with token_content there are none")
        super().__init__(channels, num_queries, num_logits, prior_probability, nms_threshold, class_proposals, hybrid, denoising)
        self.query_embed = None if token_content else nn.Embedding(1 if shared_content else num_queries + hybrid, channels)
        self.refined_positions = refined_positions
        if refined_positions:
            del self.pos_trans, self.pos_trans_norm
            self.add_position_heads(channels, scaled_positions, position_sines)

    def _queries(self, references: Tensor, proposals: Predictions, tokens: Tensor) -> Queries:
        content = tokens if self.query_embed is None else self.query_embed.weight[: tokens.shape[1]].expand_as(tokens)
        embed_boxes = self.embed_boxes if self.refined_positions else None
        return Queries(content, self.embed_boxes(references), references, proposals, embed_boxes=embed_boxes)

    def embed_boxes(self, boxes: Tensor, decoded: Tensor | None = None) -> Tensor:
        """The positions of queries at boxes, (B, Q, C); arguments as in :meth:`BoxPositions.embed_boxes`."""
        if self.refined_positions:
            return super().embed_boxes(boxes, decoded)
        return ProposedQueries.embed_boxes(self, boxes)
