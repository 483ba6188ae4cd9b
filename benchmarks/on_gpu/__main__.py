# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.on_gpu STEP SETTINGS``: one step of ``benchmarks/gpu.py``, in a process of its own."""

import importlib
import sys

from benchmarks.on_gpu import Record, settings_of

if __name__ == "__main__":
    step, settings = sys.argv[1], settings_of(sys.argv[2])
    importlib.import_module(f"benchmarks.on_gpu.{step}").run(Record(step, settings), settings)
