# SPDX-License-Identifier: Apache-2.0
"""Kinds of classification. Each defines a loss, a matching cost and a way to decode scores, which must be consistent."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpvt_det.common import defaults
from cpvt_det.common.registry import PartRegistry

CLASSIFICATION_REGISTRY = PartRegistry("CLASSIFICATION", "classification")
"""``MODEL.CRITERION.CLASSIFICATION.NAME`` -> builder, called with ``num_classes`` and the other keys of the node.

The interface is that of :class:`SoftmaxClassification`: ``num_classes``, ``num_logits``, ``prior_probability``, ``cost``, ``loss``,
``normalizer``, ``decode`` and ``predicted_object``, which must be consistent with each other. If a classification sets
``uses_overlaps``, its ``cost`` and ``loss`` also get the overlaps of boxes, as their third argument; see
``losses/overlap_classification.py``.
"""
SOFTPLUS_IS_LINEAR = 40.0  # linear from here on, to the last digit of float64; torch's own 20 is for float32


@CLASSIFICATION_REGISTRY.register_as("softmax")
class SoftmaxClassification:
    """One of K classes or none: K + 1 logits, the last for "no object".

    Args:
        num_classes: K.
        background_weight: weight of "no object" in the loss, at least 0. A low weight makes up for the many queries without an
            object.

    Raises:
        ValueError: a weight below 0.

    Source: arXiv 2005.12872, section 3.1; the weight from section A.4.
    """

    prior_probability = None
    uses_overlaps = False

    def __init__(self, num_classes: int, background_weight: float = defaults.BACKGROUND_WEIGHT):
        self.num_classes = num_classes
        self.num_logits = num_classes + 1
        require_between("background_weight", background_weight, 0)
        self.background_weight = background_weight

    def cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The cost of assigning a target to a query, up to a constant.

        Args:
            logits: (D, B, Q, K + 1) float.
            labels: (B, T) int64 in [0, K).

        Returns:
            (D, B, T, Q), minus the probability of the target's class.
        """
        return -pick_classes(logits.softmax(-1), labels)

    def loss(self, logits: Tensor, classes: Tensor) -> Tensor:
        """The weighted cross-entropy, summed over images and queries.

        Args:
            logits: (D, B, Q, K + 1) float.
            classes: (D, B, Q) int64 in [0, K], K = no object.

        Returns:
            (D,).
        """
        with torch.no_grad():
            index = classes[..., None]
            weights = torch.ones_like(index, dtype=logits.dtype).masked_fill_(index == self.num_classes, self.background_weight)
            slopes = logits.log_softmax(-1)
            losses = -weights * slopes.gather(-1, index)
            slopes.exp_()  # the slope of a cross-entropy by its logits: the probabilities, minus 1 at the true class
            slopes.scatter_(-1, index, slopes.gather(-1, index) - 1).mul_(weights)
        return PrecomputedGradient.apply(logits, losses.sum((1, 2, 3)), slopes)

    def normalizer(self, num_matched: Tensor, num_unmatched: Tensor, num_boxes: Tensor) -> Tensor:
        """The sum of the weights of all queries. Divided by it, the loss is a weighted mean."""
        return num_matched + self.background_weight * num_unmatched

    def decode(self, logits: Tensor, max_detections: int) -> tuple[Tensor, Tensor, Tensor]:
        """The best class of each query, for the queries with the highest scores in each image.

        Args:
            logits: (B, Q, K + 1) float.
            max_detections: maximum number of detections per image.

        Returns:
            Scores (B, n) float, best first; labels (B, n); query indices (B, n); n = min(Q, ``max_detections``).
        """
        scores, labels = logits.softmax(-1)[..., :-1].max(-1)
        scores, queries = scores.topk(min(max_detections, scores.shape[1]))
        return scores, labels.gather(1, queries), queries

    def predicted_object(self, logits: Tensor) -> Tensor:
        """Whether a query predicts an object: (..., K + 1) -> (...) bool."""
        return logits.argmax(-1) != self.num_classes


