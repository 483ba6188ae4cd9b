# SPDX-License-Identifier: Apache-2.0
"""The guard of strided 1x1 convolutions of few channels, whose weight's gradient oneDNN lets write past its memory."""

import copy
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

NARROW = 16
"""Input channels below which no strided 1x1 convolution is handed to torch: oneDNN gathers the cells of the stride itself, for the
weight's gradient in channels last, into memory for ``cells * channels`` numbers, and begins at ``cell * block``: past the end where
there are fewer channels than in a block, of 16 with AVX-512 and of 8 with AVX2 (``tests/upstream/strided_1x1.py``). Skipping the
cells first, with a stride of 1 after it, is the same sum.

Source: oneDNN ``jit_avx512_common_1x1_convolution.cpp`` (``rp.ws``), ``jit_uni_1x1_conv_utils.hpp``; its issue 6035."""


def guard_strided_1x1(network: nn.Module) -> None:
    """Have strided 1x1 convolutions of few channels (:data:`NARROW`) skip the cells first, in place, whoever wrote the network.

    Of a convolution only ``forward`` is replaced: its class, attributes, parameters and hooks stay.

    Args:
        network: any network.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and needs_guard(module):
            unstrided = copy.copy(module)  # shares the dict of its parameters
            unstrided.stride = (1, 1)
            module.forward = partial(_skip_and_convolve, unstrided, module.stride)


def _skip_and_convolve(unstrided: nn.Conv2d, stride: Sequence[int], x: Tensor) -> Tensor:
    return type(unstrided).forward(unstrided, skip_cells(x, stride))


def needs_guard(convolution: nn.Conv2d) -> bool:
    """Whether torch could write past memory in this convolution's backward pass."""
    is_strided_1x1 = convolution.kernel_size == (1, 1) and max(convolution.stride) > 1
    return is_strided_1x1 and convolution.padding in ((0, 0), "valid") and convolution.in_channels < NARROW


def skip_cells(x: Tensor, stride: Sequence[int]) -> Tensor:
    """The cells of (..., H, W) that a kernel of one cell looks at."""
    return x[..., :: stride[0], :: stride[1]]
