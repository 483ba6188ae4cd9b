# SPDX-License-Identifier: Apache-2.0
"""A detector and a data set -> COCO figures, files and pictures."""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from fvcore.common.config import CfgNode
from torch import nn
from tqdm import tqdm

from cpvt_det import distributed
from cpvt_det.builders import build_evaluator, build_postprocessor, build_test_loader, build_test_mapper
from cpvt_det.checkpoint.files import not_finite, remove_unfinished
from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.images import read_image
from cpvt_det.data.loader import dead_workers_named
from cpvt_det.data.mapper import Sample
from cpvt_det.errors import DataError, RunStoppedError
from cpvt_det.evaluation.coco import CocoEvaluator, format_table, write_detections, write_results
from cpvt_det.postprocess import PostProcessor
from cpvt_det.structures import Detections
from cpvt_det.visualize.curves import draw_curves
from cpvt_det.visualize.pictures import draw_comparison, save_contact_sheet
from cpvt_det.visualize.report import truth_of, write_report

logger = logging.getLogger("cpvt_det")
Results = dict[str, dict[str, float]]
DETECTIONS = "coco_instances_results.json"


@torch.no_grad()
def detect(detector: nn.Module, postprocess: PostProcessor, samples: Sequence[Sample]) -> list[Detections]:
    """Samples -> detections in pixels of the original images.

    Args:
        detector: in evaluation mode.
        postprocess: of the same classification.
        samples: each with ``image``, and ``height`` and ``width`` of the original.
    """
    batch = detector.preprocess([sample["image"] for sample in samples])
    predictions = detector(batch.images, batch.padding_mask)
    return [found.cpu() for found in postprocess(predictions, [(sample["height"], sample["width"]) for sample in samples])]


def evaluate(cfg: CfgNode, detector: nn.Module, datasets: Sequence[CocoDataset], output: Path) -> Results:
    """Evaluate on every test set and write ``results.json`` and ``inference/coco_instances_results.json``.

    Returns:
        ``{"bbox": {"AP": ..., ...}}`` in percent for one data set, ``{name: {"bbox": ...}}`` for several.

    Raises:
        RunStoppedError: weights that are not finite.
    """
    require_finite(detector)
    distributed.share_buffers(detector)
    results = {}
    for dataset in datasets:
        folder = place_of(dataset, datasets, output / "inference")
        clear_place(folder)
        results[dataset.name] = _evaluate_one(cfg, detector, dataset, folder)
    merged = results[datasets[0].name] if len(datasets) == 1 else results
    if distributed.rank() == 0:
        write_results(merged, output / "results.json")
    return merged


def _evaluate_one(cfg: CfgNode, detector: nn.Module, dataset: CocoDataset, folder: Path) -> Results:
    evaluator, postprocess = build_evaluator(cfg, dataset), build_postprocessor(cfg)
    loader = build_test_loader(cfg, dataset.records)
    quiet = distributed.rank() != 0
    with (
        dead_workers_named(loader.dataset),
        evaluation_mode(detector),
        tqdm(
            total=len(loader.dataset.records),
            desc="evaluating",
            unit="img",
            leave=False,
            disable=quiet,
            mininterval=1.0,
            file=sys.stderr,
        ) as bar,
    ):
        for samples in loader:
            for sample, found in zip(samples, detect(detector, postprocess, samples), strict=True):
                evaluator.add(sample["image_id"], found)
            bar.update(len(samples) * distributed.world_size())
    gather_detections(evaluator)
    results = evaluator.evaluate()
    if not quiet:
        write_detections(evaluator.coco_results(), folder / DETECTIONS)
        logger.info("Evaluation on %s:\n%s", dataset.name, format_table(results))
    return results


def gather_detections(evaluator: CocoEvaluator) -> None:
    """Give every process's evaluator what the others have seen."""
    for other, state in enumerate(distributed.gather_objects(evaluator.state())):
        if other != distributed.rank():
            evaluator.merge(state)


def require_finite(detector: nn.Module) -> None:
    """Refuse weights that are not finite: not all of them show in a score, and the figures would mean nothing.

    Raises:
        RunStoppedError: with the names of some.
    """
    spoilt = not_finite(detector.state_dict())
    if spoilt:
        raise RunStoppedError(f"the weights are not finite ({spoilt}) and are not evaluated")


def clear_place(folder: Path) -> None:
    """Remove what a killed evaluation left unfinished in its folder, which is this run's alone."""
    if distributed.rank() == 0:
        remove_unfinished(folder)


def place_of(dataset: CocoDataset, datasets: Sequence[CocoDataset], folder: Path) -> Path:
    """Where the files of one of the test sets go: ``folder``, or where there are several its part of that name."""
    return folder if len(datasets) == 1 else folder / dataset.name


def show_results(cfg: CfgNode, detector: nn.Module, datasets: Sequence[CocoDataset], results: Results, output: Path) -> None:
    """What both runners leave to look at after the last evaluation: pictures, and with ``TEST.REPORT`` the report.

    Args:
        cfg: the run's config.
        detector: that was evaluated.
        datasets: the test sets.
        results: what the evaluation returned; in the first process.
        output: ``OUTPUT_DIR``, with the detections of the evaluation.
    """
    draw_pictures(cfg, detector, datasets[0], output / "pictures" / "detections.png")
    if not cfg.TEST.REPORT or not results or distributed.rank() != 0:
        return
    for dataset in datasets:
        detections = json.loads((place_of(dataset, datasets, output / "inference") / DETECTIONS).read_text(encoding="utf-8"))
        figures = results if len(datasets) == 1 else results[dataset.name]
        folder = place_of(dataset, datasets, output / "report")
        write_report(dataset, detections, figures, folder, cfg.TEST.PICTURE_THRESHOLD, cfg.TEST.PICTURES)
        logger.info("Report: %s", folder / "report.md")


def draw_run(output: Path) -> None:
    """Draw the curves of a run; one without figures, because somebody removed ``metrics.json``, is finished all the same."""
    try:
        draw_curves(output / "metrics.json", output / "pictures" / "curves.png")
    except DataError as error:
        logger.warning("No curves are drawn: %s", error)


def draw_pictures(cfg: CfgNode, detector: nn.Module, dataset: CocoDataset, path: Path) -> None:
    """Draw detections over ``TEST.PICTURES`` images, spread over the data set, beside their ground truth."""
    count = min(cfg.TEST.PICTURES, len(dataset.records))
    if count < 1 or distributed.rank() != 0:
        return
    mapper, postprocess = build_test_mapper(cfg), build_postprocessor(cfg)
    panels = []
    with evaluation_mode(detector):
        for number in range(count):
            record = dataset.records[number * len(dataset.records) // count]
            found = detect(detector, postprocess, [mapper(record)])[0]
            image, names = read_image(record.file_name), dataset.classes.names
            panels.append(draw_comparison(image, truth_of(record), found, names, cfg.TEST.PICTURE_THRESHOLD))
    save_contact_sheet(panels, path)
    logger.info("Pictures: %s", path)


@contextlib.contextmanager
def evaluation_mode(detector: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, the mode of before after it, whatever happens."""
    training = detector.training
    detector.eval()
    try:
        yield
    finally:
        detector.train(training)
