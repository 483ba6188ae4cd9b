# SPDX-License-Identifier: Apache-2.0
"""Text in pictures, in any script. The font is DejaVu Sans, which comes with matplotlib. Characters that it lacks are drawn with
system fonts."""

import functools
import itertools
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from PIL import ImageDraw, ImageFont

logger = logging.getLogger(__name__)
FILE = "mpl-data/fonts/ttf/DejaVuSans.ttf"
LAST_RESORT = "Last"
"""Start of the family names of fonts that have only a placeholder for every character, such as "Last Resort"."""
UPRIGHT = ("Regular", "Book", "Normal", "Roman", "Medium")
_missing: set[str] = set()
"""Characters found so far that no font has; the first one caused a warning."""


class Face(NamedTuple):
    """A font of the system.

    Attributes:
        family: family name of the font in matplotlib.
        file: path of the font.
    """

    family: str
    file: str


class Text:
    """A line of text in which each character has a font that contains it.

    Args:
        text: text of one line.
        size: height of the font in pixels.

    Attributes:
        box: (left, top, right, bottom) of the ink in pixels, from the start of the baseline.
    """

    def __init__(self, text: str, size: float):
        faces = fallbacks(text)
        self._parts: list[tuple[float, str, ImageFont.FreeTypeFont]] = []
        end, boxes = 0.0, [(0.0, 0.0, 0.0, 0.0)]
        for face, characters in itertools.groupby(text, faces.get):
            font, part = load_font(face.file if face else None, size), "".join(characters)
            left, top, right, bottom = font.getbbox(part, anchor="ls")
            boxes.append((end + left, top, end + right, bottom))
            self._parts.append((end, part, font))
            end += font.getlength(part)
        lefts, tops, rights, bottoms = zip(*boxes[1:] or boxes, strict=True)
        self.box = round(min(lefts)), round(min(tops)), round(max(rights)), round(max(bottoms))

    def draw(self, draw: ImageDraw.ImageDraw, x: float, y: float, color: str) -> None:
        """Draw the text with the start of its baseline at (x, y)."""
        for start, part, font in self._parts:
            draw.text((x + start, y), part, fill=color, font=font, anchor="ls")


@functools.lru_cache(maxsize=64)
def load_font(file: str | None, size: float) -> ImageFont.FreeTypeFont:
    """A font at a size in pixels; ``None`` means DejaVu Sans, or Pillow's own font if DejaVu Sans is missing."""
    file = file or _dejavu()
    return ImageFont.truetype(file, size) if file else ImageFont.load_default(size)


def fallbacks(text: str) -> dict[str, Face]:
    """A system font for each character of a text that DejaVu Sans lacks.

    Characters that no font has are drawn as boxes; a warning names them once.
    """
    return {} if text.isascii() or not _dejavu() else _fallbacks("".join(sorted({*text})))


def families(text: str) -> list[str]:
    """Names of the fonts that matplotlib needs for a text."""
    from matplotlib.font_manager import fontManager

    faces = dict.fromkeys(fallbacks(text).values())
    for face in faces:
        fontManager.addfont(face.file)
    return ["DejaVu Sans", *(face.family for face in faces)]


@functools.cache
def _dejavu() -> str | None:
    """The path of DejaVu Sans, without importing matplotlib."""
    package = find_spec("matplotlib")
    file = Path(package.origin).parent / FILE if package and package.origin else None
    return str(file) if file and file.is_file() else None


@functools.cache
def _fallbacks(characters: str) -> dict[str, Face]:
    from matplotlib.ft2font import FT2Font

    own = FT2Font(_dejavu())
    left = {character for character in characters if character.isprintable() and not own.get_char_index(ord(character))}
    covered = _covered_by_system(left) if left else {}
    found: dict[str, Face] = {}
    while left and (face := max(covered, key=lambda face: len(covered[face] & left), default=None)) and covered[face] & left:
        found |= dict.fromkeys(covered[face] & left, face)
        left -= covered[face]
    if left and not _missing:
        logger.warning(
            "No font on this system has all the characters of the names, such as %s; pictures show empty boxes in their place. On "
            "Debian and Ubuntu, the package fonts-noto-cjk covers Chinese, Japanese and Korean, and fonts-noto-core most other "
            "scripts",
            min(left),
        )
    _missing.update(left)
    return found


def _covered_by_system(characters: set[str]) -> dict[Face, set[str]]:
    """System fonts, upright ones first, each with the given characters that it contains."""
    from matplotlib.font_manager import findSystemFonts
    from matplotlib.ft2font import FT2Font

    covered: dict[bool, dict[Face, set[str]]] = {True: {}, False: {}}
    for file in sorted(findSystemFonts()):  # not matplotlib's own list, which lacks fonts installed later
        try:
            font = FT2Font(file)
        except (OSError, RuntimeError):  # a damaged font
            continue
        has = {character for character in characters if font.get_char_index(ord(character))}
        if has and font.scalable and not font.family_name.lstrip(".").startswith(LAST_RESORT):
            covered[font.style_name in UPRIGHT][Face(font.family_name, file)] = has
    return covered[True] | covered[False]
