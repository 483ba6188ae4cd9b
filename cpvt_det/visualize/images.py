# SPDX-License-Identifier: Apache-2.0
"""Images of one size to average over: read from files, or drawn like the shapes data set."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from cpvt_det.data.images import read_image
from cpvt_det.data.listing import find_files
from cpvt_det.data.shapes.scene import ShapesSpec, draw_image
from cpvt_det.structures import Size

MOST_READ = 16
DRAWN = 4


def images_of_size(source: str, output: Path, size: Size) -> list[Tensor]:
    """Images stretched to a size.

    Args:
        source: file, folder or glob, of which the first 16 images by name are read; if empty, four images are drawn.
        output: a folder below which nothing is read.
        size: (h, w) of the result.

    Returns:
        Images, (3, h, w) uint8 each.

    Raises:
        DataError: a source without images, or an image that cannot be read.
    """
    if source:
        found = [read_image(str(path)) for path in find_files(source, output)[0][:MOST_READ]]
    else:
        rng = np.random.default_rng(0)
        found = [torch.from_numpy(draw_image(ShapesSpec(), rng)[0]).permute(2, 0, 1) for _ in range(DRAWN)]
    return [TF.resize(image, list(size), antialias=True) for image in found]
