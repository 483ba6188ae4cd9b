# SPDX-License-Identifier: Apache-2.0
"""Pages for a browser: one file each, with style, scripts, data and images inside, so that nothing needs to be fetched."""

import base64
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from cpvt_det.visualize.pictures import class_color

FOLDER = Path(__file__).parent / "pages"
LONGEST_SIDE = 960  # pixels of an embedded image
SMALLEST_SIDE = 64  # pixels; an image is not made smaller than this to fit its budget
QUALITY = 78  # of JPEG
DATA = '<script type="application/json" id="data"></script>'


def build_page(name: str, data: Any) -> str:
    """Build a page that contains its style and scripts.

    Args:
        name: file name of the page in ``visualize/pages``; the page refers to its style and scripts, which are in the same folder,
            by their file names.
        data: data of the page, as plain values for JSON.

    Returns:
        HTML that needs no other file.

    Raises:
        ValueError: NaN or an infinite number.
    """
    page = (FOLDER / name).read_text(encoding="utf-8")
    page = re.sub(r'<link rel="stylesheet" href="(\S+?)">', lambda link: f"<style>\n{_read(link[1])}</style>", page)
    page = re.sub(r'<script src="(\S+?)"></script>', lambda link: f"<script>\n{_read(link[1])}</script>", page)
    # Without any "<", no tag or comment in a name can end the script.
    content = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace(DATA, DATA.replace("></", f">{content}</"))


def embed_image(image: Tensor, budget: float = math.inf) -> str:
    """A data URI of an image as JPEG, with a long side of at most 960 pixels; the image is scaled down further until it fits the
    budget.

    Args:
        image: (3, H, W) uint8, RGB.
        budget: largest number of characters; an image with a long side of 64 pixels is embedded even if it exceeds the budget.
    """
    picture = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))  # (3, H, W) -> (H, W, 3)
    side = min(max(picture.size), LONGEST_SIDE)
    while True:
        uri = _jpeg_uri(picture, side)
        if len(uri) <= budget or side <= SMALLEST_SIDE:
            return uri
        side = max(SMALLEST_SIDE, min(side - 1, int(0.95 * side * math.sqrt(budget / len(uri)))))


def hex_color(label: int) -> str:
    """The colour of a class, the same as in pictures, in CSS."""
    return "#{:02x}{:02x}{:02x}".format(*class_color(label))


def _jpeg_uri(picture: Image.Image, side: int) -> str:
    scale = side / max(picture.size)
    if scale < 1:
        picture = picture.resize([max(1, round(scale * length)) for length in picture.size], Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
