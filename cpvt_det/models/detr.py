# SPDX-License-Identifier: Apache-2.0
"""DETR: one level, attention to all tokens, learned queries.

On the road of one image: the parts that ``models/detector.py`` calls.
"""

from collections.abc import Sequence

from torch import nn

from cpvt_det import defaults
from cpvt_det.layers.heads import MLP, class_head
from cpvt_det.models.detector import Detector
from cpvt_det.models.image_model import require_contract
from cpvt_det.models.necks import ProjectionNeck
from cpvt_det.models.queries import QueryEmbedding
from cpvt_det.models.transformer import Transformer
from cpvt_det.position.encoding import PositionEncoding


class DETR(Detector):
    """DETR over the last map of a backbone.

    Args:
        backbone: a module by the contract of :data:`cpvt_det.models.backbones.BACKBONE_REGISTRY`; of its maps the last is used.
        position: the encoder's position encoding.
        transformer: encoder and decoder of ``channels``.
        channels: C.
        num_queries: Q.
        num_logits: K', what the classification needs for K classes.
        decoder_position: encoding of the decoder's keys; ``"same"`` takes the encoder's additive embedding, ``None`` none.
        prior_probability: probability of every class at the start, for sigmoids; ``None`` for softmax.
        pixel_mean, pixel_std: mean and standard deviation per channel, in pixel values from 0 to 255.
        frozen: parts that are not trained, as of :meth:`Detector.freeze`.
        neck: neck of the user's own; ``None``: :class:`ProjectionNeck`.
        queries: query source of the user's own; ``None``: :class:`QueryEmbedding`.

    Raises:
        UnknownNameError: no part of this name to freeze.
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
        """The query source, by the name of its part."""
        return self.query_embed
