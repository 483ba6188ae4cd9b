# SPDX-License-Identifier: Apache-2.0
"""Parameters, multiply-adds and activations of every config, by part: the same on every machine.

After a change of a model on purpose, ``python tests/record_operations.py`` writes the file that the test compares with.
"""

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from cpvt_det.builders import build_detector
from cpvt_det.config import config_root, load_cfg
from cpvt_det.visualize.costs import count_costs

OPERATIONS = Path(__file__).with_name("operations.json")
SLOW = ("dfine_s_", "dfine_m_", "dfine_l_", "dfine_x_")  # to try their networks of timm takes up to half a minute each
CONFIGS = sorted(
    path for path in config_root().glob("*/*.yaml") if path.parent.name != "plug" and not path.name.startswith(("_", *SLOW))
)


def count_config(path: Path) -> dict[str, dict[str, int]]:
    """Of one image of 96 x 128 pixels, with 80 classes where the data decide how many."""
    cfg = load_cfg(str(path), ["MODEL.BACKBONE.WEIGHTS", "", "MODEL.DEVICE", "cpu"])
    cfg.MODEL.NUM_CLASSES = cfg.MODEL.NUM_CLASSES or 80
    with ExitStack() as stack:
        if not cfg.MODEL.BACKBONE.NAME.startswith("timm/"):  # it is probed when it is built, which needs random weights
            for name in ("uniform_", "normal_"):  # drawing random weights takes half of the time
                stack.enter_context(mock.patch.object(Tensor, name, lambda tensor, *_, **__: tensor.zero_()))
        detector = build_detector(cfg).eval()
    batch = detector.preprocess([torch.zeros(3, 96, 128)])
    return asdict(count_costs(detector, batch.images, batch.padding_mask))


if __name__ == "__main__":
    counts = {f"{path.parent.name}/{path.stem}": count_config(path) for path in CONFIGS}
    OPERATIONS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
