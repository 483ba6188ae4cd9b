# SPDX-License-Identifier: Apache-2.0
"""Dropout that costs a CPU less than half of torch's: drawn by a kernel of its own, from a seed that torch's generator gives.

Everywhere else, in compiled and exported programs, and without numba, it is torch's.
"""

import functools
import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.ops import routes

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MOST = 1 - 2**-17
"""The probability from which on the kernel's 16 bits round to dropping everything."""


def dropout(x: Tensor, probability: float, training: bool = True, rectify: bool = False) -> Tensor:
    """``F.dropout`` of ``x``, or of its ReLU.

    Args:
        x: float, of any shape.
        probability: probability that an element becomes 0.
        training: whether any does.
        rectify: whether the ReLU is taken first; the output is then all that is kept for the backward pass.
    """
    if training and _is_own(x, probability):
        return _KernelDropout.apply(x, probability, int(torch.randint(1 << 62, ())), rectify)
    return F.dropout(F.relu(x) if rectify else x, probability, training)


def _is_own(x: Tensor, probability: float) -> bool:
    """Whether the kernel drops numbers of ``x``."""
    is_for_kernel = routes.is_plain(x) and x.dtype in FLOATS and 0 < probability < MOST
    return is_for_kernel and routes.is_on("dropout") and _kernel() is not None


class FastDropout(nn.Dropout):
    """``nn.Dropout`` by :func:`dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Dropout of ``x``, of any shape."""
        return dropout(x, self.p, self.training)


class _KernelDropout(torch.autograd.Function):
    """:func:`dropout` by the kernel. The backward pass draws the same once more; after a ReLU the output says what was kept."""

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
        rectified = torch.ops.aten.threshold_backward(grad, out, 0)  # positive where the input was and was kept
        return rectified.mul_(_kernel().keep_scale(ctx.arguments[0])), None, None, None


@functools.cache
def _kernel() -> ModuleType | None:
    """The module of the kernel; ``None`` without numba."""
    try:
        return importlib.import_module("cpvt_det.fast.dropout_numba")
    except (ImportError, OSError):  # deformable attention, which loses more by it, warns of it
        return None
