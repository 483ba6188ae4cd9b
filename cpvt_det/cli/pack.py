# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det pack``: a data set as tar files, in the layout of webdataset."""

import contextlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

import click
import numpy as np

from cpvt_det.cli import common_options
from cpvt_det.common.errors import ConfigError, DataError
from cpvt_det.common.files import atomic_file, write_json
from cpvt_det.config import load_cfg
from cpvt_det.data.catalog import DatasetFiles, find_datasets
from cpvt_det.data.formats.format import read_foreign
from cpvt_det.data.images import open_image
from cpvt_det.data.shards import ARRAYS, INDEX, TAR, index_shards
from cpvt_det.data.validation.check import check_data
from cpvt_det.data.validation.issues import require_no_errors

ANNOTATIONS = "annotations.json"


@click.command()
@click.argument("dataset")
@click.argument("shards", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY VALUE]...")
@click.option("--config-file", default="", help="YAML file whose DATASETS.REGISTER has the data set.")
@click.option("--megabytes", default=256, show_default=True, help="Size of a tar file.", type=click.IntRange(1))
@common_options
def pack(dataset: str, shards: Path, overrides: tuple[str, ...], config_file: str, megabytes: int) -> None:
    """Write the images of a data set into tar files in the folder SHARDS, in webdataset's layout, with its COCO JSON.

    DATASET is a name: coco_2017_train, or one of DATASETS.REGISTER. A run reads the images in the same order as from single files,
    and gives the same result. A few large files put less load on a network file system or an object store than thousands of small
    ones. The images are checked first, and nothing is written if one has a fault.

    \b
    Example:
      cpvt-det pack coco_2017_train /data/shards/train
      cpvt-det pack mine shards --config-file output/mine/config.yaml
    """
    (files,) = find_datasets([dataset], load_cfg(config_file, list(overrides)).DATASETS.REGISTER)
    if shards.is_file() or (shards.exists() and any(shards.iterdir())):
        raise ConfigError(f"{shards} is not empty; write the tar files into a new folder")
    data = check_data([files], ())
    require_no_errors(data.issues, "error")
    records = data.train[0].records
    names, paths = ([find(index) for index in range(len(records))] for find in (records.name, records.path))
    if outside := [name for name in names if files.is_coco and (os.path.isabs(name) or ".." in name.split("/"))]:
        raise DataError(f"the image {outside[0]} cannot be packed: the JSON has to name it relative to the image folder")
    try:
        shards.mkdir(parents=True, exist_ok=True)
        if files.is_coco:
            shutil.copyfile(files.annotations, shards / ANNOTATIONS)
        else:
            names = _write_annotations(files, shards / ANNOTATIONS)
        pattern = write_shards(zip(names, paths, strict=True), shards, megabytes * 2**20)
    except OSError as error:
        raise ConfigError(f"cannot write to {shards}: {error.strerror}") from error
    click.echo(f"{len(names)} images in {pattern}; a run reads them with\n")
    click.echo(f'DATASETS.REGISTER "[[{dataset!r}, {str(shards / ANNOTATIONS)!r}, {pattern!r}]]"')


def write_shards(images: Iterable[tuple[str, str]], folder: Path, largest: int) -> str:
    """Write images into numbered tar files, and their index.

    The same images give identical tar files, because the members have no owner and no time.

    Args:
        images: name of each member, a relative path, and path of its file as ``data/images.py`` describes it.
        folder: an empty folder.
        largest: number of bytes of images after which the next tar file begins.

    Returns:
        A pattern for the tar files, ``folder/{000000..000011}.tar``.

    Raises:
        DataError: an image that cannot be read.
        OSError: a folder that cannot be written to.
    """
    names: list[str] = []
    with contextlib.ExitStack() as opened:
        tar, filled = None, 0
        for name, path in images:
            if tar is None or filled >= largest:
                opened.close()
                names.append(f"{len(names):06}{TAR}")
                tar, filled = opened.enter_context(tarfile.open(folder / names[-1], "w", format=tarfile.PAX_FORMAT)), 0
            with open_image(path) as file:
                content = file.read()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            filled += len(content)
    shards = index_shards(str(folder), names)
    with atomic_file(folder / INDEX) as file:
        np.savez(file, **{name: getattr(shards, name) for name in ARRAYS})
    return f"{folder}/{{{0:06}..{len(names) - 1:06}}}{TAR}"


def _write_annotations(files: DatasetFiles, path: Path) -> list[str]:
    """Write a data set as COCO JSON, and return the names of its images, relative to their common folder."""
    content = read_foreign(files.annotations, files.split)
    folder = os.path.commonpath([os.path.dirname(image["file_name"]) for image in content["images"]])
    for image in content["images"]:
        image["file_name"] = Path(image["file_name"]).relative_to(folder).as_posix()
    write_json(content, path)
    return [image["file_name"] for image in content["images"]]
