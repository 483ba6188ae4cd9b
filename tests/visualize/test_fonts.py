# SPDX-License-Identifier: Apache-2.0
"""Names in any script: pictures show them, or a warning says once that they do not."""

import logging
import warnings

import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from PIL import Image, ImageDraw

from cpvt_det.common.structures import Detections
from cpvt_det.visualize import fonts
from cpvt_det.visualize.figures import save_figure
from cpvt_det.visualize.fonts import Text, load_font
from cpvt_det.visualize.pictures import draw_panel
from cpvt_det.visualize.report import confusion_figure

BOX = "\u732b"  # a character that DejaVu Sans lacks, as most Chinese ones
OTHER_BOX = "\u72d7"


def test_line_breaks_are_drawn_as_blanks():
    """As of classes that were read with ``readlines``."""
    assert Text("cat\n 0.90", 14).box == Text("cat  0.90", 14).box and Text("cat\r\n", 14).box == Text("cat", 14).box


def make_font(path, characters, style="Regular", width=600):
    """A font in which every character is a filled rectangle."""
    pen = TTGlyphPen(None)
    pen.moveTo((50, 0))
    for corner in ((50, 700), (width - 50, 700), (width - 50, 0)):
        pen.lineTo(corner)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "rectangle"])
    builder.setupCharacterMap({ord(character): "rectangle" for character in characters})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "rectangle": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (width, 0), "rectangle": (width, 50)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": path.stem, "styleName": style, "fullName": path.stem, "psName": path.stem})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return str(path)


@pytest.fixture
def system(monkeypatch):
    """The fonts of the system, which a test puts into a list."""
    found = []
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda *_: found)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [*font_manager.fontManager.ttflist])
    monkeypatch.setattr(fonts, "_missing", set())
    fonts._fallbacks.cache_clear()
    yield found
    fonts._fallbacks.cache_clear()


def panel(name):
    """A picture with a name as its title and as a label; these differ where one character is drawn as another."""
    image, box = torch.full((3, 100, 200), 128, dtype=torch.uint8), torch.tensor([[30.0, 50.0, 90.0, 90.0]])
    return np.array(draw_panel(image, Detections(box, torch.ones(1), torch.zeros(1, dtype=torch.int64)), [name], name))


@pytest.mark.parametrize("two", ["ЩЖ", "πλ", "éà", "şğ", "\u0561\u0562", "\u05d0\u05d1", "\u0639\u063a"])
def test_scripts_of_dejavu_are_drawn(system, caplog, two):
    """Latin, Greek, Cyrillic, Armenian, Hebrew and Arabic letters are drawn, and not as the same box."""
    assert not np.array_equal(panel(two[0]), panel(two[1]))
    assert not caplog.records


def test_what_no_font_has_is_a_box_and_is_said_once(system, caplog, tmp_path):
    system.append(make_font(tmp_path / "Last Resort.ttf", BOX))  # not a font of that character
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    system.append(str(tmp_path / "broken.ttf"))
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(panel(BOX), panel(OTHER_BOX))
        save_figure(confusion_figure(np.eye(2), [BOX, OTHER_BOX]), tmp_path / "a.png")
    (record,) = caplog.records
    assert f"has all the characters of the names, such as {BOX}; pictures show empty boxes" in record.getMessage()


def test_a_font_of_the_system_is_taken_where_dejavu_has_none(system, caplog, tmp_path):
    """One that has all characters before one that has some, an upright one before others; also in matplotlib's figures."""
    boxes = panel(BOX + OTHER_BOX)
    system += [
        make_font(tmp_path / "A few.ttf", BOX),
        make_font(tmp_path / "Bold.ttf", BOX + OTHER_BOX, "Bold"),
        make_font(tmp_path / "Whole.ttf", BOX + OTHER_BOX),
    ]
    fonts._fallbacks.cache_clear()
    caplog.clear()
    assert not np.array_equal(panel(BOX + OTHER_BOX), boxes)
    assert {*fonts.fallbacks(f"a {BOX}{OTHER_BOX} 0.95").values()} == {str(tmp_path / "Whole.ttf")}
    figure = confusion_figure(np.eye(2), [f"a {BOX}", "b"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(figure, tmp_path / "a.png")
    families = {tuple(text.get_fontfamily()) for text in figure.axes[0].get_xticklabels() if BOX in text.get_text()}
    assert families == {("DejaVu Sans", "A few")}
    assert not caplog.records


def test_a_text_of_two_fonts_is_as_long_as_its_parts(system, tmp_path):
    """A rectangle of 12 pixels ink within 15 of advance, at size 25, between two letters of DejaVu."""
    system.append(make_font(tmp_path / "Whole.ttf", BOX))
    text, part = Text(f"a{BOX}b", 25), load_font(None, 25)
    left, _, right, bottom = text.box
    assert (left, bottom) == (round(part.getbbox("a", anchor="ls")[0]), 0)
    assert abs(right - (part.getlength("a") + 15 + part.getbbox("b", anchor="ls")[2])) <= 1
    picture = Image.new("L", (80, 40))
    text.draw(ImageDraw.Draw(picture), 4, 30, "white")
    columns = np.flatnonzero((np.array(picture)[14:29] == 255).all(0))
    assert len(columns) >= 11 and abs(columns[0] - 4 - part.getlength("a") - 1.25) <= 1


def test_plain_text_is_measured_as_pillow_measures_it():
    text, font = Text("Cat, 0.95 g", 20), load_font(None, 20)
    assert font.getname() == ("DejaVu Sans", "Book")
    assert text.box == tuple(round(value) for value in font.getbbox("Cat, 0.95 g", anchor="ls"))
    assert Text("", 20).box == (0, 0, 0, 0)
