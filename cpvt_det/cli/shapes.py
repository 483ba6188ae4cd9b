# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det shapes``: draw the shapes data set. The drawing itself is in ``data/shapes/dataset.py``."""

from pathlib import Path

import click

from cpvt_det.cli import common_options
from cpvt_det.data.shapes.dataset import draw_dataset
from cpvt_det.data.shapes.scene import ShapesSpec


@click.command()
@click.argument("root", type=click.Path(path_type=Path))
@click.option("--train", "num_train", default=4000, show_default=True, help="Images to train on.")
@click.option("--val", "num_val", default=500, show_default=True, help="Images held out.")
@click.option("--seed", default=0, show_default=True, help="Another seed draws other images.")
@click.option("--scale", default=1.0, show_default=True, help="Draw the same scenes this much larger.")
@click.option("--processes", type=int, help="Processes to draw with.  [default: one for each core, 16 at most]")
@click.option("--overwrite", is_flag=True, help="Replace a shapes data set that was drawn with other options.")
@common_options
def shapes(root: Path, num_train: int, num_val: int, seed: int, scale: float, processes: int | None, overwrite: bool) -> None:
    """Draw the shapes data set into the folder ROOT, in COCO format.

    Geometric shapes of 8 classes on textured backgrounds, 96 to 192 pixels a side: enough to train a detector on and to
    see that it learns. Where the same data set already lies, nothing is done. The images depend on the seed and the
    scale only, not on the number of processes, and more images leave the earlier ones as they were.

    \b
    Example:
      cpvt-det shapes datasets/shapes
      cpvt-det shapes datasets/shapes_large --train 1 --val 500 --scale 3
    """
    draw_dataset(root, num_train, num_val, seed, ShapesSpec(scale=scale), processes, overwrite)
    click.echo(f"{root}: {num_train} images in train, {num_val} in val")
