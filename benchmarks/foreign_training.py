# SPDX-License-Identifier: Apache-2.0
"""Training of DINO and DAB-Deformable-DETR by the authors' code and by ours: losses, pairs and gradients in float64."""

import contextlib
import copy
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor, nn
from torchvision.ops import box_convert, generalized_box_iou

from benchmarks.detrex_model import replaced_names
from benchmarks.equal import difference
from benchmarks.foreign_models import EPSILON, LIMIT, Case, Foreign, config_of, float64_of, names_of, without_cuda
from cpvt_det.builders import build_criterion
from cpvt_det.checkpoint import load_weights
from cpvt_det.common.structures import Targets
from cpvt_det.models import denoising as denoising_module

SIZE = (192, 256)
"""Of the images: no padding in any code, and more tokens than queries."""
COUNTS = ((3, 5), (4, 0), (0, 0), (2, 6), (5, 1))
"""Objects of the two images, batch by batch; each batch has a seed of its own, of images, objects and noise."""
KINDS = {"class": ("ce", "class"), "l1": ("bbox",), "giou": ("giou",)}
"""Our names of losses -> those of DINO and detrex."""
GROUPS = {"loss_": ("",), "loss_denoising_": ("_dn",), "loss_proposal_": ("_interm", "_enc")}
"""Our prefixes of losses -> suffixes there, before the layer's number."""


# DINO and DAB-Deformable-DETR


def compare_training(case: Case, foreign: Foreign, ours: nn.Module) -> dict[str, Any]:
    """Losses by name, of real, denoising and proposed boxes, their sum, and the gradients of all weights.

    Both codes make the noise of denoising from the same random numbers. The generalized IoU there adds 1e-6 to areas; torchvision's
    takes its place. Where all layers share their heads there, ours has one per layer, whose gradients are added up.

    Returns:
        The largest differences over ``COUNTS``, by column.

    Raises:
        ClickException: losses or gradients that differ.
    """
    gaps, slopes = [], []
    criterion = build_criterion(config_of(case))
    for model in (foreign.module, ours):
        model.train()
    for seed, counts in enumerate(COUNTS, start=3):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(2, 3, *SIZE, generator=generator, dtype=torch.float64)
        mask = torch.zeros(2, *SIZE, dtype=torch.bool)
        targets = [_draw_objects(count, generator) for count in counts]
        for model in (foreign.module, ours):
            model.zero_grad(set_to_none=True)
        areas = replaced_names(foreign.namespaces, {"generalized_box_iou": generalized_box_iou})
        with _random_numbers(ours, targets, generator):
            with float64_of(foreign), without_cuda(), _float64_by_default(), areas:
                theirs = LOSSES_OF[case.peer](foreign, images, targets)
            found = criterion(ours(images, mask, targets), targets).losses
        wanted = {}
        for (prefix, suffixes), (kind, name) in itertools.product(GROUPS.items(), KINDS.items()):
            pattern = re.compile(f"loss_({'|'.join(name)})({'|'.join(suffixes)})(_[0-9])?")
            wanted[prefix + kind] = sum(value for own, value in theirs.items() if pattern.fullmatch(own))
        empty = [name for name in wanted if name not in found and not wanted[name]]  # of no denoising query, or without proposals
        total = sum(theirs.values())
        gaps.append(difference(found, {name: value for name, value in wanted.items() if name not in empty}))
        gaps.append(difference(sum(found.values()), total))
        total.backward()
        sum(found.values()).backward()
        slopes.append(_compare_gradients(case, foreign.module, ours))
    if not max(*gaps, *slopes) < LIMIT:
        raise click.ClickException(f"training differs: losses {gaps}, gradients {slopes}")
    return {"losses": max(gaps), "gradients": max(slopes), "batches": len(slopes)}


def _losses_of_dino(foreign: Foreign, images: Tensor, targets: list[Targets]) -> dict[str, Tensor]:
    """The weighted losses by the names of IDEA-Research/DINO."""
    mask = torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)
    losses = foreign.criterion(foreign.module(foreign.NestedTensor(images, mask), _labels(targets)), _labels(targets))
    weights = foreign.criterion.weight_dict
    return {name: weights[name] * value for name, value in losses.items() if name in weights}


