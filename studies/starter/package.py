#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""The detector that comes with the package, and that ``cpvt-det train FOLDER`` starts from::

    python studies/starter/data.py CLONES output/starter_data
    cpvt-det train ...  # twice: studies/starter/train.yaml
    python studies/starter/package.py output/thawed/model_final.pth

The last command writes the detector of a checkpoint in half precision, and a README that names its data and their licences.
"""

import sys
from pathlib import Path

import click
import yaml
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # this folder is not part of the installed package

from cpvt_det.builders.trained import load_trained
from cpvt_det.checkpoint.fetch import STARTER, locate
from cpvt_det.checkpoint.model_folder import save_model
from cpvt_det.cli import report_errors

TABLE = Path(__file__).with_name("data.yaml")
FINE_TUNED_AT = 1e-3
"""Learning rate in its config, for fine-tuning: that of the first of its two trainings. At that of the second, less is learned."""
INTRODUCTION = """# The starter

A small Deformable-DETR in half precision, from which `cpvt-det train FOLDER` starts. Its backbone, `tf_efficientnet_lite0` of timm,
had Google's weights first, trained on ImageNet, under Apache-2.0. The files in `studies/starter` trained the detector, and then the
backbone too, on a few hundred images of each of the data below. Their authors are named there.

"""


def describe_data() -> str:
    """A Markdown page about the data."""
    rows = []
    for source in yaml.safe_load(TABLE.read_text(encoding="utf-8")):
        address = f"https://github.com/{source['repository']}/tree/{source['commit']}/{source.get('folder', '')}"
        published = source.get("published at")
        rows.append(
            (source["shows"], f"[{source['repository']}]({address})", published or "", source["licence"], source["stated in"])
        )
    heads = ("shows", "repository", "published at", "licence", "stated in")
    return INTRODUCTION + tabulate(rows, heads, tablefmt="github", disable_numparse=True) + "\n"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True))
@click.option("--output", type=click.Path(path_type=Path), help="Folder for it.  [default: its place in the package]")
@report_errors
def main(checkpoint: Path, output: Path | None) -> None:
    """Write the detector of CHECKPOINT in half precision, with its config and classes."""
    trained = load_trained(checkpoint, "cpu")
    trained.cfg.MODEL.WEIGHTS = trained.cfg.MODEL.BACKBONE.WEIGHTS = ""  # they are in the file
    trained.cfg.SOLVER.BASE_LR = FINE_TUNED_AT
    state_dict = {
        name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in trained.detector.state_dict().items()
    }
    output = output or locate(STARTER)
    save_model(output, state_dict, trained.classes, trained.cfg.dump(), trained.thresholds)
    (output / "README.md").write_text(describe_data(), encoding="utf-8")


if __name__ == "__main__":
    main(prog_name="studies/starter/package.py")
