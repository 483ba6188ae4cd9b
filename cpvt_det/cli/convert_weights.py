# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det convert-weights``: turn other projects' weights into our checkpoint; the tables are in ``checkpoint/convert.py``."""

from pathlib import Path

import click

from cpvt_det.checkpoint.convert import CONVERSIONS
from cpvt_det.checkpoint.files import write_checkpoint
from cpvt_det.checkpoint.weights import read_weights
from cpvt_det.cli import common_options
from cpvt_det.common.errors import WeightsError


@click.command()
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
@common_options
def convert_weights(source: Path, output: Path) -> None:
    """Convert weights of another project.

    INPUT is a file, or a Hugging Face folder with model.safetensors or pytorch_model.bin. OUTPUT is a checkpoint that also contains
    the classes; if its name ends in .safetensors, it contains the tensors only. You do not have to convert weights before training
    or evaluating, because MODEL.WEIGHTS also takes INPUT. If INPUT is a checkpoint of cpvt-det, OUTPUT contains only the weights,
    and these are the averaged ones if the run had SOLVER.EMA.

    \b
    Example:
      cpvt-det convert-weights detr-r50-e632da11.pth detr_r50.pth
      cpvt-det convert-weights hub/detr-resnet-50 detr_r50.safetensors
    """
    weights = read_weights(source)
    if weights.source is None and weights.classes is None:
        raise WeightsError(
            f"{source}: its tensor names match none of {', '.join(CONVERSIONS)}, and it is not a cpvt_det checkpoint"
        )
    bare = output.suffix == ".safetensors"
    write_checkpoint(weights.state_dict if bare else weights.as_checkpoint(), output)
    numbers = sum(tensor.numel() for tensor in weights.state_dict.values())
    classes = "classes unknown" if weights.classes is None else f"{len(weights.classes)} class rows"
    names = weights.project or "cpvt_det"
    click.echo(f"{output}: {len(weights.state_dict)} tensors ({numbers / 1e6:.1f} M numbers) of {names}, {classes}")
