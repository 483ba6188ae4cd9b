# SPDX-License-Identifier: Apache-2.0
"""Position encodings, the heart of the project: the contract that they meet, and all implementations.

Start with :mod:`cpvt_det.position.encoding` (the contract) and :mod:`cpvt_det.position.peg` (PEG itself).
"""

from cpvt_det.position import in_attention  # noqa: F401, registers encodings
from cpvt_det.position.encoding import POSITION_REGISTRY, PositionEncoding, build_position, register_position
from cpvt_det.position.learned import LearnedEncoding, TableEncoding
from cpvt_det.position.peg import PEGDetection, PEGEncoding
from cpvt_det.position.sine import SineEncoding

__all__ = [
    "POSITION_REGISTRY",
    "LearnedEncoding",
    "PEGDetection",
    "PEGEncoding",
    "PositionEncoding",
    "SineEncoding",
    "TableEncoding",
    "build_position",
    "register_position",
]

# Tests and messages list these; others are built too.
for _name in ("sine+peg", "sine_offset+peg", "sine_grid+peg", "table+peg_plain"):
    register_position(_name)(POSITION_REGISTRY.find(_name))
