#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Weights of DINO, DAB-Deformable-DETR, H-DETR and MS-DETR in our models: names, shapes and outputs.

The authors' code builds each of its models and saves it with random weights. Our config of that model loads the file by itself, as
``cpvt-det eval FILE --config-file CONFIG`` does; what was not loaded is an error. Then both get the same images, one by one, since
the authors' codes pad in their own ways. Of MS-DETR the one-to-many supervision is compared too, in training.

``python benchmarks/foreign_weights.py --peer dino=PATH --peer hdetr=PATH --peer msdetr=PATH --peer detrex=PATH``, with the paths of
checkouts of IDEA-Research/DINO, HDETR/H-Deformable-DETR, Atten4Vis/MS-DETR and IDEA-Research/detrex; detrex needs an installed
detectron2, and so does Swin. About three minutes on one core.
"""

import contextlib
import functools
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from fvcore.common.config import CfgNode
from tabulate import tabulate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.clocks import fixed_threads
from benchmarks.detrex_model import replaced_names
from benchmarks.equal import difference
from benchmarks.foreign_models import BUILDERS, Case, Foreign
from benchmarks.machine import machine, versions
from benchmarks.models import DRAWN_WIDE
from benchmarks.parity_outcomes import DoubleTorch
from benchmarks.peers import find_peers, peer_versions
from cpvt_det.builders import build_criterion, detector_arguments
from cpvt_det.checkpoint import load_weights
from cpvt_det.config import load_cfg
from cpvt_det.data.coco_classes import COCO_CLASSES, COCO_ROWS
from cpvt_det.losses.matcher import PaddedTargets
from cpvt_det.losses.one_to_many import OneToManyMatcher
from cpvt_det.structures import Predictions, Targets

SIZE = (192, 256)
"""Of the images: no padding in any code, and more tokens than queries."""
LIMIT = 1e-9
"""Largest relative difference of outputs in float64, of which some hundred operations lose digits."""
EPSILON = 1e-5
"""Of the numbers of boxes, from 0 and 1, as in our code; 1e-3 in DINO's and detrex's."""


CASES = [
    Case("dino", "DINO, 4 scales", "dino_r50_4scale_official_12ep", "DINO_4scale.py"),
    Case("dino", "DINO, 5 scales", "dino_r50_5scale_official_12ep", "DINO_5scale.py"),
    Case("dino", "DINO, 4 scales, Swin-T", "dino_r50_4scale_official_12ep", "DINO_4scale.py", swin=True),
    Case("hdetr", "H-DETR", "h_deformable_detr_r50_official_12ep", None),
    Case("msdetr", "MS-DETR", "ms_deformable_detr_r50_pp_sine_offset_12ep", None),
    Case("detrex", "DINO, 4 scales", "dino_r50_4scale_sine_offset_12ep", "dino/configs/dino-resnet/dino_r50_4scale_12ep.py"),
    Case("detrex", "DINO, 5 scales", "dino_r50_5scale_sine_offset_12ep", "dino/configs/dino-resnet/dino_r50_5scale_12ep.py"),
    Case(
        "detrex",
        "DINO, 4 scales, Swin-T",
        "dino_r50_4scale_sine_offset_12ep",
        "dino/configs/dino-swin/dino_swin_tiny_224_4scale_12ep.py",
        swin=True,
    ),
    Case(
        "detrex",
        "DAB-Deformable-DETR",
        "dab_deformable_detr_r50_sine_offset_50ep",
        "dab_deformable_detr/configs/dab_deformable_detr_r50_50ep.py",
    ),
    Case(
        "detrex",
        "DAB-Deformable-DETR, two stages",
        "dab_deformable_detr_r50_sine_offset_two_stage_50ep",
        "dab_deformable_detr/configs/dab_deformable_detr_r50_two_stage_50ep.py",
    ),
]


# Ours


def config_of(case: Case, **overrides: str) -> CfgNode:
    """Our config of a model, for the classes of its authors' files."""
    classes = len(COCO_CLASSES if case.peer == "detrex" else COCO_ROWS)
    words = {"MODEL.NUM_CLASSES": str(classes), "MODEL.BACKBONE.MASK_PADDING": "False", "MODEL.BACKBONE.WEIGHTS": "", **overrides}
    return load_cfg(f"coco/{case.config}.yaml", [word for pair in words.items() for word in pair])


def build_ours(case: Case, **overrides: str) -> nn.Module:
    """Our detector by the config alone, in evaluation mode; over detectron2's Swin-T where the case has it."""
    cfg = config_of(case, **overrides)
    backbone = None
    if case.swin:
        from detectron2.modeling.backbone.swin import SwinTransformer

        from cpvt_det.d2.backbone import Detectron2Backbone

        backbone = Detectron2Backbone(SwinTransformer(out_indices=(1, 2, 3)), stages=(3, 4, 5))
    detector, arguments = detector_arguments(cfg, backbone)
    return detector(**arguments).eval()


def _names(case: Case) -> tuple[str, ...]:
    return (COCO_CLASSES if case.peer == "detrex" else COCO_ROWS).names


