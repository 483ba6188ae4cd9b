# SPDX-License-Identifier: Apache-2.0
"""Where Deformable-DETR's queries come from: learned, or the encoder's best proposals (two stages).

Source: arXiv 2010.04159, sections 4.1, 4.2 and A.4; names of parameters as in fundamentalvision/Deformable-DETR.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.boxes import cxcywh_to_xyxy
from cpvt_det.models.detector import box_head, class_head, full_precision
from cpvt_det.ops.linear import Linear
from cpvt_det.ops.nms import choose_apart
from cpvt_det.position.sine import sines
from cpvt_det.structures import Levels, Predictions

PADDED_LOGIT = -50.0  # of padded tokens: a probability of 2e-22, and no gradient; matched to an object, still a small loss
FINEST_SIDE = 0.05  # of a proposal on the finest level, in sides of the image; it doubles with every level


@dataclass
class Queries:
    """What the decoder starts from.

    Attributes:
        content: (B, Q, C) float.
        positions: (B, Q, C) float.
        references: (B, Q, 2) points or (B, Q, 4) boxes, cxcywh, in [0, 1] of the unpadded image.
        proposals: logits (1, B, N, K') and boxes (1, B, N, 4) of all tokens, where the queries were chosen from them.
    """

    content: Tensor
    positions: Tensor
    references: Tensor
    proposals: Predictions | None = None


class LearnedQueries(nn.Module):
    """The same queries for every image, each with a point of its own.

    Args:
        channels: C.
        num_queries: Q.
    """

    def __init__(self, channels: int, num_queries: int):
        super().__init__()
        self.query_embed = nn.Embedding(num_queries, 2 * channels)
        self.reference_points = Linear(channels, 2)
        nn.init.xavier_uniform_(self.reference_points.weight)
        nn.init.zeros_(self.reference_points.bias)

    def forward(self, memory: Tensor, levels: Levels) -> Queries:
        """(B, N, C) memory, of which only B counts -> the queries."""
        positions, content = self.query_embed.weight.expand(memory.shape[0], -1, -1).chunk(2, dim=-1)
        with torch.autocast(memory.device.type, enabled=False):
            references = self.reference_points(full_precision(positions)).sigmoid()
        return Queries(content, positions, references)


class ProposedQueries(nn.Module):
    """Every token of the memory proposes a box; those that most look like an object become the queries.

    What an object is, is learned on the logits of class 0; the classes themselves are the decoder's.

    Args:
        channels: C, a multiple of 4.
        num_queries: Q.
        num_logits: K'.
        prior_probability: of an object at the start.
        nms_threshold: proposals that overlap a better one by a larger intersection over union are chosen after all others
            (as in arXiv 2212.06137); 1 for none.

    Raises:
        ValueError: channels that are no multiple of 4, or a threshold outside (0, 1].
    """

    def __init__(
        self, channels: int, num_queries: int, num_logits: int, prior_probability: float | None, nms_threshold: float = 1.0
    ):
        super().__init__()
        if not 0 < nms_threshold <= 1:
            raise ValueError(f"the NMS threshold of proposals must be above 0 and at most 1, got {nms_threshold}")
        if channels % 4:
            raise ValueError(f"two stages need channels in multiples of 4, for the sines of a box's four numbers; got {channels}")
        self.num_queries = num_queries
        self.nms_threshold = nms_threshold
        self.enc_output = Linear(channels, channels)
        self.enc_output_norm = nn.LayerNorm(channels)
        self.class_embed = class_head(channels, num_logits, prior_probability)
        self.bbox_embed = box_head(channels, 0.0)
        self.pos_trans = Linear(2 * channels, 2 * channels)
        self.pos_trans_norm = nn.LayerNorm(2 * channels)
        for layer in (self.enc_output, self.pos_trans):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, memory: Tensor, levels: Levels) -> Queries:
        """Propose and choose.

        Args:
            memory: (B, N, C) float.
            levels: of its tokens.

        Returns:
            Q queries an image, whatever N is: an image of fewer tokens gets empty ones beside them.
        """
        proposals = self._propose(memory, levels)
        chosen = self._choose(proposals)
        references = proposals.boxes[0].gather(1, chosen[..., None].expand(-1, -1, 4)).detach()
        embedded = sines(references * (2 * math.pi), memory.shape[-1] // 2).flatten(-2)  # (B, Q, 4, C / 2) -> (B, Q, 2 C)
        positions, content = self.pos_trans_norm(self.pos_trans(embedded)).chunk(2, dim=-1)
        return Queries(content, positions, references, proposals)

    def _choose(self, proposals: Predictions) -> Tensor:
        """(B, Q) tokens, the best first."""
        scores = proposals.logits[0, ..., 0].detach()
        if self.nms_threshold == 1:
            return scores.topk(self.num_queries, dim=1).indices
        boxes = cxcywh_to_xyxy(proposals.boxes[0].detach())
        return choose_apart(boxes, scores, scores == PADDED_LOGIT, self.nms_threshold, self.num_queries)

    def _propose(self, memory: Tensor, levels: Levels) -> Predictions:
        """Logits (1, B, N', K') and boxes (1, B, N', 4), with N' = max(N, Q) for a choice of Q."""
        missing = torch.sym_max(0, self.num_queries - memory.shape[1])  # an exported program takes any number of tokens
        memory = F.pad(memory, (0, 0, 0, missing))
        anchors = F.pad(_anchors(levels), (0, 0, 0, missing))
        padded = F.pad(levels.padding_mask, (0, missing), value=True)[..., None]
        usable = ((anchors > 0.01) & (anchors < 0.99)).all(-1, keepdim=True) & ~padded
        tokens = self.enc_output_norm(self.enc_output(memory.masked_fill(~usable, 0)))
        with torch.autocast(memory.device.type, enabled=False):
            tokens = full_precision(tokens)
            logits = self.class_embed(tokens).masked_fill(padded, PADDED_LOGIT)
            # An infinite start makes the box of an unusable token a constant without gradient.
            start = anchors.masked_fill(~usable, 0.5).logit().masked_fill(~usable, math.inf)
            boxes = (self.bbox_embed(tokens) + start).sigmoid()
        return Predictions(logits[None], boxes[None])


def _anchors(levels: Levels) -> Tensor:
    """(B, N, 4) cxcywh in the frame of the unpadded image: the boxes that proposals start from."""
    centers = levels.centers()
    sides = [FINEST_SIDE * 2**level for level in range(len(levels.shapes))]
    cells = [height * width for height, width in levels.shapes]
    sizes = torch.cat([centers.new_full((count, 2), side) for side, count in zip(sides, cells, strict=True)])
    return torch.cat((centers, sizes.expand_as(centers)), dim=-1)
