# SPDX-License-Identifier: Apache-2.0
"""Pages for a browser: one file each, with style, scripts, data and images inside, so that nothing needs to be fetched."""

import base64
import io
import json
import math
import re
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

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
    page = _read(name)
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
    picture = to_pil_image(image)
    longest = max(picture.size)
    side = min(longest, LONGEST_SIDE)
    while True:
        file = io.BytesIO()
        size = [max(1, round(side / longest * length)) for length in picture.size]
        picture.resize(size, Image.Resampling.LANCZOS).save(file, "JPEG", quality=QUALITY)
        uri = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        if len(uri) <= budget or side <= SMALLEST_SIDE:
            return uri
        side = max(SMALLEST_SIDE, min(side - 1, int(0.95 * side * math.sqrt(budget / len(uri)))))


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
