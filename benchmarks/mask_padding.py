#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Effect and cost of ``MODEL.BACKBONE.MASK_PADDING``: DETR-R50 on a batch of a wide and a tall image, in inference.

``python benchmarks/mask_padding.py --output benchmarks/results``. Each image's logits and boxes in the batch are compared with
those of the image alone; then the batch is timed with and without it, alternately. The weights are those of the suite ``model``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.clocks import clock_of, fixed_threads
from benchmarks.harness import Contender, Plan, Spread, Work, ratios, run_rounds
from benchmarks.load import check_load
from benchmarks.models import Model, Recipe, our_model
from benchmarks.photos import draw, draw_boxes
from benchmarks.records import about_run, write_record
from cpvt_det.cli import common_options, report_errors

DETR = Recipe("DETR", queries=100)
SIZES = ((480, 640), (640, 427))
"""(height, width) of the images; the batch is 640 x 640, and 29 % of it is padding."""


def draw_images(sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """(3, h, w) uint8 pictures of shapes and texture, as the benchmarks' photographs are drawn."""
    rng = np.random.default_rng(0)
    pictures = [draw(rng, draw_boxes(rng)).resize((width, height)) for height, width in sizes]
    return [torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]


def differences(model: Model, images: Sequence[Tensor]) -> tuple[float, float, float]:
    """An image in a batch against the image alone: the largest difference of a logit, that over the largest logit, and of a box."""
    logits, boxes = model.predict(model.module.preprocess(images))
    found = []
    for number, image in enumerate(images):
        alone_logits, alone_boxes = model.predict(model.module.preprocess([image]))
        of_logits = (logits[number] - alone_logits[0]).abs().max()
        found.append((of_logits, of_logits / alone_logits.abs().max(), (boxes[number] - alone_boxes[0]).abs().max()))
    return tuple(float(max(column)) for column in zip(*found, strict=True))


def cost(models: dict[bool, Model], images: Sequence[Tensor], plan: Plan) -> tuple[Spread, int]:
    """CPU time of the batch with the padding masked over without, round by round; and how many rounds."""
    batch = models[True].module.preprocess(images)
    contenders = [Contender(str(masked), lambda model=models[masked]: model.predict(batch)) for masked in (True, False)]
    _, samples = run_rounds(Work(contenders), plan, clock_of("cpu"))
    _, spread = ratios(samples["True"], samples["False"])
    return spread, len(samples["True"])


def measure(recipe: Recipe, sizes: Sequence[tuple[int, int]], plan: Plan) -> str:
    """The lines that are printed."""
    images = draw_images(sizes)
    models = {masked: our_model(recipe, mask_padding=masked) for masked in (False, True)}
    lines = []
    with torch.inference_mode():
        for masked, model in models.items():
            model.module.eval()
            logit, share, box = differences(model, images)
            lines.append(f"MASK_PADDING {masked}: logits differ by {logit:.1e} ({share:.1e} of the largest), boxes by {box:.1e}")
        spread, rounds = cost(models, images, plan)
    lines.append(f"CPU time with over without: {spread.median:.3f} ({spread.q1:.3f} to {spread.q3:.3f}), {rounds} rounds")
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=15, show_default=True, help="Rounds of timing.")
@click.option("--quick", is_flag=True, help="Use a small model and small images.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for a JSON and a Markdown file.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(rounds: int, quick: bool, output: Path | None, busy: bool) -> None:
    """Print what MODEL.BACKBONE.MASK_PADDING changes and costs."""
    about = about_run(f"mask_padding.py --rounds {rounds}{' --quick' * quick}", 1, busy, check_load(busy))
    plan = Plan(rounds=rounds, most_rounds=rounds, sample_seconds=0.0)
    with fixed_threads(1):
        if quick:
            printed = measure(Recipe("DETR", channels=64, layers=1, queries=10), ((96, 128), (128, 80)), plan)
        else:
            printed = measure(DETR, SIZES, plan)
    click.echo(printed)
    if output:
        title = "What `MODEL.BACKBONE.MASK_PADDING` changes and costs"
        paths = write_record(output, "mask_padding", about, {"printed": printed}, [title, f"```text\n{printed}\n```"])
        click.echo(f"written: {', '.join(map(str, paths))}")


if __name__ == "__main__":
    main()
