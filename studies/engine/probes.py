# SPDX-License-Identifier: Apache-2.0
"""Measurements beyond AP: how answers change with position and padding, what tokens contain, and what is found twice."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou

from cpvt_det.builders import build_postprocessor, build_test_loader, load_tests
from cpvt_det.builders.trained import Trained
from cpvt_det.common.structures import Detections, level_padding_mask
from cpvt_det.data.shapes.scene import Scene, Shape, ShapesSpec, draw_image, paint_scene, plan_scene
from cpvt_det.evaluation.answers import detect

SCENES = 24
PLACES = 4  # number of positions along each axis
FOUND = 0.5  # smallest IoU of a detection and its object
OBJECT_SIDES = (16.0, 32.0)
IMAGES = 48
CANVASES = (1.5, 2.0)
RIDGE = 1.0
SURE = 0.4  # lowest score of a detection that counts as one
REPEATED = 0.7  # lowest IoU with a better detection of the same class


@torch.no_grad()
def probe_translation(trained: Trained, canvas: int) -> dict[str, float]:
    """Move one object over a canvas; nothing else in the image changes, nor does its noise.

    Args:
        trained: a detector trained on the shapes classes.
        canvas: side of the square canvas in pixels.

    Returns:
        Values for the image's best detection, which count as 0 unless its class and box are those of the object (IoU of 0.5):
        ``score`` and ``iou``, means over scenes and positions; ``score_std`` and ``iou_std``, standard deviations over the
        positions of a scene, means over scenes; and ``found``, the percentage of positions where the object is found.
    """
    postprocess = build_postprocessor(trained.cfg)
    spec = ShapesSpec(image_sides=(canvas, canvas), object_sides=OBJECT_SIDES, max_objects=1)
    answers = []
    for seed, scene in _scenes_of_one(spec):
        moves = list(_moves(scene.shapes[0], canvas))
        images = [_paint(replace(scene, marks=[], shapes=[moved]), seed) for moved in moves]
        samples = [{"image": image, "height": canvas, "width": canvas} for image in images]
        found = detect(trained.detector, postprocess, samples)
        answers += [_answer(best, moved) for best, moved in zip(found, moves, strict=True)]
    score, iou = np.array(answers).reshape(SCENES, -1, 2).transpose(2, 0, 1)
    return {
        "score": score.mean().item(),
        "score_std": score.std(1).mean().item(),
        "iou": iou.mean().item(),
        "iou_std": iou.std(1).mean().item(),
        "found": 100 * (iou > 0).mean().item(),
    }


def _answer(found: Detections, shape: Shape) -> tuple[float, float]:
    """Score and IoU of the best detection, or zeros if it is not the shape."""
    best = int(found.scores.argmax())
    overlap = box_iou(found.boxes_xyxy[best, None].double(), torch.from_numpy(shape.box)[None]).item()
    is_right = found.labels[best].item() == shape.label and overlap >= FOUND
    return (found.scores[best].item(), overlap) if is_right else (0.0, 0.0)


def _scenes_of_one(spec: ShapesSpec) -> Iterator[tuple[int, Scene]]:
    """Scenes with one object, which is entirely inside, and their seeds."""
    seed = count = 0
    while count < SCENES:
        seed += 1
        scene = plan_scene(spec, np.random.default_rng([seed, 77]))
        if len(scene.shapes) == 1 and _is_whole(scene.shapes[0], spec.image_sides[0]):
            count += 1
            yield seed, scene


def _is_whole(shape: Shape, canvas: int) -> bool:
    points = shape.paths[0]
    return bool((points >= 0).all() and (points <= canvas).all())


def _moves(shape: Shape, canvas: int) -> Iterator[Shape]:
    """The shape at every position of a grid that reaches all four borders."""
    free = canvas - (shape.box[2:] - shape.box[:2])
    for y in np.linspace(0, free[1], PLACES):
        for x in np.linspace(0, free[0], PLACES):
            shift = np.array([x, y]) - shape.box[:2]
            yield replace(shape, paths=[path + shift for path in shape.paths], box=shape.box + np.tile(shift, 2))


def _paint(scene: Scene, seed: int) -> Tensor:
    return _tensor(paint_scene(scene, 1.0, np.random.default_rng(seed)))


@torch.no_grad()
def probe_padding(trained: Trained) -> dict[str, float]:
    """Put each image alone on its own canvas and on larger ones.

    Returns:
        For canvases of 1.5 times and twice the sides: the largest change of a logit, divided by the largest logit, and of a box, as
        a part of the image's side.
    """
    detector, divisor = trained.detector, trained.detector.size_divisibility
    changes = {f"{part}_{factor:g}": 0.0 for factor in CANVASES for part in ("logits", "boxes")}
    for image in _images():
        batch = detector.preprocess([image])
        own = detector(batch.images, batch.padding_mask)
        for factor in CANVASES:
            height, width = (divisor * math.ceil(factor * side / divisor) - side for side in batch.images.shape[2:])
            grown = F.pad(batch.images, (0, width, 0, height))
            padded = detector(grown, F.pad(batch.padding_mask, (0, width, 0, height), value=True))
            for part in ("logits", "boxes"):
                ours, theirs = getattr(own, part)[-1], getattr(padded, part)[-1]
                unit = ours.abs().max().item() if part == "logits" else 1.0
                changes[f"{part}_{factor:g}"] = max(changes[f"{part}_{factor:g}"], (ours - theirs).abs().max().item() / unit)
    return changes


@torch.no_grad()
def probe_place(trained: Trained) -> dict[str, float]:
    """How well a token's row and column, as parts of the image, can be predicted from it by a linear map, on the finest level.

    Returns:
        R2 on images that the map was not fitted to, mean of row and column; for tokens ``before`` and ``after`` the encoder.
    """
    tokens: dict[str, list[Tensor]] = {"before": [], "after": []}
    places = []

    def keep_tokens(module: nn.Module, inputs: tuple[Any, ...], memory: Tensor) -> None:
        tokens["before"].append(inputs[0][0])
        tokens["after"].append(memory[0])

    hook = trained.detector.transformer.encoder.register_forward_hook(keep_tokens)
    try:
        for image in _images():
            batch = trained.detector.preprocess([image])
            trained.detector(batch.images, batch.padding_mask)
            places.append(_places(level_padding_mask(batch.padding_mask, trained.detector.strides[0])[0]))
    finally:
        hook.remove()
    valid = [place[:, 0].isfinite() for place in places]
    targets = [place[keep] for place, keep in zip(places, valid, strict=True)]
    return {
        when: _r2([found[: len(keep)][keep] for found, keep in zip(seen, valid, strict=True)], targets)
        for when, seen in tokens.items()
    }


def _places(padding_mask: Tensor) -> Tensor:
    """(H, W) mask -> (H * W, 2) row and column of each cell, in [0, 1] of the valid part, NaN where padded."""
    height, width = (int((~padding_mask).any(dim).sum()) for dim in (1, 0))
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in padding_mask.shape), indexing="ij")
    places = torch.stack([(rows + 0.5) / height, (columns + 0.5) / width], dim=-1).double()
    return places.masked_fill(padding_mask.cpu()[..., None], math.nan).flatten(0, 1)


def _r2(tokens: list[Tensor], targets: list[Tensor]) -> float:
    """R2 of a ridge regression, fitted to two thirds of the images and tested on the others."""
    split = 2 * len(tokens) // 3
    (x, y), (x_test, y_test) = (
        (torch.cat(tokens[part]).cpu().double(), torch.cat(targets[part])) for part in (slice(split), slice(split, None))
    )
    mean, std = x.mean(0), x.std(0).clamp(min=1e-9)
    x, x_test = ((part - mean) / std for part in (x, x_test))
    weights = torch.linalg.solve(x.T @ x + RIDGE * torch.eye(x.shape[1], dtype=x.dtype), x.T @ (y - y.mean(0)))
    errors = (x_test @ weights + y.mean(0) - y_test).square().sum(0) / (y_test - y_test.mean(0)).square().sum(0)
    return (1 - errors).mean().item()


def probe_scale(trained: Trained) -> dict[str, float]:
    """The ``mean`` absolute value of zero-initialised scales; 0 where nothing was learned or there are none."""
    scales = [tensor for name, tensor in trained.detector.position.named_parameters() if name.endswith("scale")]
    return {"mean": torch.cat(scales).abs().mean().item() if scales else 0.0}


@torch.no_grad()
def probe_duplicates(trained: Trained) -> dict[str, float]:
    """How often an object is found twice, on the first data set of ``DATASETS.TEST``.

    Returns:
        ``detections``, those with a score above 0.4; ``duplicates``, those of them whose IoU with a better one of their class is
        above 0.7; and ``percent``, the latter of the former.
    """
    postprocess, counts = build_postprocessor(trained.cfg), np.zeros(2)
    for samples in build_test_loader(trained.cfg, load_tests(trained.cfg)[0].records):
        counts += sum(np.array(_repeated(found)) for found in detect(trained.detector, postprocess, samples))
    detections, duplicates = counts.tolist()
    return {"detections": detections, "duplicates": duplicates, "percent": 100 * duplicates / max(1, detections)}


def _repeated(found: Detections) -> tuple[int, int]:
    """The number of sure detections, and of those that repeat a better one."""
    order = found.scores.argsort(descending=True, stable=True)
    order = order[found.scores[order] > SURE]
    boxes, labels = found.boxes_xyxy[order].double(), found.labels[order]
    repeats = (box_iou(boxes, boxes) > REPEATED) & (labels[:, None] == labels)
    return len(order), int(repeats.tril(-1).any(1).sum())  # row: a detection; columns before it: better ones


def _images() -> Iterator[Tensor]:
    """Images, (3, h, w) uint8, of the sizes of the study's training images."""
    spec = ShapesSpec(image_sides=(48, 80), object_sides=(12, 44), max_objects=3)
    for seed in range(IMAGES):
        yield _tensor(draw_image(spec, np.random.default_rng([seed, 78]))[0])


def _tensor(image: np.ndarray) -> Tensor:
    return torch.from_numpy(image).permute(2, 0, 1).contiguous()


PROBES: dict[str, Callable[[Trained], dict[str, float]]] = {
    "translation": partial(probe_translation, canvas=80),
    "translation_twice": partial(probe_translation, canvas=160),
    "padding": probe_padding,
    "place": probe_place,
    "scale": probe_scale,
    "duplicates": probe_duplicates,
}
"""Name in plans -> function."""
VERSIONS = dict.fromkeys(PROBES, 1)
"""Increase the number with any change of what a probe measures, so that older records can be distinguished."""
