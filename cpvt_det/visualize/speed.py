# SPDX-License-Identifier: Apache-2.0
"""Time and memory of an inference."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cpvt_det.memory import peak, reset_peak, resident, trim_heap

MIN_SECONDS = 1.0  # shortest time of measuring
MIN_CALLS = 3


def measure(detector: nn.Module, images: Tensor, padding_mask: Tensor) -> tuple[float, int]:
    """Time and memory of one inference, after a first one to warm up.

    Args:
        detector: a detector in evaluation mode.
        images: (B, 3, H, W) float, normalised.
        padding_mask: (B, H, W) bool, True = padded.

    Returns:
        The median time in seconds; and the peak memory in bytes, of the GPU or of the process, less the memory in use before.
    """

    @torch.no_grad()
    def call() -> Any:
        return detector(images, padding_mask)

    call()
    took = _peak_on_gpu(call) if images.is_cuda else _peak_of_process(call)
    seconds: list[float] = []
    while sum(seconds) < MIN_SECONDS or len(seconds) < MIN_CALLS:
        start = time.perf_counter()
        call()
        if images.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), took


def _peak_on_gpu(call: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_of_process(call: Callable[[], Any]) -> int:
    gc.collect()
    trim_heap()
    reset_peak()
    before = resident()
    call()
    return max(0, peak() - before)
