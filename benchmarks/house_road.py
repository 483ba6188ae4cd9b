#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Functions that records enter on their way to losses or to AP, as JSON: the process that ``benchmarks/house.py`` starts.

``python benchmarks/house_road.py CHECKOUT/cpvt_det NUMBER`` takes one of ``ROADS``, with the checkout on ``PYTHONPATH``, in a
folder with a drawn data set at ``datasets/shapes``. The docstring of ``house.py`` has the rules.
"""

import ast
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "cpvt_det"
PARTS = ("backbone", "neck", "position", "decoder_position", "encoder", "queries", "decoder")
"""Last names of the detector's modules that are one hop each."""
HELPERS = {"common", "layers", "ops", "structures", "boxes", "errors", "files", "distributed", "config", "registry", "seeding"}
"""Rooms and modules whose functions are no hops, but for the detector's parts."""
RENAMED = {"MODEL.DETR.": "MODEL.TRANSFORMER.", "MODEL.DETECTOR.": "MODEL.DEFORMABLE.", "CLASSIFICATION.NAME": "CLASSIFICATION"}
"""Parts of keys, and of the same keys in configs of other checkouts."""
SMALL = {
    "MODEL.DEVICE": "cpu",
    "MODEL.BACKBONE.NAME": "resnet10",
    "MODEL.BACKBONE.NORM": "BN",
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.BACKBONE.WIDTH": 16,
    "MODEL.DETR.HIDDEN_DIM": 32,
    "MODEL.DETR.NHEADS": 2,
    "MODEL.DETR.DIM_FEEDFORWARD": 32,
    "MODEL.DETR.ENC_LAYERS": 2,
    "MODEL.DETR.DEC_LAYERS": 2,
    "MODEL.DETR.NUM_OBJECT_QUERIES": 20,
    "INPUT.MIN_SIZE_TRAIN": (64, 80),
    "INPUT.MAX_SIZE_TRAIN": 128,
    "INPUT.MIN_SIZE_TEST": 64,
    "INPUT.RESIZE_CROP.SIZES": (70, 80),
    "INPUT.RESIZE_CROP.RANGE": (40, 60),
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.IMS_PER_BATCH": 2,
    "DATASETS.TRAIN": ("train",),
    "DATASETS.TEST": ("val",),
    "DATASETS.REGISTER": [
        [name, f"datasets/shapes/annotations/{name}.json", f"datasets/shapes/{name}"] for name in ("train", "val")
    ],
}
DEFORMABLE = {"MODEL.META_ARCHITECTURE": "CPVTDeformableDetr", "MODEL.BACKBONE.STAGES": (3, 4, 5)}
EAGER = {"MODEL.DETECTOR.IMPLEMENTATION": "eager"}
TWO_STAGES = {
    "MODEL.DETECTOR.BOX_REFINEMENT": True,
    "MODEL.DETECTOR.TWO_STAGE": True,
    "MODEL.CRITERION.CLASSIFICATION.NAME": "focal",
}
ROADS: dict[str, tuple[str, dict[str, Any]]] = {
    "records to losses, DETR": ("losses", {}),
    "records to losses, Deformable-DETR, one stage, eager op": ("losses", DEFORMABLE | EAGER),
    "records to losses, Deformable-DETR, two stages": ("losses", DEFORMABLE | TWO_STAGES),
    "records to AP, DETR": ("AP", {}),
}
"""Goal and config keys by title."""
BATCHES = 8
Function = tuple[str, int, str]
"""Path below the package, first line, name."""


