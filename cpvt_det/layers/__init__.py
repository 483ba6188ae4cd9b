# SPDX-License-Identifier: Apache-2.0
"""Building blocks of models."""

from cpvt_det.layers.attention import Attention, DeformableAttention
from cpvt_det.ops import ms_deform_attn

__all__ = ["Attention", "DeformableAttention", "ms_deform_attn"]
