# SPDX-License-Identifier: Apache-2.0
"""The example that does without config and runner runs, and is short."""

import os
from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parents[2]
BY_HAND = ROOT / "examples" / "by_hand.py"


def test_by_hand_trains_and_evaluates(tmp_path):
    code = f"import runpy, sys; sys.argv[1:] = ['2']; runpy.run_path({str(BY_HAND)!r}, run_name='__main__'); raise SystemExit"
    ended = forked.run(before=code, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ended.returncode == 0, ended.stderr
    first, second, figures = ended.stdout.strip().splitlines()
    assert all("'loss_class'" in line and "'loss_giou'" in line for line in (first, second)) and first != second
    assert figures.startswith("{'AP': ")


def test_by_hand_is_short_and_without_config():
    text = BY_HAND.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert "cpvt_det.config" not in text and "cpvt_det.runner" not in text and "cpvt_det.builders" not in text
