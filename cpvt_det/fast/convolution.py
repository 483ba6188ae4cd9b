# SPDX-License-Identifier: Apache-2.0
"""Convolutions by the method that is fastest on a CPU. A norm with fixed statistics is folded into the weight.

On one thread, torch passes 1x1 convolutions to MKL, unless they are strided or dilated. oneDNN is faster than MKL, most of all on
AMD processors with AVX-512. So 1x1 convolutions are given a dilation here, which makes torch use oneDNN and does not change the
result of a kernel of one cell. Where it is faster, 3x3 convolutions of stride 1 are computed by Winograd's method.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.ops import FrozenBatchNorm2d

from cpvt_det.layers.norm import MaskedBatchNorm2d, folded
from cpvt_det.models.real_time_detr import ConvNorm, RepVGGBlock
from cpvt_det.ops import routes
from cpvt_det.ops.strided_1x1 import needs_guard, skip_cells

SMALL_PRODUCT = 1 << 25  # number of multiplications below which torch's own method is faster
FEW_CELLS = 6400  # cells of a batch's output below which oneDNN computes the gradient of a 1x1 weight more slowly than MKL
NARROW = 32  # channels below which the sums around Winograd's products cost more than the products save
SMALL_WINOGRAD = 1 << 28
"""Number of multiplications below which the direct convolution is faster than Winograd's on processors that run AVX-512 in two
halves. On these, its speed is closer to that of matrix products than with AVX2."""


class FastConv2d(nn.Conv2d):
    """``nn.Conv2d`` computed by :func:`convolve`."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        return convolve(self, x, self.weight, self.bias) if self.padding_mode == "zeros" else super().forward(x)


def can_fold(convolution: nn.Module, norm: nn.Module, x: Tensor) -> bool:
    """Whether the norm after a convolution of ``x`` can be folded into the convolution. This requires that the convolution
    computes exactly what torch's does, that the norm has fixed statistics, and that neither has hooks. Traced programs keep their
    batch norms.
    """
    is_torch_s = type(convolution) in (nn.Conv2d, FastConv2d) and convolution.padding_mode == "zeros"
    is_batch_norm = isinstance(norm, MaskedBatchNorm2d) and not norm.training and routes.is_plain(x)
    is_fixed = type(norm) is FrozenBatchNorm2d or is_batch_norm
    return is_torch_s and is_fixed and not (routes.is_watched(convolution) or routes.is_watched(norm))


class FastConvNorm(ConvNorm):
    """A convolution whose batch norm is folded into it in evaluation."""

    def forward(self, x: Tensor, valid: Tensor | None, after: Tensor | None = None) -> Tensor:
        """Arguments and result as in :meth:`ConvNorm.forward`."""
        if not can_fold(self.conv, self.norm, x):
            return super().forward(x, valid, after)
        if valid is not None and max(self.conv.kernel_size) > 1:
            x = x.masked_fill(~valid, 0)
        return self.act(convolve(self.conv, x, *folded(self.conv, self.norm)))


class FastRepVGGBlock(RepVGGBlock):
    """A block that is a single 3x3 convolution in evaluation, with the 1x1 convolution and both norms folded into it."""

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """(B, C, H, W) -> the same. Outputs may differ from the plain block's only in padded cells, because in the plain block
        the 1x1 convolution sees the values under the padding.
        """
        branches = [] if self.conv2 is None else [self.conv1, self.conv2]
        if not (branches and all(can_fold(branch.conv, branch.norm, x) for branch in branches)):
            return super().forward(x, valid)
        x = x if valid is None else x.masked_fill(~valid, 0)
        return F.silu(convolve(self.conv1.conv, x, *self.merged()))


