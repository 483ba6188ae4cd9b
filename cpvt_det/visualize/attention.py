# SPDX-License-Identifier: Apache-2.0
"""Where a detector looks: heat maps of DETR's attention, sampling points of Deformable-DETR's, and where a query of DETR looks
because of its own position, averaged over images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from cpvt_det.common.structures import Size
from cpvt_det.layers.attention import DeformableAttention
from cpvt_det.visualize import recording
from cpvt_det.visualize.figures import new_grid, save_figure
from cpvt_det.visualize.pictures import hex_color
from cpvt_det.visualize.position import NamedDetector, added_by
from cpvt_det.visualize.recording import AttendedQuery, ForwardRecord, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKER = "#00e5ff"
MARGIN = 0.06  # white border around an image, as a share of its sides, for points outside the image
LARGEST_POINT = 140.0  # area, in square points, of a sample that has the whole weight of its head


def draw_attention(record: ForwardRecord, tokens: Sequence[AttendedQuery], output: Path) -> list[Path]:
    """Draw ``encoder.png`` for tokens and ``decoder.png`` for detections, layer by layer. Two more pictures show the heads of the
    last encoder layer and of the last decoder layer.

    Args:
        record: record of one image's forward pass.
        tokens: tokens of the encoder, one per row of the picture.
        output: a folder.

    Returns:
        The paths of the files.
    """
    paths = []
    for part, attended in (("encoder", tokens), ("decoder", record.found)):
        layers, is_dense = len(record.layers[part]), record.is_dense(part)
        if not layers or not attended:
            continue
        what = "attention" if is_dense else "sampling points"
        mean = ", mean over heads" if is_dense else ", all heads"
        by_layer = [(f"layer {n}", n, None) for n in range(layers)]
        last = record.layers[part][-1]
        heads = range(last.num_heads if is_dense else last.samples[0])
        by_head = [(f"head {head}", layers - 1, head) for head in heads]
        paths.append(_draw(record, part, attended, by_layer, f"{part}, {what}{mean}", output / f"{part}.png"))
        title = f"{part}, {what} of the last layer ({layers - 1}) by head"
        paths.append(_draw(record, part, attended, by_head, title, output / f"{part}_heads.png"))
    return paths


def _draw(
    record: ForwardRecord,
    part: str,
    attended: Sequence[AttendedQuery],
    columns: Sequence[tuple[str, int, int | None]],
    title: str,
    path: Path,
) -> Path:
    """Draw queries in rows. Columns are triples of name, layer and head, where ``None`` means all heads."""
    height, width = record.original_size
    side = max(2.4, min(4.0, 8 / len(columns)))  # inches, the long side of a panel
    panel = (side * min(1, width / height), side * min(1, height / width) + 0.35)
    figure, panels = new_grid(len(attended), len(columns), panel, title)
    paint: Callable = _paint_weights if record.is_dense(part) else _paint_samples
    for column, (name, layer, head) in enumerate(columns):
        seen = look(record, part, layer, [query.index for query in attended])
        for row, query in enumerate(attended):
            axes = panels[row, column]
            grey = record.image.float().mean(0).cpu().numpy()  # in the background, in pixels of the original image
            axes.imshow(grey, extent=(0, width, height, 0), cmap="gray", vmin=-60, vmax=255, interpolation="bilinear")
            axes.set(xlim=(-MARGIN * width, (1 + MARGIN) * width), ylim=((1 + MARGIN) * height, -MARGIN * height))
            axes.spines[:].set_visible(False)
            note = paint(axes, record, seen, row, head)
            if query.box is not None:
                _outline(axes, query.box, "-")
            elif query.point is not None:
                axes.plot(*query.point, "o", color=MARKER, markersize=10, markeredgewidth=1.8, markerfacecolor="none")
            axes.set_title(f"{name}, {note}", fontsize=8)
            if column == 0:
                axes.set_ylabel(query.name, fontsize=9)
    if not record.is_dense(part):
        for level, stride in enumerate(record.strides):
            panels[0, 0].scatter([], [], 30, color=hex_color(level), label=f"level {level}, stride {stride}")
        wide = min(len(record.strides), 2 * len(columns))
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=wide, fontsize=8)
    save_figure(figure, path)
    return path


def look(record: ForwardRecord, part: str, layer: int, chosen: list[int]) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """The attention weights or sampling points of tokens or queries in one layer.

    Args:
        record: record of one image's forward pass.
        part: "encoder" or "decoder".
        layer: index of the layer.
        chosen: indices of Q' tokens or queries.

    Returns:
        For dense attention, weights (1, M, Q', N) float. For deformable attention, the locations of samples (1, Q', M, L, P, 2) and
        their weights (1, Q', M, L, P), as in :meth:`cpvt_det.layers.attention.DeformableAttention.sample`, and the reference points
        (1, Q', L, 2 or 4). All tensors are on the CPU.
    """
    attention, inputs = record.layers[part][layer], record.inputs[part, layer]
    with torch.no_grad():
        if record.is_dense(part):
            return recording.attention_weights(attention, *inputs, chosen=chosen).cpu()
        queries, references, _, levels = inputs
        samples = attention.sample(queries[:, chosen], references[:, chosen], levels)
        return *(part.cpu() for part in samples), references[:, chosen].cpu()


def _paint_weights(axes: "Axes", record: ForwardRecord, weights: Tensor, row: int, head: int | None) -> str:
    """Draw a heat map of the cells that get more than uniform attention. Return a note with the peak, in multiples of uniform
    attention."""
    heat, (right, bottom) = heat_map(record, weights[0, :, row].mean(0) if head is None else weights[0, head, row])
    peak = heat.max()
    share = ((heat - 1) / max(peak - 1, 1e-6)).clip(0, 1)
    extent = (0, right, bottom, 0)
    drawn = axes.imshow(share, extent=extent, cmap="inferno", alpha=0.85 * share, vmin=0, vmax=1, interpolation="bilinear")
    height, width = record.original_size  # the last cells reach into the padding
    drawn.set_clip_path(axes.fill([0, width, width, 0], [0, 0, height, height], fill=False, linewidth=0)[0])
    return f"peak {peak:.1f} x even"


def heat_map(record: ForwardRecord, weights: Tensor) -> tuple[np.ndarray, Point]:
    """The attention by cell, without the padding.

    Args:
        record: record of one image's forward pass.
        weights: (N,) float, the weights of one token or query; they sum to 1.

    Returns:
        An array (rows, columns) float32 in multiples of uniform attention, and the (x, y) of the array's lower right corner in
        pixels of the original image. The corner may lie outside the image.
    """
    stride, (x, y) = record.strides[-1], record.scale
    # Padded cells have no weight, and lie beyond the image.
    rows, columns = (-(-side // stride) for side in record.image.shape[1:])
    heat = weights.view(record.shape_of(stride))[:rows, :columns].numpy() * (rows * columns)
    return heat, (columns * stride * x, rows * stride * y)


def _paint_samples(axes: "Axes", record: ForwardRecord, seen: tuple[Tensor, ...], row: int, head: int | None) -> str:
    """Draw the reference point, and a dot per sample, whose colour is the level and whose size is the weight. Return a note with
    each level's share of the weights."""
    heads = slice(None) if head is None else slice(head, head + 1)
    locations, weights, references = seen[0][0, row, heads], seen[1][0, row, heads], seen[2]
    size = torch.tensor([record.canvas[1] * record.scale[0], record.canvas[0] * record.scale[1]])
    for level in range(locations.shape[1]):
        x, y = (locations[:, level].flatten(0, 1) * size).T.numpy()
        area = LARGEST_POINT * weights[:, level].flatten().numpy()
        x, y, area = (values[area > 0] for values in (x, y, area))  # a level may lack points
        axes.scatter(x, y, area, color=hex_color(level), linewidths=0.3, edgecolors="white")
    reference = references[0, row, 0]
    x, y = (reference[:2] * size).tolist()
    axes.plot(x, y, "+", color=MARKER, markersize=9, markeredgewidth=1.8)
    if len(reference) == 4:
        width, height = (reference[2:] * size).tolist()
        _outline(axes, (x - width / 2, y - height / 2, x + width / 2, y + height / 2), ":")
    shares = weights.sum(dim=(0, 2)) / len(weights)
    return "levels " + "/".join(f"{100 * share:.0f}" for share in shares.tolist()) + " %"


def _outline(axes: "Axes", box_xyxy: Sequence[float], style: str) -> None:
    x1, y1, x2, y2 = box_xyxy
    axes.plot([x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1], style, color=MARKER, linewidth=1.4)


@dataclass
class AttentionByPosition:
    """The attention of one encoder layer, averaged over images and heads.

    Attributes:
        layer: index of the layer.
        weights: (H, W, H, W) float: row and column of the query, then row and column of the key.
    """

    layer: int
    weights: Tensor

    @property
    def shape(self) -> Size:
        """(H, W)."""
        return tuple(self.weights.shape[:2])

    def by_offset(self) -> Tensor:
        """(2 H - 1, 2 W - 1) float, the mean over all pairs for each offset from query to key; offset 0 is in the middle."""
        height, width = self.shape
        total, count = torch.zeros(2, 2 * height - 1, 2 * width - 1).unbind(0)
        for y in range(height):
            for x in range(width):
                window = slice(height - 1 - y, 2 * height - 1 - y), slice(width - 1 - x, 2 * width - 1 - x)
                total[window] += self.weights[y, x]
                count[window] += 1
        return total / count

    def pairs(self) -> Tensor:
        """(H W, H W) float, the attention by query and key, in multiples of uniform attention."""
        return self.weights.flatten(0, 1).flatten(1) * math.prod(self.shape)

    def on_itself(self) -> float:
        """The mean weight of a query's own cell, in multiples of uniform attention."""
        return self.pairs().diagonal().mean().item()


def dense_models(models: Sequence[NamedDetector]) -> list[NamedDetector]:
    """The models whose encoder has layers and attends to all tokens, of one level."""
    layers = [recording.attention_layers(model.detector)["encoder"] for model in models]
    return [model for model, of in zip(models, layers, strict=True) if of and not isinstance(of[0], DeformableAttention)]


def average_attention(detector: nn.Module, images: Sequence[Tensor], layer: int) -> AttentionByPosition:
    """Average the attention of an encoder layer.

    Args:
        detector: a DETR in evaluation mode; not changed.
        images: (3, h, w) uint8 each, all of one size.
        layer: index of the layer; the last layer is used if the index is too high.
    """
    layers = recording.attention_layers(detector)["encoder"]
    layer = min(layer, len(layers) - 1)
    return mean_attention(detector, images, layer, layers[layer], detector.strides[-1])


@torch.no_grad()
def mean_attention(
    model: nn.Module, images: Sequence[Tensor], layer: int, attention: nn.Module, stride: int, special: int = 0
) -> AttentionByPosition:
    """Average the attention of one layer of a model.

    Args:
        model: image model in evaluation mode; not changed.
        images: (3, h, w) uint8 each, all of one size.
        layer: index of the layer.
        attention: the attention module of that layer.
        stride: pixels per cell.
        special: number of tokens before the tokens of the cells, such as a class token. They are left out as queries and as keys,
            so a query's weights sum to less than 1 if it attends to them.
    """
    total = 0.0
    for image in images:
        batch = model.preprocess([image])
        with recording.record_inputs({"chosen": attention}) as inputs:
            model(batch.images, batch.padding_mask)
        total = total + recording.attention_weights(attention, *inputs["chosen"])[0, :, special:, special:].mean(0)
    shape = tuple(-(-side // stride) for side in batch.images.shape[2:])
    return AttentionByPosition(layer, (total / len(images)).view(*shape, *shape).cpu())


def draw_attention_by_position(models: Sequence[NamedDetector], images: Sequence[Tensor], path: Path) -> None:
    """Draw the attention of several DETRs side by side. The same layer is drawn for all: the first one that comes after every
    model's encoding.

    Args:
        models: result of :func:`dense_models`, at least one.
        images: (3, h, w) uint8 each, all of one size.
        path: path of the picture.
    """
    layer = max((part.seen_by for model in models for part in added_by(model.detector, images[:1])[0]), default=0)
    found = [(model.name, average_attention(model.detector, images, layer)) for model in models]
    title = f"Encoder attention by position, mean over heads and {len(images)} images, in multiples of even attention"
    draw_found(found, title, path)


def draw_found(found: Sequence[tuple[str, AttentionByPosition]], title: str, path: Path) -> None:
    """Draw attention side by side. The upper row shows every pair of query and key, and the lower row shows the mean for each
    offset between query and key.

    Args:
        found: (name, attention) pairs, at least one.
        title: text above the picture.
        path: path of the picture.
    """
    figure, panels = new_grid(2, len(found), (3.4, 3.2), title)
    for (name, attention), (square, offset) in zip(found, panels.T, strict=True):
        pairs = attention.pairs()
        square.set_title(f"{name}\nlayer {attention.layer}, itself {attention.on_itself():.2f} x", fontsize=8)
        low, high = common_range(pairs)
        square.imshow(pairs.numpy(), vmin=low, vmax=high, cmap="viridis", interpolation="antialiased")
        height, width = attention.shape
        y, x = height // 2, width // 2  # large offsets have few pairs
        near = attention.by_offset()[height - 1 - y : height + y, width - 1 - x : width + x] * height * width
        extent = (-x - 0.5, x + 0.5, y + 0.5, -y - 0.5)
        offset.imshow(near.numpy(), extent=extent, cmap="viridis")
        for axes in (square, offset):
            figure.colorbar(axes.images[0], ax=axes, fraction=0.045, pad=0.02).ax.tick_params(labelsize=7)
        offset.set(xticks=[-x, 0, x], yticks=[-y, 0, y])
    height, width = found[0][1].shape
    panels[0, 0].set_ylabel(f"query (row), key (column),\nof {height} x {width} cells", fontsize=8)
    panels[1, 0].set_ylabel("by offset from query to key,\nthe query itself in the middle", fontsize=8)
    save_figure(figure, path)


def common_range(values: Tensor) -> tuple[float, float]:
    """The range without a few extreme values, which would leave little contrast for the rest."""
    some = values.flatten()[:: 1 + values.numel() // 10**6]  # torch computes quantiles of a limited number of values
    return tuple(torch.quantile(some, torch.tensor([0.001, 0.999])).tolist())
