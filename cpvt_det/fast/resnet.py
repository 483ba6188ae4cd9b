# SPDX-License-Identifier: Apache-2.0
"""A ResNet with fixed norms folded into its convolutions, and with a separate canvas for each image of a padded batch.

If a backbone keeps the padding at zero, an image has the same features, up to rounding, on a canvas of its own size. So the rest
of the batch's canvas need not be computed.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.structures import Size, has_padding, valid_sizes
from cpvt_det.fast.convolution import can_fold, convolve
from cpvt_det.layers.norm import folded
from cpvt_det.models.backbones.resnet import MaskedOps, ResNetBackbone
from cpvt_det.ops import routes

LEAST_SAVING = 0.1
"""Share of a batch's cells that must be saved for a loop over canvases to be worthwhile."""


@dataclass(frozen=True)
class Part:
    """Images that are computed together.

    Attributes:
        images: indices of the images in the batch.
        canvas: (height, width) in pixels of their canvas, cut from the upper left corner of the batch.
    """

    images: tuple[int, ...]
    canvas: Size


def parts_of(canvas: Size, sizes: Sequence[Size], divisor: int) -> list[Part]:
    """Split a batch into parts: one part per size of canvas, or a single part if splitting would save little.

    Args:
        canvas: (height, width) of the batch.
        sizes: (height, width) of each image.
        divisor: number that the height and width of every canvas must be multiples of.
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
    """The maps of a batch, computed in parts.

    Args:
        extract: function from (b, 3, h, w) images and their (b, h, w) padding mask to maps (b, C_l, ceil(h / stride),
            ceil(w / stride)).
        images: (B, 3, H, W) float.
        padding_mask: (B, H, W) bool, True = padded.
        parts: parts that contain every image once.
        strides: stride of each map.

    Returns:
        A map (B, C_l, ceil(H / stride), ceil(W / stride)) per stride, zero outside the parts' canvases.
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


class FastMaskedOps(MaskedOps):
    """Masked operations that fold fixed norms into convolutions, and zero only the padding if images are rectangles."""

    @functools.cached_property
    def sizes(self) -> list[Size] | None:
        """(height, width) of each image in pixels. ``None`` if nothing is masked, or if the unmasked part of an image is not a
        rectangle.
        """
        return None if self.padding_mask is None else valid_sizes(self.padding_mask)

    def rectify(self, x: Tensor, stride: int) -> Tensor:
        """The ReLU of ``x`` (B, C, H, W), in place, with zeros under the padding."""
        if not routes.is_plain(x) or self.sizes is None:
            return super().rectify(x, stride)
        return _RectifyValid.apply(x, [tuple(-(-side // stride) for side in size) for size in self.sizes])

    def convolve(self, convolution: nn.Conv2d, norm: nn.Module, x: Tensor, stride: int, residual: Tensor | None = None) -> Tensor:
        """``norm(convolution(x))``, at this stride, plus the residual, if any."""
        if not can_fold(convolution, norm, x):
            return super().convolve(convolution, norm, x, stride, residual)
        x = convolve(convolution, x, *folded(convolution, norm))
        return x if residual is None else x.add_(residual)


class FastResNetBackbone(ResNetBackbone):
    """Faster :class:`ResNetBackbone`."""

    masked_ops = FastMaskedOps

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[Tensor]:
        """A map (B, C_l, ceil(H / stride), ceil(W / stride)) float for each stage."""
        # A tool that counts operations, a hook and a norm that learns must see the whole canvas and batch.
        may_cut = self.mask_padding and routes.is_plain(images) and routes.is_on("canvases") and has_padding(padding_mask)
        learning = (part for part in self.body.modules() if isinstance(part, nn.BatchNorm2d) and part.training)
        may_cut = may_cut and not any(learning) and not any(map(routes.is_watched, self.body.modules()))
        sizes = valid_sizes(padding_mask) if may_cut else None
        if sizes is not None:
            canvas = tuple(images.shape[2:])
            parts = parts_of(canvas, sizes, self.size_divisibility)
            if [part.canvas for part in parts] != [canvas]:
                return in_parts(super().forward, images, padding_mask, parts, self.strides)
        return super().forward(images, padding_mask)


class _RectifyValid(torch.autograd.Function):
    """The ReLU in place, then zeros outside (h, w) of each image. Only the padding is written twice. The gradient of the ReLU needs
    no change, because it is zero where the output is zero."""

    @staticmethod
    def forward(ctx, x: Tensor, sizes: Sequence[Size]) -> Tensor:
        x.relu_()
        for image, (height, width) in zip(x, sizes, strict=True):
            image[:, height:] = 0
            image[:, :height, width:] = 0
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, out, 0), None
