# SPDX-License-Identifier: Apache-2.0
"""An exponential moving average of the weights, which evaluates better than the weights of the last step."""

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def make_ema(model: nn.Module, decay: float) -> AveragedModel:
    """An average of parameters and buffers, updated by ``update_parameters`` after every step.

    Args:
        model: the detector itself, not a wrapper of it; ``.module`` of the result is its average.
        decay: the share of the old average, in [0, 1].

    Raises:
        ValueError: a decay outside [0, 1].
    """
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
