# SPDX-License-Identifier: Apache-2.0
"""The loss for image classification: cross-entropy with the share of each class in an image, and with a teacher's answers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cpvt_det.losses.criterion import Losses


class ClassCriterion:
    """Cross-entropy with smoothed class shares. If there is a teacher, half of the loss is the cross-entropy with the teacher's
    best class.

    Args:
        smoothing: fraction of each label that is spread evenly over all classes.

    Raises:
        ValueError: a smoothing outside [0, 1).

    Source: label smoothing, arXiv 1512.00567, section 7; hard distillation, arXiv 2012.12877, equation 3. The teacher's half of
    the loss uses the head of the distillation token, if there is one.
    """

    def __init__(self, smoothing: float = 0.0):
        if not 0 <= smoothing < 1:
            raise ValueError(f"label smoothing must be from 0 to below 1, got {smoothing}")
        self.smoothing = smoothing

    def __call__(self, logits: Tensor, shares: Tensor, taught: Tensor | None = None, count: int | None = None) -> Losses:
        """Compare logits with shares.

        Args:
            logits: (H, B, K) float, as in :class:`cpvt_det.common.structures.ClassLogits`.
            shares: (B, K) float, the share of each class in each image; the shares of an image sum to 1.
            taught: (B,) int64, the teacher's best classes. ``None`` if there is no teacher; then the mean over the heads is
                compared with the shares.
            count: number of this process's images in the whole step, if this batch is only a part of it; ``None`` means B.

        Returns:
            ``loss_class``, ``loss_taught`` if there is a teacher, and ``metric_class_error``, the percentage of images whose best
            class is not the one with the largest share.
        """
        count = len(shares) if count is None else count
        if taught is None:
            losses = {"loss_class": self._cross_entropy(logits.mean(0), shares) / count}
        else:
            own, other = 0.5 * self._cross_entropy(logits[0], shares), 0.5 * F.cross_entropy(logits[-1], taught, reduction="sum")
            losses = {"loss_class": own / count, "loss_taught": other / count}
        with torch.no_grad():
            wrong = (logits.mean(0).argmax(-1) != shares.argmax(-1)).to(logits.dtype)
        return Losses(losses, {"metric_class_error": 100 * wrong.mean()}, logits.detach().sum((0, 2)).isfinite())

    def _cross_entropy(self, logits: Tensor, shares: Tensor) -> Tensor:
        return F.cross_entropy(logits, shares, reduction="sum", label_smoothing=self.smoothing)
