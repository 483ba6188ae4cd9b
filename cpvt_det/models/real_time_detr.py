# SPDX-License-Identifier: Apache-2.0
"""RT-DETR and D-FINE: a hybrid encoder, queries from the encoder's best proposals, and a decoder that refines their boxes.

Place in the pipeline: the parts that ``models/detector.py`` calls.
"""

from collections.abc import Sequence

from torch import nn

from cpvt_det.common import defaults
from cpvt_det.layers.heads import box_head, class_head
from cpvt_det.models.detector import Detector
from cpvt_det.models.hybrid_encoder import HybridTransformer
from cpvt_det.models.image_model import require_contract
from cpvt_det.models.mixed_queries import MixedQueries
from cpvt_det.position.encoding import PositionEncoding


class RealTimeDETR(Detector):
    """RT-DETR, or D-FINE if the decoder refines distributions.

    Args:
        backbone: module that meets the contract of :data:`cpvt_det.models.backbones.BACKBONE_REGISTRY`; all its maps are used.
        position: encoding of the coarsest level's cells.
        transformer: hybrid encoder and decoder.
        neck: neck that makes features with the encoder's number of channels.
        channels: C, of the tokens and queries.
        num_queries: Q.
        num_logits: K', the number of logits that the classification needs for K classes.
        prior_probability: initial probability of every class.
        pixel_mean, pixel_std: mean and standard deviation per channel, in pixel values from 0 to 255.
        frozen: names of parts that are not trained, as in :meth:`Detector.freeze`.
        queries: query source. ``None`` for :class:`MixedQueries`, with contents and classes from the proposals' tokens.

    Raises:
        UnknownNameError: a name in ``frozen`` that matches no part.
        ValueError: there are no queries, or the encoder and the neck have different numbers of levels.

    Source: arXiv 2304.08069, arXiv 2407.17140 (RT-DETRv2), arXiv 2410.13842 (D-FINE).
    """

    refine_boxes = True

    def __init__(
        self,
        backbone: nn.Module,
        position: PositionEncoding,
        transformer: HybridTransformer,
        neck: nn.Module,
        channels: int,
        num_queries: int,
        num_logits: int,
        prior_probability: float = 0.01,
        pixel_mean: Sequence[float] = defaults.PIXEL_MEAN,
        pixel_std: Sequence[float] = defaults.PIXEL_STD,
        frozen: Sequence[str] = (),
        queries: nn.Module | None = None,
    ):
        super().__init__(backbone, neck, position, transformer, pixel_mean, pixel_std)
        if len(neck.strides) != transformer.encoder.num_levels:
            raise ValueError(f"the neck makes {len(neck.strides)} levels, but the encoder has {transformer.encoder.num_levels}")
        layers = range(len(transformer.decoder.layers))
        bins = getattr(transformer.decoder, "num_bins", 0)
        self.class_embed = nn.ModuleList(class_head(channels, num_logits, prior_probability) for _ in layers)
        self.bbox_embed = nn.ModuleList(box_head(channels, 0.0, 4 * (bins + 1)) for _ in layers)
        if queries is None:
            chosen = {"class_proposals": True, "token_content": True, "refined_positions": True, "position_sines": False}
            queries = MixedQueries(channels, num_queries, num_logits, prior_probability, **chosen)
        self.queries = queries
        require_contract(self.queries, "query source", "num_queries")
        self.freeze(frozen)
