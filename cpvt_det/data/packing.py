# SPDX-License-Identifier: Apache-2.0
"""Images into tar files, in the layout of webdataset."""

import contextlib
import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cpvt_det.data.images import open_image
from cpvt_det.data.shards import ARRAYS, INDEX, TAR, index_shards
from cpvt_det.errors import DataError
from cpvt_det.files import atomic_file


def write_shards(images: Iterable[tuple[str, str]], folder: Path, largest: int) -> str:
    """Write images into numbered tar files, and their index.

    The same images make the same tar files: they have no owner and no time.

    Args:
        images: name of each member, and path of its file as ``data/images.py`` describes it.
        folder: an empty folder.
        largest: bytes of images after which the next tar file begins.

    Returns:
        What stands for the tar files, ``folder/{000000..000011}.tar``.

    Raises:
        DataError: an image that cannot be read, or whose name is not that of a file below a folder.
        OSError: a folder that cannot be written to.
    """
    names: list[str] = []
    with contextlib.ExitStack() as opened:
        tar, filled = None, 0
        for name, path in images:
            if os.path.isabs(name) or ".." in name.split("/"):
                raise DataError(f"the image {name} cannot be packed: the JSON has to name it relative to the image folder")
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
