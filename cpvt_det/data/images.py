# SPDX-License-Identifier: Apache-2.0
"""Image files: where they are, their headers and their pixels.

``images/1.jpg`` is a file, ``shards/{000000..000011}.tar/1.jpg`` a member of one of twelve tar files, and ``https://host/images/1.jpg``
is read by fsspec, as any other URL that it knows, tar files too.

All images become 8-bit RGB, turned according to EXIF. Of 16 bits the high byte is kept, transparency is dropped, and pixels
without a fixed range (floats, 32-bit integers) are refused.
"""

import contextlib
import errno
import io
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image

from cpvt_det.data.shards import TAR, open_shards, split_at_shards
from cpvt_det.data.storage import URL, fetch, is_url
from cpvt_det.errors import DataError, MissingFileError, UnreachableError, first_line

if TYPE_CHECKING:  # headers are read without torch and torchvision, whose import takes seconds
    from torch import Tensor

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# The mark at the end of a complete file; padding may follow it.
END_MARK = {JPEG: b"\xff\xd9", PNG: b"IEND"}
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
WIDTH, LENGTH, PHOTOMETRIC = 256, 257, 262  # tags of TIFF
NOT_A_MATTER_OF_TIME = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
WHITE_IS_ZERO = 0  # a value of PHOTOMETRIC; Pillow honours it for 8-bit images only


