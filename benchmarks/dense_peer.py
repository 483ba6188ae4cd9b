#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""torchvision's FCOS in the place of our detector, on a folder of images, for the same CPU seconds, as a record::

    python benchmarks/small_data.py aquarium FOLDER --budget 10m --output DIR
    python benchmarks/dense_peer.py aquarium FOLDER --like DIR/aquarium_10m_sine_0.json --output DIR

Backbone, loader and AP are those of ``cpvt-det train FOLDER``: a frozen EfficientNet-Lite0 with its ImageNet weights, and
its maps of strides 8, 16 and 32. On top is FCOS (arXiv 1904.01355), 128 channels wide: a feature pyramid, and towers of two
convolutions with GroupNorm. AdamW, cosine schedule, moving average, flips and five image sizes are as in our own runs.

``--like`` is the record of our run. Image sizes, seed and CPU seconds are taken from it. The CPU seconds are those of the whole
process: imports, checks of the data, and two evaluations, at half of the time and at the end.

``--beside CHECKPOINT`` also times both detectors on single validation images, from the resized image to boxes, NMS included.
"""

import json
import math
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from benchmarks.machine import machine, versions
from benchmarks.origin import commit_of
from cpvt_det import builders
from cpvt_det.builders.trained import Trained, load_trained
from cpvt_det.checkpoint.initial import load_backbone_weights
from cpvt_det.cli import common_options, report_errors
from cpvt_det.cli.folder import folder_config
from cpvt_det.common.boxes import cxcywh_to_xyxy
from cpvt_det.common.files import write_json
from cpvt_det.common.memory import usable_cores
from cpvt_det.common.structures import Detections, Sample
from cpvt_det.evaluation.answers import detect
from cpvt_det.solver.optimizer import MovingAverage
from cpvt_det.training.recipe import average_decay
from cpvt_det.training.tasks.task import Task, build_task

ROOT = Path(__file__).resolve().parent.parent
CHANNELS, CONVOLUTIONS = 128, 2
BOX_BIAS = 3.0
"""Initial bias of the box branch. A ReLU follows it, so with a bias of 0 half of the outputs would not learn."""
WARM_UP = 0.03  # share of the time
TIMED_IMAGES = 40
TIMED = 20  # steps after which the length of the run is estimated, for the moving average
WORDS = "MODEL.BACKBONE.NAME timm/tf_efficientnet_lite0 MODEL.BACKBONE.WEIGHTS pip MODEL.BACKBONE.NORM FrozenBN"
WORDS += " MODEL.BACKBONE.FREEZE_AT 5 MODEL.BACKBONE.STAGES (3,4,5) INPUT.RESIZE_CROP.ENABLED False DATALOADER.NUM_WORKERS 0"
WORDS += " SOLVER.IMS_PER_BATCH 2 TEST.IMS_PER_BATCH 8"


SIZES = ("MIN_SIZE_TRAIN", "MAX_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TEST")


class Unresized(GeneralizedRCNNTransform):
    """Normalise and pad, as torchvision does, but leave the sizes of images to our loader, also in evaluation."""

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        return image, target


class Pyramid(nn.Module):
    """Our backbone without gradients, and a feature pyramid: (B, 3, H, W) -> maps of 128 channels by name."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        self.fpn = FeaturePyramidNetwork(list(backbone.channels), CHANNELS)
        self.out_channels = CHANNELS

    def train(self, mode: bool = True) -> "Pyramid":
        """Set the mode; the backbone stays in evaluation."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        padding_mask = torch.zeros(images.shape[0], *images.shape[2:], dtype=torch.bool, device=images.device)
        with torch.no_grad():
            maps = self.backbone(images.contiguous(memory_format=torch.channels_last), padding_mask)
        return self.fpn(OrderedDict((str(level), x) for level, x in enumerate(maps)))


def build_peer(backbone: nn.Module, num_classes: int) -> FCOS:
    """FCOS over a backbone by our contract; images come from our loader, so it resizes none."""
    anchors = AnchorGenerator(tuple((stride,) for stride in backbone.strides), ((1.0,),) * len(backbone.strides))
    head = FCOSHead(CHANNELS, 1, num_classes, CONVOLUTIONS)
    nn.init.constant_(head.regression_head.bbox_reg.bias, BOX_BIAS)
    model = FCOS(Pyramid(backbone), num_classes, anchor_generator=anchors, head=head, score_thresh=0.02)
    mean, std = ([x / 255 for x in values] for values in (backbone.pixel_mean, backbone.pixel_std))
    model.transform = Unresized(0, 0, mean, std, max(backbone.strides))
    return model


def as_inputs(samples: list[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Samples of our loader -> images from 0 to 1, and targets with boxes in their pixels."""
    images = [sample["image"] / 255 for sample in samples]
    targets = []
    for image, sample in zip(images, samples, strict=True):
        height, width = image.shape[1:]
        boxes = cxcywh_to_xyxy(sample["targets"].boxes_cxcywh) * torch.tensor([width, height, width, height])
        targets.append({"boxes": boxes, "labels": sample["targets"].labels})
    return images, targets


