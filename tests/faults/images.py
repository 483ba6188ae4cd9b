# SPDX-License-Identifier: Apache-2.0
"""Data: image files.

The check before a run reads headers, and decodes only files that seem cut off; `check-data --decode` decodes all. Damage that a
decoder tolerates, for example inside the scan of a JPEG, is not found. Images are read as 8-bit RGB and rotated according to
EXIF or XMP; boxes refer to the rotated image. A JSON with the size of the unrotated image is an error.
"""

import struct
import subprocess
import sys
import unicodedata
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tiny import overrides

from faults.case import Case, Cut, Ending
from faults.configs import NEVER
from faults.drawn import DataCase, Drawn, call_on, draw, read_pixels

ORIENTATION = 0x0112
LAST_BITS = 4  # two decoders of the same JPEG
HALF_EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12"  # of which Pillow warns


def picture(mode: str = "RGB", size: tuple[int, int] = (60, 40)) -> Image.Image:
    """Noise, (width, height) pixels; half transparent where the mode has transparency."""
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    drawn = Image.fromarray(values).convert(mode)
    if mode in ("LA", "RGBA"):
        drawn.putalpha(128)
    return drawn


def wide(dtype, scale: float = 1028) -> Image.Image:
    """A grey ramp of another pixel type: ``scale`` times the column; 1028 is 4 in the high byte and in the low one."""
    return Image.fromarray((np.tile(np.arange(60), (40, 1)) * scale).astype(dtype))


def image(mode: str = "RGB", name: str = "a.png", size: tuple[int, int] = (60, 40), **options):
    """A picture of a mode in place of the first."""
    return lambda drawn: drawn.replace_image(1, picture(mode, size), name, **options)


def lab(drawn: Drawn) -> None:
    drawn.replace_image(1, picture().convert("LAB"), "a.tif")


def pixels(dtype, name: str, scale: float = 1028):
    """A ramp of a pixel type in place of the first picture."""
    return lambda drawn: drawn.replace_image(1, wide(dtype, scale), name)


def cut(name: str, kept: float):
    """A picture of which a part at the end is missing."""

    def make(drawn: Drawn) -> None:
        path = drawn.replace_image(1, picture(), name)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * kept)])

    return make


