# SPDX-License-Identifier: Apache-2.0
"""One image through a detector, with all that its attention layers were called with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cpvt_det.boxes import cxcywh_to_xyxy
from cpvt_det.data.coco import Classes
from cpvt_det.errors import BadInputError
from cpvt_det.losses.classification import Classification
from cpvt_det.models import DETR
from cpvt_det.structures import Size
from cpvt_det.visualize.recording import record_inputs

Point = tuple[float, float]
LEAST_SCORE = 0.05  # of a detection that is looked at, but for the best


@dataclass
class Subject:
    """What looks: a token of the encoder, or a query of the decoder.

    Attributes:
        name: in words.
        index: of the token or query.
        point: where the token lies, in pixels of the original image.
        box: what the query found, xyxy in pixels of the original image.
    """

    name: str
    index: int
    point: Point | None = None
    box: tuple[float, ...] | None = None


@dataclass
class Observation:
    """What was seen.

    Attributes:
        detector: that looked.
        image: (3, h, w) uint8, resized for the detector.
        original_size: (h, w) of the image on disk.
        canvas: (H, W) of the padded image.
        layers: for "encoder" and "decoder", the attention layers to the image's tokens.
        inputs: of these layers, by part and number, as in ("encoder", 0).
        found: the best queries, best first.
    """

    detector: nn.Module
    image: Tensor
    original_size: Size
    canvas: Size
    layers: dict[str, list[nn.Module]]
    inputs: dict[tuple[str, int], tuple[Any, ...]]
    found: list[Subject]

    @property
    def is_dense(self) -> bool:
        """Whether attention looks at all tokens, not at samples."""
        return isinstance(self.detector, DETR)

    @property
    def strides(self) -> list[int]:
        """Pixels of the resized image a token, over levels."""
        return self.detector.strides

    @property
    def scale(self) -> Point:
        """x and y: pixels of the original image for one of the resized."""
        (height, width), (h, w) = self.original_size, self.image.shape[1:]
        return width / w, height / h

    def shape_of(self, level: int) -> Size:
        """(H_l, W_l) of a level's map, padding included."""
        return tuple(-(-side // self.strides[level]) for side in self.canvas)


def attention_layers(detector: nn.Module) -> dict[str, list[nn.Module]]:
    """The attention layers to the image's tokens, of "encoder" and of "decoder"."""
    transformer = detector.transformer
    cross = "multihead_attn" if isinstance(detector, DETR) else "cross_attn"
    return {
        "encoder": [layer.self_attn for layer in transformer.encoder.layers],
        "decoder": [getattr(layer, cross) for layer in transformer.decoder.layers],
    }


@torch.no_grad()
def observe(
    detector: nn.Module, image: Tensor, original_size: Size, classification: Classification, classes: Classes, count: int
) -> Observation:
    """Detect in one image.

    Args:
        detector: in evaluation mode; it is the same afterwards.
        image: (3, h, w) uint8, resized for the detector.
        original_size: (h, w) of the image on disk.
        classification: what the detector was trained with.
        classes: what its labels mean.
        count: the most queries to keep, the best ones.
    """
    layers = attention_layers(detector)
    batch = detector.preprocess([image])
    with record_inputs({(part, n): layer for part, found in layers.items() for n, layer in enumerate(found)}) as inputs:
        predictions = detector(batch.images, batch.padding_mask)
    height, width = original_size
    boxes = cxcywh_to_xyxy(predictions.boxes[-1][0]).clamp(0, 1) * predictions.boxes.new_tensor([width, height, width, height])
    found: dict[int, Subject] = {}
    decoded = classification.decode(predictions.logits[-1], predictions.logits[-1][0].numel())
    for score, label, query in zip(*(part[0].tolist() for part in decoded), strict=True):
        if not found or (score >= LEAST_SCORE and query not in found):  # by sigmoids a query may be several classes
            found[query] = Subject(f"{classes.names[label]} {score:.2f}", query, box=tuple(boxes[query].tolist()))
    canvas = tuple(batch.images.shape[2:])
    return Observation(detector, image, original_size, canvas, layers, inputs, list(found.values())[:count])


def tokens_at(observation: Observation, points: Sequence[Point], level: int) -> list[Subject]:
    """The tokens of a level that lie at points.

    Args:
        observation: of the image.
        points: xy in pixels of the original image.
        level: 0 is the finest.

    Raises:
        BadInputError: a point outside the image, or a level that the detector does not have.
    """
    height, width = observation.original_size
    levels = len(observation.strides)
    if not 0 <= level < levels:
        known = "one level, 0" if levels == 1 else f"levels 0 to {levels - 1}"
        raise BadInputError(f"--level {level}: this {type(observation.detector).__name__} has {known}")
    starts = [rows * columns for rows, columns in map(observation.shape_of, range(level))]
    stride, columns = observation.strides[level], observation.shape_of(level)[1]
    subjects = []
    for x, y in points:
        if not (0 <= x < width and 0 <= y < height):
            raise BadInputError(f"--points {x:g},{y:g} is outside the image: x is below {width} and y below {height} pixels")
        column, row = (int(place / scale // stride) for place, scale in zip((x, y), observation.scale, strict=True))
        subjects.append(Subject(f"at {x:.0f}, {y:.0f}", sum(starts) + row * columns + column, point=(x, y)))
    return subjects


def centers_of(subjects: Sequence[Subject]) -> list[Point]:
    """The centres of boxes, xy."""
    return [((x1 + x2) / 2, (y1 + y2) / 2) for x1, y1, x2, y2 in (subject.box for subject in subjects)]
