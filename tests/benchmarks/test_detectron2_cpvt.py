# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/detectron2_cpvt.py``: its verdict on losses, worked out by hand. The run itself takes minutes, and detectron2."""

import json
import math

import pytest

from benchmarks.detectron2_cpvt import losses_of, require_falling
from cpvt_det.common.errors import RunStoppedError


def losses(*totals):
    """A line each 20 iterations."""
    return {str(20 * number): {"total_loss": total} for number, total in enumerate(totals, start=1)}


def test_losses_are_those_of_detectron2_s_lines(tmp_path):
    lines = [{"iteration": 19, "total_loss": 3.0, "loss_cls": 1.0, "lr": 0.1}, {"iteration": 19, "bbox/AP": 4.0}]
    (tmp_path / "metrics.json").write_text("\n".join(map(json.dumps, lines)))
    assert losses_of(tmp_path / "metrics.json") == {"20": {"total_loss": 3.0, "loss_cls": 1.0}}


def test_a_total_that_falls_once_it_has_settled_is_good():
    """It rises until iteration 40, while the average of the matched anchors comes down from 100."""
    require_falling(losses(0.8, 3.0, 5.0, 4.5, 4.0, 3.0, 2.9, 2.8))


@pytest.mark.parametrize("bad", [(0.8, 3.0, 4.0, 4.5, 5.0), (5.0, 4.0), (5.0, 4.0, 3.0), (5.0, 4.0, math.nan, 2.0), ()])
def test_other_losses_are_refused(bad):
    with pytest.raises(RunStoppedError, match="did not fall|not finite"):
        require_falling(losses(*bad))
