# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention, batch first, on ``scaled_dot_product_attention``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention that spends one matrix product on inputs that queries, keys and values share.

    Parameters have the names, shapes and initial values of ``nn.MultiheadAttention``, so official state dicts fit.

    Args:
        channels: C, a multiple of ``num_heads``.
        num_heads: M.
        dropout: on the attention weights, in training.

    Raises:
        ValueError: channels that the heads do not divide.
    """

    def __init__(self, channels: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        if num_heads < 1 or channels % num_heads:
            raise ValueError(f"channels must be a multiple of num_heads, got {channels} channels and {num_heads} heads")
        self.num_heads = num_heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * channels, channels))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * channels))
        self.out_proj = nn.Linear(channels, channels)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attend. Pass the same object twice where two inputs are the same: it is projected in one product.

        Args:
            queries: (B, Q, C) float.
            keys: (B, N, C) float.
            values: (B, N, C) float.
            padding_mask: (B, N) bool, True = padded: keys that no query sees. An image needs one valid key.

        Returns:
            (B, Q, C).
        """
        q, k, v = (self._split_heads(x) for x in self._project(queries, keys, values))
        attend = None if padding_mask is None else ~padding_mask[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attend, dropout_p=dropout)
        return self.out_proj(attended.transpose(1, 2).flatten(2))  # (B, M, Q, C / M) -> (B, Q, C)

    def _project(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        if queries is keys and keys is values:
            return F.linear(queries, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        channels = queries.shape[-1]
        if queries is keys:
            shared = F.linear(queries, self.in_proj_weight[: 2 * channels], self.in_proj_bias[: 2 * channels])
            return *shared.chunk(2, dim=-1), F.linear(values, weights[2], biases[2])
        if keys is values:
            shared = F.linear(keys, self.in_proj_weight[channels:], self.in_proj_bias[channels:])
            return F.linear(queries, weights[0], biases[0]), *shared.chunk(2, dim=-1)
        return tuple(F.linear(x, w, b) for x, w, b in zip((queries, keys, values), weights, biases, strict=True))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, N, C) -> (B, M, N, C / M)
