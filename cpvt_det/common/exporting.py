# SPDX-License-Identifier: Apache-2.0
"""A check whether a model is being exported, and a loop that stays a loop in the exported program."""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """``torch.compiler.is_exporting()`` with a workaround for torch 2.9, which compiles it to True in every program."""
    return torch.compiler.is_exporting()


def in_steps(step: Callable[..., tuple[Tensor, ...]], carry: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """Run ``carry = step(number, *carry)`` for every number below ``count``; the number is a (1,) int64 tensor.

    In an exported program this becomes torch's ``scan``, which traces ``step`` once instead of ``count`` times. So that OpenVINO
    can read the program, ``step`` must get all its tensors from ``carry`` and keep their shapes and dtypes, and scalars must have
    shape (1,).
    """
    numbers = torch.arange(count, device=carry[0].device)[:, None]
    if not is_exporting():
        for number in numbers:
            carry = step(number, *carry)
        return carry
    from torch._higher_order_ops.scan import scan  # no public name in torch 2.14

    def body(carry: tuple[Tensor, ...], number: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return tuple(one.clone() for one in step(number, *carry)), number.clone()  # scan takes no views

    return scan(body, tuple(one.clone() for one in carry), numbers)[0]