def convolve(convolution: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``convolution(x)`` with the given weight and bias, which are the convolution's own or have the next norm folded in. Weight
    and bias get gradients.

    Args:
        convolution: convolution that pads with zeros.
        x: (B, C, H, W) float.
        weight: (C', C / groups, k, k) float.
        bias: (C',) float, or ``None``.
    """
    stride, padding, dilation, groups = convolution.stride, convolution.padding, convolution.dilation, convolution.groups
    if needs_guard(convolution):
        x, stride = skip_cells(x, stride), (1, 1)
    if x.dim() != 4 or isinstance(padding, str):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    is_3x3 = convolution.kernel_size == (3, 3)
    if is_3x3 and routes.takes("winograd", x) and fits_winograd(x, weight, stride, padding, dilation, groups):
        return convolve_3x3(x, weight, bias)
    if (convolution.kernel_size, padding, groups) == ((1, 1), (0, 0), 1):
        if not routes.takes("pointwise", x):
            return F.conv2d(x, weight, bias, stride)
        cells = x[:, 0, :: stride[0], :: stride[1]].numel()
        if cells * weight.numel() < SMALL_PRODUCT:
            return F.conv2d(x, weight, bias, stride)
        if cells < FEW_CELLS and _learns(x, weight):
            return _ByRows.apply(x, weight, bias, stride, (0, 0), (2, 2))
        return F.conv2d(x, weight, bias, stride, dilation=2)
    is_strided = is_3x3 and (stride, dilation, groups) == ((2, 2), (1, 1), 1)
    if is_strided and _learns(x, weight) and x[:, 0, ::2, ::2].numel() * weight.numel() >= SMALL_PRODUCT:
        return _ByRows.apply(x, weight, bias, stride, padding, dilation)
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _learns(x: Tensor, weight: Tensor) -> bool:
    """Whether a gradient of the weight is needed and should be computed as products of rows."""
    return torch.is_grad_enabled() and weight.requires_grad and routes.takes("rows", x)


class _ByRows(torch.autograd.Function):
    """``F.conv2d`` that computes the weight's gradient as one matrix product in MKL per row of the kernel."""

    @staticmethod
    def forward(ctx, x, weight, bias, stride, padding, dilation):
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.form = stride, padding, dilation
        return F.conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        stride, padding, dilation = ctx.form
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            form = (stride, padding, dilation, False, (0, 0), 1, (True, False, False))
            of_x = torch.ops.aten.convolution_backward(grad, x, weight, None, *form)[0]
        if ctx.needs_input_grad[1]:
            with torch.autocast("cpu", enabled=False):
                of_weight = _weight_gradient(x, grad, weight.shape[2], stride, padding)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum((0, 2, 3))
        return of_x, of_weight, of_bias, None, None, None


def _weight_gradient(x: Tensor, grad: Tensor, side: int, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The weight's gradient (C', C, side, side) from input (B, C, H, W) and output gradient (B, C', H', W'), both channels last."""
    batch, out_channels, height, width = grad.shape
    channels, of_rows = x.shape[1], grad.permute(0, 2, 3, 1).reshape(-1, out_channels).T
    cells = x.permute(0, 2, 3, 1)  # (B, C, H, W) -> (B, H, W, C)
    if padding != (0, 0):
        cells = F.pad(cells, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    lines = []
    for i in range(side):
        line = cells[:, i :: stride[0]][:, :height]
        # The kernel's row on the cells: side * C neighbours in memory, every ``stride`` cells.
        strides = (line.stride(0), line.stride(1), stride[1] * channels, 1)
        rows = line.as_strided((batch, height, width, side * channels), strides).reshape(-1, side * channels)
        lines.append((of_rows @ rows).view(out_channels, side, channels))
    return torch.stack(lines, dim=1).permute(0, 3, 1, 2)


def fits_winograd(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Whether a convolution of ``x`` has the right form and size for Winograd's method. The caller checks that the route is on."""
    is_fit = weight.shape[2:] == (3, 3) and (stride, padding, dilation, groups) == ((1, 1), (1, 1), (1, 1), 1)
    is_whole = x.dim() == 4 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype  # otherwise torch reports what is wrong
    if not (is_fit and is_whole):
        return False
    is_large = x[:, 0].numel() * weight.numel() >= SMALL_WINOGRAD or routes.instructions() != routes.IN_HALVES
    return is_large and min(weight.shape[:2]) >= NARROW and _winograd_kernels() is not None


def convolve_3x3(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.conv2d(x, weight, bias, padding=1)`` by Winograd's minimal filtering, which needs only 4 of every 9 multiplications.

    A tile of 2 x 2 outputs takes 16 products per pair of channels instead of 36. A block of tiles takes 16 matrix products, with
    cheap sums before and after them. In float32, the error is between half and twice the error of a direct convolution, depending
    on the kernel that computes the direct convolution. Larger tiles would save more multiplications, but lose precision.

    Args:
        x: (B, C, H, W) float32, not empty.
        weight: (C', C, 3, 3) float32.
        bias: (C',) float32, or ``None``.

    Returns:
        (B, C', H, W), channels last.

    Source: arXiv 1509.09308, section 4.1, F(2x2, 3x3).
    """
    return _Winograd.apply(x, weight, bias)


class _Winograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        return _winograd_kernels().convolve(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _winograd_kernels().convolve(grad, weight, None, turned=True)
        if ctx.needs_input_grad[1]:
            of_weight = _winograd_kernels().weight_gradient(x, grad)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum((0, 2, 3))
        return of_x, of_weight, of_bias


def _winograd_kernels() -> ModuleType | None:
    return routes.find_kernels("cpvt_det.fast.winograd_numba")
