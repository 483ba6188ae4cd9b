# SPDX-License-Identifier: Apache-2.0
"""The neck for backbones with a single map. It makes levels of several strides from this map."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cpvt_det.common.structures import Levels, has_padding, level_padding_mask
from cpvt_det.layers.heads import full_precision
from cpvt_det.models.necks import NECK_REGISTRY


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
