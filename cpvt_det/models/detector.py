# SPDX-License-Identifier: Apache-2.0
"""The pipeline that all detectors share: backbone -> neck -> encoder -> queries -> decoder.

Place in the pipeline: after ``structures.PaddedBatch``, before ``losses/`` in training and ``evaluation/`` in evaluation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from cpvt_det.common.structures import Predictions, Targets
from cpvt_det.layers.heads import Heads
from cpvt_det.models.image_model import ImageModel, require_contract
from cpvt_det.position.encoding import PositionEncoding


@dataclass
class Memory:
    """The encoder's output for the decoder.

    Attributes:
        tokens: (B, N, C) float, values for the decoder's attention to the image.
        keys: (B, N, C) float, the tokens with positions added; the same object as ``tokens`` if there are no positions.
    """

    tokens: Tensor
    keys: Tensor


class Detector(ImageModel):
    """A detector made of five parts and a position encoding. DETR is the special case with one level and full attention.

    Parts are registered under the names of the official code, so that the official weights fit. For this reason the neck is
    ``input_proj``, and the decoder's heads belong to the detector and not to the decoder.

    Args:
        backbone: feature extractor; contract in :data:`cpvt_det.models.backbones.BACKBONE_REGISTRY`.
        neck: module that turns the maps into feature levels; contract in :data:`cpvt_det.models.necks.NECK_REGISTRY`.
        position: the encoder's position encoding.
        transformer: encoder and decoder; contract in :class:`cpvt_det.models.Transformer`.
        pixel_mean, pixel_std: mean and standard deviation per channel, in pixel values from 0 to 255.

    Attributes:
        strides: pixels per cell of each level of the transformer.
        size_divisibility: number that must divide the height and width of every canvas. It is the least common multiple of the
            largest stride and the backbone's ``size_divisibility``.

    Raises:
        TypeError: a part lacks an attribute that its contract requires.

    Subclasses register ``class_embed``, ``bbox_embed`` and their query source.
    """

    class_embed: nn.Module
    bbox_embed: nn.Module
    needs_references = True  # whether the decoder looks around points or boxes of the queries
    refine_boxes = False

    def __init__(
        self,
        backbone: nn.Module,
        neck: nn.Module,
        position: PositionEncoding,
        transformer: nn.Module,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ):
        super().__init__(backbone, pixel_mean, pixel_std)
        require_contract(neck, "neck", "strides")
        require_contract(transformer, "transformer", "encode", "decoder")
        self.input_proj = neck
        self.position = position
        self.transformer = transformer
        self.strides: list[int] = neck.strides
        self.size_divisibility = math.lcm(max(neck.strides), backbone.size_divisibility)

    @property
    def neck(self) -> nn.Module:
        """The neck; the official code registers it as ``input_proj``."""
        return self.input_proj

    @property
    def num_queries(self) -> int:
        """Q, which does not count training-only queries."""
        return self.queries.num_queries

    def forward(self, images: Tensor, padding_mask: Tensor, targets: Sequence[Targets] | None = None) -> Predictions:
        """Detect objects.

        Args:
            images: (B, 3, H, W) float, normalised; values under the padding do not matter.
            padding_mask: (B, H, W) bool, True = padded.
            targets: targets of the B images in training, for query sources that learn from them.

        Returns:
            Logits (D, B, Q, K') and boxes (D, B, Q, 4), cxcywh in [0, 1] of the unpadded image, in at least float32.

        Raises:
            TypeError: a mask that is not bool, or weights in half precision.
            ValueError: a mask of the wrong shape.
        """
        maps = self.backbone(self.without_padding(images, padding_mask), padding_mask)
        features, levels = self.input_proj(maps, padding_mask)  # the neck; zero under the padding
        memory = self.transformer.encode(features, levels, self.position)
        queries = self.queries(memory.tokens, levels, targets)
        heads = Heads(self.class_embed, self.bbox_embed, self.refine_boxes)
        return queries.split(self.transformer.decoder(queries, memory, levels, heads))
