# SPDX-License-Identifier: Apache-2.0
"""Dropout that takes less than half of torch's time on a CPU. Our own kernel draws the random numbers, from a seed that torch's
generator gives.

On other devices, in compiled and exported programs, and without numba, torch's dropout is used.
"""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.ops import routes

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MOST = 1 - 2**-17
"""Smallest probability that the kernel's 16 bits round to 1, which would drop everything."""


def dropout(x: Tensor, probability: float, training: bool = True, rectify: bool = False) -> Tensor:
    """``F.dropout`` of ``x``, or of its ReLU.

    Args:
        x: float, of any shape.
        probability: probability that an element becomes 0.
        training: whether to drop elements at all.
        rectify: whether to apply the ReLU first. Only the output is then stored for the backward pass.
    """
    is_for_kernel = training and routes.is_plain(x) and x.dtype in FLOATS and 0 < probability < MOST
    if is_for_kernel and routes.is_on("dropout") and _kernel() is not None:
        return _KernelDropout.apply(x, probability, int(torch.randint(1 << 62, ())), rectify)
    return F.dropout(F.relu(x) if rectify else x, probability, training)


class FastDropout(nn.Dropout):
    """``nn.Dropout`` computed by :func:`dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Dropout of ``x``, of any shape."""
        return dropout(x, self.p, self.training)


class _KernelDropout(torch.autograd.Function):
    """:func:`dropout` by the kernel. The backward pass draws the same bits again. After a ReLU, it uses the output as the mask
    instead.
    """

    @staticmethod
    def forward(ctx, x, probability, seed, rectify):
        ctx.arguments = (probability, seed)
        out = _kernel().drop(x, probability, seed, rectify)
        ctx.save_for_backward(out if rectify else None)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        if out is None:
            return _KernelDropout.apply(grad, *ctx.arguments, False), None, None, None
        rectified = torch.ops.aten.threshold_backward(grad, out, 0)  # positive where the input was positive and kept
        return rectified.mul_(_kernel().keep_scale(ctx.arguments[0])), None, None, None


def _kernel() -> ModuleType | None:
    return routes.find_kernels("cpvt_det.fast.dropout_numba")
