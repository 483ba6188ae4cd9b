# SPDX-License-Identifier: Apache-2.0
"""Norms of programs that compute in float16: in float32, as GPUs compute them under autocast, with all operands of one type.

ONNX requires that all operands of a norm have one type; torch also accepts a half input with float32 weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float = 1e-5, cudnn: bool = True) -> Tensor:
    return aten.native_layer_norm(x.float(), shape, weight, bias, eps)[0].to(x.dtype)


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *options) -> Tensor:
    _, momentum, eps, _ = options
    return aten._native_batch_norm_legit_no_training(x.float(), weight, bias, mean, variance, momentum, eps)[0].to(x.dtype)


NORMS = {aten.layer_norm.default: _layer_norm, aten.batch_norm.default: _batch_norm}
"""Decomposition table for ``ExportedProgram.run_decompositions``."""
