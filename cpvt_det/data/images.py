# SPDX-License-Identifier: Apache-2.0
"""Image files: their locations, headers and pixels.

``images/1.jpg`` is a file, ``shards/{000000..000011}.tar/1.jpg`` is a member of one of twelve tar files, and fsspec reads
``https://host/images/1.jpg``, like any other URL that it knows. Tar files may be at URLs, too.

All images become 8-bit RGB. They are turned in the same way as by Pillow's ``ImageOps.exif_transpose``, which follows EXIF data,
EXIF data that ImageMagick writes into the text of a PNG, or XMP data. Damaged EXIF data are ignored. 16-bit pixels are reduced to
their high byte, and transparency is dropped. Pixels without a fixed range (floats, 32-bit integers) are refused, and so are
images with more pixels than Pillow's limit, which :data:`LIMIT` can replace.
"""

import contextlib
import errno
import io
import os
import re
import struct
import unicodedata
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image

from cpvt_det.common.errors import ConfigError, DataError, MissingFileError, UnreachableError, first_line
from cpvt_det.data.shards import open_shards, split_at_shards
from cpvt_det.data.storage import fetch, is_url

if TYPE_CHECKING:  # headers are read without torch and torchvision, whose import takes seconds
    from torch import Tensor

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# The mark at the end of a complete file; padding may follow it.
TAIL = 1024  # bytes at the end of a file that are searched for the mark
END_MARK = {JPEG: b"\xff\xd9", PNG: b"IEND"}
FLIPS = {1: (), 2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}
"""EXIF orientation -> dimensions of (3, H, W) to flip; for 5 to 8, height and width are swapped before the flip."""
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
NO_RANGE = ("I", "F")  # 32-bit integers, floats
WIDTH, LENGTH, BITS, PHOTOMETRIC = 256, 257, 258, 262  # tags of TIFF
NOT_A_MATTER_OF_TIME = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
WHITE_IS_ZERO = 0  # a value of PHOTOMETRIC; Pillow honours it for 8-bit images only
CHUNKS_OF_ORIENTATION = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # of PNG
LIMIT = "CPVT_DET_MAX_PIXELS"
"""Environment variable that sets the largest number of pixels of an image, in place of Pillow's limit of 178,956,970."""
SILENT = re.compile(r"(PIL|torchvision)\.")
"""Modules whose warnings, such as those about damaged EXIF data, do not matter to code that reads images."""


