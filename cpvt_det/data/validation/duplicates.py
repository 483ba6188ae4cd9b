# SPDX-License-Identifier: Apache-2.0
"""Images that are nearly the same: copies, other sizes and compressions of one image, neighbouring frames of a film.

Each image becomes a thumbnail of 24 x 24 grey values, less their mean and divided by their norm; the product of two is the
correlation of their pixels. Brightness and contrast do not matter.
"""

import sys
from collections.abc import Sequence

import numpy as np
from PIL import Image
from tqdm import tqdm

from cpvt_det.data.images import file_threads

SIDE = 24
ALIKE = 0.95
"""Correlation from which two images are near-duplicates."""
FLAT = 1.0
"""Standard deviation, in grey values, below which a thumbnail shows nothing that could be compared."""
CHUNK = 2048


def near_duplicates(first: Sequence[str], second: Sequence[str] | None = None) -> list[tuple[int, int]]:
    """Pairs of indices of images that are nearly the same, in rising order.

    Args:
        first: paths of images; one that cannot be read has no duplicates.
        second: paths of other images; ``None``: pairs within ``first``, the smaller index first.
    """
    one = _thumbnails(first)
    other = one if second is None else _thumbnails(second)
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(one), CHUNK):
        rows, columns = np.nonzero(one[start : start + CHUNK] @ other.T >= ALIKE)
        pairs += zip((rows + start).tolist(), columns.tolist(), strict=True)
    return [pair for pair in pairs if second is not None or pair[0] < pair[1]]


def _thumbnails(paths: Sequence[str]) -> np.ndarray:
    """(n, SIDE * SIDE) float32, of norm 1; zeros for an image that cannot be compared."""
    with file_threads() as pool:
        found = pool.map(_thumbnail, paths)
        bar = tqdm(found, "comparing images", len(paths), leave=False, unit="img", mininterval=0.5, delay=1.0, file=sys.stderr)
        return np.array(list(bar), dtype=np.float32).reshape(-1, SIDE * SIDE)


def _thumbnail(path: str) -> np.ndarray:
    try:
        with Image.open(path) as image:
            image.draft("L", (4 * SIDE, 4 * SIDE))  # a JPEG is decoded at an eighth of its size
            values = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float32).ravel()
    except Exception:  # what decoders raise has no common base; the check of the data reports it
        return np.zeros(SIDE * SIDE, dtype=np.float32)
    values = values - values.mean()
    return values / np.linalg.norm(values) if values.std() >= FLAT else np.zeros_like(values)
