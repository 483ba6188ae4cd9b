# SPDX-License-Identifier: Apache-2.0
"""Necks, which turn a backbone's maps into the features of the transformer's levels.

Place in the pipeline: after ``models/backbones/``, before the encoder. The features that the encoder receives are zero under the
padding. Layers that mix cells mask their own inputs.
"""

from collections.abc import Sequence

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
        super().__init__(_projections(map_channels, channels, num_levels))
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


def _projections(map_channels: Sequence[int], channels: int, num_levels: int) -> list[nn.Sequential]:
    """One projection per level: 1x1 convolutions of the maps, then 3x3 convolutions of stride 2."""
    inputs = [*map_channels, map_channels[-1], *[channels] * num_levels][:num_levels]
    projections = []
    for index, width in enumerate(inputs):
        if index < len(map_channels):
            convolution = nn.Conv2d(width, channels, kernel_size=1)
        else:
            convolution = nn.Conv2d(width, channels, kernel_size=3, stride=2, padding=1)
        nn.init.xavier_uniform_(convolution.weight)
        nn.init.zeros_(convolution.bias)
        projections.append(nn.Sequential(convolution, MaskedGroupNorm(group_count(channels), channels)))
    return projections
