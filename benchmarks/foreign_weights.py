#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Weights of DINO, DAB-Deformable-DETR and H-DETR in our models: names, shapes and outputs.

The authors' code builds each of its models and saves it with random weights. Our config of that model loads the file by itself, as
``cpvt-det eval FILE --config-file CONFIG`` does; what was not loaded is an error. Then both get the same images, one by one, since
the authors' codes pad in their own ways. Of DINO and DAB-Deformable-DETR all of training, with the noise of denoising, is
compared too.

``python benchmarks/foreign_weights.py --peer dino=PATH --peer hdetr=PATH --peer detrex=PATH``, with the paths of
checkouts of IDEA-Research/DINO, HDETR/H-Deformable-DETR and IDEA-Research/detrex; detrex needs an installed
detectron2, and so does Swin. About twenty minutes on one core.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.clocks import fixed_threads
from benchmarks.equal import difference
from benchmarks.foreign_models import BUILDERS, LIMIT, Case, config_of, float64_of, names_of
from benchmarks.foreign_training import SIZE, compare_training
from benchmarks.machine import machine, versions
from benchmarks.models import DRAWN_WIDE
from benchmarks.peers import find_peers, peer_versions
from cpvt_det.builders import detector_arguments
from cpvt_det.checkpoint import load_weights

CASES = [
    Case("dino", "DINO, 4 scales", "dino_r50_4scale_official_12ep", "DINO_4scale.py"),
    Case("dino", "DINO, 5 scales", "dino_r50_5scale_official_12ep", "DINO_5scale.py"),
    Case("dino", "DINO, 4 scales, Swin-T", "dino_r50_4scale_official_12ep", "DINO_4scale.py", swin=True),
    Case("hdetr", "H-DETR", "h_deformable_detr_r50_official_12ep", None),
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


def build_ours(case: Case, **overrides: str) -> nn.Module:
    """Our detector by the config alone, in evaluation mode; over detectron2's Swin-T where the case has it."""
    cfg = config_of(case, **overrides)
    backbone = None
    if case.swin:
        from detectron2.modeling.backbone.swin import SwinTransformer

        from cpvt_det.d2.backbones import Detectron2Backbone

        backbone = Detectron2Backbone(SwinTransformer(out_indices=(1, 2, 3)), stages=(3, 4, 5))
    detector, arguments = detector_arguments(cfg, backbone)
    return detector(**arguments).eval()


# The comparison


@torch.no_grad()
def draw(module: nn.Module) -> None:
    """Weights with which queries differ: heads and attention are drawn wide, biases and norms are not constants."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim == 1 and name.endswith(("weight", "running_var")):
            tensor.uniform_(0.5, 1.0)
        elif tensor.is_floating_point() and tensor.ndim == 1 and "sampling_offsets" not in name:
            tensor.uniform_(-0.2, 0.2)
        elif name.endswith("sampling_offsets.weight"):  # points off the centres of cells, where the slope of sampling jumps
            tensor.normal_(0, 0.5 * tensor.shape[-1] ** -0.5)
        elif DRAWN_WIDE.search(name) or name.endswith(("refpoint_embed.weight", "enc_out_class_embed.weight")):
            tensor.normal_(0, tensor.shape[-1] ** -0.5)


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
        report = load_weights(ours, file, names_of(case))
        beside = load_weights(with_peg, file, names_of(case))
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
    if not max(*logits, *boxes) < LIMIT or not equal:
        raise click.ClickException(f"outputs differ: {row}")
    if case.peer in ("dino", "detrex") and not case.swin:
        row |= compare_training(case, foreign, ours.double())
    return row


def _zero_peg(case: Case) -> dict[str, str]:
    encoding = "sine+peg" if case.peer == "dino" else "sine_offset+peg"
    return {"MODEL.POSITION.NAME": encoding, "MODEL.POSITION.PEG": "{'ZERO_INIT': True}"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--peer", "given", multiple=True, metavar="NAME=PATH", help="Checkout: dino, hdetr, detrex.")
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
    words += [f"--model {pattern!r}"] if pattern else []
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": " ".join(words), "machine": machine("cpu"), "versions": versions() | peer_versions(peers), "rows": rows}
    output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    click.echo(tabulate(rows, headers="keys", floatfmt=".1e", tablefmt="github"))


if __name__ == "__main__":
    main(prog_name="benchmarks/foreign_weights.py")
