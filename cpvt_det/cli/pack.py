# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det pack``: a data set as tar files. The writing itself is in ``data/packing.py``."""

import os
import shutil
from pathlib import Path

import click

from cpvt_det.cli import common_options
from cpvt_det.config import load_cfg
from cpvt_det.data.catalog import DatasetFiles, find_datasets
from cpvt_det.data.formats.reading import read_foreign
from cpvt_det.data.packing import write_shards
from cpvt_det.data.validation.check import check_data
from cpvt_det.data.validation.issues import require_no_errors
from cpvt_det.errors import ConfigError
from cpvt_det.files import write_json

ANNOTATIONS = "annotations.json"


@click.command()
@click.argument("dataset")
@click.argument("shards", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY VALUE]...")
@click.option("--config-file", default="", help="YAML file whose DATASETS.REGISTER has the data set.")
@click.option("--megabytes", default=256, show_default=True, help="Size of a tar file.", type=click.IntRange(1))
@common_options
def pack(dataset: str, shards: Path, overrides: tuple[str, ...], config_file: str, megabytes: int) -> None:
    """Write the images of a data set into tar files in the folder SHARDS, in webdataset's layout, with its COCO JSON beside them.

    DATASET is a name: coco_2017_train, or one of DATASETS.REGISTER. A run reads the tar files in the same order as the files, with
    the same result; thousands of images in one file are easier on a network file system or an object store. The images are checked
    first, and nothing is written if one has a fault.

    \b
    Example:
      cpvt-det pack coco_2017_train /data/shards/train
      cpvt-det pack mine shards --config-file output/mine/config.yaml
    """
    (files,) = find_datasets([dataset], load_cfg(config_file, list(overrides)).DATASETS.REGISTER)
    if shards.exists() and any(shards.iterdir()):
        raise ConfigError(f"{shards} is not empty; write the tar files into a new folder")
    data = check_data([files], ())
    require_no_errors(data.issues, "error")
    records = data.train[0].records
    names = [records.name(index) for index in range(len(records))]
    try:
        shards.mkdir(parents=True, exist_ok=True)
        if files.is_coco:
            shutil.copyfile(files.annotations, shards / ANNOTATIONS)
        else:
            names = _write_annotations(files, shards / ANNOTATIONS)
        pattern = write_shards(zip(names, records.paths, strict=True), shards, megabytes * 2**20)
    except OSError as error:
        raise ConfigError(f"cannot write to {shards}: {error.strerror}") from error
    click.echo(f"{len(names)} images in {pattern}; a run reads them with\n")
    click.echo(f'DATASETS.REGISTER "[[{dataset!r}, {str(shards / ANNOTATIONS)!r}, {pattern!r}]]"')


def _write_annotations(files: DatasetFiles, path: Path) -> list[str]:
    """Write a data set of another format as COCO JSON; returns the names of its images, relative to what they have in common."""
    content = read_foreign(files)
    folder = os.path.commonpath([os.path.dirname(image["file_name"]) for image in content["images"]])
    for image in content["images"]:
        image["file_name"] = Path(image["file_name"]).relative_to(folder).as_posix()
    write_json(content, path)
    return [image["file_name"] for image in content["images"]]