@contextlib.contextmanager
def file_threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that read image files. There may be more threads than cores, because most of the time they wait for the disk."""
    _set_up_decoders()
    Image.init()  # fills Pillow's list of formats, which several threads would otherwise fill at the same time
    with ThreadPoolExecutor(16) as pool:
        yield pool


@dataclass(frozen=True)
class ImageHeader:
    """The header of an image file.

    Attributes:
        width, height: size in pixels after rotation.
        mode: Pillow's name for the pixel format, such as "RGB" or "I;16".
        orientation: EXIF orientation, 1 to 8. 1 means that the image is not turned; for 5 to 8, turning swaps width and height.
        is_whole: whether the file contains the end mark of its format; also true if the format has no end mark.
    """

    width: int
    height: int
    mode: str
    orientation: int
    is_whole: bool


def is_file(path: str) -> bool:
    """Whether a path is on a disk or a mount, and not in tar files or at a URL; the file itself may be missing."""
    return not is_url(path) and not split_at_shards(path)[0]


def open_image(path: str) -> BinaryIO:
    """Open an image file for reading: a file, a member of tar files, or a URL, as described at the top of this module.

    Raises:
        MissingFileError: no such file.
        UnreachableError: the file cannot be reached now, but it may be reachable later.
        DataError: a file that cannot be read.
    """
    try:
        try:
            return open(path, "rb")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL):  # the last two occur for URLs
                raise
        shards, name = split_at_shards(path)
        if shards:
            return open_shards(shards).open(name)
        if is_url(path):
            return io.BytesIO(fetch(path))
        # The name may be stored in another Unicode form: "é", for example, may be one character or two.
        others = (path[:at] + unicodedata.normalize(form, path[at:]) for form in ("NFC", "NFD") for at in range(len(path)))
        return open(path if path.isascii() else next((other for other in others if os.path.exists(other)), path), "rb")
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


def read_header(path: str, content: bytes | None = None) -> ImageHeader:
    """Read an image's header.

    Args:
        path: path of the file, as described at the top of this module. If ``content`` is given, the path serves only as a name in
            messages.
        content: bytes of the file, if it is not on the disk.

    Raises:
        DataError: a file that is missing, empty or of unknown format; pixels that :func:`read_image` refuses.
    """
    file, kind = _open(path, content)
    try:
        with file, Image.open(file) as image:
            _require_known_range(image)
            if kind == PNG and _has_text_behind_pixels(file):
                image.load()
            orientation = orientation_of(image)
            tags: Any = getattr(image, "tag_v2", {})  # TIFF's stored size: Pillow's may be turned, depending on its version
            stored = tags.get(WIDTH, image.width), tags.get(LENGTH, image.height)
            width, height = stored if orientation < 5 else stored[::-1]
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return ImageHeader(width, height, image.mode, orientation, kind is None or END_MARK[kind] in file.read())
    except Exception as error:
        raise _cannot_read(path, error) from error


def read_image(path: str, content: bytes | None = None) -> "Tensor":
    """Decode an image file to RGB, turned according to its EXIF data.

    Args:
        path, content: as in :func:`read_header`.

    Returns:
        (3, H, W) uint8.

    Raises:
        DataError: a file that cannot be read; pixels without a fixed range.
    """
    import torch
    from torchvision.io import ImageReadMode, decode_image

    file, kind = _open(path, content)
    try:
        with file, Image.open(file) as image:
            if kind != JPEG:  # JPEG only: a damaged byte in a PNG can crash torchvision 0.29 with a segmentation fault
                return _to_rgb(image)
            file.seek(0)  # not by path: torchvision would map the file, and a lost mount would then end the process
            source = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
            return _turn(decode_image(source, ImageReadMode.RGB), orientation_of(image))  # torchvision knows no XMP
    except Exception as error:
        raise _cannot_read(path, error) from error


def read_pillow(image: Image.Image) -> "Tensor":
    """The pixels of a PIL image. They equal what :func:`read_image` returns for the image's file, except that pixels of JPEGs may
    differ in the last bit.

    Returns:
        (3, H, W) uint8, turned according to the EXIF and XMP data that the image still has.

    Raises:
        DataError: an image that cannot be decoded; pixels without a fixed range; no pixels.
    """
    if 0 in image.size:
        raise DataError(f"the image has no pixels: its size is {image.width} x {image.height}")
    _set_up_decoders()
    try:
        return _to_rgb(image)
    except Exception as error:
        raise _cannot_read("from Pillow", error) from error


def _to_rgb(image: Image.Image) -> "Tensor":
    """(3, H, W) uint8 pixels of an image that Pillow opened, turned."""
    import torch

    _require_known_range(image)
    image.load()  # first: it finds an orientation that a PNG stores behind its pixels, and it turns a TIFF
    pixels = torch.from_numpy(np.array(to_eight_bits(image).convert("RGB"))).permute(2, 0, 1)  # (H, W, 3) -> (3, H, W)
    return _turn(pixels, orientation_of(image)).contiguous()


def _turn(pixels: "Tensor", orientation: int) -> "Tensor":
    """Turn (3, H, W) pixels; for orientations 5 to 8 they become (3, W, H)."""
    return pixels if orientation == 1 else (pixels.mT if orientation >= 5 else pixels).flip(FLIPS[orientation])


def _set_up_decoders() -> None:
    """Let Pillow and torchvision read up to our limit of pixels without warnings, which ``-W error`` would turn into errors.

    ``catch_warnings`` does not work with threads, so a filter is added instead. Adding the filter only once is not enough,
    because other code, such as pytest, puts its own filters before it.

    Raises:
        ConfigError: the limit is not a number of pixels.
    """
    if warnings.filters[:1] != [("ignore", None, Warning, SILENT, 0)]:
        warnings.filterwarnings("ignore", module=SILENT.pattern)
    if (limit := os.environ.get(LIMIT)) is not None:
        if not (limit.isascii() and limit.isdecimal() and int(limit)):
            raise ConfigError(f"{LIMIT} in the environment is {limit!r}; set it to a number of pixels, such as 400000000")
        Image.MAX_IMAGE_PIXELS = (int(limit) + 1) // 2  # Pillow refuses more than twice as many


def _open(path: str, content: bytes | None = None) -> tuple[BinaryIO, bytes | None]:
    """The open file, at its start, and its format according to its first bytes: ``JPEG``, ``PNG``, or ``None`` for others.

    Raises:
        DataError: an empty file, or one that cannot be opened.
    """
    _set_up_decoders()
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
    """The error to raise for any error of a decoder. Decoders' errors have no common base class; Pillow even raises
    ``SyntaxError``.
    """
    reason = re.sub(r"^.*\.cpp:\d+, ", "", first_line(error))  # torchvision's text begins with a line of its source
    why = "it is not an image, or its format is unknown" if isinstance(error, Image.UnidentifiedImageError) else reason
    if isinstance(error, Image.DecompressionBombError):
        why = f"{reason.rstrip('.')}; if you trust it, set the environment variable {LIMIT} to as many pixels"
    kind = UnreachableError if isinstance(error, OSError) and error.errno else DataError  # Pillow's own errors have no number
    return kind(f"cannot read image {path}: {why}")


def _require_known_range(image: Image.Image) -> None:
    if image.mode in NO_RANGE and not _is_wide_portable(image):
        raise DataError(
            f"pixels of mode {image.mode} have no fixed range and cannot be converted to 8-bit RGB; save the image with 8 or 16 "
            "bits"
        )


def _is_wide_portable(image: Image.Image) -> bool:
    """Whether the image is a PGM of more than 8 bits, which Pillow scales to 16 bits and stores in 32 bits."""
    return image.format == "PPM" and image.mode == "I"


def to_eight_bits(image: Image.Image) -> Image.Image:
    """The high byte of 16-bit pixels, or the highest eight bits of a TIFF's 12-bit pixels. Pillow's own conversion is not used,
    because it makes all but the darkest pixels white.
    """
    if image.mode not in SIXTEEN_BITS and not _is_wide_portable(image):
        return image
    tags: Any = getattr(image, "tag_v2", {})
    high = (np.array(image) >> (4 if 12 in np.ravel(tags.get(BITS, 16)) else 8)).astype(np.uint8)
    return Image.fromarray(255 - high if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else high)


def orientation_of(image: Image.Image) -> int:
    """The orientation of an image as Pillow finds it, in EXIF data or XMP; 1 if the EXIF data are damaged.

    In a PNG that is not decoded yet, Pillow finds an orientation only if it is stored before the pixels. In a decoded TIFF,
    Pillow finds none.
    """
    try:
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)  # a PNG's own method would decode the image
    except Exception:  # ``SyntaxError`` and ``struct.error`` among others
        return 1
    return value if value in FLIPS else 1


def _has_text_behind_pixels(file: BinaryIO) -> bool:
    """Whether a PNG has text or EXIF data after its pixels, where ExifTool writes them."""
    here, is_behind = file.tell(), False
    file.seek(len(PNG))
    while len(head := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", head)
        if is_behind and name in CHUNKS_OF_ORIENTATION:
            break
        is_behind |= name == b"IDAT"
        file.seek(length + 4, os.SEEK_CUR)  # the chunk and its checksum
    file.seek(here)
    return len(head) == 8
