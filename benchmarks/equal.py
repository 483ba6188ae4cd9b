# SPDX-License-Identifier: Apache-2.0
"""The difference of two outputs, and float64 for code that names float32."""

import math
from typing import Any

import torch

from benchmarks.clocks import CommandRun


def difference(output: Any, expected: Any) -> float:
    """The largest difference of two outputs, relative to the largest expected value; for nested outputs, the largest of all.

    Args:
        output: a tensor, an array, a number, a text, ``None``, or a tuple, list or dict of these.
        expected: output of the baseline, of the same type.

    Returns:
        0 for equal outputs; infinity for different shapes, keys, lengths or texts, and for a NaN on one side only.
    """
    if isinstance(output, CommandRun) or isinstance(expected, CommandRun):
        return difference(*(x.output if isinstance(x, CommandRun) else x for x in (output, expected)))
    if isinstance(expected, dict):
        if not isinstance(output, dict) or output.keys() != expected.keys():
            return math.inf
        return max((difference(output[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, tuple | list):
        if not isinstance(output, tuple | list) or len(output) != len(expected):
            return math.inf
        return max((difference(a, b) for a, b in zip(output, expected, strict=True)), default=0.0)
    if expected is None or isinstance(expected, str):
        return 0.0 if output == expected else math.inf
    if output is None or isinstance(output, str | dict | tuple | list):
        return math.inf
    return _difference_of_tensors(torch.as_tensor(output), torch.as_tensor(expected))


def _difference_of_tensors(output: torch.Tensor, expected: torch.Tensor) -> float:
    if output.shape != expected.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    output, expected = output.detach().to(expected.device, wide), expected.detach().to(wide)
    scale = expected.abs().nan_to_num().max().clamp(min=torch.finfo(torch.float32).tiny)
    gap = torch.where(output == expected, 0, output - expected).abs().masked_fill(output.isnan() & expected.isnan(), 0)
    return float(gap.nan_to_num(nan=math.inf).max() / scale)


class DoubleTorch:
    """The module torch, with float64 in place of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
