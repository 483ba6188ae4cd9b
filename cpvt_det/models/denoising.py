# SPDX-License-Identifier: Apache-2.0
"""Contrastive denoising: in training, objects with noise are queries too, beside the real ones.

On the road of one image: a part of the query sources that start from boxes; the loss of these queries is ``loss_denoising_*``.

Source: arXiv 2203.03605, section 3.3, and arXiv 2203.01305, section 4; the arithmetic is that of IDEA-Research/DINO
``models/dino/dn_components.py``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from cpvt_det.boxes import cxcywh_to_xyxy, inverse_sigmoid, xyxy_to_cxcywh
from cpvt_det.models.queries import Queries
from cpvt_det.structures import Targets

NEAREST = 1e-3  # to 0 and 1, of a noised box's numbers, as in DINO's code


class ContrastiveDenoising(nn.Module):
    """Pairs of queries for every object, in groups: a positive, to find its object again, and a negative, to find none.

    A positive is the object's box with each corner moved by less than half a side, a negative by half a side to a whole one; its
    content is a learned vector of the class, which may be a wrong one. Every group holds all objects once. Groups do not see
    each other, and the other queries see none of them; they see the others. In an image with fewer objects than the largest
    number T of the batch, zeros fill up.

    Random numbers are drawn from torch's global generator, which a training step seeds with the run's seed, the iteration and
    the process.

    Args:
        channels: C.
        num_classes: K.
        pairs: number of pairs per image that groups are made for; there are max(1, ``pairs`` // T) groups.
        label_noise: twice the probability that a class is replaced by a random one; half of it, as in DINO.
        box_noise: factor on the distances by which corners move.

    Raises:
        ValueError: no class, no pair, or noise outside [0, 1] for labels or (0, 1] for boxes.
    """

    def __init__(self, channels: int, num_classes: int, pairs: int, label_noise: float = 0.5, box_noise: float = 1.0):
        super().__init__()
        if num_classes < 1 or pairs < 1:
            raise ValueError(f"denoising needs classes and pairs, got {num_classes} classes and {pairs} pairs")
        if not 0 <= label_noise <= 1:
            raise ValueError(f"label_noise must be from 0 to 1, got {label_noise}")
        if not 0 < box_noise <= 1:  # without noise, negatives are where positives are; with more, corners change sides
            raise ValueError(f"box_noise must be above 0 and at most 1, got {box_noise}")
        self.num_classes = num_classes
        self.pairs = pairs
        self.label_noise = label_noise
        self.box_noise = box_noise
        self.label_enc = nn.Embedding(num_classes, channels)

    def count(self, targets: Sequence[Targets]) -> tuple[int, int]:
        """The number of groups for a batch with these targets, and of queries in each."""
        most = max(map(len, targets))
        return max(1, self.pairs // max(1, most)), 2 * most

    def forward(self, queries: Queries, targets: Sequence[Targets], place: Callable[[Tensor], Tensor]) -> Queries:
        """Put the queries of denoising before others.

        Args:
            queries: the others, with boxes as references.
            targets: targets of the B images; some or all may have no object.
            place: function from (B, Q, 4) boxes to the (B, Q, C) positions of queries there.

        Returns:
            2 G T queries more, where G is the number of groups: group by group the positives, then the negatives, both in the order
            of the targets. None where no image has an object; the learned vectors then have gradients of zeros.
        """
        groups, size = self.count(targets)
        objects, labels, boxes = self.draw_noise(targets, queries.references.dtype)
        is_filler = objects.flatten(1)[..., None] < 0
        references = boxes.flatten(1, 3).masked_fill(is_filler, 0.5)
        content = self.label_enc(labels.flatten(1)).masked_fill(is_filler, 0)
        objects[:, :, 1] = -1
        return dataclasses.replace(
            queries,
            content=torch.cat((content.to(queries.content), queries.content), dim=1),
            positions=torch.cat((place(references), queries.positions), dim=1),
            references=torch.cat((references, queries.references), dim=1),
            attention_mask=_mask(queries, groups, size),
            num_denoising=groups * size,
            objects=objects.flatten(1),
            groups=groups,
        )

    @torch.no_grad()
    def draw_noise(self, targets: Sequence[Targets], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Noised objects of a batch, from torch's global generator.

        Args:
            targets: targets of the B images.
            dtype: dtype of the boxes.

        Returns:
            For G groups, positives before negatives, and the T objects: their indices (B, G, 2, T) int64, -1 for what fills up;
            labels (B, G, 2, T) int64, of which some are random; boxes (B, G, 2, T, 4), cxcywh in [0, 1].
        """
        labels = pad_sequence([target.labels for target in targets], batch_first=True)  # (B, T)
        boxes = pad_sequence([target.boxes_cxcywh for target in targets], batch_first=True).to(dtype)
        groups, most = self.count(targets)[0], labels.shape[1]
        counts = torch.tensor([len(target) for target in targets]).to(labels.device, non_blocking=True)
        objects = torch.arange(most, device=labels.device).expand_as(labels)
        objects = objects.masked_fill(objects >= counts[:, None], -1)[:, None, None].repeat(1, groups, 2, 1)  # (B, G, 2, T)
        labels = self._noised_labels(labels[:, None, None].expand_as(objects))
        return objects, labels, self._noised_boxes(boxes[:, None, None].expand(*objects.shape, 4))

    def _noised_labels(self, labels: Tensor) -> Tensor:
        """Labels, of which some are random ones."""
        others = torch.randint_like(labels, self.num_classes)
        return torch.where(torch.rand(labels.shape, device=labels.device) < 0.5 * self.label_noise, others, labels)

    def _noised_boxes(self, boxes: Tensor) -> Tensor:
        """(B, G, 2, T, 4) cxcywh boxes, positives before negatives -> with noise."""
        noise = 2 * torch.rand_like(boxes) - 1
        noise[:, :, 1] += noise[:, :, 1].sign()
        halves = 0.5 * boxes[..., 2:].repeat(1, 1, 1, 1, 2)
        corners = cxcywh_to_xyxy(boxes) + noise * halves * self.box_noise
        return inverse_sigmoid(xyxy_to_cxcywh(corners.clamp(0, 1)), NEAREST).sigmoid()


def _mask(queries: Queries, groups: int, size: int) -> Tensor | None:
    """The attention mask with groups of ``size`` queries each before others."""
    count, others = groups * size, queries.content.shape[1]
    if not count:
        return queries.attention_mask
    mask = queries.content.new_zeros(count + others, count + others)
    if queries.attention_mask is not None:
        mask[count:, count:] = queries.attention_mask
    mask[count:, :count] = -math.inf
    group = torch.arange(count, device=mask.device) // size
    mask[:count, :count] = mask[:count, :count].masked_fill(group[:, None] != group, -math.inf)
    return mask
