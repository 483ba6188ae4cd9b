# SPDX-License-Identifier: Apache-2.0
"""Switches of torch that make a peer's model faster without a change of its code: memory format, fused attention, compilation."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Contender
from benchmarks.models import Model
from cpvt_det.common.structures import PaddedBatch

AT_BEST = " at its best"
"""End of the name of a peer with all switches."""
ROUNDED = "a peer under autocast, which it does not come with; how it rounds is its own matter"


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


def at_best(
    name: str, plain: Model, build: Callable[[], Model], make: Callable[..., Contender], everything: bool, bf16: bool
) -> list[Contender]:
    """A peer with the switches of torch that it does not set itself, each alone and together; and under autocast, without and with.

    Args:
        name: name of the peer.
        plain: its model as it comes.
        build: function that makes another such model.
        make: function that makes a contender.
        everything: True: compiled too, which takes minutes.
        bf16: True: under autocast too.
    """
    best = channels_last(build())
    found = [make(f"{name}, channels last", best, peer=True)]
    if has_fusable_attention(plain.module):
        found.append(make(f"{name}, fused attention", fused_attention(plain), peer=True))
        best = fused_attention(best)
        found.append(make(f"{name}{AT_BEST}", best, peer=True))
    if everything:
        found.append(replace(make(f"{name}, compiled", compiled(build()), peer=True), attempt=True))
    if bf16:
        found.append(make(f"{name} bf16", plain, bf16=True, other_work=ROUNDED))
        found.append(make(f"{name}{AT_BEST} bf16", best, bf16=True, other_work=ROUNDED))
    return found
