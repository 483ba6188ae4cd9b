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

from cpvt_det.ops import feed_forward as blocks
from cpvt_det.ops import routes
from cpvt_det.ops.linear import Linear, linear

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MOST = 1 - 2**-17
"""The probability from which on the kernel's 16 bits round to dropping everything."""


def dropout(x: Tensor, probability: float, training: bool = True, rectify: bool = False, residual: Tensor | None = None) -> Tensor:
    """``F.dropout`` of ``x``, of its ReLU, or of ``x`` with a residual added to it.

    Args:
        x: float, of any shape.
        probability: probability that an element becomes 0.
        training: whether any does.
        rectify: whether the ReLU is taken first; the output is then all that is kept for the backward pass.
        residual: addend of the shape of ``x``, for a sum in one new tensor; ``None``: none.
    """
    assert not rectify or residual is None  # the output of a sum does not say where x was kept
    if training and _is_own(x, probability):
        return _KernelDropout.apply(x, residual, probability, _seed(), rectify)
    dropped = F.dropout(F.relu(x) if rectify else x, probability, training)
    return dropped if residual is None else residual + dropped


def _is_own(x: Tensor, probability: float) -> bool:
    """Whether the kernel drops numbers of ``x``."""
    is_plain = x.device.type == "cpu" and x.dtype in FLOATS and type(x) in (Tensor, nn.Parameter)
    is_for_kernel = is_plain and 0 < probability < MOST and not torch.compiler.is_compiling()
    return is_for_kernel and routes.is_on("dropout") and _kernel() is not None


def _seed() -> int:
    return int(torch.randint(1 << 62, ()))


class Dropout(nn.Dropout):
    """``nn.Dropout`` by :func:`dropout`, and what stands around it in a transformer."""

    def forward(self, x: Tensor) -> Tensor:
        """Dropout of ``x``, of any shape."""
        return dropout(x, self.p, self.training)

    def of_relu(self, layer: nn.Module, x: Tensor) -> Tensor:
        """``F.dropout(F.relu(layer(x)))``, which keeps its output for the backward pass and nothing else."""
        if type(layer) is Linear and not (self.training and self.p):  # no subclass and no wrapper, which may add to the product
            return layer(x, rectify=True)
        return dropout(layer(x), self.p, self.training, rectify=True)

    def feed_forward(self, first: Linear, second: Linear, x: Tensor) -> Tensor:
        """``second(F.dropout(F.relu(first(x))))``; by blocks where that is quicker."""
        if not (_is_called_alone(first) and _is_called_alone(second) and blocks.is_for(x, first.weight)):
            return second(self.of_relu(first, x))
        weights = first.weight, first.bias, second.weight, second.bias
        drops = self.training and self.p
        if not drops and blocks.keeps_nothing(x, *weights):
            return blocks.feed_forward(x, *weights)
        with torch.no_grad():
            hidden, scale = linear(x, first.weight, first.bias, rectify=not drops), 1.0
            if drops:
                hidden, scale = _dropped(hidden, self.p)
        return blocks.feed_forward(x, *weights, hidden, scale)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + F.dropout(x)``, in one new tensor; both are of one shape."""
        return dropout(x, self.p, self.training, residual=residual)


def _dropped(x: Tensor, probability: float) -> tuple[Tensor, float]:
    """Dropout of the ReLU of ``x``, which is on a CPU, needs no gradient and is overwritten; and the factor of what is kept."""
    if _is_own(x, probability):
        return _kernel().drop(x, probability, _seed(), rectify=True, overwrite=True), _kernel().keep_scale(probability)
    return F.dropout(x.relu_(), probability, inplace=True), 1 / (1 - probability) if probability < 1 else 0.0


def _is_called_alone(layer: nn.Module) -> bool:
    """Whether a layer is ours, with a bias, and calls nothing else: no subclass, no wrapper, no hook."""
    return type(layer) is Linear and layer.bias is not None and not routes.is_watched(layer)


class _KernelDropout(torch.autograd.Function):
    """:func:`dropout` by the kernel. The backward pass draws the same once more; after a ReLU the output says what was kept."""

    @staticmethod
    def forward(ctx, x, residual, probability, seed, rectify):
        ctx.arguments, ctx.dtypes = (probability, seed), (x.dtype, None if residual is None else residual.dtype)
        out = _kernel().drop(x, probability, seed, rectify)
        ctx.save_for_backward(out if rectify else None)
        if residual is None:
            return out
        return out.add_(residual) if x.dtype == residual.dtype else residual + out

    @staticmethod
    def backward(ctx, grad):
        (out,), (of_x, of_residual) = ctx.saved_tensors, ctx.dtypes
        grad_residual = None if of_residual is None else grad.to(of_residual)
        if out is None:
            return _KernelDropout.apply(grad.to(of_x), None, *ctx.arguments, False), grad_residual, None, None, None
        rectified = torch.ops.aten.threshold_backward(grad, out, 0)  # positive where the input was and was kept
        return rectified.mul_(_kernel().keep_scale(ctx.arguments[0])), grad_residual, None, None, None


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        return importlib.import_module("cpvt_det.ops.dropout_numba")
    except (ImportError, OSError):  # deformable attention, which loses more by it, warns of it
        return None
