# SPDX-License-Identifier: Apache-2.0
"""Attention on batch-first tensors: multi-head attention through ``scaled_dot_product_attention``, and multi-scale deformable
attention."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.errors import UnknownNameError
from cpvt_det.common.structures import Levels, has_padding, require_bool
from cpvt_det.ops.deformable_attention import IMPLEMENTATIONS, ms_deform_attn

Place = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""A position encoding's ``place`` for one layer: a function that takes the projected queries and keys, (B, M, N, C / M), and
returns them rotated, with a bias to add to the attention scores."""


class Attention(nn.Module):
    """Multi-head attention. If queries, keys or values share an input, their projections are computed in a single matrix product.

    Parameters have the names, shapes and initial values of ``nn.MultiheadAttention``, so official state dicts can be loaded.

    Args:
        channels: C, a multiple of ``num_heads``.
        num_heads: M.
        dropout: probability that an attention weight is dropped during training.
        bias: whether queries, keys and values have a bias; the output always has one.

    Raises:
        ValueError: channels that the heads do not divide.
    """

    _linear = staticmethod(F.linear)
    _attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, channels: int, num_heads: int, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        if num_heads < 1 or channels % num_heads:
            raise ValueError(f"channels must be a multiple of num_heads, got {channels} channels and {num_heads} heads")
        self.num_heads = num_heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * channels, channels))
        self.register_parameter("in_proj_bias", nn.Parameter(torch.zeros(3 * channels)) if bias else None)
        self.out_proj = nn.Linear(channels, channels)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        place: Place | None = None,
    ) -> Tensor:
        """Attend. If two inputs are the same, pass the same object twice: it is then projected by a single matrix product.

        Args:
            queries: (B, Q, C) float.
            keys: (B, N, C) float.
            values: (B, N, C) float.
            padding_mask: (B, N) bool, True = padded; no query attends to a padded key. Every image needs at least one valid key.
            attention_mask: float, of a shape that broadcasts to (B, M, Q, N), added to the scores; -inf hides a key from a query.
                Every query needs at least one visible key.
            place: function of a position encoding. The bias that it returns replaces ``attention_mask``.

        Returns:
            (B, Q, C).

        Raises:
            TypeError: the attention mask is not float. A bool mask is refused because True could mean either of two opposite
                things.
        """
        if attention_mask is not None and not attention_mask.is_floating_point():
            raise TypeError(f"attention_mask is added to the scores, so it must be float, got {attention_mask.dtype}")
        q, k, v = self.project(queries, keys, values)
        if place is not None:
            q, k, attention_mask = place(q, k)
        attend = None if padding_mask is None else ~padding_mask[:, None, None, :]
        if attention_mask is not None:
            attend = attention_mask.to(q.dtype) if attend is None else attention_mask.to(q.dtype).where(attend, -math.inf)
        attended = self._attend(q, k, v, attn_mask=attend, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(attended.transpose(1, 2).flatten(2))  # (B, M, Q, C / M) -> (B, Q, C)

    def project(self, queries: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """The projected queries, keys and values, (B, M, N, C / M) each. If several of them have the same input, one matrix
        product computes them.
        """
        if queries is keys and keys is values:
            products = [(queries, 0, 3)]
        elif queries is keys:
            products = [(queries, 0, 2), (values, 2, 3)]
        elif keys is values:
            products = [(queries, 0, 1), (keys, 1, 3)]
        else:
            products = [(queries, 0, 1), (keys, 1, 2), (values, 2, 3)]
        projected: list[Tensor] = []
        for x, start, stop in products:
            rows = slice(start * x.shape[-1], stop * x.shape[-1])
            bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
            projected += self._linear(x, self.in_proj_weight[rows], bias).chunk(stop - start, dim=-1)
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected]


class DeformableAttention(nn.Module):
    """Multi-scale deformable attention: every query samples P points per head and level, around its reference point.

    Args:
        channels: C, a multiple of ``num_heads``.
        num_heads: M.
        num_levels: L.
        num_points: P, or one number for each level.
        implementation: implementation of the op, as in :func:`ms_deform_attn`.
        has_projections: whether to project values and output. With ``False``, the tokens themselves are the values, and the
            weighted samples are the output, as in D-FINE.

    Raises:
        ValueError: channels that the heads do not divide, no level, or no point.
        UnknownNameError: an unknown implementation.

    Source: arXiv 2010.04159, equation 3; names and initial values as in fundamentalvision/Deformable-DETR.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        num_levels: int,
        num_points: int | Sequence[int],
        implementation: str = "auto",
        has_projections: bool = True,
    ):
        super().__init__()
        if num_heads < 1 or channels % num_heads:
            raise ValueError(f"channels must be a multiple of num_heads, got {channels} channels and {num_heads} heads")
        points = (num_points,) * num_levels if isinstance(num_points, int) else tuple(num_points)
        if num_levels < 1 or len(points) != num_levels or min(points) < 1:
            raise ValueError(
                f"attention needs at least one level and at least one point per level, got {num_levels} levels and {num_points} "
                "points"
            )
        if implementation not in IMPLEMENTATIONS:
            raise UnknownNameError("implementation", implementation, IMPLEMENTATIONS)
        self.samples, self.points = (num_heads, num_levels, max(points)), points
        self.implementation = implementation
        count = num_heads * sum(points)
        self.sampling_offsets = nn.Linear(channels, 2 * count)
        self.attention_weights = nn.Linear(channels, count)
        self.value_proj, self.output_proj = (nn.Linear(channels, channels) if has_projections else nn.Identity() for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let every head sample points in its own direction, 1 to P cells away, with equal weights."""
        heads = self.samples[0]
        angle = torch.arange(heads) * (2 * math.pi / heads)
        direction = torch.stack((angle.cos(), angle.sin()), dim=-1)
        direction = direction / direction.abs().amax(-1, keepdim=True)  # to the border of a square
        steps = torch.cat([torch.arange(1, points + 1) for points in self.points])
        nn.init.zeros_(self.sampling_offsets.weight)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_((direction[:, None] * steps[:, None]).flatten())  # (M, points of all levels, 2)
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj) if isinstance(self.value_proj, nn.Linear) else ():
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(self, queries: Tensor, reference_points: Tensor, tokens: Tensor, levels: Levels) -> Tensor:
        """Attend.

        Args:
            queries: (B, Q, C) float.
            reference_points: (B, Q, L, 2 or 4) float, xy or cxcywh in [0, 1], relative to the padded map. Offsets from a point
                are measured in cells. Offsets from a box are measured in units of the box's sides divided by 2 P.
            tokens: (B, N, C) float.
            levels: layout of the tokens; padded tokens count as zeros.

        Returns:
            (B, Q, C).

        Raises:
            TypeError: a mask that is not bool.
            ValueError: shapes that disagree.
        """
        padding_mask = levels.padding_mask
        require_bool(padding_mask)
        if padding_mask.shape != tokens.shape[:2]:
            raise ValueError(f"tokens {tuple(tokens.shape)} need a padding_mask (B, N), got {tuple(padding_mask.shape)}")
        expected = (*queries.shape[:2], self.samples[1])
        if reference_points.shape[:-1] != expected or reference_points.shape[-1] not in (2, 4):
            raise ValueError(f"reference_points must be {(*expected, 2)} or {(*expected, 4)}, got {tuple(reference_points.shape)}")
        values = self.value_proj(tokens)
        if has_padding(padding_mask):
            values = values.masked_fill(padding_mask[..., None], 0)
        values = values.unflatten(-1, (self.samples[0], -1))
        sampled = self.sample(queries, reference_points, levels)
        return self.output_proj(ms_deform_attn(values, levels.shapes, *sampled, self.implementation))

    def sample(self, queries: Tensor, reference_points: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
        """The points that queries sample, (B, Q, M, L, P, 2), and their weights, (B, Q, M, L, P); arguments as in :meth:`forward`.

        Levels with fewer than P points are padded with points of weight 0.
        """
        heads, num_levels, points = self.samples
        offsets = self.sampling_offsets(queries).unflatten(-1, (heads, -1))  # (B, Q, M, L * P * 2)
        weights = self.attention_weights(queries).unflatten(-1, (heads, sum(self.points))).softmax(-1)
        centers = self._at_points(reference_points[..., :2])
        if reference_points.shape[-1] == 2:
            units = self._at_points(1 / levels.sizes)
        else:
            units = self._at_points(reference_points[..., 2:], half_a_share=True)
        locations = torch.addcmul(centers, offsets, units)
        if self.points == (points,) * num_levels:
            return locations.unflatten(-1, (num_levels, points, 2)), weights.unflatten(-1, (num_levels, points))
        by_level = locations.unflatten(-1, (-1, 2)).split(self.points, dim=-2), weights.split(self.points, dim=-1)
        locations = [F.pad(part, (0, 0, 0, points - part.shape[-2])) for part in by_level[0]]
        return torch.stack(locations, -3), torch.stack([F.pad(part, (0, points - part.shape[-1])) for part in by_level[1]], -2)

    def _at_points(self, x: Tensor, half_a_share: bool = False) -> Tensor:
        """(..., L, 2) -> (..., 1, L * P * 2): repeat each level's numbers for every point, unchanged or divided by 2 P, in a layout
        that is fast to add and multiply."""
        points = self.samples[2]
        if self.points == (points,) * len(self.points):
            x = x * (0.5 / points) if half_a_share else x
            return x[..., None, :].expand(*x.shape[:-1], points, 2).flatten(-3)[..., None, :]
        shares = [0.5 / count if half_a_share else 1 for count in self.points]
        parts = [
            (x[..., level, None, :] * share).expand(*x.shape[:-2], self.points[level], 2) for level, share in enumerate(shares)
        ]
        return torch.cat(parts, dim=-2).flatten(-2)[..., None, :]