# The comparison


@torch.no_grad()
def draw(module: nn.Module) -> None:
    """Weights with which queries differ: heads and attention are drawn wide, biases and norms are not constants."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim == 1 and name.endswith(("weight", "running_var")):
            tensor.uniform_(0.5, 1.0)
        elif tensor.is_floating_point() and tensor.ndim == 1 and "sampling_offsets" not in name:
            tensor.uniform_(-0.2, 0.2)
        elif DRAWN_WIDE.search(name) or name.endswith(("refpoint_embed.weight", "enc_out_class_embed.weight")):
            tensor.normal_(0, tensor.shape[-1] ** -0.5)


@contextlib.contextmanager
def float64_of(foreign: Foreign) -> Iterator[None]:
    """The authors' code with our bound of the numbers of boxes, and with float64 wherever it names float32."""
    inverse = {space["inverse_sigmoid"] for space in foreign.namespaces if "inverse_sigmoid" in space}
    assert len(inverse) == 1
    names = {"torch": DoubleTorch(), "inverse_sigmoid": functools.partial(inverse.pop(), eps=EPSILON)}
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double), replaced_names(foreign.namespaces, names):
        yield


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """Save the authors' model, load the file into ours, and compare.

    Returns:
        Counts of tensors and differences, by column.

    Raises:
        ClickException: a tensor that was not loaded, or outputs that differ.
    """
    with torch.random.fork_rng(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as place:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        foreign = BUILDERS[case.peer](folder, case)
        draw(foreign.module)
        file = Path(place) / "theirs.pth"
        torch.save({"model": foreign.module.state_dict()}, file)
        ours, with_peg = build_ours(case), build_ours(case, **_zero_peg(case))
        report = load_weights(ours, file, _names(case))
        beside = load_weights(with_peg, file, _names(case))
    if report.is_partial or beside.unexpected or any("pegs" not in name for name in beside.missing):
        raise click.ClickException(f"{case.peer}, {case.name}: {report}\n{report.table()}\n{beside}")
    images = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    foreign.module.double().eval()
    logits, boxes, equal = [], [], True
    with torch.no_grad():
        for image in images[:, None]:
            mask = torch.zeros(1, *SIZE, dtype=torch.bool)
            found = ours.double()(image, mask)
            with float64_of(foreign):
                wanted = foreign.predict(image)
            logits.append(difference(found.logits[-1], wanted[0]))
            boxes.append(difference(found.boxes[-1], wanted[1]))
            single = (part.float() for part in (ours, with_peg))
            first, second = (model(image.float(), mask) for model in single)
            equal &= torch.equal(first.logits, second.logits) and torch.equal(first.boxes, second.boxes)
    row = {"code": case.peer, "model": case.name, "config": f"coco/{case.config}.yaml", "tensors": len(foreign.module.state_dict())}
    row |= {"loaded": len(report.loaded), "not loaded": len(report.missing) + len(report.unexpected) + len(report.remade)}
    row |= {"logits": max(logits), "boxes": max(boxes), "spread of boxes": float(wanted[1].std(1).mean())}
    row |= {"bit-equal with a zero PEG": equal}
    row |= compare_training(case, foreign, ours.double()) if case.peer == "msdetr" else {}
    if not max(*logits, *boxes) < LIMIT or not equal:
        raise click.ClickException(f"outputs differ: {row}")
    return row


def compare_training(case: Case, foreign: Foreign, ours: nn.Module) -> dict[str, Any]:
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
        output = foreign.module(foreign.nested(images, mask))
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


def _zero_peg(case: Case) -> dict[str, str]:
    encoding = "sine+peg" if case.peer == "dino" else "sine_offset+peg"
    return {"MODEL.POSITION.NAME": encoding, "MODEL.POSITION.ZERO_INIT": "True"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--peer", "given", multiple=True, metavar="NAME=PATH", help="Checkout: dino, hdetr, msdetr, detrex.")
@click.option("--model", "pattern", default="", help="Only models whose name contains this.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("output/benchmarks/foreign_weights"), show_default=True)
def main(given: tuple[str, ...], pattern: str, output: Path) -> None:
    """Load weights that the authors' codes save, compare the outputs, and write OUTPUT.json."""
    peers = find_peers(given)
    rows = []
    with fixed_threads(1):
        for case in CASES:
            left_out = case.peer not in peers or ((case.swin or case.peer == "detrex") and "detectron2" not in peers)
            if not left_out and pattern in case.name:
                click.echo(f"{case.peer}: {case.name}", err=True)
                rows.append(compare(case, peers[case.peer]))
    words = ["python benchmarks/foreign_weights.py", *(f"--peer {name}=PATH" for name, folder in peers.items() if folder)]
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": " ".join(words), "machine": machine("cpu"), "versions": versions() | peer_versions(peers), "rows": rows}
    output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    click.echo(tabulate(rows, headers="keys", floatfmt=".1e", tablefmt="github"))


if __name__ == "__main__":
    main(prog_name="benchmarks/foreign_weights.py")
