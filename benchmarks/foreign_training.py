# SPDX-License-Identifier: Apache-2.0
"""Training of DINO and MS-DETR by the authors' code and by ours, in float64, with the same weights: losses, pairs, gradients."""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor, nn
from torchvision.ops import generalized_box_iou

from benchmarks.equal import difference
from benchmarks.foreign_models import LIMIT, Case, Foreign, config_of, float64_of, names_of, without_cuda
from cpvt_det.builders import build_criterion
from cpvt_det.checkpoint import load_weights
from cpvt_det.losses.matcher import PaddedTargets
from cpvt_det.losses.one_to_many import OneToManyMatcher
from cpvt_det.structures import Predictions, Targets

SIZE = (192, 256)
"""Of the images: no padding in any code, and more tokens than queries."""
COUNTS = ((3, 5), (4, 0), (0, 0))
"""Objects of the two images, batch by batch."""
KINDS = {"class": "ce", "l1": "bbox", "giou": "giou"}
"""Our names of losses -> those of the authors' code."""
GROUPS = {"loss_": "", "loss_denoising_": "_dn", "loss_proposal_": "_interm"}
"""Our prefixes of losses -> suffixes in DINO's code, before the layer's number."""


# DINO


def compare_denoising(case: Case, foreign: Foreign, ours: nn.Module) -> dict[str, Any]:
    """DINO in training: the losses of real, denoising and proposed boxes by name, their sum, and the gradients of all weights.

    The authors' code draws the noise, and ours gets it. Heads that all layers share there are six heads in ours; their gradients
    are added up. Its generalized IoU adds 1e-6 to areas; torchvision's takes its place.

    Returns:
        The largest differences over ``COUNTS``, by column.

    Raises:
        ClickException: losses or gradients that differ.
    """
    generator, gaps, slopes = torch.Generator().manual_seed(3), [], []
    criterion = build_criterion(config_of(case))
    for model in (foreign.module, ours):
        model.train()
    for counts in COUNTS:
        images = torch.randn(2, 3, *SIZE, generator=generator, dtype=torch.float64)
        mask = torch.zeros(2, *SIZE, dtype=torch.bool)
        targets = [_draw_objects(count, generator) for count in counts]
        for model in (foreign.module, ours):
            model.zero_grad(set_to_none=True)
        with float64_of(foreign), without_cuda(), _float64_by_default(), _noise_kept(foreign) as noise:
            output = foreign.module(foreign.NestedTensor(images, mask), _labels(targets))
            theirs = foreign.criterion(output, _labels(targets))
        weights, layers = foreign.criterion.weight_dict, len(output["aux_outputs"])
        given = _noise_for_ours(ours, noise, targets, foreign.module.label_enc.weight)
        with mock.patch.object(ours.queries.denoising, "draw_noise", return_value=given):
            found = criterion(ours(images, mask, targets), targets).losses
        wanted = {}
        for (prefix, suffix), (kind, name) in ((group, kind) for group in GROUPS.items() for kind in KINDS.items()):
            names = [f"loss_{name}{suffix}", *(f"loss_{name}{suffix}_{n}" for n in range(layers))]
            wanted[prefix + kind] = sum(weights[name] * theirs[name] for name in names if name in theirs)
        empty = [name for name in wanted if name not in found and not wanted[name]]  # of no denoising query
        total = sum(wanted.values())
        gaps.append(difference(found, {name: value for name, value in wanted.items() if name not in empty}))
        gaps.append(difference(sum(found.values()), total))
        total.backward()
        sum(found.values()).backward()
        slopes.append(_compare_gradients(case, foreign.module, ours))
    if not max(gaps) < LIMIT or not max(slopes) < 10 * LIMIT:
        raise click.ClickException(f"training differs: losses {gaps}, gradients {slopes}")
    return {"losses": max(gaps), "gradients": max(slopes), "batches": len(COUNTS)}


def _draw_objects(count: int, generator: torch.Generator) -> Targets:
    sides = 0.1 + 0.3 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    centers = sides / 2 + (1 - sides) * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    return Targets(torch.randint(80, (count,), generator=generator), torch.cat((centers, sides), 1))


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
def _noise_kept(foreign: Foreign) -> Iterator[list[Any]]:
    """What the authors' code makes of the targets: contents and numbers of boxes of the denoising queries, mask and counts."""
    (space,) = (space for space in foreign.namespaces if space["__name__"].endswith("dino.dino"))
    prepare, kept = space["prepare_for_cdn"], []

    @functools.wraps(prepare)
    def keep(*args: Any, **options: Any) -> Any:
        kept.extend(made := prepare(*args, **options))
        return made

    areas = next(space for space in foreign.namespaces if space["__name__"] == "util.box_ops")
    with mock.patch.dict(space, {"prepare_for_cdn": keep}), mock.patch.dict(areas, {"generalized_box_iou": generalized_box_iou}):
        yield kept


