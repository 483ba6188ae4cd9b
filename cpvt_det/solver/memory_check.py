# SPDX-License-Identifier: Apache-2.0
"""Checks that a step fits into memory. On a CPU, the checks run before the step, because the system kills a process that needs
too much memory without any message.

One image of the first batch is passed through the detector, on the canvas of its batch, and the memory that autograd keeps for it
is measured. All images of a part of the batch are in memory at the same time, so the measured memory times the number of images
is a lower bound for the step. Temporary outputs, gradients, the optimiser and the operators' work space need more memory.
Training-only queries are counted first, because their attention mask alone may exceed the available memory.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cpvt_det.common import distributed, memory
from cpvt_det.common.errors import ConfigError, counted, first_line
from cpvt_det.common.structures import Sample, Targets
from cpvt_det.models import ImageModel
from cpvt_det.models.denoising import ContrastiveDenoising

logger = logging.getLogger("cpvt_det")
LARGE = 4_000
"""If at least this many bytes are available per pixel of a batch, the step is not checked; this package's detectors need fewer."""
LARGE_SQUARE = 1_000
"""The same limit per pair of queries in the decoder's self-attention; with denoising there may be thousands of queries."""
CERTAIN = 1.1
"""A step is refused if its lower bound exceeds the available memory times this factor, which allows for images that need less."""
LIKELY = 1.5
"""A warning is logged if the lower bound times this factor exceeds the available memory. The ``SOLVER.ACCUMULATE`` that the message
suggests keeps the product below it."""
SMALLER = "set smaller INPUT.MIN_SIZE_TRAIN and MAX_SIZE_TRAIN, or MODEL.CHECKPOINTING True"
HARDLY_LESS = f"even one image at a time hardly needs less: {SMALLER}"


