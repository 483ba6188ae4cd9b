# SPDX-License-Identifier: Apache-2.0
"""Necks, which turn a backbone's maps into the features of the transformer's levels.

Place in the pipeline: after ``models/backbones/``, before the encoder. The features that the encoder receives are zero under the
padding. Layers that mix cells mask their own inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common.registry import PartRegistry
from cpvt_det.common.structures import Levels, has_padding, level_padding_mask
from cpvt_det.layers.heads import full_precision
from cpvt_det.layers.norm import MaskedGroupNorm, group_count

NECK_REGISTRY = PartRegistry("NECK", "neck")
"""Name -> builder of a neck. It is called with the options of ``MODEL.NECK``, and with whichever of these its signature names:
``map_channels`` and ``map_strides`` (of the backbone's maps), ``channels``, ``num_levels`` and ``mask_padding``.

The contract of a neck, an ``nn.Module``:

- ``strides``: pixels per cell of each level, from the finest to the coarsest;
- ``forward(maps, padding_mask) -> (features, levels)``: takes the maps (B, C_l, H_l, W_l) of the backbone and the (B, H, W) mask of
  the images; returns features (B, C, H_l, W_l) per level, **zero under the padding**, and their :class:`Levels`.
"""


@NECK_REGISTRY.register_as("projection")
class ProjectionNeck(nn.Conv2d):
    """DETR's neck: one level, a 1x1 convolution of the backbone's last map.

    Args:
        map_channels: channels of the backbone's maps.
        map_strides: strides of the backbone's maps.
        channels: C.

    Source: arXiv 2005.12872, section 3.2; the parameter name ``input_proj`` comes from facebookresearch/detr.
    """

    def __init__(self, map_channels: Sequence[int], map_strides: Sequence[int], channels: int):
        super().__init__(map_channels[-1], channels, kernel_size=1)
        self.strides = [map_strides[-1]]

    def forward(self, maps: Sequence[Tensor], padding_mask: Tensor) -> tuple[list[Tensor], Levels]:
        """Project the maps; arguments and result as in :data:`NECK_REGISTRY`."""
        mask = level_padding_mask(padding_mask, self.strides[0])
        features = super().forward(maps[-1])
        # Padded tokens get no attention weight, but 0 * inf would be NaN. Zeros keep non-finite values out.
        if has_padding(mask):
            features = features.masked_fill(mask[:, None], 0)
        return [features], Levels.from_masks([mask], full_precision(features).dtype)


@NECK_REGISTRY.register_as("multi_level")
class MultiLevelNeck(nn.ModuleList):
    """Deformable-DETR's neck: a 1x1 convolution for each backbone map, and a 3x3 convolution of stride 2 for each further level.

    Args:
        map_channels: channels of the backbone's maps, all of which are used.
        map_strides: strides of the backbone's maps.
        channels: C.
        num_levels: L, at least the number of maps.
        mask_padding: whether to leave padded cells out of the norms; ``False`` includes them, as the official code does.

    Raises:
        ValueError: fewer levels than maps.

    Source: arXiv 2010.04159, appendix A.2; names of parameters as in fundamentalvision/Deformable-DETR.
    """

    def __init__(
        self, map_channels: Sequence[int], map_strides: Sequence[int], channels: int, num_levels: int, mask_padding: bool = True
    ):
        if num_levels < len(map_strides):
            raise ValueError(f"num_levels is {num_levels}, fewer than the {len(map_strides)} maps of the backbone")
        super().__init__()
        for index in range(num_levels):
            if index < len(map_channels):
                convolution = nn.Conv2d(map_channels[index], channels, kernel_size=1)
            else:
                width = map_channels[-1] if index == len(map_channels) else channels
                convolution = nn.Conv2d(width, channels, kernel_size=3, stride=2, padding=1)
            nn.init.xavier_uniform_(convolution.weight)
            nn.init.zeros_(convolution.bias)
            self.append(nn.Sequential(convolution, MaskedGroupNorm(group_count(channels), channels)))
        extra = range(1, num_levels - len(map_strides) + 1)
        self.strides = [*map_strides, *(map_strides[-1] * 2**n for n in extra)]
        self.mask_padding = mask_padding

    def forward(self, maps: Sequence[Tensor], padding_mask: Tensor) -> tuple[list[Tensor], Levels]:
        """Project the maps; arguments and result as in :data:`NECK_REGISTRY`."""
        masks = [level_padding_mask(padding_mask, stride) for stride in self.strides]
        features = []
        x = maps[-1]
        if self.mask_padding and len(maps) < len(self) and has_padding(padding_mask):  # a backbone may leave anything there
            x = x.masked_fill(masks[len(maps) - 1][:, None], 0)
        for index, ((convolution, norm), mask) in enumerate(zip(self, masks, strict=True)):
            source = maps[index] if index < len(maps) else x
            projected = norm(convolution(source), ~mask[:, None] if self.mask_padding else None)
            features.append(projected.masked_fill(mask[:, None], 0))
            if index >= len(maps):
                x = features[-1] if self.mask_padding else projected
        return features, Levels.from_masks(masks, full_precision(features[0]).dtype)


@NECK_REGISTRY.register_as("simple_pyramid")
class SimplePyramid(nn.ModuleList):
    """ViTDet's neck: deconvolutions of the backbone's last map make finer levels, and max pooling makes coarser ones. Two
    convolutions follow in every level.

    Args:
        map_channels: channels of the backbone's maps.
        map_strides: strides of the backbone's maps.
        channels: C.
        num_levels: L.
        first_stride: stride of the finest level, a power of 2.

    Raises:
        ValueError: the first stride is not a power of 2, or more than four deconvolutions would be needed to reach it.

    Source: arXiv 2203.16527, section 3 and appendix A.2; norms are over the channels of each cell.
    """

    def __init__(
        self, map_channels: Sequence[int], map_strides: Sequence[int], channels: int, num_levels: int, first_stride: int = 8
    ):
        if type(first_stride) is not int or first_stride.bit_count() != 1 or map_strides[-1] > 16 * first_stride:
            raise ValueError(
                f"the first stride must be a power of 2 of at least {max(1, map_strides[-1] // 16)}, got {first_stride}"
            )
        self.strides = [first_stride * 2**level for level in range(num_levels)]
        super().__init__(_Level(map_channels[-1], channels, map_strides[-1], stride) for stride in self.strides)

    def forward(self, maps: Sequence[Tensor], padding_mask: Tensor) -> tuple[list[Tensor], Levels]:
        """Make the levels; arguments and result as in :data:`NECK_REGISTRY`."""
        masks = [level_padding_mask(padding_mask, stride) for stride in self.strides]
        features = [level(maps[-1], padding_mask, mask) for level, mask in zip(self, masks, strict=True)]
        return features, Levels.from_masks(masks, full_precision(features[0]).dtype)


class _Level(nn.Module):
    """One level. If a layer looks across cells, its input is set to zero under the padding.

    Args:
        width: channels of the map.
        channels: C.
        map_stride, stride: strides of the map and of the level.
    """

    def __init__(self, width: int, channels: int, map_stride: int, stride: int):
        super().__init__()
        self.map_stride, self.pool = map_stride, max(1, stride // map_stride)
        finer: list[nn.Module] = []
        for number in range((map_stride // stride).bit_length() - 1):
            finer += [_ChannelNorm(width), nn.GELU()] if number else []
            finer.append(nn.ConvTranspose2d(width, width := max(1, width // 2), kernel_size=2, stride=2))
        self.finer = nn.Sequential(*finer)
        self.projection = nn.Conv2d(width, channels, kernel_size=1, bias=False)
        self.norm1 = _ChannelNorm(channels)
        self.mix = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.norm2 = _ChannelNorm(channels)

    def forward(self, x: Tensor, padding_mask: Tensor, mask: Tensor) -> Tensor:
        """The map (B, C', H, W), the mask of the images and the mask of the level -> (B, C, H_l, W_l)."""
        if self.pool > 1:
            if has_padding(padding_mask):
                x = x.masked_fill(level_padding_mask(padding_mask, self.map_stride)[:, None], -torch.inf)
            x = nn.functional.max_pool2d(x, self.pool, ceil_mode=True)
        height, width = mask.shape[1:]
        x = self.finer(_without(x, mask) if self.pool > 1 else x)[:, :, :height, :width]
        x = self.norm1(self.projection(x))
        return _without(self.norm2(self.mix(_without(x, mask))), mask)


class _ChannelNorm(nn.LayerNorm):
    """A layer norm of the channels of each cell of a map."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the same."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _without(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask[:, None], 0) if has_padding(mask) else x
