# SPDX-License-Identifier: Apache-2.0
"""Building blocks that know neither a model nor a config."""

from typing import Any

from cpvt_det.layers.attention import Attention, DeformableAttention
from cpvt_det.ops import ms_deform_attn

__all__ = ["Attention", "DeformableAttention", "ms_deform_attn"]


def __getattr__(name: str) -> Any:
    """The names that moved to ``cpvt_det.position``, until version 1.0."""
    from cpvt_det import position

    if name in position.__all__:
        return getattr(position, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
