# SPDX-License-Identifier: Apache-2.0
"""Matcher and criterion of all decoder layers, forward and backward: from predictions to a loss and its gradients.

DETR's with a softmax over 91 classes and none, Deformable-DETR's with 91 focal sigmoids, DINO's with these and denoising queries of
100 pairs before the others; 10 to 30 objects per image. Compared before timing: which target each query got, the total loss, the
gradients of logits and boxes.

Peers get a leaf for each layer: what taking layers out of one tensor costs in backward is not counted against them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.criteria import (
    CLASSES,
    KINDS,
    LAYERS,
    Criterion,
    dino_criterion,
    hf_criterion,
    num_denoising,
    official_criterion,
    our_criterion,
    target_of_query,
)
from benchmarks.harness import ROUNDS, Case, Contender, Plan, Work
from benchmarks.suites import Options
from cpvt_det.common.structures import Targets

TITLE = "Matcher and criterion, forward and backward"
PLANS = {"quick": Plan(seconds=2.0), "full": Plan(rounds=ROUNDS, seconds=20.0)}

BATCHES, QUERIES = (8, 32), (100, 300)
FEWEST, MOST = 10, 30  # objects per image
CHECKOUT_OF = {"softmax": "detr", "focal": "deformable_detr", "denoising": "dino"}
TOLERANCE = {"softmax": 1e-5, "focal": 1e-5, "denoising": 3e-4}
"""By kind; DINO's generalized IoU adds 1e-6 to areas."""


@dataclass(frozen=True)
class Shape:
    """One case."""

    kind: str
    batch: int
    queries: int

    @property
    def name(self) -> str:
        return f"{self.kind} b{self.batch} q{self.queries}"


def shapes(size: str) -> list[Shape]:
    """The cases: for ``quick`` the smallest of each kind, otherwise all."""
    everything = [Shape(*shape) for shape in product(KINDS, BATCHES, QUERIES)]
    return [shape for shape in everything if size != "quick" or (shape.batch, shape.queries) == (8, 100)]


def cases(options: Options) -> list[Case]:
    return [make_case(shape, options) for shape in shapes(options.size)]


def make_case(shape: Shape, options: Options) -> Case:
    return Case(
        name=shape.name,
        about={"loss": shape.kind, "images": shape.batch, "queries": shape.queries},
        build=partial(make_work, shape, options),
        memory=options.size != "quick" and shape.batch == max(BATCHES),
        warm=partial(make_work, Shape(shape.kind, 1, MOST), options),
    )


def make_inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, list[Targets]]:
    """Logits (D, B, Q, K'), boxes (D, B, Q, 4) and targets, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)

    def boxes(*leading: int) -> Tensor:
        sides = 0.05 + 0.4 * torch.rand(*leading, 2, generator=generator)
        return torch.cat((sides / 2 + torch.rand(*leading, 2, generator=generator) * (1 - sides), sides), -1)

    counts = torch.randint(FEWEST, MOST + 1, (shape.batch,), generator=generator).tolist()
    targets = [Targets(torch.randint(CLASSES, (n,), generator=generator), boxes(n)).to(device) for n in counts]
    leading = (LAYERS, shape.batch, num_denoising(shape.kind, targets) + shape.queries)
    logits = 2 * torch.randn(*leading, KINDS[shape.kind], generator=generator)
    return logits.to(device), boxes(*leading).to(device), targets


def make_work(shape: Shape, options: Options) -> Work:
    """All contenders on the same predictions; the first one is the official criterion if it is available."""
    logits, boxes, targets = make_inputs(shape, options.device)
    left_out: dict[str, str] = {}
    found: list[tuple[str, Criterion, bool]] = []
    checkout = options.peers.get(CHECKOUT_OF[shape.kind])
    if checkout is None:
        left_out["official"] = f"no checkout given: --peer {CHECKOUT_OF[shape.kind]}=PATH"
    else:
        is_dino = shape.kind == "denoising"
        official = dino_criterion(targets, checkout) if is_dino else official_criterion(shape.kind, targets, checkout)
        found.append(("official", official, True))
    if shape.kind == "denoising":
        left_out["transformers"] = "it has no DINO"
    elif "transformers" in options.peers:
        found.append(("transformers", hf_criterion(shape.kind, targets), True))
    else:
        left_out["transformers"] = "not installed"
    found.append(("cpvt_det", our_criterion(shape.kind, targets), False))
    contenders = [make_contender(name, criterion, logits, boxes, peer) for name, criterion, peer in found]
    return Work(contenders, TOLERANCE[shape.kind], left_out)


def make_contender(name: str, criterion: Criterion, logits: Tensor, boxes: Tensor, peer: bool) -> Contender:
    stacks = [[x.clone().requires_grad_()] if criterion.stacked else _layers(x) for x in (logits, boxes)]
    arguments = [stack[0] if criterion.stacked else stack for stack in stacks]
    call = partial(learn, criterion, arguments, stacks[0] + stacks[1])
    return Contender(name, call, peer, check=partial(outcome, criterion, arguments, call))


def _layers(x: Tensor) -> list[Tensor]:
    return [layer.clone().requires_grad_() for layer in x]


def learn(criterion: Criterion, arguments: list[Any], leaves: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The total loss, and the gradients of logits and then boxes."""
    total = criterion.total(*arguments)
    return total.detach(), torch.autograd.grad(total, leaves)


def outcome(criterion: Criterion, arguments: list[Any], call: Any) -> dict[str, Tensor]:
    """The outputs that are compared."""
    total, gradients = call()
    half = len(gradients) // 2
    both = [gradient if criterion.stacked else torch.stack(gradient) for gradient in (gradients[:half], gradients[half:])]
    logits, boxes = (x[0] if criterion.stacked else x for x in both)
    assigned = target_of_query(criterion.match(*arguments), logits.shape[2])
    return {"assigned": assigned, "loss": total, "logits": logits, "boxes": boxes}
