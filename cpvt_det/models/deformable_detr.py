# SPDX-License-Identifier: Apache-2.0
"""Deformable-DETR: several levels, attention to sampled points, learned or proposed queries.

On the road of one image: the parts that ``models/detector.py`` calls.
"""

from collections.abc import Sequence

from torch import nn

from cpvt_det import defaults
from cpvt_det.layers.heads import box_head, class_head
from cpvt_det.models.deformable_transformer import DeformableTransformer
from cpvt_det.models.detector import Detector
from cpvt_det.models.image_model import require_contract
from cpvt_det.models.necks import MultiLevelNeck
from cpvt_det.models.queries import LearnedQueries, ProposedQueries
from cpvt_det.position.encoding import PositionEncoding


class DeformableDETR(Detector):
    """DETR over several levels, with deformable attention.

    Args:
        backbone: a module by the contract of :data:`cpvt_det.models.backbones.BACKBONE_REGISTRY`; of its maps all are used.
        position: the encoder's position encoding.
        transformer: encoder and decoder of ``channels`` and of ``num_levels``.
        channels: C.
        num_queries: Q.
        num_logits: K', what the classification needs for K classes.
        num_levels: L: the backbone's maps, and coarser ones, each by a strided convolution of the one before.
        box_refinement: every decoder layer corrects the boxes of the one before, with heads of its own.
        two_stage: queries are the encoder's best proposals.
        mask_padding: padded cells are left out of the projections' norms; ``False`` is the official arithmetic.
        prior_probability: probability of every class at the start, for sigmoids; ``None`` for softmax.
        pixel_mean, pixel_std: mean and standard deviation per channel, in pixel values from 0 to 255.
        frozen: parts that are not trained, as of :meth:`Detector.freeze`.
        neck: neck of the user's own; ``None``: :class:`MultiLevelNeck`.
        queries: query source of the user's own; ``None``: :class:`LearnedQueries`, or :class:`ProposedQueries` for two stages.

    Raises:
        UnknownNameError: no part of this name to freeze.
        ValueError: no queries, fewer levels than maps, a transformer of another number of levels, an encoding that acts inside
            dense attention, two stages without box refinement or with channels that are no multiple of 4.

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
            where = "on the product of queries and keys, which deformable attention does not have"
            where = where if position.acts_in_attention else "inside layers of one grid, which the cells of several levels are not"
            raise ValueError(
                f"{type(acting).__name__} acts {where}; use an encoding that is added or acts on the tokens, CPVTDetr or "
                "CPVTRealTimeDetr"
            )
        if two_stage and not box_refinement:
            raise ValueError("two stages need box refinement: proposals are boxes for the decoder to correct")
        super().__init__(backbone, neck, position, transformer, pixel_mean, pixel_std)
        self.refine_boxes = box_refinement
        # Without refinement one pair of heads serves every layer.
        heads = range(len(transformer.decoder.layers) if box_refinement else 1)
        self.class_embed = nn.ModuleList(class_head(channels, num_logits, prior_probability) for _ in heads)
        # A first guess from a point starts small, one from a proposal at the proposal's size.
        self.bbox_embed = nn.ModuleList(box_head(channels, 0.0 if two_stage or n else -2.0) for n in heads)
        if queries is None and two_stage:
            queries = ProposedQueries(channels, num_queries, num_logits, prior_probability)
        self.queries = LearnedQueries(channels, num_queries) if queries is None else queries
        require_contract(self.queries, "query source", "num_queries")
        self.freeze(frozen)
