# SPDX-License-Identifier: Apache-2.0
"""Stochastic depth: in training, randomly chosen images skip a part of a layer."""

from torch import Tensor, nn


class DropPath(nn.Module):
    """Leaves out a residual branch for some images of a batch, and scales it up accordingly for the others.

    Args:
        probability: probability that the branch is left out for an image.

    Raises:
        ValueError: a probability outside [0, 1).

    Source: arXiv 1603.09382; as in DeiT (arXiv 2012.12877), the choice is made per image, and the branch is divided by the
    probability of keeping it.
    """

    def __init__(self, probability: float = 0.0):
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"the probability of dropping a path must be at least 0 and below 1, got {probability}")
        self.probability = probability

    def forward(self, part: Tensor) -> Tensor:
        """(B, ...) float -> the same shape."""
        if not self.training or self.probability == 0:
            return part
        keep = 1 - self.probability
        kept = part.new_empty(len(part), *(1 for _ in part.shape[1:])).bernoulli_(keep)
        return part * kept.div_(keep)

    def extra_repr(self) -> str:
        """The probability."""
        return f"{self.probability:g}"
