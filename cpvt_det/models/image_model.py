# SPDX-License-Identifier: Apache-2.0
"""The base class of detectors and classifiers: a backbone, normalised pixels on a padded canvas, and parts that can be frozen.

Parts have the same names as in configs: ``backbone``, ``encoder``, ``transformer.encoder.layers.0``, ``class_embed``.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common.errors import UnknownNameError
from cpvt_det.common.structures import PaddedBatch, require_bool
from cpvt_det.ops.strided_1x1 import guard_strided_1x1


class ImageModel(nn.Module):
    """A model for images of any size, built on a backbone.

    Args:
        backbone: feature extractor; contract in :data:`cpvt_det.models.backbones.BACKBONE_REGISTRY`.
        pixel_mean, pixel_std: mean and standard deviation per channel, in pixel values from 0 to 255.

    Attributes:
        strides: pixels per cell of each map that the rest of the model uses.
        size_divisibility: number that must divide the height and width of every canvas.

    Raises:
        TypeError: a backbone that lacks an attribute its contract requires.
    """

    strides: list[int]
    size_divisibility: int

    def __init__(self, backbone: nn.Module, pixel_mean: Sequence[float], pixel_std: Sequence[float]):
        super().__init__()
        require_contract(backbone, "backbone", "strides", "channels", "size_divisibility")
        self.backbone = backbone.to(memory_format=torch.channels_last)  # faster on a CPU
        guard_strided_1x1(self.backbone)  # these corrupt memory in this layout; timm, detectron2 and users have such backbones
        self.frozen: tuple[str, ...] = ()
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean)[:, None, None], persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std)[:, None, None], persistent=False)

    def freeze(self, parts: Sequence[str]) -> None:
        """Freeze parts: disable their gradients and keep them in evaluation mode, so that norm statistics do not change either.

        Args:
            parts: names as in :func:`belongs_to_part`: ``backbone``, ``encoder``, ``class_embed``.

        Raises:
            UnknownNameError: a name that matches no part.
        """
        require_parts(self, parts, "frozen")
        for name, parameter in self.named_parameters():
            if any(belongs_to_part(name, part) for part in parts):
                parameter.requires_grad_(False)
        self.frozen = (*self.frozen, *parts)
        self.train(self.training)

    def train(self, mode: bool = True) -> "ImageModel":
        """Set the mode; frozen parts stay in evaluation mode."""
        super().train(mode)
        for name, module in self.named_modules():
            if any(belongs_to_part(name, part) for part in self.frozen):
                module.eval()
        return self

    def without_padding(self, images: Tensor, padding_mask: Tensor) -> Tensor:
        """The images (B, 3, H, W), zero under a padding mask (B, H, W), in channels-last layout.

        Raises:
            TypeError: the mask is not bool, or the weights are in float16 or bfloat16, whether because of ``half()`` or of the
                default dtype. Boxes and positions need at least float32.
            ValueError: a mask of the wrong shape.
        """
        require_bool(padding_mask)
        if padding_mask.shape != (images.shape[0], *images.shape[2:]):
            raise ValueError(f"images {tuple(images.shape)} need a padding_mask (B, H, W), got {tuple(padding_mask.shape)}")
        dtype = self.pixel_mean.dtype
        if dtype in (torch.float16, torch.bfloat16):
            raise TypeError(
                f"the weights of this {type(self).__name__} are {dtype}, which is too coarse for boxes; build the model in float32 "
                "(see torch.set_default_dtype) or convert it with float(), and call it under torch.autocast(device, "
                "torch.bfloat16), which uses half precision where it can; in training, set SOLVER.AMP.ENABLED"
            )
        return images.masked_fill(padding_mask[:, None], 0).contiguous(memory_format=torch.channels_last)

    def preprocess(self, images: Sequence[Tensor]) -> PaddedBatch:
        """Turn images from the mapper into one normalised, padded batch on the model's device.

        Args:
            images: each (3, h, w), RGB in [0, 255], any dtype.
        """
        return PaddedBatch.from_images(images, self.size_divisibility, self.pixel_mean, self.pixel_std)


def require_contract(part: nn.Module, kind: str, *names: str) -> None:
    """Refuse a part that lacks an attribute its contract requires.

    Raises:
        TypeError: an attribute is missing.
    """
    missing = [name for name in names if not hasattr(part, name)]
    if missing:
        lacks, needs = " and no ".join(missing), ", ".join(names)
        raise TypeError(f"the {kind} {type(part).__name__} has no {lacks}; its contract requires {needs}")


def belongs_to_part(name: str, part: str) -> bool:
    """Whether a module or parameter of a detector is the given part or lies inside it.

    Args:
        name: name in ``named_modules`` or ``named_parameters``.
        part: name of a module or parameter; the prefix ``transformer.`` may be omitted.
    """
    return f"{name}.".startswith((f"{part}.", f"transformer.{part}."))


def require_parts(model: nn.Module, parts: Iterable[str], what: str) -> None:
    """Refuse names of parts that have no parameters.

    Args:
        model: a detector.
        parts: names as in :func:`belongs_to_part`.
        what: what the names are for, for the error message.

    Raises:
        UnknownNameError: a name that matches no parameter; the message lists the existing parts.
    """
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        if not any(belongs_to_part(name, part) for name in names):
            known = {name.removeprefix("transformer.").partition(".")[0] for name in names}
            raise UnknownNameError(f"part of the model ({what})", part, known)
