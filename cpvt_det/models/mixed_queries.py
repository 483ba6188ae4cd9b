# SPDX-License-Identifier: Apache-2.0
"""Mixed query selection: queries take their boxes from the encoder's best proposals, and their content is learned.

Place in the pipeline: after the encoder, before the decoder; a query source like those of ``models/queries.py``.
"""

from torch import Tensor, nn

from cpvt_det.common.structures import Predictions
from cpvt_det.models.anchor_queries import BoxPositions
from cpvt_det.models.queries import QUERY_REGISTRY, ProposedQueries, Queries


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
        place = self.place if self.refined_positions else None
        return Queries(content, self.place(references), references, proposals, place=place)

    def place(self, boxes: Tensor, decoded: Tensor | None = None) -> Tensor:
        """The positions of queries at boxes, (B, Q, C); arguments as in :meth:`BoxPositions.place`."""
        if self.refined_positions:
            return super().place(boxes, decoded)
        return ProposedQueries.place(self, boxes)