@contextlib.contextmanager
def file_threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that read image files; more than there are cores, as they wait for the disk."""
    Image.init()  # fills Pillow's list of formats, which several threads would otherwise fill at the same time
    with ThreadPoolExecutor(16) as pool:
        yield pool


@dataclass(frozen=True)
class ImageHeader:
    """The header of an image file.

    Attributes:
        width, height: size in pixels after turning.
        mode: Pillow's name for the pixel format, such as "RGB" or "I;16".
        orientation: EXIF orientation, 1 to 8; 1 means not turned.
        is_whole: whether the file contains the end mark of its format, or the format has none.
    """

    width: int
    height: int
    mode: str
    orientation: int
    is_whole: bool

    @property
    def swaps_sides(self) -> bool:
        """Whether turning swaps width and height."""
        return self.orientation >= 5


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
    try:
        # other paths are those of files, and need not be taken apart
        return _open_elsewhere(path) if URL in path or f"{TAR}/" in path else open(path, "rb")
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


def _open_elsewhere(path: str) -> BinaryIO:
    """Open a member of tar files or a URL; or after all a file, in a folder that is named like a tar file."""
    shards, name = split_at_shards(path)
    if shards:
        return open_shards(shards).open(name)
    return io.BytesIO(fetch(path)) if is_url(path) else open(path, "rb")


def read_header(path: str, content: bytes | None = None) -> ImageHeader:
    """Read an image's header.

    Args:
        path: path of the file, as this module describes it; with ``content`` only a name for messages.
        content: bytes of the file, if it is not on the disk.

    Raises:
        DataError: a file that is missing, empty or of unknown format; pixels that :func:`read_image` refuses.
    """
    file, kind = _open(path, content)
    try:
        with file, Image.open(file) as image:
            _require_known_range(image)
            orientation = _orientation(image, kind)
            tags: Any = getattr(image, "tag_v2", {})  # TIFF's stored size: Pillow's may be turned, depending on its version
            stored = tags.get(WIDTH, image.width), tags.get(LENGTH, image.height)
            width, height = stored if orientation < 5 else stored[::-1]
            return ImageHeader(width, height, image.mode, orientation, kind is None or END_MARK[kind] in _tail(file))
    except Exception as error:
        raise _cannot_read(path, error) from error


def read_image(path: str, content: bytes | None = None) -> "Tensor":
    """Decode an image file to RGB, turned according to its EXIF data.

    Args:
        path, content: arguments as of :func:`read_header`.

    Returns:
        (3, H, W) uint8.

    Raises:
        DataError: a file that cannot be read; pixels without a fixed range.
    """
    import torch
    from torchvision.io import ImageReadMode, decode_image

    file, kind = _open(path, content)
    try:
        with file:
            if kind == JPEG:  # JPEG only: a damaged byte in a PNG can crash torchvision 0.29 with a segmentation fault
                # not by its path, which torchvision would map: a mount that goes then ends the process
                source = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
                return decode_image(source, ImageReadMode.RGB, apply_exif_orientation=True)
            with Image.open(file) as image:
                return _to_rgb(image, kind)
    except Exception as error:
        raise _cannot_read(path, error) from error


def read_pillow(image: Image.Image) -> "Tensor":
    """The pixels of a PIL image, equal to those that :func:`read_image` returns for its file; JPEGs may differ in the last bit.

    Returns:
        (3, H, W) uint8, turned according to the EXIF data that the image still has.

    Raises:
        DataError: an image that cannot be decoded; pixels without a fixed range; no pixels.
    """
    if 0 in image.size:
        raise DataError(f"the image has no pixels: its size is {image.width} x {image.height}")
    try:
        return _to_rgb(image, {"JPEG": JPEG, "PNG": PNG}.get(str(image.format)))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"the image cannot be decoded: {first_line(error)}") from error


def _to_rgb(image: Image.Image, kind: bytes | None) -> "Tensor":
    """(3, H, W) uint8 pixels of an image that Pillow opened; ``kind`` is the second result of :func:`_open`."""
    import torch

    _require_known_range(image)
    orientation = _orientation(image, kind)
    shown = _to_eight_bits(image).convert("RGB")
    if orientation in TURNS and image.format != "TIFF":  # Pillow turns TIFF itself
        shown = shown.transpose(TURNS[orientation])
    return torch.from_numpy(np.array(shown)).permute(2, 0, 1).contiguous()


def _open(path: str, content: bytes | None = None) -> tuple[BinaryIO, bytes | None]:
    """The open file, at its start; and ``JPEG`` or ``PNG`` by its first bytes, whatever its suffix, ``None`` for other formats.

    Raises:
        DataError: an empty file, or one that cannot be opened.
    """
    file = open_image(path) if content is None else io.BytesIO(content)
    try:
        start = file.read(len(PNG))
    except OSError as error:
        file.close()
        raise _cannot_read(path, error) from error
    if not start:
        file.close()
        raise DataError(f"cannot read image {path}: it is empty (0 bytes)")
    file.seek(0)
    return file, next((kind for kind in END_MARK if start.startswith(kind)), None)


def _cannot_read(path: str, error: Exception) -> DataError:
    """The error for any error of a decoder: they have no common base, Pillow raises ``SyntaxError`` among others."""
    reason = re.sub(r"^.*\.cpp:\d+, ", "", first_line(error))  # torchvision's text begins with a line of its source
    why = "it is not an image, or its format is unknown" if isinstance(error, Image.UnidentifiedImageError) else reason
    kind = UnreachableError if isinstance(error, OSError) and error.errno else DataError  # Pillow's own have no number
    return kind(f"cannot read image {path}: {why}")


def _require_known_range(image: Image.Image) -> None:
    if image.mode not in (*SIXTEEN_BITS, *EIGHT_BITS) and not _is_wide_portable(image):
        raise DataError(
            f"pixels of mode {image.mode} have no fixed range and cannot be converted to 8-bit RGB; save it with 8 or 16 bits"
        )


def _is_wide_portable(image: Image.Image) -> bool:
    """Whether the image is a PGM of more than 8 bits, which Pillow scales to 16 bits and stores in 32."""
    return image.format == "PPM" and image.mode == "I"


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """The high byte of 16-bit pixels; Pillow's own conversion makes all but the darkest pixels white."""
    if image.mode not in SIXTEEN_BITS and not _is_wide_portable(image):
        return image
    high = (np.array(image) >> 8).astype(np.uint8)
    tags: Any = getattr(image, "tag_v2", {})
    return Image.fromarray(255 - high if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else high)


def _orientation(image: Image.Image, kind: bytes | None) -> int:
    """The EXIF orientation of an image that is not decoded yet."""
    if kind is None:
        exif = image.getexif()
    else:  # not getexif, which decodes a PNG, and reads XMP in a JPEG, unlike torchvision
        exif = Image.Exif()
        exif.load(image.info.get("exif", b""))
    value = exif.get(ExifTags.Base.Orientation, 1)
    return value if value in range(1, 9) else 1


def _tail(file: BinaryIO, length: int = 1024) -> bytes:
    """The last bytes of a file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - length))
    return file.read()
