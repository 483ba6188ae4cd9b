# SPDX-License-Identifier: Apache-2.0
"""Linear layers and 1x1 convolutions that take the faster of a CPU's two ways to multiply matrices.

torch gives float32 products to MKL and convolutions to oneDNN. MKL keeps to AVX2 on AMD's processors, oneDNN does not, and is
about twice as fast where there is AVX-512. On one thread torch gives 1x1 convolutions to MKL too, unless they are strided or
dilated: so they are dilated here, which on a kernel of one cell means nothing.
"""

import functools
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

NARROW = 8
"""Input channels below which no strided 1x1 convolution is handed to torch: its weight's gradient is written past the end of
the buffer by oneDNN's AVX2 kernel, in channels last (``tests/upstream/strided_1x1.py``; oneDNN 3.7 and 3.12). Skipping the cells
first, with a stride of 1 after it, is the same sum."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: (..., C) float, (C', C) and (C',) to (..., C')."""
    if not _takes_onednn(x):
        return F.linear(x, weight, bias)
    rows = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (..., C) -> (1, C, rows, 1), channels last
    out = F.conv2d(rows, weight[:, :, None, None], bias, dilation=2)
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """``nn.Linear`` by :func:`linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C')."""
        return linear(x, self.weight, self.bias)


class Conv2d(nn.Conv2d):
    """``nn.Conv2d`` by :func:`convolve`."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        return convolve(self, x)


def convolve(convolution: nn.Conv2d, x: Tensor, norm: FrozenBatchNorm2d | None = None) -> Tensor:
    """``convolution(x)``, with the frozen norm after it, if any, as part of its weight; gradients reach that all the same.

    Args:
        convolution: convolution that pads with zeros.
        x: (B, C, H, W) float.
        norm: frozen norm of the convolution's output; ``None``: no norm.
    """
    weight, bias, dilation = convolution.weight, convolution.bias, convolution.dilation
    if norm is not None:
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift = norm.bias - norm.running_mean * scale
        weight, bias = weight * scale[:, None, None, None], shift if bias is None else shift + bias * scale
    stride = convolution.stride
    if convolution.kernel_size == (1, 1) and _takes_onednn(x):
        dilation = 2
    if convolution.kernel_size == (1, 1) and convolution.padding == (0, 0) and x.shape[1] < NARROW:
        x, stride = x[:, :, :: stride[0], :: stride[1]], (1, 1)
    return F.conv2d(x, weight, bias, stride, convolution.padding, dilation, convolution.groups)


def _takes_onednn(x: Tensor) -> bool:
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    is_open = not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling() and torch.backends.mkldnn.enabled
    return is_plain and is_open and _mkl_is_slower()


@functools.cache
def _mkl_is_slower() -> bool:
    """On AMD's processors with AVX-512."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")):
        return False
    processor = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (processor.read_text(encoding="utf-8") if processor.is_file() else platform.processor())
