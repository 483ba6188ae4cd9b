# SPDX-License-Identifier: Apache-2.0
"""Linear layers that use the faster of torch's two libraries for matrix products on a CPU.

torch passes float32 matrix products to MKL, and convolutions to oneDNN. On AMD processors, MKL uses only AVX2, whereas oneDNN
also uses AVX-512 and is about twice as fast. So on such processors, a product is written as a 1x1 convolution.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.ops import routes

SMALL = 1 << 15  # numbers in the input; torch gives convolutions of smaller inputs to a slow kernel of its own
SMALL_PRODUCT = 1 << 23  # number of multiplications below which a convolution's overhead outweighs the gain


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: (..., C) float, (C', C) and (C',) to (..., C')."""
    if not routes.takes("linear", x) or x.numel() < SMALL or x.numel() * len(weight) < SMALL_PRODUCT:
        return F.linear(x, weight, bias)
    rows = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (..., C) -> (1, C, rows, 1), channels last
    out = F.conv2d(rows, weight[:, :, None, None], bias, dilation=2)  # dilated, as in convolution.py
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


class FastLinear(nn.Linear):
    """``nn.Linear`` computed by :func:`linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C')."""
        return linear(x, self.weight, self.bias)
