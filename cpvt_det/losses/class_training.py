# SPDX-License-Identifier: Apache-2.0
"""The loss of a classifier, with Mixup and CutMix on the batch and with a teacher.

The random numbers come from torch's random state, which the step sets from seed, iteration and process before it calls the model.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

from cpvt_det.common.structures import Sample
from cpvt_det.losses.criterion import Losses

Teacher = Callable[[Tensor], Tensor]
"""(B, 3, h, w) float images, RGB from 0 to 255 -> (B,) int64 in [0, K), the class with the highest score for each image."""


class BatchMixing:
    """Mixup or CutMix; if both are on, each is applied to half of the batches. An image is mixed with a randomly chosen image
    instead of its neighbour in the batch, because the neighbour may be a copy of the same image (``INPUT.CLASSIFY.REPEATS``).

    Args:
        num_classes: K.
        mixup, cutmix: parameter of the Beta distribution from which an image's share in the mixture is drawn; 0 switches the method
            off.

    Raises:
        ValueError: a negative parameter.

    Source: arXiv 1710.09412 and arXiv 1905.04899, switched as in arXiv 2012.12877.
    """

    def __init__(self, num_classes: int, mixup: float = 0.0, cutmix: float = 0.0):
        if min(mixup, cutmix) < 0:
            raise ValueError(f"Mixup and CutMix must be at least 0 (0 for none), got {mixup} and {cutmix}")
        self.num_classes = num_classes
        kinds = [
            kind(alpha=float(alpha), num_classes=num_classes) for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix)) if alpha
        ]
        self._mix = v2.RandomChoice(kinds) if kinds else None

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the images of a batch.

        Args:
            images: (B, 3, h, w) float, of one size, without padding.
            labels: (B,) int64.

        Returns:
            The mixed images, in a different order, and the share of each class in each image, (B, K) float.
        """
        if self._mix is None or len(images) < 2:
            return images, F.one_hot(labels, self.num_classes).to(images.dtype)
        order = torch.randperm(len(images)).to(images.device)
        mixed, shares = self._mix(images[order], labels[order])  # torchvision mixes neighbours
        return mixed, shares.to(images.dtype)


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


class ClassTrainingModel(nn.Module):
    """A classifier and its loss as one module, so that one call of a wrapper (DDP) computes the losses.

    Args:
        detector: classifier; checkpoints contain its state dict.
        criterion: loss; it has no parameters.
        mixing: Mixup and CutMix.
        teacher: model to learn from; it is not registered as a submodule. ``None`` for no teacher.
    """

    def __init__(self, detector: nn.Module, criterion: ClassCriterion, mixing: BatchMixing, teacher: Teacher | None = None):
        super().__init__()
        self.detector = detector
        self.criterion = criterion
        self.mixing = mixing
        self._teacher = (teacher,)  # in a tuple, so that it gets no gradients, no training mode and is not in the state dict

    def forward(self, samples: Sequence[Sample], normalizers: int | None = None) -> Losses:
        """The losses of samples of one size with ``image`` and ``targets``; ``normalizers`` is a result of :meth:`normalizers`."""
        batch = self.detector.preprocess([sample["image"] for sample in samples])
        height, width = batch.image_sizes[0]
        labels = torch.cat([sample["targets"].labels for sample in samples]).to(batch.images.device)
        valid, shares = self.mixing(batch.images[:, :, :height, :width], labels)
        images = batch.images.clone()
        images[:, :, :height, :width] = valid
        predictions = self.detector(images, batch.padding_mask)
        (teacher,) = self._teacher
        taught = None if teacher is None else teacher(valid * self.detector.pixel_std + self.detector.pixel_mean)
        return self.criterion(predictions.logits, shares, taught, normalizers)

    def normalizers(self, samples: Sequence[Sample]) -> int:
        """The divisor of the loss of a whole step, for calls of :meth:`forward` with only a part of the step's samples."""
        return len(samples)
