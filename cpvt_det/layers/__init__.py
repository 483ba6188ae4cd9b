# SPDX-License-Identifier: Apache-2.0
"""Building blocks that know neither a model nor a config."""

import cpvt_det.layers.peg_ablations  # noqa: F401, registers encodings
from cpvt_det.layers.attention import Attention, DeformableAttention
from cpvt_det.layers.deformable_attention import ms_deform_attn
from cpvt_det.layers.peg import PEGDetection
from cpvt_det.layers.position import POSITION_REGISTRY, PositionEncoding, build_position, register_position

__all__ = [
    "POSITION_REGISTRY",
    "Attention",
    "DeformableAttention",
    "PEGDetection",
    "PositionEncoding",
    "build_position",
    "ms_deform_attn",
    "register_position",
]
