# SPDX-License-Identifier: Apache-2.0
"""The data that modules exchange, and functions that split samples and turn image sizes into padding masks.

``data/mapper.py`` makes samples, ``models/detector.py`` takes batches and returns predictions, and ``losses/`` and ``evaluation/``
read these. ``evaluation/`` makes detections and thresholds; checkpoints contain the thresholds.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Sample = dict[str, Any]
"""Keys: ``file_name``, ``image_id``, ``height`` and ``width`` of the file, and ``image`` (3, h, w) uint8 RGB; in training also
``targets``; if images are cut into tiles, also ``pixels`` (3, height, width) uint8 RGB."""
Size = tuple[int, int]
DEFAULT_THRESHOLD = 0.5
"""Score threshold for weights that come without one."""
PROPOSAL_LABEL = 0
"""The row of the proposals' class head that means "an object"; the other rows do not stand for classes and are trained as
negatives."""


def split_samples(samples: Sequence[Sample], parts: int) -> list[Sequence[Sample]]:
    """Split samples into parts of nearly equal length without an empty part."""
    parts = min(parts, len(samples))
    borders = [round(number * len(samples) / parts) for number in range(parts + 1)]
    return [samples[start:end] for start, end in pairwise(borders)]


@dataclass
class PaddedBatch:
    """Images of different sizes on canvases of the same size.

    Attributes:
        images: (B, 3, H, W) float, normalised, then zero-padded at the right and the bottom.
        padding_mask: (B, H, W) bool, True = padded.
        image_sizes: (h, w) of each image before padding.
    """

    images: Tensor
    padding_mask: Tensor
    image_sizes: list[Size]

    @classmethod
    def from_images(
        cls, images: Sequence[Tensor], divisor: int = 32, mean: Tensor | None = None, std: Tensor | None = None
    ) -> "PaddedBatch":
        """Put images on the smallest common canvas whose sides are multiples of ``divisor``.

        Args:
            images: (3, h, w) each, float and normalised. If ``mean`` and ``std`` are given, the images are normalised here; they
                may then have any dtype and be on any device.
            divisor: the largest stride of the detector. If the canvas's sides are multiples of the largest stride, every level's
                mask is exact.
            mean, std: (3, 1, 1) float, statistics to normalise the images with; the canvas is created on their device.

        Raises:
            ValueError: no image, an image that is not (3, h, w), or one without pixels.
        """
        if not images:
            raise ValueError("a batch needs at least one image, got none")
        for image in images:
            if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
                raise ValueError(f"expected images of shape (3, h, w) with h, w >= 1, got {tuple(image.shape)}")
        sizes = [(image.shape[1], image.shape[2]) for image in images]
        height, width = (-(-max(side) // divisor) * divisor for side in zip(*sizes, strict=True))
        like = images[0] if mean is None else mean
        shape = (len(images), 3, height, width)
        canvas = like.new_zeros(shape)
        for place, image in zip(canvas, images, strict=True):
            here = place[:, : image.shape[1], : image.shape[2]].copy_(image.to(canvas.device, non_blocking=True))
            if mean is not None:
                here.sub_(mean).div_(std)
        return cls(canvas, padding_mask_of(sizes, (height, width), canvas.device), sizes)


@dataclass
class Targets:
    """The ground truth of one image.

    Attributes:
        labels: (G,) int64 in [0, K).
        boxes_cxcywh: (G, 4) float in [0, 1], relative to the unpadded image.
    """

    labels: Tensor
    boxes_cxcywh: Tensor

    def to(self, device: torch.device | str) -> "Targets":
        """The same targets on another device."""
        return Targets(self.labels.to(device, non_blocking=True), self.boxes_cxcywh.to(device, non_blocking=True))

    def pin_memory(self) -> "Targets":
        """The same targets in pinned memory, from which copies to a GPU are asynchronous; a ``DataLoader`` calls it."""
        return Targets(self.labels.pin_memory(), self.boxes_cxcywh.pin_memory())

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class BoxDistributions:
    """A decoder's distributions over the positions of its boxes' sides: logits over bins of distances.

    Attributes:
        logits: (D', B, Q, 4, N + 1) float, of the last D' layers, for the left, top, right and bottom side.
        starts: (B, Q, 4) float, cxcywh without gradient, the boxes from which distances are measured.
        values: (N + 1,) float, ascending: the distance that each bin stands for.
        scale: () float. The distance of a side from the start's centre is the start's width or height times ``(scale / 2 +
            distance) / scale``.
    """

    logits: Tensor
    starts: Tensor
    values: Tensor
    scale: Tensor


@dataclass
class Predictions:
    """The predictions of a detector for a batch. The predictions of the last decoder layer are the final answer.

    Attributes:
        logits: (D, B, Q, K') float; K' is K for sigmoid and K + 1 for softmax classification.
        boxes: (D, B, Q, 4) float, cxcywh in [0, 1], relative to the unpadded image.
        proposals: predictions of the encoder, one per token: logits (1, B, N, K') and boxes (1, B, N, 4). Only two-stage
            detectors have proposals, and only the loss uses them.
        denoising: predictions of the denoising queries, which exist in training only: logits (D, B, Q', K') and boxes
            (D, B, Q', 4), with ``objects`` and ``groups``.
        objects: (B, Q) int64, the index of the target that each query belongs to, or -1 for none. Only denoising queries have it,
            so they need no matching.
        groups: number of times that each target occurs in ``objects``. The losses are divided by this number.
        by_class: whether the logits of proposals are class logits. Otherwise, only the logit for "an object" has a meaning.
        hybrid: predictions of additional queries that exist in training only: logits (D, B, Q', K') and boxes (D, B, Q', 4). The
            loss matches several of these queries with each object.
        distributions: the distributions from which the boxes of the last layers were computed; in training only, and only for
            decoders that refine distributions.
    """

    logits: Tensor
    boxes: Tensor
    proposals: "Predictions | None" = None
    denoising: "Predictions | None" = None
    objects: Tensor | None = None
    groups: int = 1
    by_class: bool = False
    hybrid: "Predictions | None" = None
    distributions: BoxDistributions | None = None

    def part(self, start: int | None, end: int | None) -> "Predictions":
        """The predictions of the queries ``[start:end]``: logits, boxes and distributions."""
        chosen, sides = slice(start, end), self.distributions
        if sides is not None:
            sides = BoxDistributions(sides.logits[:, :, chosen], sides.starts[:, chosen], sides.values, sides.scale)
        return Predictions(self.logits[:, :, chosen], self.boxes[:, :, chosen], distributions=sides)


@dataclass
class ClassLogits:
    """The answer of a classifier for a batch.

    Attributes:
        logits: (H, B, K), at least float32, from H heads. There is one head. With a distillation token, there is a second head,
            which learns from the teacher. The answer is the mean over the heads.
    """

    logits: Tensor

    def scores(self) -> Tensor:
        """(B, K) float in [0, 1], the probabilities of the classes."""
        return self.logits.mean(0).softmax(-1)


@dataclass
class Detections:
    """The detections of one image, best first.

    Attributes:
        boxes_xyxy: (n, 4) float, in pixels of the original image.
        scores: (n,) float in [0, 1].
        labels: (n,) int64 in [0, K).
    """

    boxes_xyxy: Tensor
    scores: Tensor
    labels: Tensor

    def cpu(self) -> "Detections":
        """The same detections on the CPU."""
        return Detections(self.boxes_xyxy.cpu(), self.scores.cpu(), self.labels.cpu())


@dataclass(frozen=True)
class Thresholds:
    """The thresholds with the highest F1 on the first test set, at IoU 0.5. Detections whose score is at least the threshold
    count.

    Attributes:
        overall: threshold of all classes together; ``None`` if no detection is right.
        classes: threshold of each of the K classes; ``None`` for a class without a right detection.
    """

    overall: float | None
    classes: tuple[float | None, ...]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints and JSON."""
        return {"overall": self.overall, "classes": list(self.classes)}

    @classmethod
    def from_state_dict(cls, state: Any, num_classes: int) -> "Thresholds":
        """The thresholds from the result of :meth:`state_dict`.

        Raises:
            ValueError: a value of another form, scores that are not in [0, 1], or a wrong number of classes.
        """
        classes = state.get("classes") if isinstance(state, Mapping) else None
        fits = isinstance(classes, list) and len(classes) == num_classes
        scores = [score for score in (state.get("overall"), *classes) if score is not None] if fits else []
        if not fits or not all(isinstance(score, float) and 0 <= score <= 1 for score in scores):
            expected = f'{{"overall": score, "classes": [{num_classes} scores]}}, scores from 0 to 1 or null'
            raise ValueError(f"thresholds must be {expected}, got {state!r}")
        return cls(state["overall"], tuple(classes))

    def describe(self, names: tuple[str, ...], most: int = 10) -> str:
        """One line of text with the overall threshold and the thresholds of the first classes."""
        if self.overall is None:
            return "none, because no detection is correct"
        scores = ["none" if score is None else f"{score:.3f}" for score in self.classes[:most]]
        shown = [" ".join(pair) for pair in zip(names, scores, strict=False)]
        return f"{self.overall:.3f} ({', '.join(shown)}{', ...' if len(names) > most else ''})"


@dataclass
class Levels:
    """Layout of the tokens of several feature levels: one level after another, and each level row by row.

    Attributes:
        shapes: (H_l, W_l) of each of the L levels.
        masks: (B, H_l, W_l) bool per level, True = padded.
        padding_mask: (B, N) bool, the masks as tokens; N is the sum of H_l W_l.
        sizes: (L, 2) float, xy: number of columns and rows of each level.
        valid_sizes: (B, L, 2) float, xy: number of columns and rows that are not padded.
    """

    shapes: list[Size]
    masks: list[Tensor]
    padding_mask: Tensor
    sizes: Tensor
    valid_sizes: Tensor

    @classmethod
    def from_masks(cls, padding_masks: Sequence[Tensor], dtype: torch.dtype) -> "Levels":
        """The layout for (B, H_l, W_l) masks; each image must be in the top left corner of its maps."""
        shapes = [tuple(mask.shape[1:]) for mask in padding_masks]
        if torch.jit.is_tracing():  # sizes are tensors then: tools that count operations use tracing
            shapes = [(int(height), int(width)) for height, width in shapes]
        valid = torch.stack([torch.stack(((~mask[:, 0]).sum(1), (~mask[:, :, 0]).sum(1)), -1) for mask in padding_masks], 1)
        # `full` copies nothing to a GPU, and accepts the symbolic sizes of an export.
        sides = [torch.full((), side, dtype=dtype, device=valid.device) for height, width in shapes for side in (width, height)]
        tokens = torch.cat([mask.flatten(1) for mask in padding_masks], dim=1)
        return cls(shapes, list(padding_masks), tokens, torch.stack(sides).unflatten(0, (-1, 2)), valid.to(dtype))

    @property
    def valid_ratios(self) -> Tensor:
        """(B, L, 2) float in (0, 1], xy: the fractions of each map's width and height that are not padded."""
        return self.valid_sizes / self.sizes

    def centers(self) -> Tensor:
        """(B, N, 2) xy: the centre of every token's cell, from 0 to 1 within the unpadded image and above 1 in the padding."""
        centers = []
        for (height, width), valid in zip(self.shapes, self.valid_sizes.unbind(1), strict=True):
            # Divided by whole cells, a centre is the same number on every canvas; proposals are filtered by thresholds on it.
            x, y = (torch.arange(side, dtype=valid.dtype, device=valid.device) + 0.5 for side in (width, height))
            x, y = x / valid[:, :1], y / valid[:, 1:]  # (B, W_l), (B, H_l)
            grid = torch.stack((x[:, None].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)), dim=-1)
            centers.append(grid.flatten(1, 2))  # (B, H_l, W_l, 2) -> (B, H_l W_l, 2)
        return torch.cat(centers, dim=1)

    def to_level_coordinates(self, points: Tensor) -> Tensor:
        """(B, Q, 2 or 4) points or boxes of the unpadded image -> (B, Q, L, 2 or 4), relative to every level's padded map."""
        ratios = self.valid_ratios if points.shape[-1] == 2 else self.valid_ratios.repeat(1, 1, 2)
        return points[:, :, None] * ratios[:, None]


def flatten_levels(maps: Sequence[Tensor]) -> Tensor:
    """(B, C, H_l, W_l) per level -> (B, N, C): one level after another, and each level row by row."""
    tokens = [level.flatten(2).transpose(1, 2) for level in maps]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1)


def padding_mask_of(image_sizes: Sequence[Size], canvas: Size, device: torch.device | str = "cpu") -> Tensor:
    """The padding mask of images in the top left corner of a canvas.

    Args:
        image_sizes: (h, w) of each of the B images.
        canvas: (H, W) of the padded images.
        device: device of the mask.

    Returns:
        (B, H, W) bool, True = padded.
    """
    sizes = torch.tensor(image_sizes).to(device, non_blocking=True)  # if it were created on a GPU, the host would wait
    rows = torch.arange(canvas[0], device=device) >= sizes[:, :1]  # (B, H)
    columns = torch.arange(canvas[1], device=device) >= sizes[:, 1:]  # (B, W)
    return rows[:, :, None] | columns[:, None, :]


def level_padding_mask(padding_mask: Tensor, stride: int) -> Tensor:
    """The padding mask of a feature map: a cell is valid if its first pixel is valid.

    This gives ``ceil(size / stride)`` valid rows and columns, as many as a strided convolution gives for the unpadded image.

    Args:
        padding_mask: (B, H, W) bool, True = padded.
        stride: number of pixels per cell.

    Returns:
        (B, ceil(H / stride), ceil(W / stride)) bool, True = padded.

    Raises:
        TypeError: the mask is not bool. Integer masks are refused because ``~`` would turn them into -1 and -2.
    """
    require_bool(padding_mask)
    return padding_mask[:, ::stride, ::stride]


_UNPADDED: ContextVar[bool] = ContextVar("no mask has padding", default=False)


@contextlib.contextmanager
def unpadded() -> Iterator[None]:
    """In this block, :func:`has_padding` is always false: a model that is traced in it treats every image as filling its canvas."""
    token = _UNPADDED.set(True)
    try:
        yield
    finally:
        _UNPADDED.reset(token)


def has_padding(padding_mask: Tensor) -> bool:
    """Whether any cell of a mask is padded. Also true if the check would have to wait for a device or would break a compiled
    graph.
    """
    if _UNPADDED.get():
        return False
    is_at_hand = padding_mask.device.type == "cpu" and not torch.compiler.is_compiling()
    return not is_at_hand or bool(padding_mask.any())


def valid_sizes(padding_mask: Tensor) -> list[Size] | None:
    """(height, width) of the valid rectangle in the upper left corner of each image of a mask (B, H, W).

    Returns:
        ``None`` if the valid cells have any other shape, or if the check would have to wait for a device or would break a
        compiled graph.
    """
    if padding_mask.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    valid = ~padding_mask
    rows, columns = valid.any(2), valid.any(1)
    sizes = torch.stack((rows.sum(1), columns.sum(1)), dim=1)
    places = [torch.arange(count, device=size.device) < size[:, None] for count, size in zip(valid.shape[1:], sizes.T, strict=True)]
    is_corner = torch.equal(places[0][:, :, None] & places[1][:, None, :], valid)
    return [tuple(size) for size in sizes.tolist()] if is_corner else None


def require_bool(padding_mask: Tensor) -> None:
    """Refuse a padding mask that is not bool.

    Raises:
        TypeError: a mask of another dtype, which the message names.
    """
    if padding_mask.dtype != torch.bool:
        raise TypeError(f"padding_mask must be bool with True = padded, got {padding_mask.dtype}; use mask.bool()")
