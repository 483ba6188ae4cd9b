#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What COCO in 50 epochs asks of 8 and of 64 GPUs, on paper, from measured parts: ``python benchmarks/budget.py``.

Measured are the parameters that are trained, the CPU time of a sample (``results/data_cpu.json``) and the operations of a
forward pass; the rest is arithmetic. No GPU was timed.
"""

import json
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folder is no part of the installed package

from benchmarks.models import CONFIGS
from cpvt_det.cli import common_options, report_errors

DATA = Path(__file__).resolve().parent / "results" / "data_cpu.json"
IMAGES, EPOCHS = 118_287, 50  # of COCO train2017
SIZE = (800, 1216)  # of the forward pass whose operations are counted: a multiple of 64, near the mean of COCO at 800 pixels
CLUSTERS = ((8, 32, 24), (8, 32, 72), (64, 64, 6), (64, 64, 12))  # GPUs, images a step, hours
CONFIG = {"DETR": "detr_r50_peg_50ep.yaml", "Deformable-DETR": "deformable_detr_r50_peg_50ep.yaml"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@report_errors
def main() -> None:
    """Print the table of docs/scaling.md."""
    from tabulate import tabulate

    sample = seconds_a_sample()
    click.echo(f"a sample takes {1000 * sample:.1f} ms of one core\n")
    head = ["detector", "GPUs", "batch", "hours", "images/s", "images/s a GPU", "TFLOP/s a GPU", "loader cores"]
    head += ["MB of gradients", "MB sent a step and GPU", "MB/s a GPU"]
    body = []
    for detector, name in CONFIG.items():
        trained, operations = measure(name)
        for gpus, batch, hours in CLUSTERS:
            rate = IMAGES * EPOCHS / (3600 * hours)
            gradients = 4 * trained / 1e6
            sent = 2 * (gpus - 1) / gpus * gradients  # ring all-reduce: every GPU sends its share twice round
            flops = 3 * 2 * operations * rate / gpus / 1e12  # backward is twice forward; a multiplication and an addition
            row = [detector, gpus, batch, hours, rate, rate / gpus, flops, rate * sample, gradients, sent, sent * rate / batch]
            body.append(row)
    click.echo(tabulate(body, head, tablefmt="pipe", floatfmt=("", "", "", "", ".0f", ".1f", ".1f", ".1f", ".0f", ".0f", ".0f")))


def seconds_a_sample() -> float:
    """CPU seconds from JPEG to augmented bytes, of the record of the suite ``data``."""
    cases = json.loads(DATA.read_text(encoding="utf-8"))["cases"]
    case = next(case for case in cases if case["name"] == "samples")
    row = next(row for row in case["rows"] if row["name"] == "cpvt_det")
    return row["cpu"]["median"] / case["about"]["images"]


def measure(name: str) -> tuple[int, float]:
    """Parameters that are trained, and multiply-adds of a forward pass of one image."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from cpvt_det.builders import build_detector
    from cpvt_det.config import load_cfg

    detector = build_detector(load_cfg(str(CONFIGS / name), ["MODEL.NUM_CLASSES", "80"])).eval()
    trained = sum(parameter.numel() for parameter in detector.parameters() if parameter.requires_grad)
    with FlopCounterMode(display=False) as counter:  # its hooks want gradients
        detector(torch.zeros(1, 3, *SIZE), torch.zeros(1, *SIZE, dtype=torch.bool))
    return trained, counter.get_total_flops() / 2


if __name__ == "__main__":
    main(prog_name="benchmarks/budget.py")
