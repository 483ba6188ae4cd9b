# SPDX-License-Identifier: Apache-2.0
"""The encodings beside a PEG that have a name in the registry; :class:`PositionRegistry` makes the others when one asks."""

from cpvt_det.position import learned, peg_plain, relative, rotary, sine, table  # noqa: F401, registers what is summed
from cpvt_det.position.registry import POSITION_REGISTRY, register_position

for _name in ("sine+peg", "sine_offset+peg", "table+peg_plain"):
    register_position(_name)(POSITION_REGISTRY.find(_name))
