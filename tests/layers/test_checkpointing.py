# SPDX-License-Identifier: Apache-2.0
"""MODEL.CHECKPOINTING: less is kept, and nothing else changes."""

import copy

import pytest
import torch
import torch.distributed as dist
from tiny import DETECTORS, MODEL
from torch import nn

from cpvt_det.builders import build_detector
from cpvt_det.common.structures import PaddedBatch
from cpvt_det.config import load_cfg
from cpvt_det.layers.checkpointing import recomputed


def make_pair(name: str, norm: str = "BN") -> list[nn.Module]:
    """One without and one with, with the same weights."""
    more = {key.replace("__", "."): value for key, value in DETECTORS[name].items()}
    pair = []
    for checkpointing in (False, True):
        keys = MODEL | more | {"MODEL.NUM_CLASSES": 3, "MODEL.CHECKPOINTING": checkpointing, "MODEL.BACKBONE.NORM": norm}
        torch.manual_seed(0)
        pair.append(build_detector(load_cfg("", [str(word) for item in keys.items() for word in item])))
    return pair


def step(model: nn.Module) -> tuple[torch.Tensor, int]:
    """The sum of everything predicted, and how many numbers were kept for the backward pass."""
    detector = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    batch = PaddedBatch.from_images([torch.randn(3, 64, 96), torch.randn(3, 80, 48)], detector.size_divisibility)
    parameters, kept = {parameter.data_ptr() for parameter in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        predictions = model(batch.images, batch.padding_mask)
        total = predictions.logits.sigmoid().mean() + predictions.boxes.square().mean()
    total.backward()
    return total.detach(), sum(kept.values())


def assert_same_step(plain: nn.Module, frugal: nn.Module) -> None:
    results = []
    for model in (plain, frugal):
        torch.manual_seed(1)
        results.append(step(model))
    assert torch.equal(results[0][0], results[1][0])
    assert results[1][1] < 0.75 * results[0][1]
    gradients = 0
    for (name, a), b in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        gradients += a.grad is not None
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    assert gradients > 50
    for (name, a), b in zip(plain.named_buffers(), frugal.buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("norm", ["BN", "SyncBN", "GN", "FrozenBN"])
@pytest.mark.parametrize("name", DETECTORS)
def test_a_step_comes_to_the_same_bit_for_bit(name, norm):
    """Dropout, gradients and running statistics of backbone and PEG."""
    plain, frugal = make_pair(name, norm)
    assert_same_step(plain, frugal)
    counters = [buffer for name, buffer in frugal.named_buffers() if name.endswith("num_batches_tracked")]
    assert counters
    assert all(counter == 1 for counter in counters)


@pytest.mark.parametrize("name", DETECTORS)
def test_it_works_under_ddp(name, tmp_path):
    plain, frugal = make_pair(name)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert_same_step(plain, nn.parallel.DistributedDataParallel(frugal))
    finally:
        dist.destroy_process_group()


def test_norms_are_left_as_they_were_by_a_backward_pass_that_fails():
    class Fails(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("on purpose")

    norm = nn.BatchNorm2d(3)
    frozen = copy.deepcopy(norm).eval()
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    out = recomputed(lambda *args: norm(frozen(Fails.apply(args[-1]))).square(), norm, frozen, x)
    statistics = norm.running_mean.clone()
    with pytest.raises(ArithmeticError, match="on purpose"):
        out.sum().backward()
    assert norm.momentum == frozen.momentum == 0.1
    assert torch.equal(norm.running_mean, statistics)
    assert (norm.num_batches_tracked, frozen.num_batches_tracked) == (1, 0)


def test_inference_keeps_nothing_and_recomputes_nothing():
    calls = []
    with torch.no_grad():
        recomputed(lambda x: calls.append(x) or x, torch.ones(2))
    assert len(calls) == 1
