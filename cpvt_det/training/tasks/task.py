# SPDX-License-Identifier: Apache-2.0
"""The contract of a task, and the registry of tasks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from cpvt_det import builders
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.registry import PartRegistry
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.records import Records
from cpvt_det.data.validation.check import CheckedData
from cpvt_det.data.validation.issues import EXAMPLES

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from cpvt_det.common.structures import Sample
    from cpvt_det.data.loader import SampleLoader
    from cpvt_det.evaluation.evaluator import Evaluator

TASK_REGISTRY = PartRegistry("TASK", "task")
"""``TASK`` of a config -> a subclass of :class:`Task`, called with ``cfg`` and its options, the keys of ``TASK_OPTIONS``."""
Results = dict[str, Any]
"""Figures by group, ``{"bbox": {"AP": ...}}``; for several test sets, a dict from the name of the set to its figures."""


class Task(ABC):
    """The parts of a run that depend on its task: data, model, metrics and pictures.

    Both runners, ``check-data``, ``show data``, studies and the checkpoints of a run use it.

    Methods import torch only when they are called, because ``cpvt-det check-data`` uses the task without torch.

    Args:
        cfg: config of the run. ``load_splits`` and ``load_tests`` set its ``MODEL.NUM_CLASSES``; call one of them first.

    Attributes:
        main_figure: name of the metric that decides which checkpoint is the best (higher is better), as ``group/name`` from
            :func:`flatten`. Curves and comparisons show the first two metrics of every group in alphabetical order, so the main
            metric's name must come first in that order.
        figures: names of the metrics that a study records, within the group of ``main_figure``; the main metric comes first.
        evaluators: name of the test set -> evaluator of the last evaluation, as far as :meth:`show_results` needs it.
    """

    main_figure: str
    figures: Sequence[str]

    def __init__(self, cfg: CfgNode):
        self.cfg = cfg
        self.evaluators: dict[str, Evaluator] = {}

    @abstractmethod
    def check_data(self, decode: bool = False, examples: float = EXAMPLES) -> CheckedData:
        """Training and test sets with their faults, whatever ``DATASETS.ON_BAD`` is.

        Args:
            decode: whether to read every image.
            examples: largest number of faults to keep of each kind.
        """

    @abstractmethod
    def load_splits(self) -> tuple[list[CocoDataset], list[CocoDataset]]:
        """Training sets and test sets."""

    @abstractmethod
    def load_tests(self) -> list[CocoDataset]:
        """The test sets alone."""

    def training_records(self, datasets: list[CocoDataset]) -> Records:
        """Images to train on, as :func:`cpvt_det.builders.training_records`."""
        return builders.training_records(self.cfg, datasets)

    @abstractmethod
    def build_train_loader(self, records: Records, seed: int) -> "SampleLoader":
        """Batches of samples: dicts with ``image``, ``image_id`` and ``targets``, whose ``to`` moves them to a device."""

    @abstractmethod
    def build_test_loader(self, dataset: CocoDataset) -> "DataLoader":
        """Batches of samples that contain every image of a test set once, over all processes."""

    def set_test_size(self, size: int) -> None:
        """Change ``INPUT`` so that test images have this size in pixels, for ``--sizes``.

        Raises:
            ConfigError: a task without a test size that can be set.
        """
        raise ConfigError(f"--sizes: the task {self.cfg.TASK!r} has no set_test_size, which sets the size of test images")

    @abstractmethod
    def build_training_model(self, detector: "nn.Module") -> "nn.Module":
        """A module that is called with samples, returns :class:`cpvt_det.losses.Losses` and has an attribute ``detector``. If the
        samples are only a part of a step, the module is also given the result of its method ``normalizers`` for all samples of the
        step."""

    @abstractmethod
    def build_evaluator(self, dataset: CocoDataset) -> "Evaluator":
        """The evaluator of a test set; the first key of its results is the group of ``main_figure``."""

    @abstractmethod
    def infer(self, detector: "nn.Module", samples: "Sequence[Sample]") -> Sequence[Any]:
        """The prediction for each sample of a batch, which the evaluator's ``add`` takes together with the image's id."""

    @abstractmethod
    def format_results(self, results: Results) -> str:
        """The metrics of one test set as text."""

    @abstractmethod
    def write_outputs(self, evaluator: "Evaluator", folder: Path) -> None:
        """Write the predictions for a test set."""

    @abstractmethod
    def show_results(self, detector: "nn.Module", datasets: Sequence[CocoDataset], results: Results, output: Path) -> None:
        """Write the pictures of the last evaluation and, with ``TEST.REPORT``, its report.

        Args:
            detector: the evaluated model.
            datasets: the test sets.
            results: results of the evaluation.
            output: ``OUTPUT_DIR``.
        """


def build_task(cfg: CfgNode) -> Task:
    """The task of a config.

    Raises:
        UnknownNameError: a name that is not registered, or an option that the task does not take.
    """
    return TASK_REGISTRY.build(cfg.TASK, {"cfg": cfg}, {key.lower(): value for key, value in cfg.TASK_OPTIONS.items()})


def flatten(results: Results) -> dict[str, float]:
    """Results as scalars by their path: ``bbox/AP``, or ``<data set>/bbox/AP`` if there are several sets."""
    scalars: dict[str, float] = {}
    for name, value in results.items():
        parts = flatten(value) if isinstance(value, dict) else {"": value}
        scalars |= {f"{name}/{rest}".rstrip("/"): number for rest, number in parts.items()}
    return scalars


def figure_of(figure: str, results: Results) -> float:
    """A metric of the first test set, found by its full name or by the end of the name: ``AP50`` means ``bbox/AP50``.

    Raises:
        UnknownNameError: results without this metric.
    """
    scalars = flatten(results)
    for name, value in scalars.items():
        if f"/{name}".endswith(f"/{figure}"):
            return value
    raise UnknownNameError("figure of the evaluation (TEST.BEST_FIGURE)", figure, scalars)


def require_best_figure(task: Task, datasets: Sequence[Any]) -> None:
    """Refuse a ``TEST.BEST_FIGURE`` that evaluations will not contain. The known names are taken from an evaluation without
    predictions.

    Raises:
        UnknownNameError: a name that no evaluation has.
        ConfigError: a metric that is undefined, because there is no test set, or because it has no objects for the metric.
    """
    if not (figure := task.cfg.TEST.BEST_FIGURE):
        return
    if not datasets:
        raise ConfigError(
            f"TEST.BEST_FIGURE is {figure}, but nothing is evaluated: name a test set in DATASETS.TEST, or leave the key out"
        )
    results = {dataset.name: task.build_evaluator(dataset).evaluate() for dataset in datasets}
    if math.isnan(figure_of(figure, results[datasets[0].name] if len(datasets) == 1 else results)):
        raise ConfigError(f"TEST.BEST_FIGURE {figure}: {datasets[0].name} has no objects that it measures; choose another figure")


def place_of(dataset: Any, datasets: Sequence[Any], folder: Path) -> Path:
    """The folder for files of one test set: ``folder`` itself or, if there are several sets, its subfolder with the set's name."""
    return folder if len(datasets) == 1 else folder / dataset.name
