# SPDX-License-Identifier: Apache-2.0
"""Switches of torch that make a peer's model faster without a change of its code: memory format, fused attention, compilation."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from benchmarks.models import Model
from cpvt_det.structures import PaddedBatch


def channels_last(model: Model) -> Model:
    """The model with its convolutions' weights and its images in channels last; the module is changed in place."""
    model.module.to(memory_format=torch.channels_last)

    def converted(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def with_images(batch: PaddedBatch, *targets: Any) -> Any:
            return call(replace(batch, images=batch.images.contiguous(memory_format=torch.channels_last)), *targets)

        return with_images

    return Model(model.module, converted(model.predict), converted(model.learn))


def has_fusable_attention(module: nn.Module) -> bool:
    return any(isinstance(part, nn.MultiheadAttention) for part in module.modules())


def fused_attention(model: Model) -> Model:
    """The model whose ``nn.MultiheadAttention`` takes ``scaled_dot_product_attention``; outside its calls nothing is changed.

    torch does that where the weights of attention are not asked for. The official code asks for them, and does not use them.
    """

    def fused(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def without_weights(*inputs: Any) -> Any:
            with _no_attention_weights(model.module):
                return call(*inputs)

        return without_weights

    return Model(model.module, fused(model.predict), fused(model.learn))


@contextlib.contextmanager
def _no_attention_weights(module: nn.Module) -> Iterator[None]:
    parts = [part for part in module.modules() if isinstance(part, nn.MultiheadAttention)]
    for part in parts:
        part.forward = partial(part.forward, need_weights=False)  # of the instance, before that of the class
    try:
        yield
    finally:
        for part in parts:
            del part.forward


def compiled(model: Model) -> Model:
    """The model whose module is compiled, in place, at its first call."""
    model.module.compile()
    return model
