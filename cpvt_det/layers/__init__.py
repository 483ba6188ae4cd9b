# SPDX-License-Identifier: Apache-2.0
"""Building blocks that depend on neither models nor configs."""

from cpvt_det.layers.attention import Attention, DeformableAttention
from cpvt_det.ops import ms_deform_attn

__all__ = ["Attention", "DeformableAttention", "ms_deform_attn"]
