# SPDX-License-Identifier: Apache-2.0
"""Vision transformers as backbones (DeiT and CPVT): the encoder of the detectors, applied to patches of an image.

Place in the pipeline: the first step of ``models/detector.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.structures import Size, has_padding, level_padding_mask
from cpvt_det.layers.attention import Attention
from cpvt_det.models.backbones.contract import BACKBONE_REGISTRY
from cpvt_det.models.backbones.vit_weights import load_vit
from cpvt_det.models.encoder import Encoder
from cpvt_det.position import PositionEncoding, TableEncoding, build_position

SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}
"""Size -> channels, layers, heads, of DeiT and of CPVT (arXiv 2012.12877, table 1; arXiv 2102.10882, table 2)."""
POSITIONS = {"deit": "table", "cpvt": "peg_plain"}
"""Family -> its own position encoding."""
INITIAL_STD = 0.02

PositionBuilder = Callable[..., PositionEncoding]
"""A function that builds the encoding; it is called with ``channels``, ``num_layers`` and ``num_heads``."""


class VisionTransformer(nn.Module):
    """An encoder over patch tokens and, if there are any, class and distillation tokens. It returns one map of the patches'
    stride.

    Norms come before attention and feed-forward networks, and after the last layer. An additive encoding is added once, to the
    patches. Patches under the padding are masked as keys, and encodings use each image's own grid, so an image's tokens do not
    depend on the rest of its batch.

    Args:
        channels: C.
        num_layers: layers of the encoder.
        num_heads: M.
        position: builder of the position encoding.
        patch_size: side of a patch in pixels, a power of 2.
        num_tokens: number of tokens in addition to the patches: 1 for the class token, 2 for class and distillation tokens, or 0.
            Encodings do not act on these tokens. With a table, each of these tokens has its own position vector.
        drop_path: rate of the last layer, as in :class:`cpvt_det.models.encoder.Encoder`.
        stages: stage n of the only map, as (n,); the map's stride is 2 ** n. ``None`` skips this check.
        checkpointing: whether to recompute layers in the backward pass instead of storing their activations.
        layers: options for the layers of a subclass.

    Attributes:
        num_tokens: number of tokens in addition to the patches.

    Raises:
        ValueError: the patch size is not a power of 2, the stages do not exist, there are fewer than 0 or more than 2 tokens, or
            the encoding is meant for queries and keys only. Such an encoding would be added to the patches and thus to the
            values, too.

    Source: arXiv 2012.12877, section 3; initial values from facebookresearch/deit.
    """

    norm_eps = 1e-6

    def __init__(
        self,
        channels: int,
        num_layers: int,
        num_heads: int,
        position: PositionBuilder,
        patch_size: int = 16,
        num_tokens: int = 1,
        drop_path: float = 0.0,
        stages: Sequence[int] | None = None,
        checkpointing: bool = False,
        **layers: Any,
    ):
        super().__init__()
        if patch_size < 2 or patch_size.bit_count() != 1:
            raise ValueError(f"the side of a patch must be 2, 4, 8, 16, ... pixels, got {patch_size}")
        stage = patch_size.bit_length() - 1
        if stages is not None and list(stages) != [stage]:
            raise ValueError(
                f"a vision transformer with patches of {patch_size} pixels has one map, of stride {patch_size}: its stages are "
                f"({stage},), got {tuple(stages)}; set MODEL.BACKBONE.STAGES to ({stage},), and for more levels MODEL.NECK.NAME to "
                "simple_pyramid"
            )
        if num_tokens not in (0, 1, 2):
            raise ValueError(
                f"the number of tokens besides the patches must be 0, 1 (class) or 2 (class and distillation), got {num_tokens}"
            )
        self.strides, self.channels, self.size_divisibility = [patch_size], [channels], patch_size
        self.num_tokens, self.drop_path = num_tokens, drop_path
        self.special_tokens = nn.Parameter(torch.empty(num_tokens, channels)) if num_tokens else None
        self.position = position(channels=channels, num_layers=num_layers, num_heads=num_heads, ffn_channels=4 * channels)
        has_table = any(isinstance(part, TableEncoding) for part in self.position.modules())
        self.special_positions = nn.Parameter(torch.empty(num_tokens, channels)) if num_tokens and has_table else None
        self._build(channels, num_layers, num_heads, checkpointing, **layers)
        self.apply(_initialise)
        for tokens in (self.special_tokens, self.special_positions):
            if tokens is not None:
                nn.init.trunc_normal_(tokens, std=INITIAL_STD)

    def _build(self, channels: int, num_layers: int, num_heads: int, checkpointing: bool) -> None:
        """Make the stem and the layers; a subclass may make different ones."""
        self.patch_embed = nn.Conv2d(3, channels, self.strides[0], stride=self.strides[0])
        layers = (num_layers, channels, num_heads, 4 * channels, 0.0, True, checkpointing, "gelu", self.norm_eps, self.drop_path)
        self.encoder = Encoder(*layers)

    def load_pretrained(self, weights: str, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Load the weights of a classifier or of a backbone of the same kind.

        Args:
            weights: a file with the names of facebookresearch/deit or timm, or a file of one of our classifiers. The heads are
                ignored. If this model has no table, a table in the file is ignored, with a line in the log. If the file has no
                PEG, this model's PEG keeps its initial values.
            read: function that reads a file's state dict.

        Raises:
            WeightsError: the file does not exist, the weights belong to a different network, or the table has a different grid.
        """
        load_vit(self, weights, read)

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[Tensor]:
        """Extract features.

        Args:
            images: (B, 3, H, W) float, normalised, zero under the padding.
            padding_mask: (B, H, W) bool, True = padded.

        Returns:
            One map, (B, C, ceil(H / stride), ceil(W / stride)) float.
        """
        height, width = (-(-side // self.strides[0]) for side in images.shape[2:])
        _, patches, _ = self.tokens(images, padding_mask)
        return [patches.unflatten(1, (height, width)).permute(0, 3, 1, 2)]  # (B, H * W, C) -> (B, C, H, W)

    def tokens(self, images: Tensor, padding_mask: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """The tokens after the last norm, for a classifier; arguments as in :meth:`forward`.

        Returns:
            Class and distillation tokens (B, 1 or 2, C), or ``None``; patches (B, N, C), row by row; and their mask (B, N) bool,
            True = padded.
        """
        below, right = (-side % self.strides[0] for side in images.shape[2:])
        if below or right:
            images = F.pad(images, (0, right, 0, below))
        mask = level_padding_mask(padding_mask, self.strides[0])
        patches, state = self._embed(images)
        additive = self.position([patches], [mask])
        patches = patches if additive is None else patches + additive[0]
        tokens, count = patches.flatten(2).transpose(1, 2), self.num_tokens  # (B, C, H, W) -> (B, N, C)
        if count:
            special = self.special_tokens if self.special_positions is None else self.special_tokens + self.special_positions
            tokens = torch.cat((special.expand(tokens.shape[0], -1, -1).to(tokens.dtype), tokens), dim=1)
        keys = F.pad(mask.flatten(1), (count, 0)) if has_padding(mask) else None
        encoded = self._encode(tokens, state, keys, BesideTokens(self.position, count, mask))
        return encoded[:, :count] if count else None, encoded[:, count:], mask.flatten(1)

    def _embed(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """The patches (B, C, H, W), and any further state that the layers need."""
        return self.patch_embed(images), None

    def _encode(self, tokens: Tensor, state: Tensor | None, padding_mask: Tensor | None, position: "BesideTokens") -> Tensor:
        return self.encoder(tokens, None, padding_mask, position.level_shapes, position)

    def layers_above(self, name: str) -> int:
        """Count the layers after a parameter: 0 for the last norm, and 1 for the last layer. For the stem, and for encodings whose
        tensors serve all layers (``relative``, ``rope_mixed``), the result is the number of layers + 1."""
        total, parts = len(self.encoder.layers), name.split(".")
        if parts[:2] in (["encoder", "layers"], ["position", "pegs"]) and parts[2].isdecimal():
            return total - int(parts[2])
        return 0 if parts[:2] == ["encoder", "norm"] else total + 1


class BesideTokens:
    """A position encoding that acts on the patches of a sequence; the tokens before them are unchanged.

    Args:
        position: the encoding.
        count: number of tokens before the patches.
        padding_mask: (B, H, W) bool of the patches, True = padded.
    """

    def __init__(self, position: PositionEncoding, count: int, padding_mask: Tensor):
        self._position, self._count = position, count
        self._mask = padding_mask.flatten(1)
        self.level_shapes: list[Size] = [tuple(padding_mask.shape[1:])]
        self.acts_in_attention, self.acts_in_ffn = position.acts_in_attention, position.acts_in_ffn
        self.looks_at_padding = position.looks_at_padding

    def acts_after(self, layer: int) -> bool:
        """As :meth:`PositionEncoding.acts_after`."""
        return self._position.acts_after(layer)

    def inject(self, tokens: Tensor, padding_mask: Tensor | None, level_shapes: Sequence[Size], layer: int) -> Tensor:
        """As :meth:`PositionEncoding.inject`."""
        return self._on_patches(self._position.inject, tokens, level_shapes, layer)

    def feed(self, hidden: Tensor, padding_mask: Tensor | None, level_shapes: Sequence[Size], layer: int) -> Tensor:
        """As :meth:`PositionEncoding.feed`."""
        return self._on_patches(self._position.feed, hidden, level_shapes, layer)

    def _on_patches(self, act: Callable[..., Tensor], tokens: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        patches = tokens[:, self._count :]
        changed = act(patches, self._mask, level_shapes, layer)
        if changed is patches:
            return tokens
        return torch.cat((tokens[:, : self._count], changed), dim=1) if self._count else changed

    def place(
        self, queries: Tensor, keys: Tensor, padding_mask: Tensor | None, level_shapes: Sequence[Size], layer: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As :meth:`PositionEncoding.place`. The bias is 0 in the rows and columns of the tokens before the patches."""
        count = self._count
        patches = (x[:, :, count:] for x in (queries, keys))
        *turned, bias = self._position.place(*patches, self._mask, level_shapes, layer)
        if not count:
            return *turned, bias
        queries, keys = (torch.cat((x[:, :, :count], own), dim=2) for x, own in zip((queries, keys), turned, strict=True))
        return queries, keys, None if bias is None else F.pad(bias, (count, 0, count, 0))


NAMED: dict[str, tuple[Callable[..., VisionTransformer], tuple[int, int, int]]] = {}
"""Name of a vision transformer -> class, and channels, layers and heads."""
OWN_POSITIONS: dict[str, str] = {}
"""Name of a vision transformer -> its own position encoding."""


def vision_transformer(
    name: str,
    position: PositionBuilder | None = None,
    embed_dim: int = 0,
    depth: int = 0,
    num_heads: int = 0,
    patch_size: int = 16,
    num_tokens: int = 1,
    drop_path: float = 0.0,
    stages: Sequence[int] | None = None,
    checkpointing: bool = False,
) -> VisionTransformer:
    """Build a DeiT, a CPVT or a TNT.

    Args:
        name: key of ``NAMED``, which is also a value of ``MODEL.BACKBONE.NAME``: ``deit_tiny`` and so on, whose own encoding is a
            table; ``cpvt_tiny`` and so on, whose own encoding is one PEG after the first layer; or a name of
            :mod:`cpvt_det.models.backbones.tnt`.
        position: builder of an encoding that replaces the model's own.
        embed_dim: number of channels; 0 means as many as the named model has.
        depth: number of layers; 0 means 12.
        num_heads: number of attention heads; 0 means as many as the named model has.
        patch_size: side of a patch in pixels, a power of 2; also the stride of the only map.
        num_tokens: number of tokens in addition to the patches: 1 for the class token, 2 for class and distillation tokens, 0 for
            none.
        drop_path: probability that an image skips a part of the last layer; it rises from 0 in the first layer.
        stages, checkpointing: as in :class:`VisionTransformer`.

    Raises:
        ValueError: as in :class:`VisionTransformer`.
    """
    if min(embed_dim, depth, num_heads) < 0:
        raise ValueError(f"EMBED_DIM, DEPTH and NUM_HEADS must be at least 0, got {embed_dim}, {depth} and {num_heads}")
    network, own = NAMED[name]
    sizes = [given or usual for given, usual in zip((embed_dim, depth, num_heads), own, strict=True)]
    position = position or partial(build_position, OWN_POSITIONS[name])
    return network(*sizes, position, patch_size, num_tokens, drop_path, stages, checkpointing)


def register_transformer(name: str, network: Callable[..., VisionTransformer], sizes: tuple[int, int, int], position: str) -> None:
    """Register a vision transformer as a backbone; the arguments are its name and what ``NAMED`` and ``OWN_POSITIONS`` hold."""
    NAMED[name], OWN_POSITIONS[name] = (network, sizes), position
    BACKBONE_REGISTRY.register_as(name)(partial(vision_transformer, name))


for _family, _position in POSITIONS.items():
    for _size, _numbers in SIZES.items():
        register_transformer(f"{_family}_{_size}", VisionTransformer, _numbers, _position)


def _initialise(module: nn.Module) -> None:
    """Set DeiT's initial values: truncated normals, cut at -2 and 2, and biases of 0. Norms and convolutions keep torch's
    values."""
    if isinstance(module, Attention):
        nn.init.trunc_normal_(module.in_proj_weight, std=INITIAL_STD)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INITIAL_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
