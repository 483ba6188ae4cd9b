# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det train FOLDER --start``: the choice of the detector to start from, and the settings for fine-tuning it.

Architecture and losses are those of the detector that the run starts from. If it is one of our detectors, a run keeps only as many
of the detector's queries as the images need. The run also uses the detector's learning rates, scaled by the square root of the
ratio of batch sizes, because a run of a few minutes learns more at these rates than at a seventh of them (docs/train.md). For
detectors of other projects, the learning rates are the ones that the authors use for fine-tuning.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fvcore.common.config import CfgNode

from cpvt_det.checkpoint import fetch
from cpvt_det.checkpoint.fetch import STARTER, find_start, starts
from cpvt_det.checkpoint.files import sha256_of
from cpvt_det.checkpoint.load import nearly_named
from cpvt_det.checkpoint.weights import config_of_weights, read_weights
from cpvt_det.common.errors import ConfigError, counted
from cpvt_det.config import flat_items, get_cfg
from cpvt_det.training import recipe
from cpvt_det.training.recipe import Choice, DataFacts, MachineFacts, Plan

BASE_LR, BACKBONE_LR, NEW_HEAD = 1e-4, 1e-5, 10.0
STARTER_RATE = 1.5
"""Learning rates with the starter, over those of its training: the best of 0.7, 1, 1.5 and 2.5 on fish (docs/small_data.md)."""
LEAST_CANVAS = 384
"""Smallest canvas for a trained detector, as a short side in pixels; if the weights were trained with smaller sizes, the middle of
those takes its place."""
FROZEN = {"cpu": 3, "cuda": 2}
"""Device -> the last frozen stage of the backbone if there are enough steps to train the later stages."""
BEST = {"cuda": "dino_r50"}
"""Device -> the detector that ``--start auto`` takes. On a CPU it is the starter, because a step of any public detector takes
seconds."""
OWN = (
    "MODEL.WEIGHTS",
    "MODEL.WEIGHTS_SHA256",
    "MODEL.BACKBONE.WEIGHTS",
    "MODEL.BACKBONE.FREEZE_AT",
    "MODEL.DETR.NUM_OBJECT_QUERIES",
    "MODEL.NUM_CLASSES",
    "MODEL.DEVICE",
)
"""Keys of ``MODEL`` that a run does not take from the config of its start."""
PIP = "pip install 'cpvt-det[pretrained]'"
HEADS = [[part, NEW_HEAD] for part in ("class_embed", "queries.class_embed", "queries.denoising.label_enc")]


@dataclass(frozen=True)
class TrainedStart:
    """A detector to start from.

    Attributes:
        word: name, path or repository, as typed.
        sha256: hash of its file.
        cfg: config that the detector was trained with.
        class_names: names of its classes; empty if they are unknown.
        is_ours: whether the detector was trained with this package, so that its config contains its learning rates.
        state_names: names of its tensors.
        by_default: whether the detector was chosen automatically. In that case, a run trains a new detector instead if this one
            does not suit the data.
    """

    word: str
    sha256: str
    cfg: CfgNode
    class_names: tuple[str, ...]
    is_ours: bool
    state_names: frozenset[str]
    by_default: bool = False

    def unsuited(self, plan: Plan, data: DataFacts) -> str:
        """Why a new detector should be trained instead, if this one was chosen automatically; empty if there is no reason."""
        if self.by_default and data.most_objects > self.cfg.MODEL.DETR.NUM_OBJECT_QUERIES:
            objects = counted(data.most_objects, "object")
            return f"{self.word} has too few queries for {objects} in an image, so the run starts as with --start none"
        if self.by_default and self.word == STARTER and not recipe.has_small_objects(plan, data):
            return (
                f"{self.word} has a map for small objects, but the objects are large, and steps without it are faster, so the run "
                "starts as with --start none"
            )
        return ""


def choose_start(word: str | None, device: str, keys: Sequence[str], tell: Callable[[str], None]) -> TrainedStart | None:
    """The detector that a run starts from: the one the user typed, otherwise the best one for the device that is on this machine.

    Args:
        word: value of ``--start``: public weights, a file, a folder, a repository, ``auto`` or ``none``; ``None`` if not given.
        device: cpu or cuda.
        keys: keys that the user typed; if one of them belongs to MODEL, the run starts from a detector only if ``word`` is given.
        tell: function that is called with a line that names the start and the reason.

    Raises:
        BadInputError: weights that cannot be fetched or read.
    """
    best = BEST.get(device, STARTER)
    if word == "none" or (word is None and any(key.startswith("MODEL.") and key != "MODEL.DEVICE" for key in keys)):
        return None
    if word not in (None, "auto"):
        return open_start(word, tell)
    if word is None and best != STARTER and fetch.find(starts()[best]) is None:
        tell(f"--start auto fetches {best}, a detector trained on COCO, which needs fewer steps")
        best = STARTER
    if best == STARTER and importlib.util.find_spec("timm") is None:
        tell(f"the run cannot start from the detector that comes with the package, as timm is not installed: {PIP}")
        return None
    if word is None:
        tell(f"{best} is on this machine, so the run starts from it; --start none starts from ImageNet weights")
    return replace(open_start(best, tell), by_default=True)


