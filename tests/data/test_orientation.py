# SPDX-License-Identifier: Apache-2.0
"""Where programs write how an image is turned: every place is read as Pillow reads it, for the header and for the pixels."""

import io
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image, ImageOps, features

from cpvt_det.data.images import read_header, read_image, read_pillow

ORIENTATION = 0x0112
PIXELS = np.kron(np.random.default_rng(0).integers(0, 256, (5, 8, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
GARBAGE = (
    b"Exif\0\0\xff\xff\xff\xff\0\0\0\x08",
    b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12",
    b"Exif\0\0MM\0*",
    b"Exif\0\0" + b"7" * 99,
    b"\0",
)


def exif_of(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif.tobytes()


def xmp_of(orientation):
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


def save(path, **options):
    Image.fromarray(PIXELS).save(path, **({"quality": 95} if path.suffix == ".jpg" else {}), **options)


def chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def with_chunk(path, name, content, behind):
    """Write a PNG with a chunk before or behind its pixels; these are in two chunks, between which none can be."""
    save(path)
    data = path.read_bytes()
    at = data.index(b"IEND" if behind else b"IDAT") - 4
    path.write_bytes(data[:at] + chunk(name, content) + data[at:])


def raw_profile(orientation):
    """EXIF data as ImageMagick writes it: in hexadecimal digits, lines of 72, behind a name and a length."""
    data = exif_of(orientation)
    digits = data.hex()
    lines = [digits[start : start + 72] for start in range(0, len(digits), 72)]
    return "\n".join(["", "exif", f"{len(data):8d}", *lines, ""]).encode()


def international(text):
    return b"XML:com.adobe.xmp" + b"\0" * 5 + text


PLACES = {
    "EXIF, JPEG": lambda path, turn: save(path.with_suffix(".jpg"), exif=exif_of(turn)),
    "EXIF, JPEG, with a resolution": lambda path, turn: save(path.with_suffix(".jpg"), exif=exif_of(turn), dpi=(72, 72)),
    "XMP, JPEG": lambda path, turn: save(path.with_suffix(".jpg"), xmp=xmp_of(turn)),
    "both, which differ, JPEG": lambda path, turn: save(path.with_suffix(".jpg"), exif=exif_of(turn), xmp=xmp_of(1 + turn % 8)),
    "EXIF, PNG": lambda path, turn: save(path, exif=exif_of(turn)),
    "EXIF behind the pixels, PNG": lambda path, turn: with_chunk(path, b"eXIf", exif_of(turn)[6:], behind=True),
    "XMP, PNG": lambda path, turn: with_chunk(path, b"iTXt", international(xmp_of(turn)), behind=False),
    "XMP behind the pixels, PNG": lambda path, turn: with_chunk(path, b"iTXt", international(xmp_of(turn)), behind=True),
    "ImageMagick, PNG": lambda path, turn: with_chunk(
        path, b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(turn)), behind=False
    ),
    "ImageMagick behind the pixels, PNG": lambda path, turn: with_chunk(
        path, b"tEXt", b"Raw profile type exif\0" + raw_profile(turn), behind=True
    ),
    "EXIF, TIFF": lambda path, turn: save(path.with_suffix(".tif"), exif=exif_of(turn)),
    "XMP, TIFF": lambda path, turn: save(path.with_suffix(".tif"), tiffinfo={700: xmp_of(turn)}),
    "EXIF, WebP": lambda path, turn: save(path.with_suffix(".webp"), exif=exif_of(turn), lossless=True),
    "XMP, WebP": lambda path, turn: save(path.with_suffix(".webp"), xmp=xmp_of(turn), lossless=True),
    "EXIF, AVIF": lambda path, turn: save(path.with_suffix(".avif"), exif=exif_of(turn)),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("place", PLACES)
def test_images_are_turned_as_pillow_turns_them(tmp_path, place, orientation):
    if "AVIF" in place and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    PLACES[place](tmp_path / "a.png", orientation)
    (path,) = tmp_path.iterdir()
    with Image.open(path) as opened:
        expected = np.array(ImageOps.exif_transpose(opened).convert("RGB")).astype(int)
    assert expected.shape[:2] == ((64, 40) if orientation >= 5 else (40, 64))
    header, last_bit = read_header(str(path)), path.suffix == ".jpg"
    assert (header.orientation, header.width, header.height) == (orientation, *expected.shape[1::-1])
    for place in (str(path), path.name):  # from the disk and from bytes
        content = None if place == str(path) else path.read_bytes()
        assert np.abs(read_image(place, content).permute(1, 2, 0).numpy() - expected).max() <= 4 * last_bit
    with Image.open(path) as fresh, Image.open(path) as decoded:
        decoded.load()
        for image in (fresh, decoded):
            assert np.abs(read_pillow(image).permute(1, 2, 0).numpy() - expected).max() <= last_bit


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "with a resolution.jpg"])
def test_damaged_exif_data_turn_nothing(tmp_path, name, garbage):
    """Pillow raises of some, and warns of others; both also where warnings are errors."""
    path = tmp_path / name
    if path.suffix == ".png":
        with_chunk(path, b"eXIf", garbage.removeprefix(b"Exif\0\0"), behind=False)
    else:
        options = {"lossless": True} if path.suffix == ".webp" else {"dpi": (72, 72)} if " " in name else {}
        save(path, exif=garbage, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        header, image = read_header(str(path)), read_image(str(path))
        with Image.open(io.BytesIO(path.read_bytes())) as opened:
            same = read_pillow(opened)
    assert (header.width, header.height, header.orientation, header.is_whole) == (64, 40, 1, True)
    for pixels in (image, same):
        assert np.abs(pixels.permute(1, 2, 0).numpy() - PIXELS.astype(int)).mean() <= (16 if path.suffix == ".jpg" else 0)


def test_an_orientation_that_is_none_turns_nothing(tmp_path):
    for value in (0, 9, 65535):
        save(tmp_path / "a.jpg", exif=exif_of(value))
        assert read_header(str(tmp_path / "a.jpg")).orientation == 1


def test_decoders_do_not_warn_in_python_with_warnings_as_errors(tmp_path):
    """A palette with transparency, a JPEG, of which torchvision 0.29 says that its decoder goes, and a bomb of 100 megapixels."""
    picture = Image.fromarray(PIXELS).quantize(4)
    picture.save(tmp_path / "a.png", transparency=bytes([0, 128, 255, 255]))
    save(tmp_path / "a.jpg", exif=GARBAGE[1])
    Image.new("1", (10_000, 10_000)).save(tmp_path / "b.png")
    lines = [
        "import sys",
        "from cpvt_det.data.images import read_header, read_image",
        "for path in sys.argv[1:]:",
        "    read_header(path), read_image(path)",
    ]
    words = [sys.executable, "-W", "error", "-c", "\n".join(lines), *sorted(map(str, tmp_path.iterdir()))]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
