# SPDX-License-Identifier: Apache-2.0
"""Find images that are nearly the same: copies, the same image in another size or compression, neighbouring frames of a video.

Each image becomes a thumbnail of 24 x 24 grey values, minus their mean and divided by their norm. The product of two thumbnails is
the correlation of their pixels, so brightness and contrast do not matter. No list of all pairs is made, because the list would
grow with the square of the number of a video's frames.
"""

import sys
from collections.abc import Sequence

import numpy as np
from PIL import Image
from tqdm import tqdm

from cpvt_det.data.images import FLIPS, file_threads, open_image, orientation_of, to_eight_bits

SIDE = 24
ALIKE = 0.95
"""Smallest correlation of near-duplicates."""
FLAT = 1.0
"""Standard deviation, in grey values, below which a thumbnail is too uniform to be compared."""
CHUNK = 256
"""Number of images that are compared with all others at a time."""


def near_duplicates(first: Sequence[str], second: Sequence[str]) -> dict[int, tuple[int, int]]:
    """Find images in ``second`` that are nearly the same as one in ``first``.

    Args:
        first, second: paths of images, as in :func:`cpvt_det.data.images.open_image`; unreadable images have no duplicates.

    Returns:
        A map from index in ``second``, ascending, to a pair: the index in ``first`` of the first image that is nearly the same,
        and the number of such images.
    """
    one, other = _thumbnails(first), _thumbnails(second)
    found = {}
    for start in range(0, len(other), CHUNK):
        alike = other[start : start + CHUNK] @ one.T >= ALIKE
        counts = alike.sum(1)
        for row in np.flatnonzero(counts).tolist():
            found[start + row] = int(alike[row].argmax()), int(counts[row])
    return found


def group_near_duplicates(paths: Sequence[str]) -> list[int]:
    """The group of each image: images that are nearly the same share a group, and so do all images linked by such pairs.

    Args:
        paths: paths of images, as in :func:`near_duplicates`.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    thumbnails, groups = _thumbnails(paths), np.arange(len(paths))
    for start in range(0, len(paths), CHUNK):
        rows, columns = np.nonzero(thumbnails[start : start + CHUNK] @ thumbnails[start:].T >= ALIKE)
        links = groups[rows + start], groups[columns + start]
        graph = coo_array((np.ones(len(rows), dtype=bool), links), shape=(len(paths), len(paths)))
        groups = connected_components(graph, directed=False)[1][groups]
    return groups.tolist()


def _thumbnails(paths: Sequence[str]) -> np.ndarray:
    """(n, SIDE * SIDE) float32 rows of norm 1; zeros for an image that cannot be compared."""
    with file_threads() as pool:
        found = pool.map(_thumbnail, paths)
        bar = tqdm(found, "comparing images", len(paths), leave=False, unit="img", mininterval=0.5, delay=1.0, file=sys.stderr)
        return np.array(list(bar), dtype=np.float32).reshape(-1, SIDE * SIDE)


def _thumbnail(path: str) -> np.ndarray:
    try:
        with open_image(path) as file, Image.open(file) as image:
            image.draft("L", (4 * SIDE, 4 * SIDE))  # a JPEG is decoded at an eighth of its size
            grey = to_eight_bits(image).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
            turn = orientation_of(image)  # after decoding, which turns a TIFF
    except Exception:  # decoders' errors have no common base class; the data check reports them
        return np.zeros(SIDE * SIDE, dtype=np.float32)
    values = np.asarray(grey, dtype=np.float32)
    values = np.flip(values.T if turn >= 5 else values, tuple(dimension - 1 for dimension in FLIPS[turn])).ravel()
    values = values - values.mean()
    return values / np.linalg.norm(values) if values.std() >= FLAT else np.zeros_like(values)
