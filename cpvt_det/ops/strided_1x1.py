# SPDX-License-Identifier: Apache-2.0
"""A guard for strided 1x1 convolutions with few channels, because oneDNN writes past its memory when it computes the gradient of
their weight.
"""

import copy
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

NARROW = 16
"""Strided 1x1 convolutions with fewer input channels than this are not passed to torch.

For the weight's gradient in channels-last layout, oneDNN gathers the cells that the stride selects into memory for
``cells * channels`` numbers, but writes each cell at ``cell * block``. That is past the end if there are fewer channels than a
block holds, 16 with AVX-512 and 8 with AVX2 (``tests/upstream/strided_1x1.py``). Skipping cells first and convolving with a stride
of 1 gives the same sum.

Source: oneDNN ``jit_avx512_common_1x1_convolution.cpp`` (``rp.ws``), ``jit_uni_1x1_conv_utils.hpp``; its issue 6035."""


def guard_strided_1x1(network: nn.Module) -> None:
    """Change strided 1x1 convolutions with few channels (:data:`NARROW`), in place, so that they first drop the cells that the
    stride skips.

    Only the ``forward`` of a convolution is replaced; its class, attributes, parameters and hooks stay.

    Args:
        network: any network, ours or third-party.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and needs_guard(module):
            unstrided = copy.copy(module)  # shares the dict of its parameters
            unstrided.stride = (1, 1)
            module.forward = partial(_skip_and_convolve, unstrided, module.stride)


def _skip_and_convolve(unstrided: nn.Conv2d, stride: Sequence[int], x: Tensor) -> Tensor:
    return type(unstrided).forward(unstrided, skip_cells(x, stride))


def needs_guard(convolution: nn.Conv2d) -> bool:
    """Whether torch could write past the end of its memory in this convolution's backward pass."""
    is_strided_1x1 = convolution.kernel_size == (1, 1) and max(convolution.stride) > 1
    return is_strided_1x1 and convolution.padding in ((0, 0), "valid") and convolution.in_channels < NARROW


def skip_cells(x: Tensor, stride: Sequence[int]) -> Tensor:
    """The cells of (..., H, W) that a strided 1x1 kernel reads."""
    return x[..., :: stride[0], :: stride[1]]