def flip_bytes(drawn: Drawn) -> None:
    data = bytearray(drawn.path(1).read_bytes())
    data[len(data) // 2] ^= 0xFF
    drawn.path(1).write_bytes(data)


def turned(orientation: int, swap: bool):
    """A JPEG that EXIF turns; ``swap``: the JSON has the size after the turn."""

    def make(drawn: Drawn) -> None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        drawn.replace_image(1, picture(), "a.jpg", exif=exif)
        if swap:
            entry = drawn.content["images"][0]
            entry["width"], entry["height"] = entry["height"], entry["width"]

    return make


def turned_by_text(behind: bool):
    """A PNG that is turned by 180 degrees, as text before or behind its pixels says: EXIF data in hexadecimal digits."""

    def make(drawn: Drawn) -> None:
        exif = Image.Exif()
        exif[ORIENTATION] = 3
        text = b"Raw profile type exif\0\nexif\n36\n" + exif.tobytes().hex().encode()
        chunk = struct.pack(">I", len(text)) + b"tEXt" + text + struct.pack(">I", zlib.crc32(b"tEXt" + text))
        data = drawn.path(1).read_bytes()
        start = data.index(b"IEND" if behind else b"IDAT") - 4
        drawn.path(1).write_bytes(data[:start] + chunk + data[start:])

    return make


def without_a_warning(make: Callable[[Drawn], object]):
    """Check a data set, of which no decoder warns."""

    def run(folder: Path) -> Ending:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            ending = call_on(draw(folder / "data", make), "check-data", "--decode")
        return Ending("a warning", str(warned[0].message)) if warned else ending

    return run


def portable(drawn: Drawn) -> None:
    values = (np.tile(np.arange(60), (40, 1)) * 1000).astype(">u2")
    drawn.replace_image(1, picture(), "a.png")
    (drawn.folder / "images/a.pgm").write_bytes(b"P5\n60 40\n65535\n" + values.tobytes())
    drawn.content["images"][0]["file_name"] = "a.pgm"


def other_form(drawn: Drawn) -> None:
    drawn.replace_image(1, picture(), unicodedata.normalize("NFD", "früh/é.png"))
    drawn.content["images"][0]["file_name"] = unicodedata.normalize("NFC", "früh/é.png")


def renamed(name: str):
    """A GIF under another name."""

    def make(drawn: Drawn) -> None:
        path = drawn.replace_image(1, picture("P"), "a.gif")
        path.rename(path.with_name(name))
        drawn.content["images"][0]["file_name"] = name

    return make


def folder(drawn: Drawn) -> None:
    drawn.path(1).unlink()
    drawn.path(1).mkdir()


def size(**values):
    """Another size in the JSON."""
    return lambda drawn: drawn.content["images"][0].update(values)


def met_by_a_worker(folder: Path) -> Ending:
    """Train in a process of its own, which has to end though the worker that met the damage is still there."""
    drawn = draw(folder / "data", flip_bytes)
    (folder / "run.yaml").write_text("VERSION: 2\n")
    words = ["--config-file", folder / "run.yaml", "--runner", "builtin"]
    words += overrides(drawn.files, folder / "out", DATALOADER__NUM_WORKERS=1)
    command = [sys.executable, "-m", "cpvt_det", "train", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return Ending(ended.returncode, ended.stderr)


def shows(expected: Callable[[Drawn], np.ndarray], atol: int = 0):
    """Look at every pixel of the first image as a run reads it."""

    def then(drawn: Drawn) -> None:
        np.testing.assert_allclose(read_pixels(drawn).astype(int), expected(drawn).astype(int), atol=atol)

    return then


def noise(mode: str = "RGB", size: tuple[int, int] = (60, 40)):
    """The drawn noise, by way of a mode that holds less of it; transparency changes nothing."""
    return shows(lambda _: np.array(picture(mode.replace("A", ""), size).convert("RGB")))


def ramp(step: float):
    """The drawn ramp in 8 bits, ``step`` a column."""
    return shows(lambda _: np.tile((np.arange(60) * step).astype(np.uint8)[None, :, None], (40, 1, 3)))


def by_pillow(drawn: Drawn) -> np.ndarray:
    """The file as Pillow decodes and turns it, whose decoder differs from ours by a bit or two."""
    with Image.open(drawn.folder / "images" / drawn.content["images"][0]["file_name"]) as found:
        return np.array(ImageOps.exif_transpose(found).convert("RGB"))


def decoder(old: str, new: str) -> Cut:
    return Cut("data/images.py", old, new)


def check(old: str, new: str) -> Cut:
    return Cut("data/validation/check.py", old, new)


CANNOT = "image files that cannot be read: ...image 1: cannot read image .../images/"
FINE = "drawn: 4 images, 0 of them without objects, "
TURNED = "images rotated according to EXIF; boxes are assumed to be in the rotated image: 1"
REPORTED = check(  # an image that cannot be read is passed over
    "        if isinstance(found, NotTriedError):  # not a fault, because faults may be dropped\n",
    "        if isinstance(found, DataError):\n            continue\n        if False:\n",
)
ENDS = check("if decode or not header.is_whole:", "if decode:")
DECODED = check("if decode or not header.is_whole:", "if not header.is_whole:")
SIZES = check("if (header.width, header.height) == said:", "if True:")
TURNS = decoder("pixels if orientation == 1 else", "pixels if True else")
CONVERTED = decoder('to_eight_bits(image).convert("RGB")', 'Image.new("RGB", image.size)')  # all pixels zeroed
BEHIND = decoder("if kind == PNG and _has_text_behind_pixels(file):", "if False:")
PLACES = decoder("Image.Image.getexif(image).get(", "Image.Exif().get(")  # no place is looked at
HIGH_BYTE = decoder("if image.mode not in SIXTEEN_BITS and not _is_wide_portable(image):", "if True:")
KNOWN_RANGE = decoder("if image.mode in NO_RANGE and not _is_wide_portable(image):", "if False:")
ONE_PIXEL = Cut("data/validation/rules.py", "1 <= side <= LARGEST_SIDE", "2 <= side <= LARGEST_SIDE")

CASES = [
    DataCase(
        "missing image",
        lambda d: d.path(1).unlink(),
        "image files that are missing: ...image 1: cannot read image ...1.png: no such file",
        guard=REPORTED,
    ),
    DataCase(
        "image that is a folder",
        folder,
        "image files that are missing: ...image 1: cannot read image ...1.png: it is a folder",
        guard=REPORTED,
    ),
    DataCase("empty file", lambda d: d.path(1).write_bytes(b""), f"{CANNOT}1.png: it is empty (0 bytes)", guard=REPORTED),
    DataCase(
        "text in an image file", lambda d: d.path(1).write_text("no image"), f"{CANNOT}1.png: it is not an image", guard=REPORTED
    ),
    DataCase("half a JPEG", cut("a.jpg", 0.5), f"{CANNOT}a.jpg: Image is incomplete or truncated", guard=ENDS),
    DataCase("half a PNG", cut("a.png", 0.5), f"{CANNOT}a.png: ", guard=ENDS),
    DataCase(
        "the first 20 bytes of a PNG",
        lambda d: d.path(1).write_bytes(d.path(1).read_bytes()[:20]),
        f"{CANNOT}1.png: ",
        guard=REPORTED,
    ),
    DataCase("half a BMP, with --decode", cut("a.bmp", 0.5), f"{CANNOT}a.bmp: ", 2, ["--decode"], guard=DECODED),
    DataCase("damaged PNG, with --decode", flip_bytes, f"{CANNOT}1.png: ", 2, ["--decode"], guard=DECODED),
    Case(
        "damaged PNG met by a data worker",
        met_by_a_worker,
        "error: cannot read image ...1.png: ",
        guard=Cut("data/loader.py", "    for worker in workers:\n        worker.kill()\n", ""),
    ),
    DataCase(
        "other size than the JSON says",
        size(width=61),
        "image 1: .../images/1.png has 60 x 40 pixels, but 61 x 40 in the annotations",
        guard=SIZES,
    ),
    DataCase(
        "EXIF swaps the sides, the JSON does not",
        turned(6, swap=False),
        "a.jpg has 40 x 60 pixels, but 60 x 40 in the annotations; EXIF orientation 6 rotates it, and the annotations",
        guard=SIZES,
    ),
    DataCase("EXIF swaps the sides, the JSON too", turned(6, swap=True), TURNED, 0, guard=TURNS, then=shows(by_pillow, LAST_BITS)),
    DataCase("EXIF turns by 180 degrees", turned(3, swap=False), TURNED, 0, guard=TURNS, then=shows(by_pillow, LAST_BITS)),
    DataCase(
        "JPEG that XMP turns",
        image(name="a.jpg", xmp=b'<x tiff:Orientation="3"/>'),
        TURNED,
        0,
        guard=PLACES,
        then=shows(by_pillow, LAST_BITS),
    ),
    DataCase("PNG that ImageMagick's text turns", turned_by_text(behind=False), TURNED, 0, guard=PLACES, then=shows(by_pillow)),
    DataCase("PNG that text behind its pixels turns", turned_by_text(behind=True), TURNED, 0, guard=BEHIND, then=shows(by_pillow)),
    *(
        Case(
            f"{format} with {damage}",
            without_a_warning(image(name=f"a.{format.lower()}", **options, exif=exif)),
            FINE,
            0,
            guard=guard,
        )
        for format, options in (("JPEG", {"dpi": (72, 72)}), ("PNG", {}), ("WebP", {}))
        for damage, exif, guard in (
            (
                "garbage for EXIF data",
                b"Exif\0\0" + b"7" * 20,
                decoder("    except Exception:  # ``SyntaxError``", f"    {NEVER}  #"),
            ),
            ("half of its EXIF data", HALF_EXIF, decoder("    if warnings.filters[:1] != ", "    if False and ")),
        )
    ),
    DataCase(
        "grey", image("L"), "images of mode L, converted to RGB: ...image 1: .../images/a.png", 0, guard=CONVERTED, then=noise("L")
    ),
    DataCase("grey with transparency", image("LA"), "images of mode LA, converted to RGB: 1", 0, guard=CONVERTED, then=noise("LA")),
    DataCase("RGBA", image("RGBA"), "images of mode RGBA, converted to RGB: 1", 0, guard=CONVERTED, then=noise("RGBA")),
    DataCase(
        "CMYK JPEG",
        image("CMYK", "a.jpg"),
        "images of mode CMYK, converted to RGB: 1",
        0,
        guard=decoder("decode_image(source, ImageReadMode.RGB)", "decode_image(source, ImageReadMode.UNCHANGED)"),
        then=shows(by_pillow, LAST_BITS),
    ),
    DataCase("LAB", lab, "images of mode LAB, converted to RGB: 1", 0, guard=CONVERTED, then=shows(by_pillow)),
    DataCase("palette", image("P"), "images of mode P, converted to RGB: 1", 0, guard=CONVERTED, then=noise("P")),
    DataCase("1 bit", image("1"), "images of mode 1, converted to RGB: 1", 0, guard=CONVERTED, then=noise("1")),
    DataCase(
        "16-bit PNG", pixels(np.uint16, "a.png"), "images of mode I;16, converted to RGB: 1", 0, guard=HIGH_BYTE, then=ramp(4)
    ),
    DataCase(
        "16-bit TIFF", pixels(np.uint16, "a.tiff"), "images of mode I;16, converted to RGB: 1", 0, guard=HIGH_BYTE, then=ramp(4)
    ),
    DataCase(
        "16-bit TIFF, big-endian",
        pixels(">u2", "a.tiff"),
        "images of mode I;16B, converted to RGB: 1",
        0,
        guard=HIGH_BYTE,
        then=ramp(4),
    ),
    DataCase(
        "16-bit PGM",
        portable,
        "images of mode I, converted to RGB: 1",
        0,
        guard=decoder("not in SIXTEEN_BITS and not _is_wide_portable(image):", "not in SIXTEEN_BITS:"),
        then=ramp(1000 / 256),
    ),
    DataCase(
        "TIFF of floats",
        pixels(np.float32, "a.tiff", 0.01),
        f"{CANNOT}a.tiff: pixels of mode F have no fixed range and cannot be converted to 8-bit RGB",
        guard=KNOWN_RANGE,
    ),
    DataCase(
        "TIFF of 32-bit integers",
        pixels(np.int32, "a.tiff"),
        f"{CANNOT}a.tiff: pixels of mode I have no fixed range and cannot be converted to 8-bit RGB",
        guard=KNOWN_RANGE,
    ),
    DataCase(
        "GIF that is called .jpg", renamed("a.jpg"), "images of mode P, converted to RGB: 1", 0, guard=CONVERTED, then=noise("P")
    ),
    DataCase("1 x 1 image", image(size=(1, 1)), FINE.replace("0", "1"), 0, guard=ONE_PIXEL, then=noise(size=(1, 1))),
    DataCase("1 x 2000 image", image(size=(1, 2000)), FINE.replace("0", "1"), 0, guard=ONE_PIXEL, then=noise(size=(1, 2000))),
    DataCase("2000 x 1 image", image(size=(2000, 1)), FINE.replace("0", "1"), 0, guard=ONE_PIXEL, then=noise(size=(2000, 1))),
    DataCase(
        "20,000 x 20,000 image",
        lambda d: d.replace_image(1, Image.new("1", (20_000, 20_000)), "a.png"),
        f"{CANNOT}a.png: Image size (400000000 pixels) exceeds limit of 178956970 pixels, ...; if you trust it, set the "
        "environment variable CPVT_DET_MAX_PIXELS to as many pixels",
        guard=decoder(
            "    if (limit := os.environ.get(LIMIT)) is not None:\n",
            "    Image.MAX_IMAGE_PIXELS = None\n    if limit := None:\n",
        ),
    ),
    DataCase(
        "name of other letters in a subfolder",
        image(name="früh/图片 🪲.png"),
        FINE,
        0,
        guard="names are passed on unchanged",
        then=noise(),
    ),
    DataCase(
        "name in another Unicode form than on the disk",
        other_form,
        "file names found on the disk in another Unicode form: 1",
        0,
        guard=decoder("open(path if path.isascii() else next(", "open(path if True else next("),
        then=noise(),
    ),
    DataCase(
        "name that no file can have",
        lambda d: d.content["images"][0].update(file_name="\0"),
        "image files that are missing: ...image 1: ",
        guard=REPORTED,
    ),
]
