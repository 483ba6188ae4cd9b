# SPDX-License-Identifier: Apache-2.0
"""A run of a few steps: its data, its checkpoint, and what its evaluation found."""

import json
from dataclasses import dataclass
from pathlib import Path

from conftest import DrawnCoco, draw_coco
from tiny import DETECTORS, overrides

from cpvt_det.config import load_cfg
from cpvt_det.training.train import run


@dataclass
class TrainedRun:
    """What a run left.

    Attributes:
        drawn: its data.
        folder: its ``OUTPUT_DIR``.
    """

    drawn: DrawnCoco
    folder: Path

    @property
    def weights(self) -> Path:
        return self.folder / "model_final.pth"

    @property
    def found(self) -> list[dict]:
        """What the run's own evaluation wrote."""
        return json.loads((self.folder / "inference/coco_instances_results.json").read_text())

    def image(self, image_id: int) -> Path:
        return self.drawn.files.image_root / f"part/{image_id:03d}.png"


def train_tiny(folder: Path, detector: str) -> TrainedRun:
    """Three steps with a moving average, evaluated image by image."""
    folder.mkdir()
    drawn = draw_coco(folder)
    more = {**DETECTORS[detector], "SOLVER__MAX_ITER": 3, "SOLVER__EMA__ENABLED": True, "SOLVER__EMA__DECAY": 0.5}
    run(load_cfg("", overrides(drawn.files, folder / "run", **more)))
    return TrainedRun(drawn, folder / "run")
