# SPDX-License-Identifier: Apache-2.0
"""D-FINE's decoder. Its layers do not refine a box, but a distribution of the distance by which each side of a first box moves.

Place in the pipeline: after the queries; the losses for the distributions are in ``losses/terms.py``.

Source: arXiv 2410.13842, section 4; names of parameters as in Peterande/D-FINE.
"""

import torch
from torch import Tensor, nn

from cpvt_det.common.boxes import xyxy_to_cxcywh
from cpvt_det.common.structures import BoxDistributions, Levels, Predictions
from cpvt_det.layers.attention import DeformableAttention
from cpvt_det.layers.heads import MLP, Heads, box_head, full_precision, without_autocast
from cpvt_det.models.deformable_detr import DeformableDecoderLayer, layers_in_evaluation
from cpvt_det.models.detector import Memory
from cpvt_det.models.queries import Queries

FARTHEST_POSITION = 10.0  # limit of the numbers in queries' positions, as in the authors' code
NUM_LARGEST = 4  # how many of the largest probabilities of a side estimate a box's quality, together with their mean
QUALITY_CHANNELS = 64  # inner channels of the estimate


class Gate(nn.Module):
    """The sum of queries and their attention output, each multiplied by a gate that depends on both, followed by a norm.

    Args:
        channels: C.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.gate = nn.Linear(2 * channels, 2 * channels)
        self.norm = nn.LayerNorm(channels)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, queries: Tensor, attended: Tensor) -> Tensor:
        """Twice (B, Q, C) -> (B, Q, C)."""
        gates = self.gate(torch.cat((queries, attended), dim=-1)).sigmoid().chunk(2, dim=-1)
        return self.norm(gates[0] * queries + gates[1] * attended)


class GatedDecoderLayer(DeformableDecoderLayer):
    """A decoder layer whose attention to the image has no projections, and has a gate in place of the residual connection.

    Args:
        channels, num_heads, ffn_channels, dropout, num_levels, num_points, implementation: as in
            :class:`cpvt_det.models.deformable_detr.DeformableDecoderLayer`.
    """

    def __init__(self, channels: int, num_heads: int, ffn_channels: int, dropout: float, *attention):
        super().__init__(channels, num_heads, ffn_channels, dropout, *attention)
        self.cross_attn = DeformableAttention(channels, num_heads, *attention, has_projections=False)
        del self.norm1
        self.gateway = Gate(channels)

    def forward(
        self,
        queries: Tensor,
        positions: Tensor,
        reference_points: Tensor,
        memory: Tensor,
        levels: Levels,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """One layer; arguments and result as in :meth:`DeformableDecoderLayer.forward`."""
        placed = queries + positions
        attended = self.self_attn(placed, placed, queries, attention_mask=attention_mask)
        queries = self.norm2(queries + self.dropout(attended))
        attended = self.cross_attn(queries + positions, reference_points, memory, levels)
        queries = self.gateway(queries, self.dropout(attended))
        return self.norm3(queries + self.dropout(self.feed_forward(self.linear1, self.linear2, queries)))


class QualityHead(nn.Module):
    """Estimate a box's quality from the shape of its four distributions, and add it to the logits of all classes."""

    def __init__(self):
        super().__init__()
        self.reg_conf = MLP(4 * (NUM_LARGEST + 1), QUALITY_CHANNELS, 1)
        nn.init.zeros_(self.reg_conf.layers[-1].weight)
        nn.init.zeros_(self.reg_conf.layers[-1].bias)

    def forward(self, logits: Tensor, sides: Tensor) -> Tensor:
        """Logits of classes (B, Q, K') and of bins (B, Q, 4, N + 1) -> (B, Q, K')."""
        largest = sides.softmax(-1).topk(NUM_LARGEST, dim=-1).values
        seen = torch.cat((largest, largest.mean(-1, keepdim=True)), dim=-1)
        return logits + self.reg_conf(seen.flatten(-2))