def _losses_of_detrex(foreign: Foreign, images: Tensor, targets: list[Targets]) -> dict[str, Tensor]:
    """The same for detrex, whose models weight their losses."""
    from detectron2.structures import Boxes, Instances

    size = images.shape[2:]
    scale = torch.tensor([size[1], size[0]] * 2, dtype=torch.float64)
    inputs = []
    for image, target in zip(images, targets, strict=True):
        boxes = Boxes((box_convert(target.boxes_cxcywh, "cxcywh", "xyxy") * scale).round())  # float32, exact for whole pixels
        inputs.append({"image": image, "instances": Instances(tuple(size), gt_classes=target.labels, gt_boxes=boxes)})
    weights = foreign.module.criterion.weight_dict
    return {name: value for name, value in foreign.module(inputs).items() if name in weights}


LOSSES_OF = {"dino": _losses_of_dino, "detrex": _losses_of_detrex}


def _draw_objects(count: int, generator: torch.Generator) -> Targets:
    """Objects whose corners are whole pixels."""
    sides = 0.1 + 0.3 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    centers = sides / 2 + (1 - sides) * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    scale = torch.tensor([SIZE[1], SIZE[0]] * 2, dtype=torch.float64)
    corners = (box_convert(torch.cat((centers, sides), 1), "cxcywh", "xyxy") * scale).round() / scale
    return Targets(torch.randint(80, (count,), generator=generator), box_convert(corners, "xyxy", "cxcywh"))


@contextmanager
def _float64_by_default() -> Iterator[None]:
    """The authors' code has zeros of the default dtype where it prepares the noise."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def _random_numbers(ours: nn.Module, targets: list[Targets], generator: torch.Generator) -> Iterator[None]:
    """Inside, both codes get the same random numbers where they make the noise of denoising.

    Ours draws for B images, G groups, positives and negatives, and T objects, with those that fill up; the authors' code for G
    groups, positives and negatives, and the objects of all images one after the other; of a corner's shift a sign and a size, where
    ours draws both in one number; and new labels only where a label changes. As in all of the authors' code here, the numbers of a
    noised box keep our bound from 0 and 1, in both.
    """
    denoising = getattr(ours.queries, "denoising", None)
    if denoising is None:
        yield
        return
    groups, size = denoising.count(targets)
    shape = (len(targets), groups, 2, size // 2)
    changes = torch.rand(shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(denoising.num_classes, shape, generator=generator)
    signs = torch.randint(2, (*shape, 4), generator=generator).double()
    sizes = torch.rand((*shape, 4), generator=generator, dtype=torch.float64)

    def of_objects(values: Tensor) -> Tensor:
        """(B, G, 2, T, ...) in the order of the authors' code."""
        return torch.cat([values[image, :, :, : len(target)] for image, target in enumerate(targets)], dim=2).flatten(0, 2)

    def rand_like(like: Tensor) -> Tensor:
        if like.dim() == 5:
            return (1 + (2 * signs - 1) * sizes) / 2
        return of_objects(changes if like.dim() == 1 else sizes)

    def randint_like(like: Tensor, *bounds: int, **options: Any) -> Tensor:
        if like.dim() == 4:
            return labels
        return of_objects(labels)[like] if like.dim() == 1 else of_objects(signs)

    functions = {"rand": lambda *_, **__: changes, "rand_like": rand_like, "randint_like": randint_like}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(denoising_module, "NEAREST", EPSILON))
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch, name, function))
        yield


def _compare_gradients(case: Case, theirs: nn.Module, ours: nn.Module) -> float:
    """The largest difference of a weight's gradients, relative to the norm of all."""
    slopes = {name: torch.zeros_like(tensor) for name, tensor in theirs.state_dict().items()}
    for name, parameter in theirs.named_parameters(remove_duplicate=False):
        slopes[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    wanted = copy.deepcopy(ours)
    load_weights(wanted, slopes, names_of(case))
    pairs, heads = [], {}
    expected = dict(wanted.named_parameters())
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        slope = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        first, _, rest = name.partition(".")
        shared = first in ("class_embed", "bbox_embed") and getattr(theirs, first)[0] is getattr(theirs, first)[1]
        if shared and int(rest.split(".")[0]) < len(theirs.transformer.decoder.layers):
            heads.setdefault((first, rest.partition(".")[2]), []).append((slope, expected[name].detach()))
        else:
            pairs.append((slope, expected[name].detach()))
    pairs += [(sum(own for own, _ in layers), layers[0][1]) for layers in heads.values()]
    norm = torch.stack([slope.norm() for _, slope in pairs]).norm()
    return float(max((one - other).abs().max() for one, other in pairs) / norm)


def _labels(targets: list[Targets]) -> list[dict[str, Tensor]]:
    return [{"labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
