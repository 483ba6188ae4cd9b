# SPDX-License-Identifier: Apache-2.0
"""PEG as the encoder's encoding: after which layers it acts, alone or beside another encoding."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from cpvt_det import defaults
from cpvt_det.position.peg import PEGDetection, encode_levels
from cpvt_det.position.registry import PositionEncoding, register_position
from cpvt_det.structures import Size


class PEGEncoding(PositionEncoding):
    """:class:`PEGDetection` after chosen encoder layers, alone or beside an encoding that is added or acts in the attention.

    Args:
        channels: C.
        num_levels: L.
        num_layers: encoder layers, the bound of ``positions``.
        additive: builder, from the channels, of the encoding beside it; ``None``: there is none.
        peg: builder of one PEG, from the channels and the last four arguments: :class:`PEGDetection` or one of
            ``position/peg_ablations.py``.
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
        num_layers: int = defaults.LAYERS,
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
                "before" if position < 0 else str(position): nn.ModuleList(
                    peg(channels, kernel_size, norm, mask_input, zero_init) for _ in range(1 if share_levels else num_levels)
                )
                for position in positions
            }
        )

    def forward(self, features: Sequence[Tensor], padding_masks: Sequence[Tensor]) -> list[Tensor] | None:
        return None if self.additive is None else self.additive(features, padding_masks)

    def inject(self, tokens: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        key = "before" if layer < 0 else str(layer)
        if key not in self.pegs:
            return tokens
        return encode_levels(self.pegs[key], tokens, padding_mask, level_shapes)

    def place(
        self, queries: Tensor, keys: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs = (queries, keys, padding_mask, level_shapes, layer)
        return super().place(*inputs) if self.additive is None else self.additive.place(*inputs)

    @property
    def acts_in_attention(self) -> bool:
        return self.additive is not None and self.additive.acts_in_attention


register_position("peg")(PEGEncoding)
