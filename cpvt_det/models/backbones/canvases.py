# SPDX-License-Identifier: Apache-2.0
"""The images of a batch in parts, each on a canvas without the padding that larger images give it.

Where a backbone keeps the padding at zero, an image's features are those on a canvas of its own, up to rounding; so nothing has
to be computed for the rest of the batch's canvas.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cpvt_det.structures import Size

LEAST_SAVING = 0.1
"""Share of a batch's cells below which it is not worth a loop."""


@dataclass(frozen=True)
class Part:
    """Images that are computed together.

    Attributes:
        images: their indices in the batch.
        canvas: (height, width) in pixels, of the batch's upper left corner.
    """

    images: tuple[int, ...]
    canvas: Size


def parts_of(canvas: Size, sizes: Sequence[Size], divisor: int) -> list[Part]:
    """Cut a batch into parts: images of one canvas together, or all of them where that would save little.

    Args:
        canvas: (height, width) of the batch.
        sizes: (height, width) of each image.
        divisor: number that the sides of canvases are multiples of.
    """
    own = [tuple(max(1, -(-side // divisor)) * divisor for side in size) for size in sizes]
    if sum(height * width for height, width in own) > (1 - LEAST_SAVING) * len(own) * canvas[0] * canvas[1]:
        own = [canvas] * len(own)
    return [Part(tuple(index for index, other in enumerate(own) if other == size), size) for size in dict.fromkeys(own)]


def in_parts(
    extract: Callable[[Tensor, Tensor], Sequence[Tensor]],
    images: Tensor,
    padding_mask: Tensor,
    parts: Sequence[Part],
    strides: Sequence[int],
) -> list[Tensor]:
    """The maps of a batch that is computed in parts.

    Args:
        extract: (b, 3, h, w) images and their (b, h, w) padding mask -> maps (b, C_l, ceil(h / stride), ceil(w / stride)).
        images: (B, 3, H, W) float.
        padding_mask: (B, H, W) bool, True = padded.
        parts: parts that contain every image once.
        strides: stride of each map.

    Returns:
        (B, C_l, ceil(H / stride), ceil(W / stride)) per stride, zero outside the parts' canvases.
    """
    by_part = []
    for part in parts:
        (height, width), chosen = part.canvas, list(part.images)
        own = images[chosen, :, :height, :width].contiguous(memory_format=torch.channels_last)
        by_part.append(extract(own, padding_mask[chosen, :height, :width]))
    order = [index for part in parts for index in part.images]
    found = []
    for maps, stride in zip(zip(*by_part, strict=True), strides, strict=True):
        height, width = (-(-side // stride) for side in images.shape[2:])
        whole = torch.cat([F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2])) for x in maps])
        found.append(whole if order == sorted(order) else whole[torch.tensor(order).argsort()])
    return found
