# SPDX-License-Identifier: Apache-2.0
"""3x3 convolutions on a CPU by Winograd's minimal filtering, which needs only 4 of every 9 multiplications.

A tile of 2 x 2 outputs takes 16 products per pair of channels instead of 36. A block of tiles takes 16 matrix products, with
cheap sums before and after them. In float32, the error is between half and twice the error of a direct convolution, depending on
the kernel that computes the direct convolution. Larger tiles would save more multiplications, but lose precision.

Source: arXiv 1509.09308, section 4.1, F(2x2, 3x3).
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpvt_det.ops import routes

NARROW = 32  # channels below which the sums before and after the products cost more than the products save
SMALL = 1 << 28
"""Number of multiplications below which the direct convolution is faster on processors that run AVX-512 in two halves. On these,
its speed is closer to that of matrix products than with AVX2."""


def is_for(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> bool:
    """Whether a convolution of ``x`` has the right form and size for this method. The caller checks that the route is switched
    on.
    """
    is_fit = weight.shape[2:] == (3, 3) and (stride, padding, dilation, groups) == ((1, 1), (1, 1), (1, 1), 1)
    is_whole = x.dim() == 4 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype  # otherwise torch reports what is wrong
    if not (is_fit and is_whole):
        return False
    is_large = x[:, 0].numel() * weight.numel() >= SMALL or routes.instructions() != routes.IN_HALVES
    return is_large and min(weight.shape[:2]) >= NARROW and _kernels() is not None


def convolve_3x3(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.conv2d(x, weight, bias, padding=1)``.

    Args:
        x: (B, C, H, W) float32, not empty.
        weight: (C', C, 3, 3) float32.
        bias: (C',) float32, or ``None``.

    Returns:
        (B, C', H, W), channels last.
    """
    return _Convolution.apply(x, weight, bias)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        return _kernels().convolve(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _kernels().convolve(grad, weight, None, turned=True)
        if ctx.needs_input_grad[1]:
            of_weight = _kernels().weight_gradient(x, grad)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum((0, 2, 3))
        return of_x, of_weight, of_bias


def _kernels() -> ModuleType | None:
    return routes.find_kernels("cpvt_det.fast.winograd_numba")
