# SPDX-License-Identifier: Apache-2.0
"""Two linear layers with a ReLU between them, by blocks of rows, so that the numbers between them, or their gradients at least,
are never all in memory.

A tensor of 32 MB or more gets new pages of memory from the system each time, in both passes, which takes nearly as long as the
product that fills them; a block's memory is there already, and stays near the processor. The backward pass makes a block's numbers
once more, in less time than new pages would take, and needs nothing but the input to be kept. Where the product takes longer than
new pages, and where numbers are dropped, they are kept instead, and only their gradients are made by blocks.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpvt_det.ops import routes
from cpvt_det.ops.linear import linear

LARGE = 1 << 23  # float32 numbers between the layers: from 32 MB on the C library asks the system for new pages
BLOCK = 1 << 21  # numbers of a block


def is_for(x: Tensor, weight: Tensor) -> bool:
    """Whether ``x`` (..., C) and the first layer's weight (C', C) make so many numbers that blocks of them are quicker."""
    return routes.takes("hidden", x) and x.numel() // x.shape[-1] * len(weight) >= LARGE


def keeps_nothing(*learned: Tensor) -> bool:
    """Whether the numbers between the layers are not kept: they are made once more in the backward pass, or there is none.

    Args:
        learned: tensors that gradients may be wanted of.
    """
    return routes.is_on("linear") or not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learned))


def feed_forward(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, hidden: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """``F.linear(F.relu(F.linear(x, weight1, bias1)), weight2, bias2)``, by blocks; with ``hidden`` the backward pass alone.

    Args:
        x: (..., C) float32.
        weight1, bias1: (C', C) and (C',).
        weight2, bias2: (C'', C') and (C'',).
        hidden: (..., C'), the numbers between the layers, without gradient; those that are zero, by the ReLU or dropped, pass none
            on. ``None``: they are made here.
        scale: what numbers that are not zero were multiplied by.

    Returns:
        (..., C'').
    """
    return _ByBlocks.apply(x, weight1, bias1, weight2, bias2, hidden, scale)


class _ByBlocks(torch.autograd.Function):
    """:func:`feed_forward`; of its tensors the input, the weights and ``hidden`` are kept."""

    @staticmethod
    def forward(ctx, x, weight1, bias1, weight2, bias2, hidden, scale):
        ctx.save_for_backward(x, weight1, bias1, weight2, hidden)
        ctx.scale = scale
        if hidden is not None:
            return linear(hidden, weight2, bias2)
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), len(weight2))
        for some, fed in zip(_blocks(rows, weight1), _blocks(out, weight1), strict=True):
            fed.copy_(linear(linear(some, weight1, bias1, rectify=True), weight2, bias2))
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight1, bias1, weight2, kept = ctx.saved_tensors
        needs_x, *needs1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        rows, slopes = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_x = torch.empty_like(rows) if needs_x else None
        sums: list[Tensor | None] = [None] * 4  # of the four weights and biases
        blocks = _blocks(rows, weight1)
        of_rows = [None] * len(blocks) if grad_x is None else _blocks(grad_x, weight1)
        of_hidden = [None] * len(blocks) if kept is None else _blocks(kept.reshape(len(rows), -1), weight1)
        scaled = weight2 * ctx.scale
        for some, slope, place, hidden in zip(blocks, _blocks(slopes, weight1), of_rows, of_hidden, strict=True):
            hidden = linear(some, weight1, bias1, rectify=True) if hidden is None else hidden
            on_hidden, *grads2 = _slopes(slope, hidden, scaled, [needs_x or any(needs1), needs_weight2, needs_bias2])
            on_rows, grads1 = None, [None, None]
            if on_hidden is not None:
                torch.ops.aten.threshold_backward.grad_input(on_hidden, hidden, 0, grad_input=on_hidden)
                on_rows, *grads1 = _slopes(on_hidden, some, weight1, [needs_x, *needs1])
            if on_rows is not None:
                place.copy_(on_rows)
            sums = [_sum(total, value) for total, value in zip(sums, (*grads1, *grads2), strict=True)]
        return None if grad_x is None else grad_x.view(x.shape), *sums, None, None


def _sum(total: Tensor | None, value: Tensor | None) -> Tensor | None:
    return value if total is None or value is None else total.add_(value)


def _blocks(rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Rows in blocks of as many as make :data:`BLOCK` numbers with a weight (C', C)."""
    return rows.split(max(1, BLOCK // len(weight)))


def _slopes(grad: Tensor, x: Tensor, weight: Tensor, needs: list[bool]) -> list[Tensor | None]:
    """The gradients of a linear layer's input (R, C), weight (C', C) and bias (C',) that are needed."""
    if not routes.is_on("linear"):
        makers = (lambda: grad @ weight, lambda: grad.T @ x, lambda: grad.sum(0))
        return [make() if wanted else None for make, wanted in zip(makers, needs, strict=True)]
    grad, x = (rows.reshape(1, -1, 1, rows.shape[-1]).permute(0, 3, 1, 2) for rows in (grad, x))  # (R, C) -> (1, C, R, 1)
    shape = ([1, 1], [0, 0], [2, 2], False, [0, 0], 1)  # stride, padding, dilation, whether transposed, output padding, groups
    found = torch.ops.aten.convolution_backward(grad, x, weight[:, :, None, None], [len(weight)], *shape, needs)
    of_x, of_weight, of_bias = (value if wanted else None for value, wanted in zip(found, needs, strict=True))
    of_x = None if of_x is None else of_x.permute(0, 2, 3, 1).reshape(-1, of_x.shape[1])
    return [of_x, None if of_weight is None else of_weight[:, :, 0, 0], of_bias]
