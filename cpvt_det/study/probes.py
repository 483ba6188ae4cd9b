# SPDX-License-Identifier: Apache-2.0
"""What AP does not say of a trained detector: how its answer changes with the place of an object and with the padding."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou

from cpvt_det.build import Trained, build_postprocessor
from cpvt_det.data.shapes_scene import Scene, Shape, ShapesSpec, draw_image, paint_scene, plan_scene
from cpvt_det.runner.evaluate import detect

SCENES = 24
PLACES = 4  # along each axis
FOUND = 0.5  # IoU


@torch.no_grad()
def probe_translation(trained: Trained, canvas: int, object_sides: tuple[float, float] = (16, 32)) -> dict[str, float]:
    """Move one object over a canvas; nothing else in the image changes, its noise neither.

    Args:
        trained: of the shapes' classes.
        canvas: pixels a side.
        object_sides: pixels.

    Returns:
        Of the best detection of the object's class: ``score`` and ``iou``, means over scenes and places; ``score_std`` and
        ``iou_std``, over the places of a scene, means over scenes; and ``found``, the percentage of places with an IoU of 0.5.
    """
    postprocess = build_postprocessor(trained.cfg)
    spec = ShapesSpec(image_sides=(canvas, canvas), object_sides=object_sides, max_objects=1)
    scores, ious = [], []
    for seed, scene in _scenes_of_one(spec):
        shape = scene.shapes[0]
        boxes = [moved.box for moved in _moves(shape, canvas)]
        images = [_paint(replace(scene, marks=[], shapes=[moved]), seed) for moved in _moves(shape, canvas)]
        samples = [{"image": image, "height": canvas, "width": canvas} for image in images]
        for found, box in zip(detect(trained.detector, postprocess, samples), boxes, strict=True):
            of_class = found.labels == shape.label
            overlaps = box_iou(found.boxes_xyxy[of_class].double(), torch.from_numpy(box)[None])[:, 0]
            near = overlaps >= FOUND
            scores.append(found.scores[of_class][near].max().item() if near.any() else 0.0)
            ious.append(overlaps.max().item() if len(overlaps) else 0.0)
    score, iou = (np.array(values).reshape(SCENES, -1) for values in (scores, ious))
    return {
        "score": score.mean().item(),
        "score_std": score.std(1).mean().item(),
        "iou": iou.mean().item(),
        "iou_std": iou.std(1).mean().item(),
        "found": 100 * (iou >= FOUND).mean().item(),
    }


def _scenes_of_one(spec: ShapesSpec) -> Iterator[tuple[int, Scene]]:
    """Scenes with one object, whole, and their seeds."""
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
    """The shape at every place of a grid that reaches all four borders."""
    free = canvas - (shape.box[2:] - shape.box[:2])
    for y in np.linspace(0, free[1], PLACES):
        for x in np.linspace(0, free[0], PLACES):
            shift = np.array([x, y]) - shape.box[:2]
            yield replace(shape, paths=[path + shift for path in shape.paths], box=shape.box + np.tile(shift, 2))


def _paint(scene: Scene, seed: int) -> Tensor:
    return torch.from_numpy(paint_scene(scene, 1.0, np.random.default_rng(seed))).permute(2, 0, 1).contiguous()


@torch.no_grad()
def probe_padding(trained: Trained, images: int = 24, factors: tuple[float, ...] = (1.5, 2.0)) -> dict[str, float]:
    """Put each image alone on its own canvas and on larger ones.

    Returns:
        For each factor of the canvas' sides, the largest change of a logit over the largest logit, and of a box, in its units
        of the image.
    """
    detector, divisor = trained.detector, trained.detector.size_divisibility
    changes = {f"{part}_{factor:g}": 0.0 for factor in factors for part in ("logits", "boxes")}
    for seed in range(images):
        image = draw_image(ShapesSpec(image_sides=(48, 80), object_sides=(12, 44)), np.random.default_rng([seed, 78]))[0]
        batch = detector.preprocess([torch.from_numpy(image).permute(2, 0, 1)])
        own = detector(batch.images, batch.padding_mask)
        for factor in factors:
            height, width = (divisor * round(factor * side / divisor) - side for side in batch.images.shape[2:])
            grown = F.pad(batch.images, (0, width, 0, height))
            padded = detector(grown, F.pad(batch.padding_mask, (0, width, 0, height), value=True))
            for part in ("logits", "boxes"):
                ours, theirs = getattr(own, part)[-1], getattr(padded, part)[-1]
                unit = ours.abs().max().item() if part == "logits" else 1.0
                changes[f"{part}_{factor:g}"] = max(changes[f"{part}_{factor:g}"], (ours - theirs).abs().max().item() / unit)
    return changes


PROBES: dict[str, Callable[[Trained], dict[str, float]]] = {
    "translation": partial(probe_translation, canvas=80),
    "translation_twice": partial(probe_translation, canvas=160),
    "padding": probe_padding,
}
"""By the name that plans call them."""
