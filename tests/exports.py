# SPDX-License-Identifier: Apache-2.0
"""Exports of the same weights: traced once, and converted once, as each takes seconds; files are written and compared each time."""

import hashlib

import pytest
import torch

from cpvt_det.export import program
from cpvt_det.layers.attention import DeformableAttention


@pytest.fixture(scope="module")
def kept_exports() -> dict:
    """Programs and ONNX graphs of the tests of a file."""
    return {}


@pytest.fixture
def shared_exports(kept_exports, monkeypatch):
    """Within a file of tests, a module that is equal to one before has its program. ``export`` compares what comes of it with the
    model, so that a program of another module would not pass.
    """
    trace, convert = program.trace, torch.onnx.export

    def trace_once(module, canvas, dynamic=program.DIMENSIONS, masked=True):
        key = (_identity(module), canvas, tuple(dynamic), masked)
        if key not in kept_exports:
            kept_exports[key] = trace(module, canvas, dynamic, masked)
        return kept_exports[key]

    def convert_once(traced, **options):
        key = (id(traced), repr(options))
        if key not in kept_exports:
            kept_exports[key] = convert(traced, **options)
        return kept_exports[key]

    monkeypatch.setattr(program, "trace", trace_once)
    monkeypatch.setattr(torch.onnx, "export", convert_once)


def _identity(module: program.ExportModule) -> tuple:
    """What a module's program depends on: its parts, their settings, and all numbers."""
    ways = [part.implementation for part in module.modules() if isinstance(part, DeformableAttention)]
    numbers = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        numbers.update(name.encode() + tensor.numpy().tobytes())
    decoding = tuple(str(item) for item in vars(module.postprocess).items() if isinstance(item[1], (int, float)))
    return repr(module), module.half_precision, *ways, *decoding, numbers.hexdigest()
