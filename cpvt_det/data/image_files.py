# SPDX-License-Identifier: Apache-2.0
"""Image files by path: in a folder, in tar files, behind a URL.

``images/1.jpg`` is a file, ``shards/{000000..000011}.tar/1.jpg`` a member of one of twelve tar files, and ``https://host/images/1.jpg``
is read by fsspec, as any other URL that it knows, tar files too.
"""

import errno
import io
from typing import BinaryIO

from cpvt_det.data.shards import open_shards, split_at_shards
from cpvt_det.data.storage import fetch, is_url
from cpvt_det.errors import DataError, MissingFileError, UnreachableError, first_line

NOT_A_MATTER_OF_TIME = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)


def is_file(path: str) -> bool:
    """Whether the path is that of a file on a disk or a mount, which may be missing."""
    return not is_url(path) and not split_at_shards(path)[0]


def open_image(path: str) -> BinaryIO:
    """Open an image file for reading.

    Raises:
        MissingFileError: no such file.
        UnreachableError: a file that is not there now, and may be later.
        DataError: a file that cannot be read.
    """
    shards, name = split_at_shards(path)
    try:
        if shards:
            return open_shards(shards).open(name)
        return io.BytesIO(fetch(path)) if is_url(path) else open(path, "rb")
    except DataError as error:
        raise type(error)(f"cannot read image {path}: {error}") from error
    except IsADirectoryError as error:
        raise MissingFileError(f"cannot read image {path}: it is a folder") from error
    except FileNotFoundError as error:
        raise MissingFileError(f"cannot read image {path}: no such file") from error
    except ValueError as error:  # a name that no file can have
        raise MissingFileError(f"cannot read image {path}: {first_line(error)}") from error
    except OSError as error:
        kind = DataError if error.errno in NOT_A_MATTER_OF_TIME else UnreachableError
        raise kind(f"cannot read image {path}: {first_line(error)}") from error