@torch.no_grad()
def evaluate(model: FCOS, task: Task, dataset: Any) -> dict[str, float]:
    """COCO's figures on a test set, by our evaluator."""
    model.eval()
    evaluator = task.build_evaluator(dataset)
    for samples in task.build_test_loader(dataset):
        images = [sample["image"] / 255 for sample in samples]
        for sample, image, found in zip(samples, images, model(images), strict=True):
            scale = torch.tensor([sample["width"] / image.shape[2], sample["height"] / image.shape[1]] * 2)
            evaluator.add(sample["image_id"], Detections(found["boxes"] * scale, found["scores"], found["labels"]))
    model.train()
    return evaluator.evaluate()["bbox"]


def train(model: FCOS, task: Task, records: Any, dataset: Any, seconds: float, rate: float, seed: int) -> dict[str, Any]:
    """Train until the process has used so many CPU seconds; the figures at half of them and at the end, of averaged weights."""
    learned = nn.ModuleList([model.backbone.fpn, model.head])
    optimizer = torch.optim.AdamW(learned.parameters(), rate, weight_decay=1e-4)
    average = MovingAverage(learned, 0.9)
    begin, steps, curve, evaluation = time.process_time(), 0, {}, 0.0
    model.train()
    for samples in task.build_train_loader(records, seed):
        used = time.process_time()
        if used >= seconds - evaluation:
            break
        if not curve and used >= seconds / 2:
            curve[steps] = _of_average(average, learned, model, task, dataset)
            evaluation = time.process_time() - used
        share = used / seconds
        factor = min(1.0, share / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        losses = model(*as_inputs(samples))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps == TIMED:
            expected = (seconds - used) / ((time.process_time() - begin) / TIMED)
            average.decay = average_decay(expected)
        average.update_parameters(learned)
    final = _of_average(average, learned, model, task, dataset)
    figures = {name: _number(final[name]) for name in task.figures}
    curve = {step: _number(found["AP50"]) for step, found in {**curve, steps: final}.items()}
    return {**figures, "iterations": steps, "curve": curve, "decay": average.decay}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value  # of sizes that no object has


def _of_average(average: MovingAverage, learned: nn.Module, model: FCOS, task: Task, dataset: Any) -> dict[str, float]:
    own = {name: value.clone() for name, value in learned.state_dict().items()}
    learned.load_state_dict(average.module.state_dict())
    found = evaluate(model, task, dataset)
    learned.load_state_dict(own)
    return found


@torch.no_grad()
def time_inference(model: FCOS, ours: Trained, task: Task, dataset: Any) -> dict[str, Any]:
    """Median CPU milliseconds of both on single images, each image by both in turn; and quartiles of the images' ratios."""
    model.eval()
    postprocess, loader = builders.build_postprocessor(ours.cfg), builders.build_test_loader(ours.cfg, dataset.records)
    of_ours = [sample for samples in loader for sample in samples][:TIMED_IMAGES]
    of_peer = [sample for samples in task.build_test_loader(dataset) for sample in samples][:TIMED_IMAGES]
    times = []
    for one, other in zip(of_ours * 3, of_peer * 3, strict=True):
        begin = time.process_time()
        detect(ours.detector, postprocess, [one])
        middle = time.process_time()
        model([other["image"] / 255])
        times.append((middle - begin, time.process_time() - middle))
    times = np.array(times)[TIMED_IMAGES:]  # the first round warms up
    found = dict(zip(("ours", "fcos"), (1000 * np.median(times, axis=0)).round(2).tolist(), strict=True))
    ratios = np.percentile(times[:, 1] / times[:, 0], [25, 50, 75]).round(3).tolist()
    return {"ms": found, "fcos over ours, quartiles": ratios, "images": TIMED_IMAGES, "canvas": ours.cfg.INPUT.MIN_SIZE_TEST}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path, resolve_path=True))
