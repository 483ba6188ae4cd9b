# SPDX-License-Identifier: Apache-2.0
"""Recompute activations in the backward pass instead of storing them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``, and call it again in the backward pass instead of storing its activations. The second call draws
    the same dropout masks, and does not update the statistics of batch norms again.

    Args:
        function: a module, or a function that gets the modules it calls as arguments.
        args: arguments of the call.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiler chooses itself what to store
        return function(*args)
    modules = [part for part in (function, *args) if isinstance(part, nn.Module)]
    return checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _counted_already(modules))
    )


@contextlib.contextmanager
def _counted_already(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within this block, batch norms still normalise by the statistics of the batch, but do not change their running statistics."""
    parts = [part for module in modules for part in module.modules()]
    norms = [part for part in parts if isinstance(part, _BatchNorm) and part.training and part.track_running_stats]
    before = [(norm, norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0  # switched off by their own flag, torch's norms would store different tensors
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(count)
