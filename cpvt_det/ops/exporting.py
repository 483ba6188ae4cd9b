# SPDX-License-Identifier: Apache-2.0
"""Whether a program is being exported, and loops that are one in such a program."""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, which torch 2.9 compiles to True in every program."""
    return torch.compiler.is_exporting()


def in_steps(step: Callable[..., tuple[Tensor, ...]], carry: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """``carry = step(number, *carry)`` for every number below ``count``, which is (1,) int64.

    In an exported program this is torch's ``scan``, traced once and not ``count`` times. OpenVINO reads one that takes everything
    from ``carry``, whose shapes and dtypes stay, and whose numbers are rows.
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