class SigmoidClassification:
    """Base class of all classifications by K independent sigmoids.

    Args:
        num_classes: K.
    """

    prior_probability = 0.01
    uses_overlaps = False

    def __init__(self, num_classes: int):
        self.num_classes = num_classes
        self.num_logits = num_classes

    def normalizer(self, num_matched: Tensor, num_unmatched: Tensor, num_boxes: Tensor) -> Tensor:
        """The number of boxes."""
        return num_boxes

    def decode(self, logits: Tensor, max_detections: int) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs of query and class with the highest scores; arguments and result as in :meth:`SoftmaxClassification.decode`."""
        flat = logits.sigmoid().flatten(1)  # (B, Q, K) -> (B, Q * K)
        scores, index = flat.topk(min(max_detections, flat.shape[1]))
        return scores, index % self.num_classes, index // self.num_classes

    def predicted_object(self, logits: Tensor) -> Tensor:
        """Whether a query predicts an object: (..., K) -> (...) bool."""
        return (logits > 0).any(-1)


@CLASSIFICATION_REGISTRY.register_as("focal")
class FocalClassification(SigmoidClassification):
    """K independent sigmoids with the focal loss.

    Args:
        num_classes: K.
        alpha: weight of positives, in [0, 1]; negatives have the weight 1 - alpha.
        gamma: focusing parameter, at least 0: a higher value gives easy examples less weight.

    Raises:
        ValueError: alpha or gamma out of range.

    Source: arXiv 1708.02002; the matching cost from arXiv 2010.04159, appendix A.4.
    """

    def __init__(self, num_classes: int, alpha: float = defaults.FOCAL_ALPHA, gamma: float = defaults.FOCAL_GAMMA):
        super().__init__(num_classes)
        require_between("alpha", alpha, 0, 1)
        require_between("gamma", gamma, 0)
        self.alpha = alpha
        self.gamma = gamma

    def cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The focal loss of a positive minus the focal loss of a negative; arguments as in :meth:`SoftmaxClassification.cost`."""
        return focal_cost(pick_classes(logits, labels).sigmoid_(), self.alpha, self.gamma)

    def loss(self, logits: Tensor, classes: Tensor) -> Tensor:
        """The focal loss, summed; arguments as in :meth:`SoftmaxClassification.loss`.

        All logits are first treated as negatives, then the few positives are corrected. Layers are computed one at a time, so that
        their values fit into a cache.
        """
        classes = classes[..., None]
        is_object, own = classes != self.num_classes, classes.clamp(max=self.num_classes - 1)
        sums, slopes = logits.new_empty(len(logits)), torch.empty_like(logits)
        with torch.no_grad():
            for x, total, slope, index, here in zip(logits, sums, slopes, own, is_object, strict=True):
                losses = self._negatives(x, 1 - self.alpha, slope)
                positive = -x.gather(-1, index)
                positive_slope = torch.empty_like(positive)
                positive_losses = self._negatives(positive, self.alpha, positive_slope)
                losses.scatter_(-1, index, torch.where(here, positive_losses, losses.gather(-1, index)))
                slope.scatter_(-1, index, torch.where(here, -positive_slope, slope.gather(-1, index)))
                total.copy_(losses.sum())
        return PrecomputedGradient.apply(logits, sums, slopes)

    def _negatives(self, x: Tensor, weight: float, slope: Tensor) -> Tensor:
        """weight * p^gamma * -log(1 - p) for p = sigmoid(x): the loss of negatives with logits x, or of positives with logits -x.

        Its slope, weight * p^gamma * (p + gamma * (1 - p) * -log(1 - p)), is written to ``slope``.
        """
        probability, entropy = x.sigmoid(), softplus(x)
        factor = (probability**self.gamma).mul_(weight)
        losses = factor * entropy
        entropy.mul_(self.gamma)
        torch.addcmul(entropy, entropy, probability, value=-1, out=slope).add_(probability).mul_(factor)
        return losses


class PrecomputedGradient(torch.autograd.Function):
    """Sums (D,) over logits (D, ...). The gradient is computed from given slopes, which have the logits' shape; nothing else is
    stored.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, sums: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * gradient.view(-1, *[1] * (slopes.ndim - 1)), None, None


Classification = SoftmaxClassification | SigmoidClassification


def make_classification(name: str, num_classes: int, **options: float) -> Classification:
    """The classification with this name.

    Raises:
        UnknownNameError: a name that is not registered.
    """
    return CLASSIFICATION_REGISTRY.build(name, {"num_classes": num_classes}, options)


def require_between(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Refuse a number outside its range; both ends are allowed.

    Raises:
        ValueError: a number outside its range, or NaN.
    """
    if not low <= value <= high:
        told = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name} must be {told}, got {value}")


def focal_cost(probability: Tensor, alpha: float = defaults.FOCAL_ALPHA, gamma: float = defaults.FOCAL_GAMMA) -> Tensor:
    """The focal loss of a positive with this probability minus the focal loss of a negative; same shape, without gradient."""
    rest = 1 - probability
    minus_positive = (probability + 1e-8).log_().mul_(rest**gamma)
    minus_negative = (rest + 1e-8).log_().mul_(probability**gamma)
    return minus_negative.mul_(1 - alpha).sub_(minus_positive, alpha=alpha)


def softplus(x: Tensor) -> Tensor:
    """-log(1 - p) for p = sigmoid(x), without gradient.

    The result is max(x, 0) + log(1 + y) for y = exp(-abs(x)). On a CPU with AVX-512, torch's ``log1p`` takes ten times as long as
    its ``log``. So on a CPU, log(1 + y) is computed as log(u) - ((u - 1) - y) / u for u = 1 + y. The quotient corrects the
    rounding of u.
    """
    if x.device.type != "cpu":
        return F.softplus(x, threshold=SOFTPLUS_IS_LINEAR)
    y = x.abs().neg_().exp_()
    u = y + 1
    y.sub_(u - 1).div_(u)
    return u.log_().add_(y).add_(x.relu())


def pick_classes(values: Tensor, labels: Tensor) -> Tensor:
    """The values of the target classes: (D, B, Q, K'), (B, T) -> (D, B, T, Q)."""
    layers, _, queries, _ = values.shape
    picked = values.gather(-1, labels[None, :, None].expand(layers, -1, queries, -1))
    return picked.transpose(2, 3).contiguous()
