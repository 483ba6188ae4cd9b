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


def dropout(x: Tensor, probability: float, training: bool = True) -> Tensor:
    """``F.dropout``."""
    seed = _kernel_seed(x, probability, training)
    return F.dropout(x, probability, training) if seed is None else _Dropout.apply(x, probability, seed)


class Dropout(nn.Dropout):
    """``nn.Dropout`` by :func:`dropout`, and what stands around it in a transformer."""

    def forward(self, x: Tensor) -> Tensor:
        """Dropout of ``x``, of any shape."""
        return dropout(x, self.p, self.training)

    def after_relu(self, x: Tensor) -> Tensor:
        """``F.dropout(F.relu(x))``, which keeps its output for the backward pass and nothing else."""
        seed = _kernel_seed(x, self.p, self.training)
        return F.dropout(F.relu(x), self.p, self.training) if seed is None else _ReluDropout.apply(x, self.p, seed)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + F.dropout(x)``, in one new tensor; both are of one shape."""
        seed = _kernel_seed(x, self.p, self.training)
        return residual + F.dropout(x, self.p, self.training) if seed is None else _AddDropout.apply(residual, x, self.p, seed)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probability, seed):
        ctx.arguments = probability, seed
        return _kernel().drop(x, probability, seed, rectify=False)

    @staticmethod
    def backward(ctx, grad):
        return _Dropout.apply(grad, *ctx.arguments), None, None


class _AddDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, x, probability, seed):
        ctx.arguments, ctx.dtypes = (probability, seed), (residual.dtype, x.dtype)
        dropped = _kernel().drop(x, probability, seed, rectify=False)
        return dropped.add_(residual) if x.dtype == residual.dtype else residual + dropped

    @staticmethod
    def backward(ctx, grad):
        grads = [grad.to(dtype) for dtype in ctx.dtypes]
        return grads[0], _Dropout.apply(grads[1], *ctx.arguments), None, None


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probability, seed):
        ctx.scale = _kernel().keep_scale(probability)
        out = _kernel().drop(x, probability, seed, rectify=True)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors  # positive where the input was and was kept
        return torch.ops.aten.threshold_backward(grad, out, 0).mul_(ctx.scale), None, None


def _kernel_seed(x: Tensor, probability: float, training: bool) -> int | None:
    """The seed of a draw by the kernel, from torch's generator; ``None`` where the draw is torch's own."""
    is_plain = x.device.type == "cpu" and x.dtype in FLOATS and type(x) in (Tensor, nn.Parameter)
    if not training or not is_plain or not 0 < probability < MOST or torch.compiler.is_compiling():
        return None
    if not routes.is_on("dropout") or _kernel() is None:
        return None
    return int(torch.randint(1 << 62, ()))


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        return importlib.import_module("cpvt_det.ops.dropout_numba")
    except (ImportError, OSError):  # deformable attention, which loses more by it, warns of it
        return None
