# SPDX-License-Identifier: Apache-2.0
"""A trained detector -> a program of aten operators, or an ONNX file, that runs without this package and is compared with it."""

from cpvt_det.export.check import Comparison, compare, unseen_canvases
from cpvt_det.export.program import DIMENSIONS, SAMPLINGS, Canvas, ExportModule, foreign_operators, prepare, trace
from cpvt_det.export.programs import FORMATS, open_program, write_program

__all__ = [
    "DIMENSIONS",
    "FORMATS",
    "SAMPLINGS",
    "Canvas",
    "Comparison",
    "ExportModule",
    "compare",
    "foreign_operators",
    "open_program",
    "prepare",
    "trace",
    "unseen_canvases",
    "write_program",
]
