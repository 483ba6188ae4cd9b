#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""One folder of several, on which a detector is trained that others start from::

    python benchmarks/join_folders.py output/joined aquarium cards bccd
    cpvt-det train output/joined --budget 40m OUTPUT_DIR output/pretrained
    python benchmarks/small_data.py kangaroos FOLDER --budget 3m --images 20 --output benchmarks/results/fine_tuning \\
        --label start_new_heads MODEL.WEIGHTS output/pretrained/model_best.pth

Classes of one name are one class. Labels of the records of fine-tuning: ``start`` at the rates of other projects' detectors,
``SOLVER.BASE_LR 1e-4``, a tenth for the backbone, ten times for new heads; ``start_new_heads`` at those that it was trained at.
Others, in no table, start from a second detector, at its own rates: ``base`` and one change each; ``again``, and ``kept``, without
augmentation and with 28 % more time, as if the outputs of the frozen backbone were stored.
"""

import sys
import tempfile
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.small_data import write_split
from cpvt_det.builders.datasets import check_datasets
from cpvt_det.cli import report_errors
from cpvt_det.cli.folder import folder_config


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("output", type=click.Path(path_type=Path, exists=False))
@click.argument("folders", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@report_errors
def main(output: Path, folders: tuple[Path, ...]) -> None:
    """Write OUTPUT/train and OUTPUT/valid of the images of all FOLDERS."""
    with tempfile.TemporaryDirectory() as drawn:
        data = [check_datasets(folder_config(folder, Path(drawn) / str(i), ())[0]) for i, folder in enumerate(folders)]
        for split, datasets in (("train", [one.train[0] for one in data]), ("valid", [one.tests[0] for one in data])):
            write_split(output / split, datasets)
            click.echo(f"{output / split}: {sum(len(dataset.records) for dataset in datasets)} images")


if __name__ == "__main__":
    main(prog_name="benchmarks/join_folders.py")
