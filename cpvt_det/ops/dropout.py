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

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def dropout(x: Tensor, probability: float, training: bool = True) -> Tensor:
    """``F.dropout``."""
    if not training or not _takes_kernel(x, probability):
        return F.dropout(x, probability, training)
    return _Dropout.apply(x, probability, _draw_seed())


def relu_dropout(x: Tensor, probability: float, training: bool = True) -> Tensor:
    """``F.dropout(F.relu(x))``, which keeps its output for the backward pass and nothing else."""
    if not training or not _takes_kernel(x, probability):
        return F.dropout(F.relu(x), probability, training)
    return _ReluDropout.apply(x, probability, _draw_seed())


def add_dropout(residual: Tensor, x: Tensor, probability: float, training: bool = True) -> Tensor:
    """``residual + F.dropout(x)``, in one new tensor; both are of one shape."""
    if not training or not _takes_kernel(x, probability):
        return residual + F.dropout(x, probability, training)
    return _AddDropout.apply(residual, x, probability, _draw_seed())


class Dropout(nn.Dropout):
    """``nn.Dropout`` by :func:`dropout`, and what stands around it in a transformer."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        return dropout(x, self.p, self.training)

    def after_relu(self, x: Tensor) -> Tensor:
        """Of the input's ReLU."""
        return relu_dropout(x, self.p, self.training)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """Of ``x``, added to ``residual``."""
        return add_dropout(residual, x, self.p, self.training)


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


def _takes_kernel(x: Tensor, probability: float) -> bool:
    is_plain = x.device.type == "cpu" and x.dtype in FLOATS and type(x) in (Tensor, nn.Parameter)
    if not is_plain or probability == 0 or torch.compiler.is_compiling():
        return False
    return _kernel() is not None and _kernel().serves(probability)


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        return importlib.import_module("cpvt_det.ops.dropout_numba")
    except (ImportError, OSError):  # of which deformable attention, which loses more by it, tells
        return None


def _draw_seed() -> int:
    return int(torch.randint(1 << 62, ()))