class Tracer:
    """Profile function that collects the functions of a package that are entered.

    Args:
        package: folder of the package.
        parts: the detector's parts, by ``id`` of the module.

    Attributes:
        entered: every function.
        hops: those that count as hops.
        deepest: length of the longest chain of nested calls.
    """

    def __init__(self, package: Path, parts: set[int]):
        self.entered: set[Function] = set()
        self.hops: set[Function] = set()
        self.deepest = 0
        self._prefix = f"{package}{os.sep}"
        self._parts = parts
        self._stack: list[tuple[Function, bool]] = []  # and whether it is a part or inside one

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """Note one call or return."""
        code = frame.f_code
        if event not in ("call", "return") or code.co_name.startswith("<") or not code.co_filename.startswith(self._prefix):
            return
        if event == "return":
            self._stack.pop()
            return
        function = (code.co_filename.removeprefix(self._prefix), code.co_firstlineno, code.co_name)
        caller, inside = self._stack[-1] if self._stack else (None, False)
        if caller and not inside and Path(caller[0]).parts[0].removesuffix(".py") not in HELPERS:
            self.hops.add(caller)
        if not inside and code.co_name == "forward" and id(frame.f_locals.get("self")) in self._parts:
            self.hops.add(function)
            inside = True
        self.entered.add(function)
        self._stack.append((function, inside))
        self.deepest = max(self.deepest, len(self._stack))


def trace(package: Path, goal: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Counts of one road, taken in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    take, detector = prepare(package, goal, keys)
    parts = {id(module) for name, module in detector.named_modules() if name.split(".")[-1] in PARTS}
    first, second = (Tracer(package, parts) for _ in range(2))
    for tracer in (first, second):
        sys.setprofile(tracer)
        take()
        sys.setprofile(None)
    marked = [(*function, " (hop)" if function in second.hops else "") for function in sorted(second.entered)]
    return {
        "functions": len(second.entered),
        "files": len({path for path, _, _ in second.entered}),
        "first_time": len(first.entered),
        "hops": len(second.hops),
        "deepest": second.deepest,
        "entered": [f"{path}:{line}: {name}{mark}" for path, line, name, mark in marked],
    }


def prepare(package: Path, goal: str, keys: dict[str, Any]) -> tuple[Callable[[], object], Any]:
    """A call that takes the road from loaded records to its goal, and the detector.

    Raises:
        RuntimeError: the package of another checkout was imported.
    """
    config = importlib.import_module(f"{PACKAGE}.config")
    if not Path(config.__file__).is_relative_to(package):
        raise RuntimeError(f"{config.__file__} is not below {package}")
    cfg = config.load_cfg("")
    for key, value in {**SMALL, **keys}.items():
        set_key(cfg, key, value)
    train, tests = find("load_splits", package)(cfg)
    detector = find("build_detector", package)(cfg)
    if goal == "AP":
        room = "training" if (package / "training").is_dir() else "runner"
        asked = find("build_task", package)(cfg) if any(package.rglob("tasks")) else cfg
        return functools.partial(find("evaluate", package, room), asked, detector, tests, Path("evaluation")), detector
    model = find("TrainingModel", package)(detector, find("build_criterion", package)(cfg)).train()
    loader = find("build_train_loader", package)(cfg, find("training_records", package)(cfg, train), 0)
    return lambda: [model(samples) for samples, _ in zip(loader, range(BATCHES), strict=False)], detector


def set_key(cfg: Any, key: str, value: Any) -> None:
    """Set a key of a config, under its new name where the config has no other.

    Raises:
        AttributeError: a node that is not in the config.
    """
    for name in (key, *(key.replace(old, new) for old, new in RENAMED.items())):
        *nodes, leaf = name.split(".")
        node = functools.reduce(lambda node, part: node.get(part, {}), nodes, cfg)
        if leaf in node:
            node[leaf] = value
            return
    *nodes, leaf = key.split(".")
    functools.reduce(getattr, nodes, cfg)[leaf] = value  # an option of a part, which no default names


def find(name: str, package: Path, room: str = "") -> Any:
    """A function or class by its name, wherever in a package it is defined, in ``room`` first and in ``d2`` never; imported.

    Raises:
        LookupError: not defined there.
    """
    for path in sorted(package.rglob("*.py"), key=lambda path: (room not in path.parts, path)):
        below = path.relative_to(package).with_suffix("").parts
        names = {getattr(node, "name", "") for node in ast.parse(path.read_text(encoding="utf-8")).body}
        if name in names and below[0] != "d2":
            return getattr(importlib.import_module(".".join((PACKAGE, *below)).removesuffix(".__init__")), name)
    raise LookupError(f"{name} is not defined in {package}")


if __name__ == "__main__":
    print(json.dumps(trace(Path(sys.argv[1]), *list(ROADS.values())[int(sys.argv[2])])))
