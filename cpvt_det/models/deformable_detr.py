# SPDX-License-Identifier: Apache-2.0
"""Deformable-DETR: images and padding mask in, predictions of every decoder layer, and of the encoder where it proposes, out.

On the road of one image: after ``structures.PaddedBatch``, before ``losses/`` in training and ``postprocess.py`` in evaluation.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.boxes import inverse_sigmoid
from cpvt_det.layers.norm import MaskedGroupNorm, group_count
from cpvt_det.models.deformable_transformer import DeformableTransformer
from cpvt_det.models.detector import Detector, box_head, class_head, full_precision
from cpvt_det.models.queries import LearnedQueries, ProposedQueries
from cpvt_det.ops.linear import Conv2d
from cpvt_det.position.registry import PositionEncoding
from cpvt_det.structures import Levels, Predictions, level_padding_mask


class DeformableDETR(Detector):
    """DETR over several levels, with deformable attention.

    Args:
        backbone: a module with ``strides``, ``channels`` and ``forward(images, padding_mask) -> list of maps``; all are used.
        position: the encoder's position encoding.
        transformer: encoder and decoder of ``channels`` and of ``num_levels``.
        channels: C.
        num_queries: Q.
        num_logits: K', what the classification needs for K classes.
        num_levels: L: the backbone's maps, and coarser ones, each by a strided convolution of the one before.
        box_refinement: every decoder layer corrects the boxes of the one before, with heads of its own.
        two_stage: queries are the encoder's best proposals.
        proposal_nms: the threshold of :class:`ProposedQueries`, for two stages.
        mask_padding: padded cells are left out of the projections' norms; ``False`` is the official arithmetic.
        prior_probability: of every class at the start, for sigmoids.
        pixel_mean, pixel_std: of the channels, in pixel values from 0 to 255.
        frozen: parts that are not trained, as of :meth:`Detector.freeze`.

    Raises:
        UnknownNameError: no part of this name to freeze.
        ValueError: no queries, fewer levels than maps, a transformer of another number of levels, two stages without box
            refinement, with channels that are no multiple of 4 or with an NMS threshold outside (0, 1].

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
        num_levels: int = 4,
        box_refinement: bool = False,
        two_stage: bool = False,
        proposal_nms: float = 1.0,
        mask_padding: bool = True,
        prior_probability: float | None = None,
        pixel_mean: Sequence[float] = (123.675, 116.28, 103.53),
        pixel_std: Sequence[float] = (58.395, 57.12, 57.375),
        frozen: Sequence[str] = (),
    ):
        super().__init__(backbone, num_queries, pixel_mean, pixel_std)
        if num_levels < len(backbone.strides):
            raise ValueError(f"num_levels is {num_levels}, fewer than the {len(backbone.strides)} maps of the backbone")
        if len(transformer.level_embed) != num_levels:
            raise ValueError(f"num_levels is {num_levels}, but the transformer has {len(transformer.level_embed)}")
        if two_stage and not box_refinement:
            raise ValueError("two stages need box refinement: proposals are boxes for the decoder to correct")
        extra = range(1, num_levels - len(backbone.strides) + 1)
        self.strides = [*backbone.strides, *(backbone.strides[-1] * 2**n for n in extra)]
        self.input_proj = nn.ModuleList(_projections(backbone.channels, channels, num_levels))
        self.mask_padding = mask_padding
        self.position = position
        self.transformer = transformer
        self.box_refinement = box_refinement
        layers = len(transformer.decoder.layers)
        # Without refinement one pair of heads serves every layer.
        heads = range(layers if box_refinement else 1)
        self.class_embed = nn.ModuleList(class_head(channels, num_logits, prior_probability) for _ in heads)
        # A first guess from a point starts small, one from a proposal at the proposal's size.
        self.bbox_embed = nn.ModuleList(box_head(channels, 0.0 if two_stage or n else -2.0) for n in heads)
        if two_stage:
            self.queries = ProposedQueries(channels, num_queries, num_logits, prior_probability, proposal_nms)
        else:
            self.queries = LearnedQueries(channels, num_queries)
        self.freeze(frozen)

    @property
    def size_divisibility(self) -> int:
        """Canvases are padded to a multiple of this: the largest stride, or what the backbone needs."""
        return math.lcm(max(self.strides), self.backbone.size_divisibility)

    def _detect(self, maps: list[Tensor], padding_mask: Tensor) -> Predictions:
        masks = [level_padding_mask(padding_mask, stride) for stride in self.strides]
        features = self._project(maps, masks)
        levels = Levels.from_masks(masks, full_precision(features[0]).dtype)
        memory = self.transformer.encode(features, self.position(features, masks), levels, self.position.inject)
        queries = self.queries(memory, levels)
        predictions = self.transformer.decoder(
            queries.content, queries.positions, queries.references, memory, levels, self._predict, self.box_refinement
        )
        predictions.proposals = queries.proposals
        return predictions

    def _project(self, maps: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        """Maps (B, C_l, H_l, W_l) -> every level (B, C, H_l, W_l), zero under the padding."""
        features = []
        x = maps[-1]
        for index, ((convolution, norm), mask) in enumerate(zip(self.input_proj, masks, strict=True)):
            source = maps[index] if index < len(maps) else x
            projected = norm(convolution(source), ~mask[:, None] if self.mask_padding else None)
            # Padded tokens are never seen again; zero keeps a non-finite one out of what follows.
            features.append(projected.masked_fill(mask[:, None], 0))
            if index >= len(maps):
                x = features[-1] if self.mask_padding else projected
        return features

    def _predict(self, layer: int, decoded: Tensor, references: Tensor) -> Predictions:
        """(B, Q, C) queries after a decoder layer, (B, Q, 2 or 4) references -> logits and boxes, in full precision."""
        head = layer if self.box_refinement else 0
        with torch.autocast(decoded.device.type, enabled=False):
            decoded, references = full_precision(decoded), full_precision(references)
            correction = self.bbox_embed[head](decoded)
            start = inverse_sigmoid(references)
            if references.shape[-1] == 2:  # a point has no size yet
                start = torch.cat((start, torch.zeros_like(start)), dim=-1)
            return Predictions(self.class_embed[head](decoded), (correction + start).sigmoid())


def _projections(map_channels: Sequence[int], channels: int, num_levels: int) -> list[nn.Sequential]:
    """One projection a level: 1x1 convolutions of the maps, then 3x3 ones of stride 2."""
    inputs = [*map_channels, map_channels[-1], *[channels] * num_levels][:num_levels]
    projections = []
    for index, width in enumerate(inputs):
        if index < len(map_channels):
            convolution = Conv2d(width, channels, kernel_size=1)
        else:
            convolution = Conv2d(width, channels, kernel_size=3, stride=2, padding=1)
        nn.init.xavier_uniform_(convolution.weight)
        nn.init.zeros_(convolution.bias)
        projections.append(nn.Sequential(convolution, MaskedGroupNorm(group_count(channels), channels)))
    return projections
