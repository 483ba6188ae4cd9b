# SPDX-License-Identifier: Apache-2.0
"""Query sources: the decoder starts either from learned queries or from the encoder's best proposals (two stages).

Place in the pipeline: after the encoder, before the decoder.

Source: arXiv 2005.12872, section 3.2; arXiv 2010.04159, sections 4.1, 4.2 and A.4; names of parameters as in the official code.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.boxes import cxcywh_to_xyxy
from cpvt_det.common.registry import PartRegistry
from cpvt_det.common.structures import PROPOSAL_LABEL, Levels, Predictions, Targets
from cpvt_det.layers.heads import box_head, class_head, full_precision, without_autocast
from cpvt_det.ops.nms import nms_topk
from cpvt_det.position.sine import sines

PADDED_LOGIT = -50.0  # logit of padded tokens: probability 2e-22, no gradient, and a small loss even if matched to an object
FINEST_SIDE = 0.05  # side of a proposal on the finest level, as a fraction of the image's side; it doubles with every level


QUERY_REGISTRY = PartRegistry("QUERIES", "query source")
"""Name -> builder of a query source. It is called with the options of ``MODEL.QUERIES``, and with whichever of these arguments its
signature names: ``channels``, ``num_queries``, ``num_logits``, ``prior_probability`` and ``needs_references`` (whether the decoder
looks around points).