class DistributionDecoder(nn.Module):
    """Decoder layers, each followed by the heads. Box heads change the logits of N + 1 bins for each of the four sides.

    Args:
        num_layers: D, at least 1.
        layer: arguments of :class:`GatedDecoderLayer`.
        num_bins: N, even and at least 4.
        scale: number by which the first box's width and height are divided. The quotients are the units in which the sides move.
        reach: half of the largest distance that a side can move, in widths or heights of the first box.
        eval_layers: number of layers, counted from the first, that run in evaluation; 0 for all.

    Raises:
        ValueError: there is no layer, there are fewer layers than ``eval_layers``, the number of bins is odd or below 4, or the
            scale is not above 0.
    """

    def __init__(self, num_layers: int, *layer, num_bins: int = 32, scale: float = 4.0, reach: float = 0.5, eval_layers: int = 0):
        super().__init__()
        self.eval_layers = layers_in_evaluation(num_layers, eval_layers)
        if num_bins < 4 or num_bins % 2:
            raise ValueError(f"distributions need an even number of bins, at least 4, got {num_bins}")
        if not scale > 0:
            raise ValueError(f"the scale of distributions must be above 0, got {scale}")
        self.num_bins = num_bins
        self.layers = nn.ModuleList(GatedDecoderLayer(*layer) for _ in range(num_layers))
        self.lqe_layers = nn.ModuleList(QualityHead() for _ in range(num_layers))
        self.pre_bbox_head = box_head(layer[0], 0.0)
        # Buffers, because loaded weights contain their own values, which may differ from the config's.
        self.register_buffer("reg_scale", torch.tensor([scale]))
        self.register_buffer("up", torch.tensor([reach]))

    def values(self) -> Tensor:
        """(N + 1,) float: the distances that the bins stand for, which are closest together near 0."""
        end = self.up * self.reg_scale
        base = (end + 1) ** (2 / (self.num_bins - 2))
        right = base ** torch.arange(1, self.num_bins // 2, device=end.device) - 1
        return torch.cat((-2 * end, -right.flip(0), torch.zeros_like(end), right, 2 * end))

    def forward(self, queries: Queries, memory: Memory, levels: Levels, heads: Heads) -> Predictions:
        """Decode.

        Args:
            queries: output of a query source, with boxes as references.
            memory: output of the encoder.
            levels: layout of the memory's tokens.
            heads: the heads of all layers.

        Returns:
            Logits (D, B, Q, K') and boxes (D, B, Q, 4). In training, both have an additional first entry: the boxes that all
            layers start from, with the first layer's class logits. The distributions of the layers are then returned, too.
        """
        decoded, positions, references = queries.content, queries.positions, queries.references
        values, outputs, sides, earlier = self.values(), [], [], 0
        for index, layer in enumerate(self.layers if self.training else self.layers[: self.eval_layers]):
            positions = positions.clamp(-FARTHEST_POSITION, FARTHEST_POSITION)
            points = levels.to_level_coordinates(references)
            decoded = layer(decoded, positions, points, memory.tokens, levels, queries.attention_mask)
            if index == 0:
                first = Heads(heads.class_embed, self.pre_bbox_head)(decoded, references)
                start = first.boxes.detach()
            with without_autocast(decoded):
                change = heads.bbox_embed[index](full_precision(decoded + earlier)).unflatten(-1, (4, -1))
                sides.append(sides[-1] + change if sides else change)
                boxes = self._boxes(start, sides[-1].softmax(-1) @ values)
                logits = self.lqe_layers[index](heads.class_embed[index](full_precision(decoded)), sides[-1])
            outputs.append((logits, boxes.clamp(0, 1)))
            references, earlier = boxes.detach(), decoded.detach()
            positions = positions if queries.embed_boxes is None else queries.embed_boxes(references, decoded)
        if not self.training:
            return Predictions(*map(torch.stack, zip(*outputs, strict=True)))
        made = BoxDistributions(torch.stack(sides), start, values.detach(), self.reg_scale[0])
        outputs = [(first.logits, first.boxes), *outputs]
        return Predictions(*map(torch.stack, zip(*outputs, strict=True)), distributions=made)

    def _boxes(self, start: Tensor, distances: Tensor) -> Tensor:
        """First boxes (B, Q, 4) and distances of their sides (B, Q, 4) -> boxes (B, Q, 4), not limited to the image."""
        reached = (self.reg_scale / 2 + distances) * start[..., 2:].repeat(1, 1, 2) / self.reg_scale
        centers = start[..., :2]
        return xyxy_to_cxcywh(torch.cat((centers - reached[..., :2], centers + reached[..., 2:]), dim=-1))
