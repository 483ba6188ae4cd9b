# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det analyze``: parameters, operations, time and memory of a detector. The counting is in ``cpvt_det/visualize/``."""

import re

import click
import torch
from tabulate import tabulate
from torch import nn

from cpvt_det import builders
from cpvt_det.cli.train import RUN_CONTEXT, build_any, config_file_option, load_any, runner_options
from cpvt_det.common.errors import BadInputError, config_errors
from cpvt_det.common.structures import PaddedBatch, Size
from cpvt_det.visualize.costs import REST, Costs, count_costs, measure

CLASSES = 80  # number of classes if the config takes it from the data


@click.command(context_settings=RUN_CONTEXT)
@config_file_option()
@runner_options
@click.option("--sizes", default="480,640,800,1333", show_default=True, help="Image sizes: sides of squares, or HEIGHTxWIDTH.")
def analyze(config_file: str, runner: str, overrides: tuple[str, ...], sizes: str) -> None:
    """Count the parameters and operations of a config's detector in inference; KEY VALUE pairs override the config.

    Prints parameters, multiply-adds and activations (the outputs of convolutions, matrix products and attention) by part, with
    PEG's share. Then prints the time and memory that one image without padding takes on this machine. Weights are random.

    \b
    Example:
      cpvt-det analyze --config-file coco/detr_r50_peg_50ep.yaml
      cpvt-det analyze --config-file coco/deformable_detr_r50_peg_50ep.yaml --sizes 800x1216 MODEL.DEVICE cpu
    """
    sides = [_size(word) for word in sizes.split(",")]
    cfg = load_any(config_file, overrides, runner)
    cfg.MODEL.NUM_CLASSES = cfg.MODEL.NUM_CLASSES or CLASSES
    detector = build_any(cfg, runner)
    stride = detector.size_divisibility
    small = [f"{height}x{width}" for height, width in sides if min(height, width) < stride]
    if small:
        raise BadInputError(f"--sizes {small[0]} is too small: each side must be at least this model's stride, {stride}")
    batches = [detector.preprocess([torch.zeros(3, *size)]) for size in sides]
    with config_errors(f"--sizes {sizes}"):  # a learned table may limit the size
        costs = [count_costs(detector, batch.images, batch.padding_mask) for batch in batches]
    names = [f"{height}x{width}" for height, width in sides]
    kind = cfg.MODEL.BACKBONE.NAME if builders.is_classifier(cfg) else cfg.MODEL.POSITION.NAME
    click.echo(f"{type(detector).__name__}, {kind}, {cfg.MODEL.NUM_CLASSES} classes\n")
    _print_parts(costs, names)
    _print_peg(costs, names)
    _print_speed(detector, batches, names)


def _size(word: str) -> Size:
    if (match := re.fullmatch(r"\s*(\d+)(?:x(\d+))?\s*", word)) is None:
        raise BadInputError(f"--sizes: {word!r} must be a side length or HEIGHTxWIDTH, as in --sizes 480,800x1333")
    return int(match[1]), int(match[2] or match[1])


def _print_parts(costs: list[Costs], names: list[str]) -> None:
    rest = any(cost.parameters[REST] or cost.multiply_adds[REST] for cost in costs)
    parts = [part for part in costs[0].parameters if part != REST or rest]
    total = sum(costs[0].parameters.values())
    rows = [(part, f"{costs[0].parameters[part]:,}", *_of_sizes(costs, part)) for part in parts]
    rows.append(("all", f"{total:,}", *_of_sizes(costs, *costs[0].parameters)))
    headers = ["", "parameters", *(f"G at {name}" for name in names), *(f"M at {name}" for name in names)]
    click.echo("Multiply-adds in G, activations in M")
    right = ("left", *["right"] * (len(headers) - 1))
    click.echo(tabulate(rows, headers, tablefmt="github", colalign=right, disable_numparse=True))


def _of_sizes(costs: list[Costs], *parts: str) -> list[str]:
    products = [sum(cost.multiply_adds[part] for part in parts) / 1e9 for cost in costs]
    outputs = [sum(cost.activations[part] for part in parts) / 1e6 for cost in costs]
    return [f"{value:.4g}" for value in (*products, *outputs)]


def _print_peg(costs: list[Costs], names: list[str]) -> None:
    if not costs[0].parameters.get("PEG"):
        return
    rows = []
    for name, cost in zip(names, costs, strict=True):
        kinds = (cost.parameters, cost.multiply_adds, cost.activations)
        rows.append((name, *(f"{100 * kind['PEG'] / sum(kind.values()):.4f} %" for kind in kinds)))
    headers = ("PEG's share at", "of parameters", "of multiply-adds", "of activations")
    click.echo("\n" + tabulate(rows, headers, tablefmt="github", disable_numparse=True))


def _print_speed(detector: nn.Module, batches: list[PaddedBatch], names: list[str]) -> None:
    device = batches[0].images.device
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{device.type.upper()}, {torch.get_num_threads()} threads"
    rows = []
    for name, batch in zip(names, batches, strict=True):
        seconds, took = measure(detector, batch.images, batch.padding_mask)
        canvas = "x".join(map(str, batch.images.shape[2:]))
        rows.append((name, canvas, f"{1000 * seconds:.1f}", f"{1 / seconds:.2f}", f"{took / 1e6:.0f}"))
    headers = ("image", "canvas", "ms", "images/s", "peak MB, without weights")
    click.echo(f"\nInference of one image on {where}")
    click.echo(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