The contract of a query source, an ``nn.Module``: ``num_queries``, Q; and ``forward(memory, levels, targets=None) -> Queries``. Its
arguments are the (B, N, C) tokens of the encoder's memory, their :class:`Levels`, and in training the targets of the B images.
"""


@dataclass
class Queries:
    """The queries that the decoder starts from.

    Attributes:
        content: (B, Q, C) float.
        positions: (B, Q, C) float.
        references: (B, Q, 2) points or (B, Q, 4) boxes, cxcywh, in [0, 1] of the unpadded image; ``None`` where the decoder
            attends to all tokens.
        proposals: logits (1, B, N, K') and boxes (1, B, N, 4) of all tokens, or only of the chosen tokens. ``None`` if the
            queries were not chosen from tokens.
        attention_mask: (Q, Q) float, added to the scores of the queries' self-attention; -inf where a query must not see another.
            ``None`` lets all queries see each other.
        num_denoising: number of denoising queries. They come first, and exist only in training, for the loss.
        objects: (B, ``num_denoising``) int64, index of the target that each denoising query stands for. -1 if it stands for no
            target, as negatives do.
        groups: number of times that each target occurs in ``objects``.
        num_hybrid: number of queries of the hybrid branch. These queries come last and exist only in training. The loss matches
            each object with several of them.
        embed_boxes: function that takes the (B, Q, 4) boxes corrected by a decoder layer and the (B, Q, C) queries that it
            decoded, and returns the (B, Q, C) positions in the next layer; ``None`` leaves positions unchanged.
    """

    content: Tensor
    positions: Tensor
    references: Tensor | None = None
    proposals: Predictions | None = None
    attention_mask: Tensor | None = None
    num_denoising: int = 0
    objects: Tensor | None = None
    groups: int = 1
    num_hybrid: int = 0
    embed_boxes: Callable[[Tensor, Tensor], Tensor] | None = None

    def split(self, predictions: Predictions) -> Predictions:
        """Separate the decoder's predictions (D, B, Q, ...) of training-only queries, which only the loss uses, from the others.

        Raises:
            ValueError: denoising queries without their objects.
        """
        if self.objects is None and not self.num_denoising + self.num_hybrid:
            return dataclasses.replace(predictions, proposals=self.proposals)
        expected = (predictions.logits.shape[1], self.num_denoising)
        if self.num_denoising and (self.objects is None or self.objects.shape != expected):
            raise ValueError(
                f"with {self.num_denoising} denoising queries, objects must have shape {expected}: target indices, or -1"
            )
        denoising = None
        if self.objects is not None:
            learned = predictions.part(0, self.num_denoising)
            denoising = dataclasses.replace(learned, objects=self.objects, groups=self.groups)
        own = (self.num_denoising, -self.num_hybrid or None)
        return dataclasses.replace(
            predictions.part(*own),
            proposals=self.proposals,
            denoising=denoising,
            hybrid=predictions.part(-self.num_hybrid, None) if self.num_hybrid else None,
        )


class QueryEmbedding(nn.Embedding):
    """DETR's queries. Each query has a learned position, which is the same for every image, and a content that is zero at first.

    Args:
        channels: C.
        num_queries: Q.

    Raises:
        ValueError: no queries.
    """

    def __init__(self, channels: int, num_queries: int):
        super().__init__(at_least_one(num_queries), channels)
        self.num_queries = num_queries

    def forward(self, memory: Tensor, levels: Levels, targets: Sequence[Targets] | None = None) -> Queries:
        """The queries; only the batch size B of the (B, N, C) memory matters."""
        positions = self.weight.expand(memory.shape[0], -1, -1)
        return Queries(torch.zeros_like(positions), positions)


class LearnedQueries(nn.Module):
    """The same learned queries for every image, each with its own reference point.

    Args:
        channels: C.
        num_queries: Q.

    Raises:
        ValueError: no queries.
    """

    def __init__(self, channels: int, num_queries: int):
        super().__init__()
        self.num_queries = at_least_one(num_queries)
        self.query_embed = nn.Embedding(num_queries, 2 * channels)
        self.reference_points = nn.Linear(channels, 2)
        nn.init.xavier_uniform_(self.reference_points.weight)
        nn.init.zeros_(self.reference_points.bias)

    def forward(self, memory: Tensor, levels: Levels, targets: Sequence[Targets] | None = None) -> Queries:
        """The queries; only the batch size B of the (B, N, C) memory matters."""
        positions, content = self.query_embed.weight.expand(memory.shape[0], -1, -1).chunk(2, dim=-1)
        with without_autocast(memory):
            references = self.reference_points(full_precision(positions)).sigmoid()
        return Queries(content, positions, references)


@QUERY_REGISTRY.register_as("learned")
def learned_queries(channels: int, num_queries: int, needs_references: bool) -> nn.Module:
    """:class:`LearnedQueries` for a decoder that samples around points, :class:`QueryEmbedding` for one that sees all tokens."""
    return (LearnedQueries if needs_references else QueryEmbedding)(channels, num_queries)


@QUERY_REGISTRY.register_as("proposals")
class ProposedQueries(nn.Module):
    """Every token of the memory proposes a box. The proposals that look most like objects become the queries.

    Objectness is learned on the logits of class 0. The decoder predicts the classes.

    Args:
        channels: C, a multiple of 4.
        num_queries: Q.
        num_logits: K'.
        prior_probability: initial probability of an object.
        nms_threshold: if a proposal's intersection over union with a better proposal exceeds this threshold, the proposal is
            chosen only after all others (as in arXiv 2212.06137). 1 switches this off.
        class_proposals: whether proposals have classes and are chosen by the score of their best class. The loss then sees only
            the chosen proposals, as in DINO's code.
        hybrid: number of additional training-only queries, made from the next-best proposals. The loss matches each object with
            several of these queries. The additional queries and the other queries do not see each other (arXiv 2207.13080,
            section 3).
        denoising: module that puts training-only queries before the others, such as
            :class:`cpvt_det.models.denoising.ContrastiveDenoising` (in a config, its number of pairs per image); ``None`` for no
            such queries.

    Raises:
        ValueError: channels that are not a multiple of 4, a threshold outside (0, 1], no queries, or a negative ``hybrid``.
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
    ):
        super().__init__()
        if hybrid < 0:
            raise ValueError(f"the number of queries of the hybrid branch must be at least 0, got {hybrid}")
        if not 0 < nms_threshold <= 1:
            raise ValueError(f"the NMS threshold of proposals must be above 0 and at most 1, got {nms_threshold}")
        if channels % 4:
            raise ValueError(
                "two-stage queries need channels in multiples of 4, because each of a box's four numbers is encoded; got "
                f"{channels}"
            )
        self.channels = channels
        self.num_queries = at_least_one(num_queries)
        self.nms_threshold = nms_threshold
        self.class_proposals = class_proposals
        self.hybrid = hybrid
        self.enc_output = nn.Linear(channels, channels)
        self.enc_output_norm = nn.LayerNorm(channels)
        self.class_embed = class_head(channels, num_logits, prior_probability)
        self.bbox_embed = box_head(channels, 0.0)
        self.pos_trans = nn.Linear(2 * channels, 2 * channels)
        self.pos_trans_norm = nn.LayerNorm(2 * channels)
        for layer in (self.enc_output, self.pos_trans):
            nn.init.xavier_uniform_(layer.weight)
        self.denoising = denoising

    def forward(self, memory: Tensor, levels: Levels, targets: Sequence[Targets] | None = None) -> Queries:
        """Make proposals and choose the queries among them.

        Args:
            memory: (B, N, C) float.
            levels: layout of the tokens.
            targets: targets of the B images, in training. Without them, there are no training-only queries.

        Returns:
            Q queries per image. If there are fewer than Q tokens, empty tokens are added. In training, denoising queries come
            before the Q queries, and the queries of the hybrid branch come after them.
        """
        learning = self.training and targets is not None
        hybrid = self.hybrid if learning else 0
        count = self.num_queries + hybrid
        tokens, starts, logits = self._score(memory, levels, count)
        # Neither the loss nor NMS sees the boxes of tokens that are not chosen. The choice below keeps these in their order.
        if self.class_proposals and self.nms_threshold == 1:
            chosen = self._choose(logits, None, count)
            tokens, starts, logits = (_pick(part, chosen) for part in (tokens, starts, logits))
        with without_autocast(memory):
            boxes = (self.bbox_embed(tokens) + starts).sigmoid()
        chosen = self._choose(logits, boxes, count)
        references = _pick(boxes, chosen).detach()
        if self.class_proposals:
            logits, boxes = _pick(logits, chosen), _pick(boxes, chosen)
        proposals = Predictions(logits[None], boxes[None], by_class=self.class_proposals)
        queries = self._queries(references, proposals, _pick(tokens, chosen).detach())
        if hybrid:  # the queries of this branch, which come last, and the other queries do not see each other
            mask = queries.content.new_zeros(count, count)
            mask[-hybrid:, :-hybrid] = mask[:-hybrid, -hybrid:] = -math.inf
            queries = dataclasses.replace(queries, attention_mask=mask, num_hybrid=hybrid)
        return self.denoising(queries, targets, self.embed_boxes) if learning and self.denoising is not None else queries

    def embed_boxes(self, boxes: Tensor) -> Tensor:
        """Compute the positions of queries.

        Args:
            boxes: (B, Q, 4) float, cxcywh in [0, 1] of the unpadded image.

        Returns:
            (B, Q, C).
        """
        return self._transform(boxes).chunk(2, dim=-1)[0]

    def _queries(self, references: Tensor, proposals: Predictions, tokens: Tensor) -> Queries:
        """Queries at (B, Q, 4) boxes that were proposed by (B, Q, C) tokens."""
        positions, content = self._transform(references).chunk(2, dim=-1)
        return Queries(content, positions, references, proposals)

    def _transform(self, boxes: Tensor) -> Tensor:
        """(B, Q, 4) boxes -> (B, Q, 2 C): positions and contents of the queries at these boxes."""
        return self.pos_trans_norm(self.pos_trans(sines_of_boxes(boxes, self.channels // 2)))

    def _choose(self, logits: Tensor, boxes: Tensor | None, count: int) -> Tensor:
        """Indices (B, ``count``) of the chosen tokens, the best first. The choice is by (B, N', K') logits and, for NMS, (B, N',
        4) boxes.
        """
        logits = logits.detach()
        scores = logits.amax(-1) if self.class_proposals else logits[..., PROPOSAL_LABEL]
        if self.nms_threshold == 1:
            return scores.topk(count, dim=1).indices
        boxes = cxcywh_to_xyxy(boxes.detach())
        return nms_topk(boxes, scores, scores == PADDED_LOGIT, self.nms_threshold, count)

    def _score(self, memory: Tensor, levels: Levels, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute three things that proposals are made from: tokens (B, N', C), the boxes that proposals start from, as logits
        (B, N', 4), and the class logits of the proposals (B, N', K'). N' is max(N, ``count``), so that ``count`` proposals can be
        chosen.
        """
        missing = count - memory.shape[1]
        # An exported program takes any number of tokens; torch 2.9 cannot compile sym_max of plain numbers.
        missing = torch.sym_max(0, missing) if isinstance(missing, torch.SymInt) else max(0, missing)
        memory = F.pad(memory, (0, 0, 0, missing))
        centers = levels.centers()
        sizes = [
            centers.new_full((height * width, 2), FINEST_SIDE * 2**level) for level, (height, width) in enumerate(levels.shapes)
        ]
        anchors = torch.cat((centers, torch.cat(sizes).expand_as(centers)), dim=-1)  # (B, N, 4), cxcywh of the unpadded image
        anchors = F.pad(anchors, (0, 0, 0, missing))
        padded = F.pad(levels.padding_mask, (0, missing), value=True)[..., None]
        usable = ((anchors > 0.01) & (anchors < 0.99)).all(-1, keepdim=True) & ~padded
        tokens = self.enc_output_norm(self.enc_output(memory.masked_fill(~usable, 0)))
        with without_autocast(memory):
            tokens = full_precision(tokens)
            logits = self.class_embed(tokens).masked_fill(padded, PADDED_LOGIT)
            # An infinite start turns the box of an unusable token into a constant without gradient.
            starts = anchors.masked_fill(~usable, 0.5).logit().masked_fill(~usable, math.inf)
        return tokens, starts, logits


def sines_of_boxes(boxes: Tensor, channels: int) -> Tensor:
    """Encode the four numbers of each box by sines and cosines.

    Args:
        boxes: (..., 4) float in [0, 1].
        channels: number of sines and cosines per number of a box, even.

    Returns:
        (..., 4 ``channels``): all values of one number of the box, then all values of the next number.
    """
    return sines(boxes * (2 * math.pi), channels).flatten(-2)


def _pick(values: Tensor, tokens: Tensor) -> Tensor:
    """(B, N, C) values and (B, Q) indices of tokens -> (B, Q, C)."""
    return values.gather(1, tokens[..., None].expand(-1, -1, values.shape[-1]))


def at_least_one(num_queries: int) -> int:
    """Return the number of queries, if it is at least 1.

    Raises:
        ValueError: a number below 1.
    """
    if num_queries < 1:
        raise ValueError(f"num_queries must be at least 1, got {num_queries}")
    return num_queries
