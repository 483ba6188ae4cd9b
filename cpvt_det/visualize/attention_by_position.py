# SPDX-License-Identifier: Apache-2.0
"""DETR's encoder attention by position: where a query looks because of its own position, averaged over images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cpvt_det.common.structures import Size
from cpvt_det.visualize.figures import new_grid, save_figure
from cpvt_det.visualize.position import NamedDetector, added_by
from cpvt_det.visualize.recording import attention_layers, attention_weights, record_inputs


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
    """The models whose encoder has layers and attends to all tokens."""
    return [model for model in models if not model.detector.needs_references and attention_layers(model.detector)["encoder"]]


def average_attention(detector: nn.Module, images: Sequence[Tensor], layer: int) -> AttentionByPosition:
    """Average the attention of an encoder layer.

    Args:
        detector: a DETR in evaluation mode; not changed.
        images: (3, h, w) uint8 each, all of one size.
        layer: index of the layer; the last layer is used if the index is too high.
    """
    layers = attention_layers(detector)["encoder"]
    layer = min(layer, len(layers) - 1)
    return mean_attention(detector, images, layer, layers[layer], detector.backbone.strides[-1])


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
        with record_inputs({"chosen": attention}) as inputs:
            model(batch.images, batch.padding_mask)
        total = total + attention_weights(attention, *inputs["chosen"])[0, :, special:, special:].mean(0)
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
