# SPDX-License-Identifier: Apache-2.0
"""Record the forward pass of an image with hooks, so that the layers need no code for recording.

A layer with a hook always computes the whole batch. If it would leave out padded tokens without the hook, its results with the hook
differ only by rounding. Attention layers keep no attention weights, because fused kernels do not produce them. Here, the weights
are computed from the layers' inputs.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Size
from cpvt_det.evaluation.answers import PostProcessor, ScoreDecoder
from cpvt_det.layers.attention import Attention, DeformableAttention, Place

Point = tuple[float, float]
LEAST_SCORE = 0.05  # lowest score of a recorded detection; the best one is always recorded


@contextlib.contextmanager
def record_inputs(modules: Mapping[Any, nn.Module]) -> Iterator[dict[Any, tuple[Any, ...]]]:
    """Within the block, record the arguments with which modules are called.

    Args:
        modules: name -> module.

    Yields:
        A dict: name -> positional arguments of the module's last call. A module has no entry before its first call.
    """
    inputs: dict[Any, tuple[Any, ...]] = {}
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args})))
        yield inputs


def attention_weights(
    attention: Attention,
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None = None,
    padding_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    place: Place | None = None,
    chosen: Sequence[int] | None = None,
) -> Tensor:
    """The attention weights of a layer, computed from its inputs.

    Args:
        attention: the layer.
        queries, keys, values, padding_mask, attention_mask, place: arguments of the layer's call; values have no effect.
        chosen: indices of the queries whose weights are computed; ``None`` for all queries.

    Returns:
        Weights (B, M, Q, N) float of the chosen queries; they sum to 1 over N.
    """
    channels = queries.shape[-1]
    biases = (None, None) if attention.in_proj_bias is None else attention.in_proj_bias.split(channels)
    q, k = (
        F.linear(x, weight, bias).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)  # (B, N, C) -> (B, M, N, C / M)
        for x, weight, bias in zip((queries, keys), attention.in_proj_weight.split(channels), biases, strict=False)
    )
    if place is not None:
        q, k, attention_mask = place(q, k)
    rows = slice(None) if chosen is None else list(chosen)
    scores = q[:, :, rows] @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if attention_mask is not None:
        scores = scores + attention_mask.expand(*q.shape[:-1], -1)[:, :, rows]
    if padding_mask is not None:
        scores = scores.masked_fill(padding_mask[:, None, None], -math.inf)
    return scores.softmax(-1)


@dataclass
class AttendedQuery:
    """A token of the encoder or a query of the decoder whose attention is drawn.

    Attributes:
        name: label shown in the picture.
        index: index of the token or query.
        point: (x, y) of the token, in pixels of the original image; ``None`` for a decoder query.
        box: the query's predicted box, xyxy in pixels of the original image; ``None`` for a token.
    """

    name: str
    index: int
    point: Point | None = None
    box: tuple[float, ...] | None = None


@dataclass
class ForwardRecord:
    """The record of one image's forward pass.

    Attributes:
        detector: the detector that was run.
        image: (3, h, w) uint8, resized for the detector.
        original_size: (h, w) of the image on disk.
        canvas: (H, W) of the padded image.
        layers: the layers that attend to the image's tokens, by "encoder" and "decoder".
        inputs: arguments of these layers, by part and layer index, as in ("encoder", 0).
        found: the best queries, best first.
    """

    detector: nn.Module
    image: Tensor
    original_size: Size
    canvas: Size
    layers: dict[str, list[nn.Module]]
    inputs: dict[tuple[str, int], tuple[Any, ...]]
    found: list[AttendedQuery]

    def is_dense(self, part: str) -> bool:
        """Whether the "encoder" or the "decoder" attends to all tokens instead of sampling points."""
        return bool(self.layers[part]) and not isinstance(self.layers[part][0], DeformableAttention)

    @property
    def strides(self) -> list[int]:
        """The stride of each level, in pixels of the resized image per token."""
        return self.detector.strides

    @property
    def scale(self) -> Point:
        """(x, y), the number of pixels of the original image per pixel of the resized image."""
        (height, width), (h, w) = self.original_size, self.image.shape[1:]
        return width / w, height / h

    def shape_of(self, stride: int) -> Size:
        """(H_l, W_l) of the map of a level with this stride, padding included."""
        return tuple(-(-side // stride) for side in self.canvas)


def attention_layers(detector: nn.Module) -> dict[str, list[nn.Module]]:
    """The layers that attend to the image's tokens, by "encoder" and "decoder"."""
    transformer = detector.transformer
    cross = "cross_attn" if detector.needs_references else "multihead_attn"
    return {
        "encoder": [layer.self_attn for layer in transformer.encoder.layers],
        "decoder": [getattr(layer, cross) for layer in transformer.decoder.layers],
    }


@torch.no_grad()
def record_forward(
    detector: nn.Module, image: Tensor, original_size: Size, classification: ScoreDecoder, classes: Classes, count: int
) -> ForwardRecord:
    """Detect objects in one image, and record the inputs of the attention layers.

    Args:
        detector: a detector in evaluation mode; not changed.
        image: (3, h, w) uint8, resized for the detector.
        original_size: (h, w) of the image on disk.
        classification: the classification that the detector was trained with.
        classes: ids and names of its labels.
        count: largest number of queries to keep, best first.
    """
    layers = attention_layers(detector)
    batch = detector.preprocess([image])
    with record_inputs({(part, n): layer for part, found in layers.items() for n, layer in enumerate(found)}) as inputs:
        predictions = detector(batch.images, batch.padding_mask)
    height, width = original_size
    boxes, *decoded = PostProcessor(classification, predictions.logits[-1, 0].numel()).rank(predictions)
    boxes = boxes * boxes.new_tensor([width, height, width, height])
    found: dict[int, AttendedQuery] = {}
    for box, score, label, query in zip(*(part[0].tolist() for part in (boxes, *decoded)), strict=True):
        if not found or (score >= LEAST_SCORE and query not in found):  # with sigmoids a query may have several classes
            found[query] = AttendedQuery(f"{classes.names[label]} {score:.2f}", query, box=tuple(box))
    canvas = tuple(batch.images.shape[2:])
    return ForwardRecord(detector, image, original_size, canvas, layers, inputs, list(found.values())[:count])


def tokens_at(record: ForwardRecord, points: Sequence[Point], level: int) -> list[AttendedQuery]:
    """The tokens of a level at given points.

    Args:
        record: record of the image's forward pass.
        points: (x, y) in pixels of the original image.
        level: index of the level; 0 is the finest. The only level of an encoder that attends to all tokens is the coarsest one.

    Raises:
        BadInputError: a point outside the image, or a level that the detector does not have.
    """
    height, width = record.original_size
    strides = record.strides[-1:] if record.is_dense("encoder") else record.strides
    levels = len(strides)
    if not 0 <= level < levels:
        known = "one level, 0" if levels == 1 else f"levels 0 to {levels - 1}"
        raise BadInputError(f"--level {level}: this {type(record.detector).__name__} has {known}")
    starts = [rows * columns for rows, columns in map(record.shape_of, strides[:level])]
    stride, columns = strides[level], record.shape_of(strides[level])[1]
    attended = []
    for x, y in points:
        if not (0 <= x < width and 0 <= y < height):
            raise BadInputError(f"--points {x:g},{y:g} is outside the image: x must be below {width} and y below {height} pixels")
        column, row = (int(position / scale // stride) for position, scale in zip((x, y), record.scale, strict=True))
        attended.append(AttendedQuery(f"at {x:.0f}, {y:.0f}", sum(starts) + row * columns + column, point=(x, y)))
    return attended
