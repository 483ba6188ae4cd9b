# SPDX-License-Identifier: Apache-2.0
"""The smallest run of a classifier: images of unequal size in folders of three colours, as KEY VALUE pairs over the defaults."""

from pathlib import Path

import numpy as np
from PIL import Image
from tiny import MODEL, RUN

COLOURS = {"blue": (40, 40, 220), "green": (40, 220, 40), "red": (220, 40, 40)}
SIDES = [(40, 56), (33, 30), (64, 48), (50, 37)]


def draw_folders(root: Path, train: int = 4, val: int = 2) -> Path:
    """``train`` and ``val``, with so many images in the folder of each colour."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for name, colour in COLOURS.items():
            for number in range(count):
                path = root / split / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = rng.integers(-30, 30, (*SIDES[number % len(SIDES)], 3))
                Image.fromarray((np.array(colour) + noise).astype(np.uint8)).save(path)
    return root


def class_words(root: Path, output: Path, **more: object) -> list[str]:
    """KEY VALUE words; ``more`` has ``__`` for the dots of a key."""
    pairs = {
        **{key: value for key, value in MODEL.items() if "DETR" not in key},
        **{key: value for key, value in RUN.items() if not key.startswith("INPUT.")},
        "TASK": "classification",
        "MODEL.META_ARCHITECTURE": "CPVTClassifier",
        "INPUT.CLASSIFY.SIZE": 32,
        "INPUT.CLASSIFY.TEST_SIZE": 32,
        "SOLVER.IMS_PER_BATCH": 4,
        "SOLVER.BASE_LR": 1e-3,
        "SOLVER.BACKBONE_LR": 1e-3,
        "OUTPUT_DIR": str(output),
        "DATASETS.REGISTER": [[split, str(root), split] for split in ("train", "val")],
        "DATASETS.TRAIN": ("train",),
        "DATASETS.TEST": ("val",),
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [str(word) for pair in pairs.items() for word in pair]
