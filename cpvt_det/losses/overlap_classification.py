# SPDX-License-Identifier: Apache-2.0
"""Kinds of classification whose scores also express how well a box fits. They use sigmoids whose targets depend on the overlap."""

import torch
from torch import Tensor

from cpvt_det.common import defaults
from cpvt_det.losses.classification import (
    CLASSIFICATION_REGISTRY,
    PrecomputedGradient,
    SigmoidClassification,
    focal_cost,
    pick_classes,
    require_between,
    softplus,
)


class OverlapClassification(SigmoidClassification):
    """K independent sigmoids p. The loss of an object's class is the cross-entropy with ``target``, times ``weight``. For all
    other classes it is the cross-entropy with 0, times ``factor`` p^``gamma``. Gradients treat targets and weights as constants,
    and p^gamma too unless ``is_focal`` is set. The matching cost is the focal cost of p u^(1/2), where u is the overlap. So if
    two boxes have the same score, the box that fits better never costs more. The loss itself would not work as a cost, because
    for a low score it is lower if the box fits worse.

    Args:
        num_classes: K.
        gamma: exponent of the scores of negatives.
        factor: weight of negatives.

    Source: the cost is from arXiv 2304.04742 (Stable-DINO), section 3.2, where u is the generalized IoU, scaled to [0, 1]. The
    code of RT-DETR, DEIM and Align-DETR matches by p alone.
    """

    uses_overlaps = True
    is_focal = False

    def __init__(self, num_classes: int, gamma: float, factor: float = 1.0):
        super().__init__(num_classes)
        self.gamma = gamma
        self.factor = factor

    def target(self, probabilities: Tensor, overlaps: Tensor) -> Tensor:
        """Target probabilities of the objects' classes, in [0, 1]; both arguments and the result have the same shape."""
        raise NotImplementedError

    def weight(self, overlaps: Tensor) -> Tensor:
        """Weights of positives, with the shape of the overlaps."""
        return torch.ones_like(overlaps)

    def cost(self, logits: Tensor, labels: Tensor, overlaps: Tensor) -> Tensor:
        """The cost of assigning a target to a query.

        Args:
            logits: (D, B, Q, K) float.
            labels: (B, T) int64 in [0, K).
            overlaps: (D, B, T, Q) float, intersection over union of the boxes, without gradient.

        Returns:
            (D, B, T, Q).
        """
        return focal_cost(pick_classes(logits, labels).sigmoid_().mul_(overlaps.sqrt()))

    def loss(self, logits: Tensor, classes: Tensor, overlaps: Tensor) -> Tensor:
        """The loss, summed over images and queries.

        Args:
            logits: (D, B, Q, K) float.
            classes: (D, B, Q) int64 in [0, K], K = no object.
            overlaps: (D, B, Q) float, intersection over union with the object's box, without gradient; it has no effect for
                queries without an object.

        Returns:
            (D,).
        """
        classes = classes[..., None]
        with torch.no_grad():
            is_object, index = classes != self.num_classes, classes.clamp(max=self.num_classes - 1)
            own, overlaps = logits.gather(-1, index), overlaps[..., None]
            probabilities, weights = own.sigmoid(), self.weight(overlaps)
            target = self.target(probabilities, overlaps)
            losses, slopes = self._negatives(logits)
            positive, positive_slope = weights * (softplus(own) - target * own), weights * (probabilities - target)
            losses.scatter_(-1, index, torch.where(is_object, positive, losses.gather(-1, index)))
            slopes.scatter_(-1, index, torch.where(is_object, positive_slope, slopes.gather(-1, index)))
        return PrecomputedGradient.apply(logits, losses.sum((1, 2, 3)), slopes)

    def _negatives(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of negatives, and their slopes."""
        slopes, losses = logits.sigmoid(), softplus(logits)
        weights = (slopes**self.gamma).mul_(self.factor)
        if self.is_focal:  # the slope of p^gamma is gamma p^gamma (1 - p)
            slopes = slopes + self.gamma * (1 - slopes) * losses
        return losses.mul_(weights), slopes.mul_(weights)


@CLASSIFICATION_REGISTRY.register_as("mal")
class MatchabilityClassification(OverlapClassification):
    """The matchability-aware loss: the target is the overlap to the power of gamma.

    Args:
        num_classes: K.
        gamma: exponent of the overlaps, and of the scores of negatives, at least 0.

    Raises:
        ValueError: a number out of its range.

    Source: arXiv 2412.04234 (DEIM), section 3.
    """

    def __init__(self, num_classes: int, gamma: float = defaults.MAL_GAMMA):
        require_between("gamma", gamma, 0)
        super().__init__(num_classes, gamma)

    def target(self, probabilities: Tensor, overlaps: Tensor) -> Tensor:
        return overlaps**self.gamma


@CLASSIFICATION_REGISTRY.register_as("varifocal")
class VarifocalClassification(OverlapClassification):
    """The varifocal loss: the overlap is both the target and the weight of a positive.

    Args:
        num_classes: K.
        alpha: weight of negatives, at least 0.
        gamma: exponent of the scores of negatives, at least 0.

    Raises:
        ValueError: a number out of its range.

    Source: arXiv 2008.13367, section 3.2; the defaults from arXiv 2304.08069 (RT-DETR).
    """

    def __init__(self, num_classes: int, alpha: float = defaults.VARIFOCAL_ALPHA, gamma: float = defaults.VARIFOCAL_GAMMA):
        require_between("alpha", alpha, 0)
        require_between("gamma", gamma, 0)
        super().__init__(num_classes, gamma, alpha)

    def target(self, probabilities: Tensor, overlaps: Tensor) -> Tensor:
        return overlaps

    def weight(self, overlaps: Tensor) -> Tensor:
        return overlaps


@CLASSIFICATION_REGISTRY.register_as("ia_bce")
class AlignClassification(OverlapClassification):
    """IoU-aware cross-entropy. The target is p^alpha u^(1 - alpha) for the overlap u, but at least 0.01. Negatives use focal
    loss.

    Args:
        num_classes: K.
        alpha: exponent of the score in the target, in [0, 1]; the overlap has the exponent 1 - alpha.
        gamma: exponent of the scores of negatives, at least 0.

    Raises:
        ValueError: a number out of its range.

    Source: arXiv 2304.07527 (Align-DETR), section 3.2, and IDEA-Research/detrex ``projects/align_detr/modeling/losses``.
    """

    is_focal = True
    LEAST = 0.01

    def __init__(self, num_classes: int, alpha: float = defaults.IA_BCE_ALPHA, gamma: float = defaults.IA_BCE_GAMMA):
        require_between("alpha", alpha, 0, 1)
        require_between("gamma", gamma, 0)
        super().__init__(num_classes, gamma)
        self.alpha = alpha

    def target(self, probabilities: Tensor, overlaps: Tensor) -> Tensor:
        return (probabilities**self.alpha * overlaps ** (1 - self.alpha)).clamp_(min=self.LEAST)
