# SPDX-License-Identifier: Apache-2.0
"""Classifiers and vision transformers.

Options that do not fit DeiT, CPVT or TNT are refused before the first iteration. Each row also checks that no metrics were
written.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from image_classes import class_words, draw_folders

from cpvt_det.builders import build_detector
from cpvt_det.config import load_cfg
from faults.case import Case, Cut, Ending, call

VIT = {
    "MODEL__BACKBONE__NAME": "deit_tiny",
    "MODEL__BACKBONE__STAGES": (4,),
    "MODEL__BACKBONE__EMBED_DIM": 16,
    "MODEL__BACKBONE__DEPTH": 1,
    "MODEL__BACKBONE__NUM_HEADS": 2,
    "MODEL__BACKBONE__NORM": "FrozenBN",
    "MODEL__BACKBONE__FREEZE_AT": 2,
    "MODEL__BACKBONE__POSITION__GRID": (2, 2),
    "DATASETS__TEST": (),
    "SOLVER__MAX_ITER": 1,
}

OTHER_GRID = VIT | {"MODEL__BACKBONE__POSITION__GRID": (3, 5)}
TNT = VIT | {"MODEL__BACKBONE__NAME": "tnt_small"}
WIDER = VIT | {"MODEL__BACKBONE__EMBED_DIM": 32}


def train(folder: Path, **more: object) -> Ending:
    """``cpvt-det train`` a small DeiT on images in folders."""
    (folder / "run.yaml").write_text("VERSION: 2\n")
    words = class_words(draw_folders(folder / "data"), folder / "out", **{**VIT, **more})
    ending = call("train", "--config-file", folder / "run.yaml", "--runner", "builtin", *words)
    assert not (folder / "out/metrics.json").exists() or not ending.code, "refused after iterations"
    return ending


def with_keys(**more: object) -> Callable[[Path], Ending]:
    return lambda folder: train(folder, **more)


def from_weights(key: str, **other: object) -> Callable[[Path], Ending]:
    """Start from random weights of a model of three classes with other keys; without any, on a ResNet."""

    def run(folder: Path) -> Ending:
        cfg = load_cfg("", class_words(folder, folder, MODEL__NUM_CLASSES=3, **other))
        node = {"config": cfg.dump(), "classes": {"ids": [1, 2, 3], "names": ["blue", "green", "red"]}}
        torch.save({"model": build_detector(cfg).state_dict(), "cpvt_det": node}, folder / "weights.pth")
        return train(folder, **{key: folder / "weights.pth"})

    return run


STAGES = Cut("models/backbones/vit.py", "if stages is not None and list(stages) != [stage]:", "if False:")
SHAPES = Cut("checkpoint/initial.py", "if not any(pattern.search(name) for pattern in may_differ):", "if False:")

CASES = [
    Case(
        "test images smaller than a patch",
        with_keys(INPUT__CLASSIFY__TEST_SIZE=12),
        "INPUT.CLASSIFY.TEST_SIZE allows images of 12 pixels, which is smaller than a patch (16 pixels): use larger images, or "
        "change ...PATCH_SIZE",
        guard=Cut("builders/parts.py", "        if small:\n", "        if False:\n"),
    ),
    Case(
        "MODEL.BACKBONE.STAGES of a ResNet",
        with_keys(MODEL__BACKBONE__STAGES=(5,)),
        "a vision transformer with patches of 16 pixels has one map, of stride 16: its stages are (4,), got (5,); set ...",
        guard=STAGES,
    ),
    Case(
        "several MODEL.BACKBONE.STAGES",
        with_keys(MODEL__BACKBONE__STAGES=(3, 4)),
        "its stages are (4,), got (3, 4); set MODEL.BACKBONE.STAGES to (4,), and for more levels MODEL.NECK.NAME to simple_pyramid",
        guard=STAGES,
    ),
    Case(
        "MODEL.BACKBONE.WEIGHTS with a table of another grid",
        from_weights("MODEL__BACKBONE__WEIGHTS", **OTHER_GRID),
        "has a table of 3 x 5 cells, the backbone's has 2 x 2: set MODEL.BACKBONE.POSITION.GRID to (3, 5)",
        guard=Cut(
            "models/backbones/vit_weights.py", "if table in found and found[table].shape[1:] != own[table].shape[1:]:", "if False:"
        ),
    ),
    Case(
        "MODEL.WEIGHTS with a table of another grid",
        from_weights("MODEL__WEIGHTS", **OTHER_GRID),
        "has different shapes from the config's model: backbone.position.table is ...with, including MODEL.BACKBONE.POSITION.GRID",
        guard=SHAPES,
    ),
    Case(
        "MODEL.WEIGHTS of another size of model",
        from_weights("MODEL__WEIGHTS", **WIDER),
        "has different shapes from the config's model: ...set the MODEL keys to the values that it was trained with",
        guard=SHAPES,
    ),
    Case(
        "MODEL.WEIGHTS of a TNT in a DeiT",
        from_weights("MODEL__WEIGHTS", **TNT),
        "has a different backbone from MODEL.BACKBONE.NAME deit_tiny: it lacks ...such as backbone.patch_embed",
        guard=Cut("checkpoint/initial.py", "if unexpected and 2 * len(missing) > len(own):", "if False:"),
    ),
    Case(
        "MODEL.BACKBONE.WEIGHTS of a ResNet's classifier",
        from_weights("MODEL__BACKBONE__WEIGHTS"),
        "has no weights of this backbone, under our names, its authors' or timm's",
        guard=Cut("models/backbones/vit_weights.py", "if not found:", "if False:"),
    ),
]
