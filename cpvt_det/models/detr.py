# SPDX-License-Identifier: Apache-2.0
"""DETR: images and padding mask in, predictions of every decoder layer out.

On the road of one image: after ``structures.PaddedBatch``, before ``losses/`` in training and ``postprocess.py`` in evaluation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.models.detector import MLP, Detector, class_head, flatten_levels, full_precision
from cpvt_det.models.transformer import Transformer
from cpvt_det.ops.linear import Conv2d
from cpvt_det.position.registry import PositionEncoding
from cpvt_det.structures import Predictions, level_padding_mask, may_be_padded


class DETR(Detector):
    """End-to-end detection: a backbone, a transformer over its last map, and two heads on every query.

    Args:
        backbone: a module with ``strides``, ``channels`` and ``forward(images, padding_mask) -> list of maps``; the last is used.
        position: the encoder's position encoding.
        transformer: encoder and decoder of ``channels``.
        channels: C.
        num_queries: Q.
        num_logits: K', what the classification needs for K classes.
        decoder_position: the encoding of the decoder's keys; ``"same"`` takes the encoder's additive embedding, ``None`` none.
        prior_probability: of every class at the start, for sigmoids.
        pixel_mean, pixel_std: of the channels, in pixel values from 0 to 255.
        frozen: parts that are not trained, as of :meth:`Detector.freeze`.

    Raises:
        UnknownNameError: no part of this name to freeze.
        ValueError: no queries.

    Source: arXiv 2005.12872.
    """

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
        pixel_mean: Sequence[float] = (123.675, 116.28, 103.53),
        pixel_std: Sequence[float] = (58.395, 57.12, 57.375),
        frozen: Sequence[str] = (),
    ):
        super().__init__(backbone, num_queries, pixel_mean, pixel_std)
        self.strides = [backbone.strides[-1]]
        self.input_proj = Conv2d(backbone.channels[-1], channels, kernel_size=1)
        self.position = position
        self.decoder_same = decoder_position == "same"
        self.decoder_position = None if self.decoder_same else decoder_position
        self.transformer = transformer
        self.query_embed = nn.Embedding(num_queries, channels)
        self.class_embed = class_head(channels, num_logits, prior_probability)
        self.bbox_embed = MLP(channels, channels, channels, 4)
        self.freeze(frozen)

    def _detect(self, maps: list[Tensor], padding_mask: Tensor) -> Predictions:
        features = self.input_proj(maps[-1])
        mask = level_padding_mask(padding_mask, self.strides[0])
        # Padded tokens are never seen again; zero keeps a non-finite one out of 0 * value in the attention.
        if may_be_padded(mask):
            features = features.masked_fill(mask[:, None], 0)
        return self._heads(self._transform(features, mask))

    def _transform(self, features: Tensor, mask: Tensor) -> Tensor:
        """(B, C, H, W) features and their (B, H, W) mask -> (D, B, Q, C) decoded queries."""
        positions = _additive(self.position, features, mask)
        key_positions = positions if self.decoder_same else _additive(self.decoder_position, features, mask)
        shapes = [tuple(features.shape[-2:])]
        mask = mask.flatten(1)
        memory = self.transformer.encoder(flatten_levels([features]), positions, mask, shapes, self.position.inject)
        queries = self.query_embed.weight.expand(memory.shape[0], -1, -1)
        return self.transformer.decoder(queries, memory, key_positions, mask)

    def _heads(self, decoded: Tensor) -> Predictions:
        """(D, B, Q, C) -> both heads of every layer, in full precision."""
        with torch.autocast(decoded.device.type, enabled=False):
            decoded = full_precision(decoded)
            return Predictions(self.class_embed(decoded), self.bbox_embed(decoded).sigmoid())


def _additive(position: PositionEncoding | None, features: Tensor, mask: Tensor) -> Tensor | None:
    """The additive embedding of one map, (B, H * W, C); ``None`` where there is none."""
    maps = None if position is None else position([features], [mask])
    return None if maps is None else flatten_levels(maps)
