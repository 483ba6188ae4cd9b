# SPDX-License-Identifier: Apache-2.0
"""Contrastive denoising: in training, noised copies of the objects become extra queries next to the real ones.

Place in the pipeline: inside the query sources that start from boxes. The loss of these queries is ``loss_denoising_*``.

Source: arXiv 2203.03605, section 3.3, and arXiv 2203.01305, section 4; the arithmetic is that of IDEA-Research/DINO
``models/dino/dn_components.py``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from cpvt_det.common.boxes import cxcywh_to_xyxy, inverse_sigmoid, xyxy_to_cxcywh
from cpvt_det.common.structures import Targets
from cpvt_det.models.queries import Queries

NEAREST = 1e-3  # smallest distance of a noised box's numbers from 0 and 1, as in DINO's code


class ContrastiveDenoising(nn.Module):
    """Groups of query pairs, with one pair per object. The positive query of a pair must recover the object, and the negative
    query must find no object.

    For a positive, each corner of the object's box is moved by less than half a side. For a negative, each corner is moved by
    half a side to a whole side. The content of a query is the learned vector of the object's class, or of another class if label
    noise replaces the class. Every group contains each object once. Groups do not see each other. Every group sees the other
    queries, but the other queries see no group. T is the largest number of objects in an image of the batch. An image with fewer
    objects is padded with queries of zero content.

    Random numbers are drawn from torch's global generator, which a training step seeds with the run's seed, the iteration and
    the process.

    Args:
        channels: C.
        num_classes: K.
        pairs: target number of pairs per image; the number of groups is max(1, ``pairs`` // T).
        label_noise: twice the probability that a class is replaced by a random one, as in DINO.
        box_noise: factor for the distances by which corners are moved.

    Raises:
        ValueError: there is no class or no pair, label noise is outside [0, 1], or box noise is outside (0, 1].
    """

    def __init__(self, channels: int, num_classes: int, pairs: int, label_noise: float = 0.5, box_noise: float = 1.0):
        super().__init__()
        if num_classes < 1 or pairs < 1:
            raise ValueError(f"denoising needs at least one class and one pair, got {num_classes} classes and {pairs} pairs")
        if not 0 <= label_noise <= 1:
            raise ValueError(f"label_noise must be from 0 to 1, got {label_noise}")
        if not 0 < box_noise <= 1:  # at 0, negatives coincide with positives; above 1, corners may swap sides
            raise ValueError(f"box_noise must be above 0 and at most 1, got {box_noise}")
        self.num_classes = num_classes
        self.pairs = pairs
        self.label_noise = label_noise
        self.box_noise = box_noise
        self.label_enc = nn.Embedding(num_classes, channels)

    def count(self, targets: Sequence[Targets]) -> tuple[int, int]:
        """The number of groups for a batch with these targets, and the number of queries in each group."""
        most = max(map(len, targets))
        return max(1, self.pairs // max(1, most)), 2 * most

    def forward(self, queries: Queries, targets: Sequence[Targets], embed_boxes: Callable[[Tensor], Tensor]) -> Queries:
        """Put the denoising queries before the other queries.

        Args:
            queries: the other queries, with boxes as references.
            targets: targets of the B images; some or all may have no object.
            embed_boxes: function that turns (B, Q, 4) boxes into (B, Q, C) positions of queries.

        Returns:
            The queries, preceded by 2 G T denoising queries, where G is the number of groups. Each group has its positives first,
            then its negatives, both in the order of the targets. If no image has an object, no queries are added, and the learned
            vectors get zero gradients.
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
            positions=torch.cat((embed_boxes(references), queries.positions), dim=1),
            references=torch.cat((references, queries.references), dim=1),
            attention_mask=_mask(queries, groups, size),
            num_denoising=groups * size,
            objects=objects.flatten(1),
            groups=groups,
        )

    @torch.no_grad()
    def draw_noise(self, targets: Sequence[Targets], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Noised objects of a batch; the noise comes from torch's global generator.

        Args:
            targets: targets of the B images.
            dtype: dtype of the boxes.

        Returns:
            Three tensors for G groups and T objects, positives before negatives: object indices (B, G, 2, T) int64, -1 for
            fillers; labels (B, G, 2, T) int64, some of them replaced by random labels; and boxes (B, G, 2, T, 4), cxcywh in [0,
            1].
        """
        labels = pad_sequence([target.labels for target in targets], batch_first=True)  # (B, T)
        boxes = pad_sequence([target.boxes_cxcywh for target in targets], batch_first=True).to(dtype)
        groups, most = self.count(targets)[0], labels.shape[1]
        counts = torch.tensor([len(target) for target in targets]).to(labels.device, non_blocking=True)
        objects = torch.arange(most, device=labels.device).expand_as(labels)
        objects = objects.masked_fill(objects >= counts[:, None], -1)[:, None, None].repeat(1, groups, 2, 1)  # (B, G, 2, T)
        labels = labels[:, None, None].expand_as(objects)
        others = torch.randint_like(labels, self.num_classes)
        labels = torch.where(torch.rand(labels.shape, device=labels.device) < 0.5 * self.label_noise, others, labels)
        boxes = boxes[:, None, None].expand(*objects.shape, 4)  # (B, T, 4) -> (B, G, 2, T, 4)
        noise = 2 * torch.rand_like(boxes) - 1
        noise[:, :, 1] += noise[:, :, 1].sign()
        halves = 0.5 * boxes[..., 2:].repeat(1, 1, 1, 1, 2)
        corners = cxcywh_to_xyxy(boxes) + noise * halves * self.box_noise
        return objects, labels, inverse_sigmoid(xyxy_to_cxcywh(corners.clamp(0, 1)), NEAREST).sigmoid()


def _mask(queries: Queries, groups: int, size: int) -> Tensor | None:
    """The attention mask with ``groups`` groups of ``size`` denoising queries before the other queries."""
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