def open_start(word: str, tell: Callable[[str], None]) -> TrainedStart:
    """Read a detector to start from.

    Raises:
        WeightsError: weights that cannot be fetched or read, or whose config is unknown.
        ConfigError: a model that is not a detector.
    """
    weights, start = read_weights(word), find_start(word)
    cfg = config_of_weights(weights)
    if not cfg.MODEL.META_ARCHITECTURE.endswith("Detr"):
        raise ConfigError(f"--start {word}: {cfg.MODEL.META_ARCHITECTURE} is not a detector")
    digest = sha256_of(weights.path)
    origin = f"{start.ap} AP on COCO, of {start.publisher}, " if start else ""
    tell(f"start: {word} ({origin}SHA-256 {digest})")
    names = () if weights.classes is None else weights.classes.names
    return TrainedStart(word, digest, cfg, names, weights.project is None, frozenset(weights.state_dict))


def describe_classes(start: TrainedStart, names: Sequence[str]) -> list[str]:
    """Lines that say which classes of the data the detector already knows, and which new classes have nearly the same name as a
    class that it knows."""
    new = [name for name in names if name not in start.class_names]
    lines = [
        f"classes that these weights already know: {len(names) - len(new)} of {len(names)}"
        + (f"; new: {', '.join(new[:10])}" if new else "")
    ]
    near = nearly_named(new, start.class_names)
    return lines + [
        f"{name} is new, but {known} is known: use that name in the data if it is the same" for name, known in near.items()
    ]


def tuning_choices(
    start: TrainedStart, plan: Plan, data: DataFacts, machine: MachineFacts, names: Sequence[str], typed: dict[str, Any]
) -> list[Choice]:
    """All choices except the length for a run that fine-tunes ``start``.

    Args:
        start: detector to start from.
        plan: decisions on canvas, batch and frozen stages.
        data, machine: facts about data and machine.
        names: classes of the data.
        typed: values that the user typed, by key.

    Raises:
        ConfigError: a number of queries that the detector to start from cannot have, or fewer queries than an image has objects.
    """
    queries, is_ranked = start.cfg.MODEL.DETR.NUM_OBJECT_QUERIES, start.cfg.MODEL.QUERIES.NAME == "mixed"
    fewer = min(queries, recipe.num_queries(data)) if start.is_ours and is_ranked else queries
    number = typed.get("MODEL.DETR.NUM_OBJECT_QUERIES", fewer)
    if number > queries or (number < queries and not is_ranked):
        most = "at most " if is_ranked else ""
        raise ConfigError(f"MODEL.DETR.NUM_OBJECT_QUERIES {number}: {start.word} has {most}{queries} trained queries; leave it out")
    if data.most_objects > number:
        objects = counted(data.most_objects, "object")
        raise ConfigError(
            f"an image has {objects}, but {start.word} has only {number} queries: choose another --start, or --start none"
        )
    rates, why = (BASE_LR, BACKBONE_LR), "a tenth of the rates for new weights, so that these keep what they know"
    if start.is_ours:
        solver = start.cfg.SOLVER
        root = math.sqrt(plan.batch / solver.IMS_PER_BATCH)
        faster = STARTER_RATE if start.word == STARTER else 1.0
        rates = [float(f"{faster * root * rate:.3g}") for rate in (solver.BASE_LR, solver.BACKBONE_LR)]
        why = f"{faster:g} times those of the starting weights, scaled with the square root of the batch size: docs/train.md"
    keeps_heads = start.is_ours or all(name in start.class_names for name in names)
    few = "; head and decoder learn in few steps" if plan.freeze_at == 5 else ""
    is_frozen = start.cfg.MODEL.BACKBONE.NAME.startswith(("resnet", "timm/"))
    heads = [pair for pair in HEADS if any(name.startswith(f"{pair[0]}.") for name in start.state_names)]
    defaults = dict(flat_items(get_cfg()))
    own = [(f"MODEL.{key}", value) for key, value in flat_items(start.cfg.MODEL)]
    changed = [(key, value) for key, value in own if key not in OWN and defaults.get(key, ...) != value]
    return [
        Choice("MODEL.WEIGHTS", start.word, "the architecture, losses and queries below are those of these weights"),
        Choice("MODEL.WEIGHTS_SHA256", start.sha256, "that of the weights file"),
        *(Choice(key, list(value) if isinstance(value, tuple) else value) for key, value in changed),
        *([Choice("MODEL.BACKBONE.FREEZE_AT", plan.freeze_at, "what is frozen needs no backward pass" + few)] if is_frozen else []),
        *recipe.query_choices(data, number),
        *([] if start.cfg.TEST.NMS == 1 else [Choice("TEST.NMS", start.cfg.TEST.NMS)]),
        *recipe.input_choices(plan, data, machine),
        *recipe.step_choices(plan, *rates, why),
        Choice("SOLVER.POINTS_LR_MULTIPLIER", start.cfg.SOLVER.POINTS_LR_MULTIPLIER),
        *([] if keeps_heads else [Choice("SOLVER.LR_MULTIPLIERS", heads, "the heads, because some classes are new")]),
    ]
