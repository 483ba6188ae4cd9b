# SPDX-License-Identifier: Apache-2.0
"""The valid tokens of a padded batch, packed into one row for all images.

An encoder's layers process every token separately, except in attention, and attention ignores padded tokens. So the valid tokens
do not depend on the padded tokens, which therefore need not be computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """The positions of a batch's valid tokens.

    Attributes:
        places: (T,) int64, ascending indices of the valid tokens among the B * N tokens of the batch.
        counts: number of valid tokens of each of the B images; they sum to T.
        shape: (B, N).
    """

    places: Tensor
    counts: list[int]
    shape: tuple[int, int]

    @classmethod
    def of(cls, padding_mask: Tensor) -> "Packing":
        """The packing for a mask (B, N) bool, True = padded."""
        valid = ~padding_mask
        return cls(valid.flatten().nonzero()[:, 0], valid.sum(1).tolist(), tuple(padding_mask.shape))

    def pack(self, whole: Tensor) -> Tensor:
        """(B or 1, N, ...) -> (1, T, ...)."""
        whole = whole.expand(self.shape[0], *whole.shape[1:])
        return _Pack.apply(whole.flatten(0, 1), self.places)[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """(1, T, ...) -> (B, N, ...), zero at padded tokens."""
        whole = packed.new_zeros(self.shape[0] * self.shape[1], *packed.shape[2:])
        return whole.index_copy_(0, self.places, packed[0]).unflatten(0, self.shape)

    def images(self, packed: Tensor, dim: int = 1) -> Sequence[Tensor]:
        """Split a tensor with T tokens along ``dim`` into one tensor per image."""
        return packed.split(self.counts, dim)


class _Pack(torch.autograd.Function):
    """(R, ...) -> (T, ...), the rows at the given places. Torch itself would add the gradients of the rows, which takes longer."""

    @staticmethod
    def forward(ctx, rows, places):
        ctx.save_for_backward(places)
        ctx.count = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, *ctx.saved_tensors, grad), None
