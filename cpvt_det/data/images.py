# SPDX-License-Identifier: Apache-2.0
"""Image files: what their headers say, and their pixels.

Everything becomes 8-bit RGB, turned as EXIF says. 16 bits keep their high byte, transparency is dropped, and pixels without a fixed
range (floats, 32-bit integers) are refused.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image

from cpvt_det.errors import DataError, first_line

if TYPE_CHECKING:  # headers are read without torch and torchvision, whose import takes seconds
    from torch import Tensor

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# How a whole file ends, be it before padding.
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
WHITE_IS_ZERO = 0  # a value of the last; Pillow minds it for 8 bits only


@contextlib.contextmanager
def file_threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that read image files; more than cores, as they wait for the disk."""
    Image.init()  # Pillow's list of formats, which threads would fill at the same time
    with ThreadPoolExecutor(16) as pool:
        yield pool


@dataclass(frozen=True)
class ImageHeader:
    """What an image file says of itself.

    Attributes:
        width, height: in pixels, after the turn.
        mode: Pillow's name for its pixels, as in "RGB" or "I;16".
        orientation: EXIF's, 1 to 8; 1 is as stored.
        is_whole: the mark that ends it is there, or its format has none.
    """

    width: int
    height: int
    mode: str
    orientation: int
    is_whole: bool

    @property
    def swaps_sides(self) -> bool:
        """Whether the turn makes rows of columns."""
        return self.orientation >= 5


def read_header(path: str) -> ImageHeader:
    """Read an image's header.

    Raises:
        DataError: a file that is missing, empty or of no known format, and pixels that :func:`read_image` refuses.
    """
    file, kind = _open(path)
    try:
        with file, Image.open(file) as image:
            _require_known_range(image)
            orientation = _orientation(image, kind)
            tags: Any = getattr(image, "tag_v2", {})  # TIFF's size as stored; Pillow's may be turned, which depends on the version
            stored = tags.get(WIDTH, image.width), tags.get(LENGTH, image.height)
            width, height = stored if orientation < 5 else stored[::-1]
            return ImageHeader(width, height, image.mode, orientation, kind is None or END_MARK[kind] in _tail(file))
    except Exception as error:
        raise _cannot_read(path, error) from error


def read_image(path: str) -> "Tensor":
    """Decode an image file to RGB, turned as its EXIF data says.

    Returns:
        (3, H, W) uint8.

    Raises:
        DataError: a file that cannot be read, by name; pixels without a fixed range.
    """
    from torchvision.io import ImageReadMode, decode_image

    file, kind = _open(path)
    try:
        with file:
            if kind == JPEG:  # only these: a flipped byte in a PNG ends torchvision 0.29 with a segmentation fault
                return decode_image(path, ImageReadMode.RGB, apply_exif_orientation=True)
            with Image.open(file) as image:
                return _to_rgb(image, kind)
    except Exception as error:
        raise _cannot_read(path, error) from error


def read_pillow(image: Image.Image) -> "Tensor":
    """The pixels of an image of Pillow's, as :func:`read_image` gives them of its file, but for JPEG's last bit.

    Returns:
        (3, H, W) uint8, turned as the EXIF data says that it still has.

    Raises:
        DataError: one that cannot be decoded; pixels without a fixed range; none at all.
    """
    if 0 in image.size:
        raise DataError(f"it has no pixels, {image.width} x {image.height}")
    try:
        return _to_rgb(image, {"JPEG": JPEG, "PNG": PNG}.get(str(image.format)))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"it cannot be decoded: {first_line(error)}") from error


def _to_rgb(image: Image.Image, kind: bytes | None) -> "Tensor":
    """(3, H, W) uint8 of an image that Pillow opened; ``kind`` as of :func:`_open`."""
    import torch

    _require_known_range(image)
    orientation = _orientation(image, kind)
    shown = _to_eight_bits(image).convert("RGB")
    if orientation in TURNS and image.format != "TIFF":  # which Pillow turns itself
        shown = shown.transpose(TURNS[orientation])
    return torch.from_numpy(np.array(shown)).permute(2, 0, 1).contiguous()


def _open(path: str) -> tuple[BinaryIO, bytes | None]:
    """The file, at its start; and ``JPEG`` or ``PNG`` by its first bytes, whatever it is called, ``None`` for other formats.

    Raises:
        DataError: no file, or an empty one.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115, the caller closes it
    except IsADirectoryError as error:
        raise DataError(f"cannot read image {path}: it is a folder") from error
    except FileNotFoundError as error:
        raise DataError(f"cannot read image {path}: no such file") from error
    except (OSError, ValueError) as error:  # the latter: a name that no file can have
        raise DataError(f"cannot read image {path}: {first_line(error)}") from error
    start = file.read(len(PNG))
    if not start:
        file.close()
        raise DataError(f"cannot read image {path}: it is empty, 0 bytes")
    file.seek(0)
    return file, next((kind for kind in END_MARK if start.startswith(kind)), None)


def _cannot_read(path: str, error: Exception) -> DataError:
    """For whatever a decoder raised: there is no common base, Pillow has ``SyntaxError`` and ``DecompressionBombError``."""
    told = re.sub(r"^.*\.cpp:\d+, ", "", first_line(error))  # torchvision says where in its code first
    why = "it is no image, or of a format that is not known" if isinstance(error, Image.UnidentifiedImageError) else told
    return DataError(f"cannot read image {path}: {why}")


def _require_known_range(image: Image.Image) -> None:
    if image.mode not in (*SIXTEEN_BITS, *EIGHT_BITS) and not _is_wide_portable(image):
        raise DataError(f"its pixels (mode {image.mode}) cannot be turned into 8 bits of RGB faithfully; save it with 8 or 16 bits")


def _is_wide_portable(image: Image.Image) -> bool:
    """PGM of more than 8 bits, which Pillow brings to 16 bits and puts into 32."""
    return image.format == "PPM" and image.mode == "I"


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """The high byte of 16; Pillow's own conversion makes all but the darkest white."""
    if image.mode not in SIXTEEN_BITS and not _is_wide_portable(image):
        return image
    high = (np.array(image) >> 8).astype(np.uint8)
    tags: Any = getattr(image, "tag_v2", {})
    return Image.fromarray(255 - high if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else high)


def _orientation(image: Image.Image, kind: bytes | None) -> int:
    """EXIF's of an image that is not decoded yet."""
    if kind is None:
        exif = image.getexif()
    else:  # not getexif, which decodes a PNG, and minds XMP in a JPEG, where torchvision does not
        exif = Image.Exif()
        exif.load(image.info.get("exif", b""))
    value = exif.get(ExifTags.Base.Orientation, 1)
    return value if value in range(1, 9) else 1


def _tail(file: BinaryIO, length: int = 1024) -> bytes:
    """The last bytes of a file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - length))
    return file.read()
