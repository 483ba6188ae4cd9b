# SPDX-License-Identifier: Apache-2.0
"""Text in pictures, in any script. The font is DejaVu Sans, which comes with matplotlib. Characters that it lacks are drawn with
system fonts."""

import functools
import itertools
import logging
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageDraw, ImageFont

logger = logging.getLogger(__name__)
FILE = "mpl-data/fonts/ttf/DejaVuSans.ttf"
LAST_RESORT = "Last"
"""Start of the family names of fonts that have only a placeholder for every character, such as "Last Resort"."""
UPRIGHT = ("Regular", "Book", "Normal", "Roman", "Medium")
_missing: set[str] = set()
"""Characters found so far that no font has; the first one caused a warning."""


class Text:
    """A line of text in which each character has a font that contains it.

    Args:
        text: text; line breaks are drawn as blanks.
        size: height of the font in pixels.

    Attributes:
        box: (left, top, right, bottom) of the ink in pixels, from the start of the baseline.
    """

    def __init__(self, text: str, size: float):
        text = " ".join(text.splitlines())
        files = fallbacks(text)
        self._parts: list[tuple[float, str, ImageFont.FreeTypeFont]] = []
        end, boxes = 0.0, [(0.0, 0.0, 0.0, 0.0)]
        for file, characters in itertools.groupby(text, files.get):
            font, part = load_font(file, size), "".join(characters)
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
    """A font at a size in pixels; ``None`` means DejaVu Sans."""
    return ImageFont.truetype(file or _dejavu(), size)


def fallbacks(text: str) -> dict[str, str]:
    """The path of a system font for each character of a text that DejaVu Sans lacks.

    Characters that no font has are drawn as boxes; a warning names them once.
    """
    return {} if text.isascii() else _fallbacks("".join(sorted({*text})))


def families(text: str) -> list[str]:
    """Names of the fonts that matplotlib needs for a text."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    files = dict.fromkeys(fallbacks(text).values())
    for file in files:
        fontManager.addfont(file)
    return ["DejaVu Sans", *(FT2Font(file).family_name for file in files)]


@functools.cache
def _dejavu() -> str:
    """The path of DejaVu Sans, without importing matplotlib."""
    return str(Path(find_spec("matplotlib").origin).parent / FILE)


@functools.cache
def _fallbacks(characters: str) -> dict[str, str]:
    """Fonts with more of the characters come first, then upright ones."""
    from matplotlib.font_manager import findSystemFonts
    from matplotlib.ft2font import FT2Font

    own = FT2Font(_dejavu())
    left = {character for character in characters if character.isprintable() and not own.get_char_index(ord(character))}
    fonts = []
    for file in findSystemFonts() if left else ():  # not matplotlib's own list, which lacks fonts installed later
        try:
            font = FT2Font(file)
        except (OSError, RuntimeError):  # a damaged font
            continue
        has = {character for character in left if font.get_char_index(ord(character))}
        if has and font.scalable and not font.family_name.lstrip(".").startswith(LAST_RESORT):
            fonts.append((-len(has), font.style_name not in UPRIGHT, file, has))
    found: dict[str, str] = {}
    for *_, file, has in sorted(fonts):
        found |= dict.fromkeys(has & left, file)
        left -= has
    if left and not _missing:
        logger.warning(
            "No font on this system has all the characters of the names, such as %s; pictures show empty boxes in their place. On "
            "Debian and Ubuntu, the package fonts-noto-cjk covers Chinese, Japanese and Korean, and fonts-noto-core most other "
            "scripts",
            min(left),
        )
    _missing.update(left)
    return found
