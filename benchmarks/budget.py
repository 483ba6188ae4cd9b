#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Estimate of what 50 epochs of COCO need of 8 and of 64 GPUs: ``python benchmarks/budget.py``.

The trained parameters, the CPU time per sample (``results/data_cpu_avx2.json``) and the operations of a forward pass are measured;
the rest is computed from them. No GPU was timed.
"""

import json
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.models import CONFIGS
from cpvt_det.cli import common_options, report_errors

DATA = Path(__file__).resolve().parent / "results" / "data_cpu_avx2.json"
IMAGES, EPOCHS = 118_287, 50  # images in COCO train2017
SIZE = (800, 1216)  # size of the counted forward pass: multiples of 64, near COCO's mean size with a short side of 800 pixels
CLUSTERS = ((8, 32, 24), (8, 32, 72), (64, 64, 6), (64, 64, 12))  # GPUs, images per step, hours
CONFIG = {"DETR": "detr_r50_peg_50ep.yaml", "Deformable-DETR": "deformable_detr_r50_peg_50ep.yaml"}


def rows() -> list[list[str]]:
    """The table of docs/scaling.md, with its heading."""
    sample = seconds_a_sample()
    found = [["detector", "GPUs", "batch", "hours", "images/s", "images/s per GPU", "TFLOP/s per GPU", "loader cores"]]
    found[0] += ["MB of gradients", "MB sent per step and GPU", "MB/s per GPU"]
    for detector, name in CONFIG.items():
        trained, operations = measure(name)
        for gpus, batch, hours in CLUSTERS:
            rate = IMAGES * EPOCHS / (3600 * hours)
            gradients = 4 * trained / 1e6
            sent = 2 * (gpus - 1) / gpus * gradients  # ring all-reduce: the data goes around twice
            flops = 3 * 2 * operations * rate / gpus / 1e12  # backward costs twice forward; each multiply-add is two operations
            decimals = [f"{value:.1f}" for value in (rate / gpus, flops, rate * sample)]
            whole = [f"{value:.0f}" for value in (gradients, sent, sent * rate / batch)]
            found.append([detector, str(gpus), str(batch), str(hours), f"{rate:.0f}", *decimals, *whole])
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@report_errors
def main() -> None:
    """Print the table of docs/scaling.md."""
    from tabulate import tabulate

    click.echo(f"a sample takes {1000 * seconds_a_sample():.1f} ms of one core\n")
    head, *body = rows()
    click.echo(tabulate(body, head, tablefmt="pipe", disable_numparse=True))


def seconds_a_sample() -> float:
    """CPU seconds per sample from JPEG to augmented bytes, from the record of the suite ``data``."""
    cases = json.loads(DATA.read_text(encoding="utf-8"))["cases"]
    case = next(case for case in cases if case["name"] == "samples")
    row = next(row for row in case["rows"] if row["name"] == "cpvt_det")
    return row["cpu"]["median"] / case["about"]["images"]


def measure(name: str) -> tuple[int, int]:
    """Parameters that are trained, and multiply-adds of a forward pass of one image."""
    import torch

    from cpvt_det.builders import build_detector
    from cpvt_det.config import load_cfg
    from cpvt_det.visualize.costs import count_costs

    detector = build_detector(load_cfg(str(CONFIGS / name), ["MODEL.NUM_CLASSES", "80", "MODEL.DEVICE", "cpu"])).eval()
    trained = sum(parameter.numel() for parameter in detector.parameters() if parameter.requires_grad)
    costs = count_costs(detector, torch.zeros(1, 3, *SIZE), torch.zeros(1, *SIZE, dtype=torch.bool))
    return trained, sum(costs.multiply_adds.values())


if __name__ == "__main__":
    main(prog_name="benchmarks/budget.py")
