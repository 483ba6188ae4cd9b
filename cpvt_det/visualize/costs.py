# SPDX-License-Identifier: Apache-2.0
"""The costs of a detector: parameters, multiply-adds and activations by part, and time and memory of one inference.

Operations are counted as torch runs them, by the formulas of ``torch.utils.flop_counter``. Each is added to the innermost part
whose module is running. So the count does not depend on the kernel that computes a product. Two operations have different kernels
on different devices, and are therefore counted from their shapes: deformable sampling and attention, whose CPU kernel has no
formula in torch 2.9 and 2.14.
"""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import flop_registry

from cpvt_det.common.memory import peak, reset_peak, resident, trim_heap
from cpvt_det.layers.attention import DeformableAttention
from cpvt_det.models.image_model import belongs_to_part

PARTS = {
    "backbone": ("backbone",),
    "projection": ("input_proj",),
    "position": ("position", "decoder_position", "backbone.position"),
    "PEG": ("position.pegs", "backbone.position.pegs"),
    "encoder": ("encoder", "level_embed"),
    "decoder": ("decoder",),
    "queries": ("query_embed", "queries"),
    "heads": ("class_embed", "distilled_embed", "bbox_embed"),
}
"""Part -> names of modules and parameters. If names are nested, the longest one decides."""
REST = "rest"
SAMPLE_COST = 5
"""Multiply-adds per channel of a sample: bilinear interpolation and the weighted sum (arXiv 2010.04159, appendix A.1)."""
MIN_SECONDS = 1.0  # shortest time to measure


@dataclass
class Costs:
    """The costs of all parts, as dicts with the names of the parts as keys; 0 for a part without costs.

    Attributes:
        parameters: number of parameters, frozen ones included.
        multiply_adds: number of multiply-adds in convolutions, matrix products and attention.
        activations: number of values that these operations output.
    """

    parameters: dict[str, int]
    multiply_adds: dict[str, int]
    activations: dict[str, int]


def count_costs(detector: nn.Module, images: Tensor, padding_mask: Tensor) -> Costs:
    """Count one inference.

    Args:
        detector: a detector in evaluation mode; not changed.
        images: (B, 3, H, W) float, normalised.
        padding_mask: (B, H, W) bool, True = padded.

    Returns:
        The costs by part; ``"rest"`` has the costs outside all parts.
    """
    costs = Costs(*(dict.fromkeys((*PARTS, REST), 0) for _ in range(3)))
    for name, parameter in detector.named_parameters():
        costs.parameters[part_of(name)] += parameter.numel()
    running = [REST]

    def book(multiply_adds: int, activations: int) -> None:
        costs.multiply_adds[running[-1]] += multiply_adds
        costs.activations[running[-1]] += activations

    def count_samples(attention: DeformableAttention, args: tuple[Any, ...]) -> None:
        _, levels, points = attention.samples
        outputs = args[0].numel()  # (B, Q, C), the shape of the op's output
        book(SAMPLE_COST * outputs * levels * points, outputs)

    with torch.no_grad(), contextlib.ExitStack() as hooks, _Products(book), _Attention(book):
        for name, module in detector.named_modules():
            part = part_of(name)
            if part != REST:
                hooks.enter_context(module.register_forward_pre_hook(lambda _, args, part=part: running.append(part)))
                hooks.enter_context(module.register_forward_hook(lambda _, args, out: running.pop() and None))
            if isinstance(module, DeformableAttention):
                hooks.enter_context(module.register_forward_pre_hook(count_samples))
        detector(images, padding_mask)
    return costs


def part_of(name: str) -> str:
    """The part of a module or parameter, by its name in the detector."""
    found = [(len(prefix), part) for part, prefixes in PARTS.items() for prefix in prefixes if belongs_to_part(name, prefix)]
    return max(found)[1] if found else REST


class _Products(TorchDispatchMode):
    """A mode that counts convolutions and matrix products as they run."""

    def __init__(self, book: Callable[[int, int], None]):
        super().__init__()
        self.book = book

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if (formula := flop_registry.get(function._overloadpacket)) is not None:
            first = out[0] if isinstance(out, tuple) else out
            self.book(formula(*args, **(kwargs or {}), out_val=out) // 2, first.numel())
        return out


class _Attention(TorchFunctionMode):
    """A mode that counts attention from its shapes. The kernel that runs it and the operations inside the kernel have no effect on
    the count."""

    def __init__(self, book: Callable[[int, int], None]):
        super().__init__()
        self.book = book

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        given = kwargs | dict(zip(("query", "key"), args, strict=False))
        with _disable_current_modes():  # the operations inside are not counted
            out = function(*args, **kwargs)
        scores = out.shape[:-1].numel() * given["key"].shape[-2]  # (B, M, Q, N)
        self.book(scores * (given["query"].shape[-1] + out.shape[-1]), out.numel())
        return out


def measure(detector: nn.Module, images: Tensor, padding_mask: Tensor) -> tuple[float, int]:
    """Time and memory of one inference, measured after a warm-up.

    Args:
        detector: a detector in evaluation mode.
        images: (B, 3, H, W) float, normalised.
        padding_mask: (B, H, W) bool, True = padded.

    Returns:
        The median time in seconds, and the peak memory of the GPU or the process in bytes, minus the memory in use before.
    """

    @torch.no_grad()
    def call() -> None:
        detector(images, padding_mask)

    call()
    if images.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        took = torch.cuda.max_memory_allocated() - before
    else:
        gc.collect()
        trim_heap()
        reset_peak()
        before = resident()
        call()
        took = max(0, peak() - before)
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=MIN_SECONDS).median, took
