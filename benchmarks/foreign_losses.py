#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Classification losses that know overlaps, by their authors' code and by ours: values and gradients in float64.

The varifocal loss of D-FINE (RT-DETR's), the matchability-aware loss of DEIM and the IoU-aware cross-entropy of Align-DETR get the
same logits, boxes and matches as ours: batches of three images of which one, or all, have no object, from several seeds.

``python benchmarks/foreign_losses.py --peer dfine=PATH --peer deim=PATH --peer detrex=PATH``, with the paths of checkouts of
Peterande/D-FINE, ShihuaHuang95/DEIM and IDEA-Research/detrex; seconds.
"""

import importlib
import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate
from torch import Tensor
from torchvision.ops import box_iou

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.clocks import fixed_threads
from benchmarks.detrex_model import imports_from
from benchmarks.equal import difference
from benchmarks.machine import machine, versions
from benchmarks.peers import find_peers, peer_versions
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Targets
from cpvt_det.losses import make_classification

CLASSES, QUERIES = 7, 40
COUNTS = ((3, 0, 11), (1, 9, 2), (0, 0, 0))
"""Objects of each image, batch by batch."""
SEEDS = 5
LIMIT = 1e-12
"""Largest relative difference; a value is a sum of some hundred terms."""

Pairs = list[tuple[Tensor, Tensor]]
"""Queries and objects of each image that are matched."""
Theirs = Callable[[Tensor, Tensor, Sequence[Targets], Pairs], Tensor]
"""Logits (B, Q, K), boxes (B, Q, 4), targets and matches -> loss, not divided."""


# The authors' code


def dfine_loss(folder: Path) -> Theirs:
    """The varifocal loss of D-FINE, with RT-DETR's alpha of 0.75."""
    criterion = _imported(folder, "src.zoo.dfine.dfine_criterion", ("src", "src.zoo", "src.zoo.dfine", "src.misc")).DFINECriterion
    return _of_criterion(criterion(None, {}, [], 0.75, 2.0, CLASSES), "vfl")


def deim_loss(folder: Path) -> Theirs:
    """The matchability-aware loss of DEIM, with the gamma of its configs."""
    criterion = _imported(folder, "engine.deim.deim_criterion", ("engine", "engine.deim", "engine.misc")).DEIMCriterion
    return _of_criterion(criterion(None, {}, [], gamma=1.5, num_classes=CLASSES), "mal")


def detrex_loss(folder: Path) -> Theirs:
    """The IoU-aware cross-entropy of Align-DETR, for one query per object; torchvision's IoU is put in, since its own adds 1e-6."""
    parts = ("projects", "projects.align_detr", "projects.align_detr.modeling", "projects.align_detr.modeling.losses")
    code = _imported(folder, "projects.align_detr.modeling.losses.losses", parts)
    code.box_iou = lambda boxes, others: (box_iou(boxes, others), None)

    def loss(logits: Tensor, boxes: Tensor, targets: Sequence[Targets], pairs: Pairs) -> Tensor:
        image = torch.cat([torch.full_like(queries, n) for n, (queries, _) in enumerate(pairs)])
        query = torch.cat([queries for queries, _ in pairs])
        labels = torch.cat([target.labels[objects] for target, (_, objects) in zip(targets, pairs, strict=True)])
        wanted = torch.cat([target.boxes_cxcywh[objects] for target, (_, objects) in zip(targets, pairs, strict=True)])
        return code.IA_BCE_loss(logits, (image, query, labels), boxes[image, query], wanted, pairs, 1, 0.25, 2)[0]

    return loss


def _imported(folder: Path, name: str, packages: Sequence[str]) -> types.ModuleType:
    """One file of a checkout; of the packages around it nothing is run.

    Raises:
        BadInputError: a file that cannot be imported.
    """
    for package in packages:
        made = types.ModuleType(package)
        made.__path__ = [str(folder.joinpath(*package.split(".")))]
        sys.modules[package] = made
    try:
        with imports_from([folder]):
            return importlib.import_module(name)
    except Exception as error:
        raise BadInputError(f"{name} of {folder} cannot be imported: {error}") from error
    finally:
        for package in packages:
            del sys.modules[package]


def _of_criterion(criterion: Any, kind: str) -> Theirs:
    """A loss of D-FINE's criterion, and of those made of it."""

    def loss(logits: Tensor, boxes: Tensor, targets: Sequence[Targets], pairs: Pairs) -> Tensor:
        labels = [{"labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
        output = {"pred_logits": logits, "pred_boxes": boxes}
        return getattr(criterion, f"loss_labels_{kind}")(output, labels, pairs, 1)[f"loss_{kind}"]

    return loss


PEERS = {
    "dfine": ("varifocal", {}, dfine_loss),
    "deim": ("mal", {"mal_gamma": 1.5}, deim_loss),
    "detrex": ("ia_bce", {}, detrex_loss),
}
"""Checkout -> our classification with its options, and the function that imports theirs."""


# The comparison


def compare(theirs: Theirs, kind: str, options: dict[str, float]) -> dict[str, Any]:
    """The largest differences of the loss and of its gradient over ``COUNTS`` and seeds, relative to the largest value.

    Raises:
        ClickException: a difference above ``LIMIT``.
    """
    ours, gaps = make_classification(kind, CLASSES, **options), {"loss": 0.0, "gradient": 0.0}
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        for counts in COUNTS:
            logits = 3 * torch.randn(len(counts), QUERIES, CLASSES, generator=generator, dtype=torch.float64)
            boxes = _draw_boxes(len(counts) * QUERIES, generator).unflatten(0, (-1, QUERIES))
            targets, pairs = [], []
            classes = torch.full((len(counts), QUERIES), CLASSES)
            overlaps = torch.zeros(len(counts), QUERIES, dtype=torch.float64)
            for image, count in enumerate(counts):
                objects, queries = (torch.randperm(most, generator=generator)[:count] for most in (count, QUERIES))
                near = boxes[image, queries] * (1 + 0.2 * torch.rand(count, 4, generator=generator, dtype=torch.float64))
                targets.append(Targets(torch.randint(CLASSES, (count,), generator=generator), near[objects.argsort()]))
                pairs.append((queries, objects))
                classes[image, queries] = targets[-1].labels[objects]
                for query, box in zip(queries.tolist(), near, strict=True):
                    overlaps[image, query] = _overlap(boxes[image, query], box)
            found, wanted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
            own = ours.loss(found[None], classes[None], overlaps[None]).sum()
            other = theirs(wanted, boxes, targets, pairs)
            gaps["loss"] = max(gaps["loss"], difference(own, other))
            slopes = [torch.autograd.grad(value, x)[0] for value, x in ((own, found), (other, wanted))]
            gaps["gradient"] = max(gaps["gradient"], difference(*slopes))
    if not max(gaps.values()) < LIMIT:
        raise click.ClickException(f"{kind} differs: {gaps}")
    return {**gaps, "batches": SEEDS * len(COUNTS)}


def _draw_boxes(count: int, generator: torch.Generator) -> Tensor:
    sides = 0.05 + 0.3 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    return torch.cat((0.2 + 0.5 * torch.rand(count, 2, generator=generator, dtype=torch.float64), sides), 1)


def _overlap(box: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of two cxcywh boxes, by hand."""
    (a, b), (c, d) = ((part[:2] - part[2:] / 2, part[:2] + part[2:] / 2) for part in (box, other))
    common = (torch.minimum(b, d) - torch.maximum(a, c)).clamp(min=0).prod()
    return common / ((b - a).prod() + (d - c).prod() - common)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--peer", "given", multiple=True, metavar="NAME=PATH", help="Checkout: dfine, deim, detrex.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("output/benchmarks/foreign_losses"), show_default=True)
def main(given: tuple[str, ...], output: Path) -> None:
    """Compare the losses, and write OUTPUT.json."""
    peers, rows = find_peers(given), []
    with fixed_threads(1):
        for peer, (kind, options, build) in PEERS.items():
            if peer in peers:
                rows.append({"code": peer, "loss of": kind, **compare(build(peers[peer]), kind, options)})
    words = ["python benchmarks/foreign_losses.py", *(f"--peer {name}=PATH" for name, folder in peers.items() if folder)]
    record = {"command": " ".join(words), "machine": machine("cpu"), "versions": versions() | peer_versions(peers), "rows": rows}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    click.echo(tabulate(rows, headers="keys", floatfmt=".1e", tablefmt="github"))


if __name__ == "__main__":
    main(prog_name="benchmarks/foreign_losses.py")
