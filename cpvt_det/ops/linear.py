# SPDX-License-Identifier: Apache-2.0
"""Linear layers that take the faster of a CPU's two ways to multiply matrices.

torch gives float32 products to MKL and convolutions to oneDNN. On AMD's processors MKL keeps to AVX2; oneDNN does not, and where
there is AVX-512 it is about twice as fast. So a product is written as a 1x1 convolution there.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.ops import routes

SMALL = 1 << 15  # numbers; torch gives smaller inputs of convolutions to a slow kernel of its own
SMALL_PRODUCT = 1 << 23  # multiplications, below which a convolution's overhead counts for more


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, rectify: bool = False) -> Tensor:
    """``F.linear``: (..., C) float, (C', C) and (C',) to (..., C'); with ``rectify`` its ReLU, on a CPU in the product's memory."""
    if not routes.takes("linear", x) or x.numel() < SMALL or x.numel() * len(weight) < SMALL_PRODUCT:
        if rectify and routes.is_plain(x):  # as a matrix: in place of a view the backward pass would be slower
            return F.linear(x.reshape(-1, x.shape[-1]), weight, bias).relu_().view(*x.shape[:-1], len(weight))
        out = F.linear(x, weight, bias)
        return F.relu(out) if rectify else out
    rows = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (..., C) -> (1, C, rows, 1), channels last
    out = F.conv2d(rows, weight[:, :, None, None], bias, dilation=2)  # dilated, as in convolution.py
    if rectify:
        out = out.relu_()
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """``nn.Linear`` by :func:`linear`."""

    def forward(self, x: Tensor, rectify: bool = False) -> Tensor:
        """(..., C) -> (..., C'), or the ReLU of it."""
        return linear(x, self.weight, self.bias, rectify)