@click.option("--like", type=click.Path(path_type=Path), required=True, help="Record of our run, by small_data.py.")
@click.option("--rate", default=2.5e-4, show_default=True, help="Learning rate; the best of four on a fifth of Aquarium.")
@click.option("--beside", type=click.Path(path_type=Path, exists=True), help="A checkpoint of ours, whose inference is timed too.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("output/small_data_peers"), show_default=True)
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(
    name: str,
    folder: Path,
    like: Path,
    rate: float,
    beside: Path | None,
    output: Path,
    busy: bool,
) -> None:
    """Train FCOS on FOLDER with one thread, and write OUTPUT/NAME_BUDGET_fcos_SEED.json."""
    load = check_load(busy)
    torch.set_num_threads(1)
    ours = json.loads(like.read_text(encoding="utf-8"))
    budget, seconds, seed = (ours[name] for name in ("budget", "cpu_seconds", "seed"))
    sizes = [word for name in SIZES for word in (f"INPUT.{name}", str(ours["chosen"]["INPUT"][name]))]
    torch.manual_seed(seed)
    words = f"--like {like.name} --rate {rate:g}"
    words += " --beside CHECKPOINT" * bool(beside) + " --busy" * busy
    command = f"python benchmarks/dense_peer.py {name} FOLDER {words}"
    found = {"command": command, "commit": commit_of(ROOT), "machine": machine("cpu", load), "versions": versions()}
    found |= {"cores": usable_cores(), "seed": seed, "budget": budget, "seconds": seconds, "rate": rate}
    with tempfile.TemporaryDirectory() as place:
        cfg, _ = folder_config(folder, Path(place), [*WORDS.split(), *sizes])
        task = build_task(cfg)
        train_sets, tests = task.load_splits()
        backbone = builders.build_backbone(cfg)
        load_backbone_weights(backbone, cfg.MODEL.BACKBONE.WEIGHTS, cfg.MODEL.BACKBONE.NAME)
        model = build_peer(backbone, cfg.MODEL.NUM_CLASSES)
        found["test_size"] = cfg.INPUT.MIN_SIZE_TEST
        start = time.perf_counter()
        found |= train(model, task, task.training_records(train_sets), tests[0], seconds, rate, seed)
        found |= {"wall_seconds": round(time.perf_counter() - start, 1), "cpu_seconds": round(time.process_time(), 1)}
        if beside:
            found["inference"] = time_inference(model, load_trained(beside), task, tests[0])
    path = output / f"{name}_{budget}_fcos_{seed}.json"
    write_json(found, path)
    click.echo(f"{path}: AP {found['AP']:.1f}, AP50 {found['AP50']:.1f}, {found['iterations']} steps, {found['cpu_seconds']:.0f} s")


if __name__ == "__main__":
    main(prog_name="benchmarks/dense_peer.py")
