# SPDX-License-Identifier: Apache-2.0
"""Position encodings: the contract, the registry, and the encodings there are.

A new encoding is one class or function registered here under its name; the contract tests find it through the registry.
``build/detector.py`` hands it the options of ``MODEL.POSITION`` as keywords.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence

import torch
from fvcore.common.registry import Registry
from torch import Tensor, nn

from cpvt_det.errors import MapSizeError, UnknownNameError
from cpvt_det.layers.peg import PEGDetection, encode_levels
from cpvt_det.structures import Size, require_bool

POSITION_REGISTRY = Registry("POSITION")
"""Name -> what builds the encoding. It is called with keywords: its own options, and those of ``channels``, ``num_levels`` and
``num_layers`` that it names."""


class PositionEncoding(nn.Module):
    """The contract, and the encoding that does nothing.

    The encoder asks two things, always with the *projected* features and one padding mask a level (DETR has one level), so
    that an encoding may condition on what it encodes.
    """

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor] | None:
        """The additive embedding for queries and keys of every encoder layer.

        Args:
            features: over levels, (B, C, H_l, W_l) float.
            padding_masks: over levels, (B, H_l, W_l) bool, True = padded.

        Returns:
            Over levels, (B, C, H_l, W_l) in the features' dtype; or ``None``, which saves a product in every layer.
        """
        return None

    def inject(self, tokens: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        """Act on the tokens: called before the first encoder layer (``layer == -1``) and after every one.

        Args:
            tokens: (B, N, C) float, the levels one after another, each row by row.
            padding_mask: (B, N) bool, True = padded.
            level_shapes: (H_l, W_l) of each level.
            layer: the index of the layer that has just run.

        Returns:
            (B, N, C); padded tokens unchanged.
        """
        return tokens


def register_position(name: str) -> Callable:
    """Register a class or function under a name that need not be a Python one, as in ``sine+peg``."""

    def register(builder: Callable[..., PositionEncoding]) -> Callable[..., PositionEncoding]:
        POSITION_REGISTRY._do_register(name, builder)
        return builder

    return register


def build_position(name: str, channels: int, num_levels: int = 1, num_layers: int = 6, **options) -> PositionEncoding:
    """Build a registered encoding.

    Args:
        name: as registered.
        channels: C.
        num_levels: feature levels of the encoder.
        num_layers: layers of the encoder.
        options: what the encoding's constructor takes beside these.

    Raises:
        UnknownNameError: a name that is not registered, or an option that this encoding does not take.
        ValueError: what the encoding refuses.
    """
    known = [registered for registered, _ in POSITION_REGISTRY]
    if name not in known:
        raise UnknownNameError("position encoding", name, known)
    builder = POSITION_REGISTRY.get(name)
    facts = {"channels": channels, "num_levels": num_levels, "num_layers": num_layers}
    accepted = position_options(name)
    for option in options:
        if option not in accepted:
            raise UnknownNameError(f"option of position encoding {name!r}", option, accepted - facts.keys())
    return builder(**{fact: value for fact, value in facts.items() if fact in accepted}, **options)


def position_options(name: str) -> set[str]:
    """The keywords that the builder of a registered encoding takes."""
    return set(inspect.signature(POSITION_REGISTRY.get(name)).parameters) - {"additive", "peg"}  # the registry's choices


class SineEncoding(PositionEncoding):
    """Sines and cosines of the row and the column, normalised to the valid part of the map.

    Computed in float32, or float64 for float64 features, whatever autocast says; so half precision cannot round positions.

    Args:
        channels: C, a multiple of 4; the first half encodes the row, the second the column.
        offset: added to the cell index, which counts from 1: 0 in DETR, -0.5 in Deformable-DETR.
        temperature: the longest wavelength over the shortest, for as many channels.

    Raises:
        ValueError: channels that are no multiple of 4.
        TypeError: in ``forward``, a mask that is not bool.

    Source: arXiv 2005.12872, appendix A.4; the offset from fundamentalvision/Deformable-DETR ``models/position_encoding.py``.
    """

    def __init__(self, channels: int, offset: float = 0.0, temperature: float = 10000.0):
        super().__init__()
        if channels % 4:
            raise ValueError(f"a sine encoding needs channels in multiples of 4, got {channels}")
        self.channels_per_axis = channels // 2
        self.offset = offset
        self.temperature = temperature

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor]:
        for mask in padding_masks:
            require_bool(mask)
        return [self._encode(~mask, feature.dtype) for feature, mask in zip(features, padding_masks, strict=True)]

    def _encode(self, valid: Tensor, dtype: torch.dtype) -> Tensor:
        compute = torch.promote_types(dtype, torch.float32)
        axes = [self._encode_axis(valid.cumsum(dim).to(compute), dim) for dim in (1, 2)]
        return torch.cat(axes, dim=-1).permute(0, 3, 1, 2).to(dtype)  # (B, H, W, C) -> (B, C, H, W)

    def _encode_axis(self, index: Tensor, dim: int) -> Tensor:
        """(B, H, W) cell indices from 1 -> (B, H, W, C / 2) sines and cosines by turns."""
        extent = index.narrow(dim, index.shape[dim] - 1, 1)
        angle = (index + self.offset) / (extent + 1e-6) * (2 * math.pi)
        return sines(angle, self.channels_per_axis, self.temperature)


def sines(angle: Tensor, channels: int, temperature: float = 10000.0) -> Tensor:
    """Sines and cosines by turns, of wavelengths that rise from 2 pi to nearly ``temperature`` times that.

    Args:
        angle: (...) float, in radians.
        channels: how many, even.
        temperature: the longest wavelength over the shortest, for as many channels.

    Returns:
        (..., ``channels``).
    """
    exponent = torch.arange(channels, dtype=angle.dtype, device=angle.device)
    wavelength = temperature ** (2 * torch.div(exponent, 2, rounding_mode="floor") / channels)
    phase = angle[..., None] / wavelength
    return torch.stack((phase[..., 0::2].sin(), phase[..., 1::2].cos()), dim=-1).flatten(-2)


class LearnedEncoding(PositionEncoding):
    """A learned vector for each column and each row; it cannot reach beyond its table.

    Args:
        channels: C, even; the first half encodes the column, the second the row.
        table_size: the largest map side there is a vector for.

    Raises:
        ValueError: odd channels.
        MapSizeError: in ``forward``, a map with a longer side.

    Source: facebookresearch/detr ``models/position_encoding.py``.
    """

    def __init__(self, channels: int, table_size: int = 50):
        super().__init__()
        if channels % 2:
            raise ValueError(f"a learned encoding needs an even number of channels, got {channels}")
        self.row_embed = nn.Embedding(table_size, channels // 2)
        self.col_embed = nn.Embedding(table_size, channels // 2)
        nn.init.uniform_(self.row_embed.weight)
        nn.init.uniform_(self.col_embed.weight)

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor]:
        return [self._encode(feature) for feature in features]

    def _encode(self, feature: Tensor) -> Tensor:
        batch, _, height, width = feature.shape
        size = self.row_embed.num_embeddings
        if height > size or width > size:
            raise MapSizeError(
                f"a map of {height} x {width} tokens is beyond the learned table of {size} x {size}; "
                "set MODEL.POSITION.TABLE_SIZE, use smaller images, or an encoding without a table (sine, peg)"
            )
        columns = self.col_embed.weight[:width].expand(height, -1, -1)
        rows = self.row_embed.weight[:height, None].expand(-1, width, -1)
        table = torch.cat((columns, rows), dim=-1).permute(2, 0, 1)  # (H, W, C) -> (C, H, W)
        return table.to(feature.dtype).expand(batch, -1, -1, -1)


class PEGEncoding(PositionEncoding):
    """:class:`PEGDetection` after chosen encoder layers, alone or beside an additive encoding.

    Args:
        channels: C.
        num_levels: L.
        num_layers: encoder layers, the bound of ``positions``.
        additive: builds, from the channels, an encoding that is asked for the additive embedding.
        peg: builds, from the channels and the last four, what acts; :class:`PEGDetection` or one of ``layers/peg_ablations.py``.
        positions: the layers after which a PEG acts; -1 is before the first. 0, the default, is CPVT's choice.
        share_levels: one PEG for all levels at a position, whose norm looks at all of them, instead of one for each.
        kernel_size, norm, mask_input, zero_init: as in :class:`PEGDetection`.

    Raises:
        ValueError: positions outside [-1, ``num_layers`` - 1], double, or none at all.
    """

    def __init__(
        self,
        channels: int,
        num_levels: int = 1,
        num_layers: int = 6,
        additive: Callable[[int], PositionEncoding] | None = None,
        peg: Callable[..., nn.Module] = PEGDetection,
        positions: Sequence[int] = (0,),
        share_levels: bool = False,
        kernel_size: int = 3,
        norm: str = "BN",
        mask_input: bool = True,
        zero_init: bool = False,
    ):
        super().__init__()
        if not positions or len(set(positions)) != len(positions) or not all(-1 <= p < num_layers for p in positions):
            raise ValueError(
                f"PEG positions must be different layers from -1 (before the first) to {num_layers - 1}, got {list(positions)}"
            )
        self.additive = None if additive is None else additive(channels)
        self.pegs = nn.ModuleDict(
            {
                _layer_key(position): nn.ModuleList(
                    peg(channels, kernel_size, norm, mask_input, zero_init) for _ in range(1 if share_levels else num_levels)
                )
                for position in positions
            }
        )

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor] | None:
        return None if self.additive is None else self.additive(features, padding_masks)

    def inject(self, tokens: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        key = _layer_key(layer)
        if key not in self.pegs:
            return tokens
        return encode_levels(self.pegs[key], tokens, padding_mask, level_shapes)


def _layer_key(layer: int) -> str:
    """A layer index as a key of a module dict and so of the state dict: ``before`` for -1."""
    return "before" if layer < 0 else str(layer)


register_position("none")(PositionEncoding)
register_position("sine")(SineEncoding)
register_position("sine_offset")(functools.partial(SineEncoding, offset=-0.5))
register_position("learned")(LearnedEncoding)
register_position("peg")(PEGEncoding)
register_position("sine+peg")(functools.partial(PEGEncoding, additive=SineEncoding))
register_position("sine_offset+peg")(functools.partial(PEGEncoding, additive=functools.partial(SineEncoding, offset=-0.5)))
