#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Time of a training step of networks of timm as our backbones, beside timm's own ``features_only``, with the same weights.

    python benchmarks/timm_backbone.py --output benchmarks/results

A step is forward and backward of the maps of strides 8 to 32. Batch norms keep their statistics (``FrozenBN``, as with pretrained
weights) or follow those of the batch (``BN``), on both sides alike. timm's network does not know of padding. Ours is timed on a
batch without padding, where both compute the same maps, which are compared first; and on a batch of which 29 % is padded, where
ours keeps the padding out of the features, and timm's does not. Rounds are alternate.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import click
import timm
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.clocks import clock_of, fixed_threads
from benchmarks.harness import Contender, Plan, Work, ratios, run_rounds
from benchmarks.load import check_load
from benchmarks.machine import machine, name_of_instructions, versions
from benchmarks.origin import commit_of
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.files import write_json
from cpvt_det.common.structures import PaddedBatch
from cpvt_det.models.backbones.timm import TimmBackbone

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("tf_efficientnet_lite0", "resnet50", "efficientnet_b0", "convnext_atto")
STAGES = (3, 4, 5)
PADDED = {"none": ((256, 256), (256, 256)), "29 %": ((192, 256), (256, 171))}
"""Share of the batch that is padded -> (height, width) of its two images; the canvas is 256 x 256."""
EQUAL = 1e-3
"""Largest difference of maps, as a share of the largest value, of two ways to compute them in float32."""


def networks(name: str, norm: str) -> tuple[TimmBackbone, nn.Module]:
    """Ours and timm's, with the same weights."""
    torch.manual_seed(0)
    ours = TimmBackbone(name, norm, STAGES, freeze_at=0).train()
    theirs = timm.create_model(name, features_only=True, feature_cls="getter", out_indices=ours._indices).train()
    missing = theirs.model.load_state_dict(ours.body.state_dict(), strict=False).missing_keys
    if [key for key in missing if not key.endswith("num_batches_tracked")]:
        raise ValueError(f"{name}: {', '.join(missing[:3])} have no counterpart in ours")
    for part in theirs.modules():
        if norm == "FrozenBN" and isinstance(part, nn.BatchNorm2d):
            part.eval().requires_grad_(False)
    return ours, theirs


def step(network: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Forward and backward; the maps."""
    network.zero_grad(set_to_none=True)
    maps = network(*inputs)
    sum(map_.square().mean() for map_ in maps).backward()
    return maps


def measure(name: str, norm: str, plan: Plan) -> list[dict[str, Any]]:
    """For each share of padding the time of ours over timm's.

    Raises:
        ValueError: maps of a batch without padding that differ.
    """
    ours, theirs = networks(name, norm)
    rows = []
    for padded, sizes in PADDED.items():
        batch = PaddedBatch.from_images([torch.randn(3, *size) for size in sizes], 32)
        calls: dict[str, Callable] = {
            "ours": lambda batch=batch: step(ours, batch.images, batch.padding_mask),
            "timm": lambda batch=batch: step(theirs, batch.images),
        }
        maps = [[map_.detach() for map_ in call()] for call in calls.values()]
        differ = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(*maps, strict=True))
        if padded == "none" and differ > EQUAL:
            raise ValueError(f"{name}, {norm}: maps differ by {differ:.1e} without padding")
        _, samples = run_rounds(Work([Contender(*call) for call in calls.items()]), plan, clock_of("cpu"))
        _, spread = ratios(samples["ours"], samples["timm"])
        row = {"network": name, "norm": norm, "padded": padded, "rounds": len(samples["ours"]), "maps_differ": differ}
        rows.append(row | {"cpu_ratio": asdict(spread)})
    return rows


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--network", "names", multiple=True, default=NAMES, show_default=True, help="Name of timm's.")
@click.option("--rounds", default=11, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("output/benchmarks"), show_default=True)
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(names: Sequence[str], rounds: int, output: Path, busy: bool) -> None:
    """Write OUTPUT/timm_backbone_cpu.json: CPU time of a training step of ours over timm's, one thread."""
    load = check_load(busy)
    command = shlex.join(["python", "benchmarks/timm_backbone.py", "--rounds", str(rounds), *["--busy"] * busy])
    found = {"command": command, "commit": commit_of(ROOT), "machine": machine("cpu", load), "versions": versions(), "rows": []}
    plan = Plan(rounds=rounds, most_rounds=rounds, sample_seconds=0.0)
    with fixed_threads(1):
        for name, norm in product(names, ("FrozenBN", "BN")):
            for row in measure(name, norm, plan):
                found["rows"].append(row)
                spread = row["cpu_ratio"]
                quartiles = f"{spread['median']:.3f} ({spread['q1']:.3f} to {spread['q3']:.3f})"
                click.echo(f"{name}, {norm}, padded {row['padded']}: {quartiles} of timm's time")
    write_json(found, output / f"timm_backbone_cpu{name_of_instructions(found['machine'])}.json")


if __name__ == "__main__":
    main(prog_name="benchmarks/timm_backbone.py")
