# SPDX-License-Identifier: Apache-2.0
"""The example that does without config and runner runs, and is short."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BY_HAND = ROOT / "examples" / "by_hand.py"


def test_by_hand_trains_and_evaluates(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, str(BY_HAND), "2"], capture_output=True, text=True, timeout=200, env=environment)
    assert ended.returncode == 0, ended.stderr
    first, second, figures = ended.stdout.strip().splitlines()
    assert all("'loss_class'" in line and "'loss_giou'" in line for line in (first, second)) and first != second
    assert figures.startswith("{'AP': ")


def test_by_hand_is_short_and_without_config():
    text = BY_HAND.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert "cpvt_det.config" not in text and "cpvt_det.runner" not in text and "cpvt_det.builders" not in text
