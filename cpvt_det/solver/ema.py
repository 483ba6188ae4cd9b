# SPDX-License-Identifier: Apache-2.0
"""An exponential moving average of the weights, which scores better in evaluation than the weights of the last step."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class MovingAverage(AveragedModel):
    """A moving average of parameters and buffers; ``.module`` is a model with the averages.

    Args:
        model: detector to average, not a wrapper around it.
        decay: share of the old average that each update keeps, in [0, 1].

    Raises:
        ValueError: a decay outside [0, 1].
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay <= 1:
            raise ValueError(f"the decay of a moving average must be between 0 and 1, got {decay}")
        super().__init__(model, use_buffers=True)
        self.decay = decay
        self.n_averaged = self.n_averaged.to(next(model.parameters()).device)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module, good: Tensor | None = None) -> None:
        """Move the average towards a model. The first update copies the model.

        Args:
            model: model with finite weights.
            good: () bool on the model's device. If it is False, the average does not change. The host does not wait for its
                value.
        """
        share = torch.where(self.n_averaged == 0, 1.0, 1.0 - self.decay)
        if good is not None:
            share = share * good
        pairs = list(zip(_tensors(self.module), _tensors(model), strict=True))
        averages, values = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
        change = torch._foreach_sub(values, averages)
        torch._foreach_mul_(change, share)
        torch._foreach_add_(averages, change)
        for average, value in pairs:
            if not average.is_floating_point():  # counters
                average.copy_(value)
        self.n_averaged += 1 if good is None else good


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
