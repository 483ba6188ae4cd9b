# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det shapes``: draw the shapes data set. The drawing itself is in ``data/shapes/dataset.py``."""

from pathlib import Path

import click

from cpvt_det.cli import common_options
from cpvt_det.data.shapes.dataset import draw_dataset
from cpvt_det.data.shapes.scene import ShapesSpec

POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("root", type=click.Path(path_type=Path))
@click.option("--train", "num_train", type=POSITIVE, default=4000, show_default=True, help="Number of training images.")
@click.option("--val", "num_val", type=POSITIVE, default=500, show_default=True, help="Number of validation images.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Random seed; a different seed draws different images."
)
@click.option("--scale", default=1.0, show_default=True, help="Factor by which the same scenes are drawn larger.")
@click.option("--processes", type=POSITIVE, help="Number of processes.  [default: one per core, at most 16]")
@common_options
def shapes(root: Path, num_train: int, num_val: int, seed: int, scale: float, processes: int | None) -> None:
    """Draw the shapes data set into the folder ROOT, in COCO format.

    The images show geometric shapes of 8 classes on textured backgrounds, and their sides have 96 to 192 pixels. That is enough to
    train a detector and to see that it learns. Nothing is done if ROOT already contains the same data set. The images depend only
    on the seed and the scale, not on the number of processes. Drawing more images does not change the earlier ones.

    \b
    Example:
      cpvt-det shapes datasets/shapes
      cpvt-det shapes datasets/shapes_large --train 1 --val 500 --scale 3
    """
    draw_dataset(root, num_train, num_val, seed, ShapesSpec(scale=scale), processes)
    click.echo(f"{root}: {num_train} images in train, {num_val} in val")
