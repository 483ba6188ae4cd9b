# SPDX-License-Identifier: Apache-2.0
"""Transformer in Transformer: each layer runs a small transformer over the pixels of every patch and adds its output to the patch.

Place in the pipeline: the first step of ``models/detector.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpvt_det.layers.checkpointing import recomputed
from cpvt_det.models.backbones.vit import INITIAL_STD, BesideTokens, VisionTransformer, register_transformer
from cpvt_det.models.backbones.vit_weights import TNT, convert_tnt, load_vit
from cpvt_det.models.encoder import EncoderLayer, inside_layer, rising_rates

SIZES = {"small": (384, 12, 6), "base": (640, 12, 10)}
"""Size -> channels, layers and heads (arXiv 2103.00112, table 1)."""
INNER_HEADS = 4
STRIDE = 4  # image pixels per pixel token, along each side


class TransformerInTransformer(VisionTransformer):
    """A :class:`VisionTransformer` whose patches are made from pixel tokens. Every layer adds the pixel tokens to their patch
    again. Pixel tokens have a sixteenth as many channels as patches, rounded down to a multiple of 4, and at least 4.

    By default, the patches have a position table; another encoding can replace it. The pixels of all patches share one table of 4 x
    4 cells. A PEG acts on the patches after a layer. Images may have any size.

    Args:
        channels, num_layers, num_heads, position, patch_size, num_tokens, drop_path, stages, checkpointing: as in
            :class:`VisionTransformer`; the side of a patch is at least 4 pixels.
        legacy: whether to build the network of the paper's first version. Its stem convolution looks beyond a patch, and pixels
            are added to patches after a norm per pixel and a linear layer.
        squeeze: whether the outer feed-forward outputs are weighted by channel (SE).

    Attributes:
        pixel_mean, pixel_std: channel statistics that the public weights expect.

    Raises:
        ValueError: as in :class:`VisionTransformer`, or a patch side below 4 pixels.

    Source: arXiv 2103.00112, equations 2 to 6. Norms, initial values, legacy form and SE are those of
    huawei-noah/Efficient-AI-Backbones.
    """

    norm_eps = 1e-5
    pixel_mean = pixel_std = (127.5, 127.5, 127.5)

    def _build(
        self, channels: int, num_layers: int, num_heads: int, checkpointing: bool, legacy: bool = False, squeeze: bool = False
    ) -> None:
        if not (side := self.strides[0] // STRIDE):
            raise ValueError(f"patches of a TNT need sides of at least {STRIDE} pixels, got {self.strides[0]}")
        self.legacy = legacy
        inner_channels = 4 * max(1, channels // 64)
        self.pixel_embed = nn.Conv2d(3, inner_channels, kernel_size=7, stride=STRIDE, padding=3)
        self.pixel_table = nn.Parameter(torch.empty(inner_channels, side, side))
        nn.init.trunc_normal_(self.pixel_table, std=INITIAL_STD)
        self.project = _PixelsToPatch(inner_channels, side * side, channels)
        layer = partial(_Layer, channels, num_heads, inner_channels, side * side, legacy=legacy, squeeze=squeeze)
        rates = rising_rates(self.drop_path, num_layers)
        self.encoder = _Encoder([layer(drop_path=rate) for rate in rates], channels, checkpointing)

    def load_pretrained(self, weights: str, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Load weights from a file with timm's or the authors' names, or from a file of one of our classifiers, in the same way
        as for DeiT.
        """
        load_vit(self, weights, read, convert_tnt, TNT)

    def _embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Patches (B, C, H, W), and pixels (B * H * W, pixels of a patch, C')."""
        side, rows, columns = self.strides[0], *(length // self.strides[0] for length in images.shape[2:])
        if self.legacy:
            images, side = self.pixel_embed(images), side // STRIDE
        cut = images.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 1, 3, 5)
        cut = cut.flatten(0, 2)  # (B, C, H * side, W * side) -> (B * H * W, C, side, side)
        pixels = ((cut if self.legacy else self.pixel_embed(cut)) + self.pixel_table).flatten(2).transpose(1, 2)
        patches = self.project(pixels).unflatten(0, (images.shape[0], rows, columns))
        return patches.permute(0, 3, 1, 2), pixels

    def _encode(self, tokens: Tensor, state: Tensor, padding_mask: Tensor | None, position: BesideTokens) -> Tensor:
        return self.encoder(tokens, state, padding_mask, position)


class _PixelsToPatch(nn.Module):
    """Pixels (P, N, C') of patches -> (P, C).

    Args:
        inner_channels, num_pixels, channels: C', N and C.
        bias: whether the linear layer has a bias.
        per_pixel: whether the norm before the linear layer is over the channels of each pixel, and no norm follows the linear
            layer. Otherwise, the norm is over all pixels of a patch together.
    """

    def __init__(self, inner_channels: int, num_pixels: int, channels: int, bias: bool = True, per_pixel: bool = False):
        super().__init__()
        width = inner_channels * num_pixels
        self.per_pixel = per_pixel
        self.norm1 = nn.LayerNorm(inner_channels if per_pixel else width)
        self.linear = nn.Linear(width, channels, bias)
        self.norm2 = nn.Identity() if per_pixel else nn.LayerNorm(channels)

    def forward(self, pixels: Tensor) -> Tensor:
        flat = self.norm1(pixels).flatten(1) if self.per_pixel else self.norm1(pixels.flatten(1))
        return self.norm2(self.linear(flat))


class _Layer(nn.Module):
    """The inner transformer over pixels, the addition of pixels to their patches, and the outer transformer over patches."""

    def __init__(
        self, channels: int, num_heads: int, inner_channels: int, num_pixels: int, drop_path: float, legacy: bool, squeeze: bool
    ):
        super().__init__()
        shared = {"dropout": 0.0, "pre_norm": True, "activation": "gelu", "drop_path": drop_path, "attention_bias": False}
        self.inner = EncoderLayer(inner_channels, INNER_HEADS, 4 * inner_channels, **shared)
        self.project = _PixelsToPatch(inner_channels, num_pixels, channels, bias=legacy, per_pixel=legacy)
        self.outer = (_SqueezedLayer if squeeze else EncoderLayer)(channels, num_heads, 4 * channels, **shared)

    def forward(self, tokens: Tensor, pixels: Tensor, padding_mask: Tensor | None, *inside: Any) -> tuple[Tensor, Tensor]:
        """Tokens (B, T + N, C), the last N of them patches, and the patches' pixels (B * N, ., C') -> the same."""
        pixels = self.inner(pixels, None, None)
        added = self.project(pixels).unflatten(0, (tokens.shape[0], -1))
        count = tokens.shape[1] - added.shape[1]
        patches = tokens[:, count:] + added
        tokens = torch.cat((tokens[:, :count], patches), dim=1) if count else patches
        return self.outer(tokens, None, padding_mask, *inside), pixels


class _SqueezedLayer(EncoderLayer):
    """An encoder layer whose feed-forward output is weighted by channel. The weights are computed from the mean of this output
    over the valid tokens.
    """

    def __init__(self, channels: int, *arguments: Any, **named: Any):
        super().__init__(channels, *arguments, **named)
        hidden = channels // 4
        parts = (nn.LayerNorm(channels), nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels), nn.Tanh())
        self.squeeze = nn.Sequential(*parts)

    def feed_forward(self, first: nn.Linear, second: nn.Linear, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        out = super().feed_forward(first, second, x)
        if padding_mask is None:
            mean = out.mean(1, keepdim=True)
        else:
            valid = (~padding_mask)[..., None]
            mean = out.masked_fill(~valid, 0).sum(1, keepdim=True) / valid.sum(1, keepdim=True)
        return out + out * self.squeeze(mean)


class _Encoder(nn.Module):
    """The layers, with the encoding between them, and the last norm."""

    def __init__(self, layers: Sequence[_Layer], channels: int, checkpointing: bool):
        super().__init__()
        self.checkpointing = checkpointing
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(channels)

    def forward(self, tokens: Tensor, pixels: Tensor, padding_mask: Tensor | None, position: BesideTokens) -> Tensor:
        shapes = position.level_shapes
        tokens = position.inject(tokens, padding_mask, shapes, -1)
        for index, layer in enumerate(self.layers):
            run_layer = partial(recomputed, layer) if self.checkpointing else layer
            inside = inside_layer(position, padding_mask=padding_mask, level_shapes=shapes, layer=index)
            tokens, pixels = run_layer(tokens, pixels, padding_mask, *inside)
            tokens = position.inject(tokens, padding_mask, shapes, index)
        return self.norm(tokens)


for _size, _numbers in SIZES.items():
    for _variant, _options in (("", {}), ("_legacy", {"legacy": True}), ("_se", {"squeeze": True})):
        register_transformer(f"tnt_{_size}{_variant}", partial(TransformerInTransformer, **_options), _numbers, "table")