def _noise_for_ours(ours: nn.Module, noise: list[Any], targets: list[Targets], vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result of ``ContrastiveDenoising.draw_noise`` that says the same; a label is the one whose vector is the content."""
    contents, numbers, _, counts = noise
    most, groups = max(map(len, targets)), counts["num_dn_group"]
    if counts["pad_size"] != 2 * groups * most or (most and groups != ours.queries.denoising.count(targets)[0]):
        raise click.ClickException(f"groups of denoising differ: {counts}")
    shape = (len(targets), groups, 2, most)
    labels = torch.cdist(contents.detach().flatten(0, 1), vectors.detach()).argmin(-1) if most else contents.new_zeros(0)
    objects = torch.stack([torch.arange(most).where(torch.arange(most) < len(target), -1) for target in targets])
    objects = objects[:, None, None].repeat(1, groups, 2, 1)
    return objects, labels.long().reshape(shape), numbers.detach().sigmoid().reshape(*shape, 4)


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
        if first in ("class_embed", "bbox_embed") and int(rest.split(".")[0]) < theirs.transformer.num_decoder_layers:
            heads.setdefault((first, rest.partition(".")[2]), []).append((slope, expected[name].detach()))
        else:
            pairs.append((slope, expected[name].detach()))
    pairs += [(sum(own for own, _ in layers), layers[0][1]) for layers in heads.values()]
    norm = torch.stack([slope.norm() for _, slope in pairs]).norm()
    return float(max((one - other).abs().max() for one, other in pairs) / norm)


# MS-DETR


def compare_one_to_many(case: Case, foreign: Foreign, ours: nn.Module) -> dict[str, Any]:
    """The one-to-many supervision of MS-DETR: its predictions, pairs and losses, of all layers, for two images with objects.

    Objects are predicted boxes with noise, far enough from each other that no query fits two of them: there the codes differ.
    """
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(2, 3, *SIZE, generator=generator, dtype=torch.float64)
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    ours.train()
    for module in ours.backbone.modules():
        module.eval()
    criterion = build_criterion(config_of(case))
    found = ours(images, mask)
    many, targets = found.one_to_many, []
    for boxes, corner in zip(many.boxes[-1].detach(), ((0.3, 0.3), (0.6, 0.4)), strict=True):
        near = (boxes[:, :2] - torch.tensor(corner)).abs().sum(-1).argmin()
        noise = 0.02 * torch.randn(1, 4, generator=generator, dtype=torch.float64)
        targets.append(Targets(torch.randint(80, (1,), generator=generator), (boxes[near][None] + noise).clamp(0.05, 0.95)))
    labels = _labels(targets)
    foreign.module.train()
    with float64_of(foreign):
        output = foreign.module(foreign.NestedTensor(images, mask))
        theirs = foreign.criterion(output, labels)
        layers = [*output["o2m_outputs"]["aux_outputs"], output["o2m_outputs"]]
    count = compare_pairs(foreign, criterion.one_to_many, Predictions(many.logits, many.boxes), targets)
    count += sum(compare_pairs(foreign, criterion.one_to_many, *draw_clusters(seed)) for seed in range(10))
    gaps = [difference(many.logits[n], layer["pred_logits"]) for n, layer in enumerate(layers)]
    gaps += [difference(many.boxes[n], layer["pred_boxes"]) for n, layer in enumerate(layers)]
    losses = criterion(found, targets).losses
    for kind, name in {"class": "ce", "l1": "bbox", "giou": "giou"}.items():
        names = [f"loss_{name}{suffix}_o2m" for suffix in ("", *(f"_{n}" for n in range(len(layers) - 1)))]
        total = sum(foreign.criterion.weight_dict[name] * theirs[name] for name in names)
        gaps.append(difference(losses[f"loss_many_{kind}"], total))
    if not max(gaps) < LIMIT:
        raise click.ClickException(f"one-to-many supervision differs: {gaps}")
    return {"one-to-many": max(gaps), "its pairs": count}


def compare_pairs(foreign: Foreign, matcher: OneToManyMatcher, predictions: Predictions, targets: list[Targets]) -> int:
    """The number of pairs of the one-to-many matching, which have to be the same ones."""
    wanted = set()
    for layer, (logits, boxes) in enumerate(zip(predictions.logits, predictions.boxes, strict=True)):
        with float64_of(foreign):
            found = foreign.criterion.matcher_o2m({"pred_logits": logits, "pred_boxes": boxes}, _labels(targets))
        for image, pairs in enumerate(found):
            wanted |= {(layer, image, int(query), int(number)) for query, number in zip(*pairs, strict=True)}
    matches = matcher(predictions, PaddedTargets.from_targets(targets, torch.float64))
    ours = [part.tolist() for part in (matches.layer, matches.image, matches.query, matches.target)]
    if wanted != set(zip(*ours, strict=True)):
        raise click.ClickException(f"pairs of the one-to-many matching differ: {wanted ^ set(zip(*ours, strict=True))}")
    return len(wanted)


def draw_clusters(seed: int) -> tuple[Predictions, list[Targets]]:
    """300 boxes for each of two images, 20 of them near each of three objects that lie apart; the second has none."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.tensor([(0.2, 0.2, 0.3, 0.2), (0.7, 0.2, 0.4, 0.3), (0.4, 0.7, 0.5, 0.4)], dtype=torch.float64)
    boxes = 0.05 + 0.1 * torch.rand(2, 2, 300, 4, generator=generator, dtype=torch.float64)
    noise = 0.08 * torch.randn(2, 3, 20, 4, generator=generator, dtype=torch.float64)
    boxes[:, 0, :60] = (wanted[:, None] + noise).clamp(min=0.01).flatten(1, 2)
    logits = torch.randn(2, 2, 300, 91, generator=generator, dtype=torch.float64)
    objects = Targets(torch.randint(91, (3,), generator=generator), wanted)
    return Predictions(logits, boxes), [objects, Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4).double())]


def _labels(targets: list[Targets]) -> list[dict[str, Tensor]]:
    return [{"labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