@contextlib.contextmanager
def out_of_memory_explained(images: int, parts: int) -> Iterator[None]:
    """Within the block, turn an out-of-memory error of the GPU into an error that names the setting to change.

    Args:
        images: number of samples of this process in the step.
        parts: ``SOLVER.ACCUMULATE``.

    Raises:
        ConfigError: the GPU's memory is not enough.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        more = min(images, 2 * parts)
        way_out = f"set SOLVER.ACCUMULATE {more}, which splits the step into {more} parts" if more > parts else SMALLER
        raise ConfigError(
            f"the step of {images} images does not fit into the memory of the GPU ({first_line(error)}); {way_out}; a run that "
            "has begun continues with --resume"
        ) from error


def require_memory(detector: nn.Module, part: Sequence[Sample], count: int, amp_dtype: torch.dtype | None = None) -> None:
    """Refuse a step that cannot fit into memory. Every process must call this. The detector and its statistics do not change.

    Args:
        detector: model of the step, in training mode; a model from outside this package is not checked.
        part: samples that are processed at the same time.
        count: number of all samples of this process in a step.
        amp_dtype: dtype of autocast; ``None`` for full precision.

    Raises:
        ConfigError: the step needs more memory than is available. The message suggests a value of ``SOLVER.ACCUMULATE``, or says
            what else to change.
    """
    available = memory.available()
    if not isinstance(detector, ImageModel) or detector.pixel_mean.device.type != "cpu" or available is None:
        return
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", distributed.world_size()))
    _require_images(detector, part, count, available // processes)
    batch = detector.preprocess([sample["image"] for sample in part])
    targets = [sample["targets"] for sample in part]
    squared = _require_attention_mask(detector, targets, available // processes)
    expected = processes * (batch.padding_mask.numel() * LARGE + len(part) * squared * LARGE_SQUARE)
    if not distributed.all_reduce_max(int(expected > available)):  # all processes check, because norms may communicate
        return
    targets = [max(targets, key=lambda target: 0 if target is None else len(target))]
    images, padding_mask = batch.images[:1].clone(), batch.padding_mask[:1].clone()
    buffers = {name: buffer.clone() for name, buffer in detector.named_buffers()}
    with torch.autocast("cpu", amp_dtype, enabled=amp_dtype is not None):
        each = processes * kept_bytes(detector, images, padding_mask, targets)
    for name, buffer in detector.named_buffers():
        buffer.copy_(buffers[name])
    each = distributed.all_reduce_max(each)
    size = f"{len(part)} images on a canvas of {images.shape[2]} x {images.shape[3]} pixels"
    _judge(each, len(part), count, available, size)


def _require_images(detector: ImageModel, part: Sequence[Sample], count: int, available: int) -> None:
    """Refuse images that do not fit into memory even before anything is computed from them."""
    height, width = (max(sample["image"].shape[axis] for sample in part) for axis in (1, 2))
    taken = len(part) * 3 * height * width * detector.pixel_mean.element_size()
    if distributed.all_reduce_max(int(taken > available)):
        fewer = f"set a smaller SOLVER.IMS_PER_BATCH, or SOLVER.ACCUMULATE {count}, which processes one image at a time"
        raise ConfigError(
            f"the first step does not fit into memory: {counted(len(part), 'image')} on a canvas of {height} x {width} pixels "
            f"take {taken / 1e9:.3g} GB before anything is computed, but only {available / 1e9:.3g} GB are available for each "
            "process; "
            f"{fewer if taken / len(part) <= available and len(part) > 1 else SMALLER}"
        )


def _require_attention_mask(detector: ImageModel, targets: Sequence[Targets | None], available: int) -> int:
    """Refuse training-only queries whose attention mask does not fit into memory.

    Returns:
        The square of the number of queries, or 0 without training-only queries.
    """
    source = getattr(detector, "queries", None)
    denoising, hybrid = getattr(source, "denoising", None), getattr(source, "hybrid", 0)
    has_denoising = isinstance(denoising, ContrastiveDenoising)
    if None in targets or not (has_denoising or hybrid):
        return 0
    groups, size = denoising.count(targets) if has_denoising else (0, 0)
    squared = (groups * size + detector.num_queries + hybrid) ** 2
    need = squared * detector.pixel_mean.element_size()
    if distributed.all_reduce_max(int(need > available)):
        keys = [f"MODEL.QUERIES.HYBRID makes {hybrid} queries"] if hybrid else []
        if has_denoising:
            made = f"makes {groups} groups of {size} queries for the first batch"
            keys.insert(0, f"MODEL.QUERIES.DENOISING {denoising.pairs} {made}")
        raise ConfigError(
            f"{' and '.join(keys)}, and their attention mask alone needs {need / 1e9:.3g} GB of the {available / 1e9:.3g} GB of "
            "memory for each process; set a lower number, or 0 if images have that many objects"
        )
    return squared


def _judge(each: int, images: int, count: int, available: int, size: str) -> None:
    """Refuse, warn about, or accept ``images`` images at once if each image needs ``each`` bytes."""
    need = each * images
    if need * LIKELY <= available:
        return
    fitting = [parts for parts in range(1, count + 1) if -(-count // parts) * each * LIKELY <= available]
    way_out = f"set SOLVER.ACCUMULATE {fitting[0]}, which splits the step into {fitting[0]} parts" if fitting else HARDLY_LESS
    told = (
        f"{size} keep {need / 1e9:.3g} GB for the backward pass (measured on one of them), "
        f"but only {available / 1e9:.3g} GB of memory are available"
    )
    if need > CERTAIN * available:
        raise ConfigError(f"the first step does not fit into memory: {told}; {way_out}")
    logger.warning("The first step may not fit into memory: %s; %s", told, way_out)


def kept_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Count the bytes that autograd stores for the backward pass of a call. Each storage counts once, and parameters and buffers
    do not count.

    Tensors of functions that recompute their activations (``MODEL.CHECKPOINTING``) are not counted.
    """
    modules = [function] if isinstance(function, nn.Module) else []
    own = {t.untyped_storage().data_ptr() for module in modules for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that refers to itself would never be freed

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*args)  # kept tensors are not freed before this point, so no address is used twice
    total = sum(kept.values())
    del result
    return total
