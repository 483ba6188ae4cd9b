# SPDX-License-Identifier: Apache-2.0
"""What happens inside a vision transformer: attention between patches, patches as feature maps, pixels of a TNT."""

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Size
from cpvt_det.models import VisionTransformer
from cpvt_det.models.backbones.tnt import TransformerInTransformer
from cpvt_det.visualize.attention import AttentionByPosition, common_range, mean_attention
from cpvt_det.visualize.figures import new_grid, save_figure
from cpvt_det.visualize.position import NamedDetector

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GAP = 1  # cells of NaN between tiles


def transformer_of(model: NamedDetector) -> VisionTransformer:
    """The backbone of a model.

    Raises:
        BadInputError: a backbone without patches.
    """
    backbone = model.detector.backbone
    if not isinstance(backbone, VisionTransformer):
        raise BadInputError(f"{model.name} has no patches: its backbone is no DeiT, CPVT or TNT")
    return backbone


def choose_layers(model: NamedDetector, chosen: Sequence[int]) -> list[int]:
    """The layers to draw of a model: the chosen ones; without any, the first, the middle and the last.

    Raises:
        BadInputError: a layer that it does not have.
    """
    count = len(transformer_of(model).encoder.layers)
    for layer in chosen:
        if not 0 <= layer < count:
            raise BadInputError(f"{model.name} has layers 0 to {count - 1}, not {layer}")
    return list(chosen) or sorted({0, (count - 1) // 2, count - 1})


def patch_attention(model: NamedDetector, images: Sequence[Tensor], layer: int) -> AttentionByPosition:
    """The attention between the patches in one layer, the mean over heads and images.

    Args:
        model: a model on a vision transformer, in evaluation mode; not changed.
        images: (3, h, w) uint8 each, all of one size.
        layer: index of the layer.

    Source: arXiv 2102.10882, figures of DeiT's and CPVT's attention.
    """
    backbone = transformer_of(model)
    (layer,) = choose_layers(model, [layer])
    part = backbone.encoder.layers[layer]
    attention = part.outer.self_attn if isinstance(backbone, TransformerInTransformer) else part.self_attn
    return mean_attention(model.detector, images, layer, attention, backbone.strides[0], backbone.num_tokens)


@torch.no_grad()
def patch_features(model: NamedDetector, image: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """The patches after layers, as maps.

    Args:
        model: a model on a vision transformer, in evaluation mode; not changed.
        image: (3, h, w) uint8.
        layers: indices of layers.

    Returns:
        Layer -> (C, H, W) float.
    """
    backbone = transformer_of(model)
    outputs, (height, width) = _outputs(model, image, layers)
    tokens = {layer: out[0] if isinstance(out, tuple) else out for layer, out in outputs.items()}
    maps = {layer: out[0, backbone.num_tokens :].unflatten(0, (height, width)) for layer, out in tokens.items()}
    return {layer: out.permute(2, 0, 1).float().cpu() for layer, out in maps.items()}  # (H, W, C) -> (C, H, W)


@torch.no_grad()
def pixel_features(model: NamedDetector, image: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """The pixel tokens of a TNT after layers, the mean over their channels.

    Args:
        model: a model on a TNT, in evaluation mode; not changed.
        image: (3, h, w) uint8.
        layers: indices of layers.

    Returns:
        Layer -> (H, W, side, side) float: row and column of the patch, then of the pixel token in it.

    Raises:
        BadInputError: a model without pixel tokens.
    """
    if not isinstance(transformer_of(model), TransformerInTransformer):
        raise BadInputError(f"{model.name} has no pixel tokens: its backbone is no TNT")
    outputs, shape = _outputs(model, image, layers)
    means = {layer: pixels.mean(-1) for layer, (_, pixels) in outputs.items()}  # (H * W, side * side)
    return {layer: mean.view(*shape, *[math.isqrt(mean.shape[1])] * 2).float().cpu() for layer, mean in means.items()}


def _outputs(model: NamedDetector, image: Tensor, layers: Sequence[int]) -> tuple[dict[int, Any], Size]:
    """What layers return, and (H, W) of the patches."""
    backbone, batch = transformer_of(model), model.detector.preprocess([image])
    outputs: dict[int, Any] = {}
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            part = backbone.encoder.layers[layer]
            hooks.enter_context(part.register_forward_hook(lambda _, args, out, layer=layer: outputs.update({layer: out})))
        model.detector(batch.images, batch.padding_mask)
    height, width = (-(-side // backbone.strides[0]) for side in batch.images.shape[2:])
    return outputs, (height, width)


def as_tiles(values: Tensor) -> Tensor:
    """(H, W, h, w) -> (H * (h + 1) - 1, W * (w + 1) - 1): a grid of H x W tiles, with one cell of NaN between them."""
    rows, columns, height, width = values.shape
    canvas = values.new_full((rows, columns, height + GAP, width + GAP), math.nan)
    canvas[:, :, :height, :width] = values
    tiled = canvas.permute(0, 2, 1, 3).reshape(rows * (height + GAP), columns * (width + GAP))
    return tiled[:-GAP, :-GAP]


def draw_attention_grids(found: Sequence[tuple[str, AttentionByPosition]], title: str, path: Path) -> Path:
    """Draw a grid of grids for each model: the tile in row y and column x is where the patch at (x, y) looks.

    Args:
        found: names and attention, at least one.
        title: text above.
        path: path of the picture.

    Source: arXiv 2102.10882, figure of the attention of CPVT's second block.
    """
    figure, panels = new_grid(1, len(found), (6.4, 6.4), title)
    for (name, attention), axes in zip(found, panels[0], strict=True):
        cells = math.prod(attention.shape)
        low, high = common_range(attention.pairs())
        axes.set_title(f"{name}, layer {attention.layer}", fontsize=9)
        _show(axes, as_tiles(attention.weights * cells), low, high)
    save_figure(figure, path)
    return path


def draw_features(
    models: Sequence[NamedDetector], image: Tensor, layers: Sequence[int], count: int, path: Path, seed: int = 0
) -> Path:
    """Draw randomly chosen channels of the patches after layers, a row per model and layer, each channel in its own range.

    Args:
        models: models on vision transformers, in evaluation mode.
        image: (3, h, w) uint8.
        layers: as of :func:`choose_layers`.
        count: number of channels.
        path: path of the picture.
        seed: seed of the choice; models of as many channels get the same ones.

    Source: arXiv 2103.00112, figure of the feature maps of blocks 1, 6 and 12.
    """
    rows = [(model, layer, maps) for model in models for layer, maps in _by_layer(patch_features, model, image, layers)]
    count = min(count, *(len(maps) for _, _, maps in rows))
    height, width = image.shape[1:]
    panel = (1.3 * min(1, width / height) + 0.05, 1.3 * min(1, height / width) + 0.2)
    title = f"{count} channels of the patches after layers, of an image of {width} x {height}"
    figure, panels = new_grid(len(rows), count, panel, title)
    for (model, layer, maps), line in zip(rows, panels, strict=True):
        line[0].set_ylabel(f"{model.name}\nlayer {layer}", fontsize=6)
        for axes, channel in zip(line, channels_of(len(maps), count, seed), strict=True):
            axes.set_title(f"{channel}", fontsize=6)
            _show(axes, maps[channel])
    save_figure(figure, path)
    return path


def channels_of(channels: int, count: int, seed: int) -> list[int]:
    """Randomly chosen channels, ascending."""
    return sorted(torch.randperm(channels, generator=torch.Generator().manual_seed(seed))[:count].tolist())


def draw_pixels(models: Sequence[NamedDetector], image: Tensor, layers: Sequence[int], path: Path) -> Path:
    """Draw the pixel tokens of TNTs as tiles, one per patch, the mean over channels; a row per model, a column per layer.

    Args:
        models: models on TNTs, in evaluation mode.
        image: (3, h, w) uint8.
        layers: as of :func:`choose_layers`.
        path: path of the picture.

    Source: arXiv 2103.00112, figure of the pixel embeddings.
    """
    rows = [(model, _by_layer(pixel_features, model, image, layers)) for model in models]
    columns = max(len(found) for _, found in rows)
    title = "Pixel tokens after layers, the mean over channels; a tile is a patch"
    figure, panels = new_grid(len(rows), columns, (4.2, 4.2), title)
    for (model, found), line in zip(rows, panels, strict=True):
        line[0].set_ylabel(model.name, fontsize=8)
        for axes in line[len(found) :]:
            axes.set_axis_off()
        for axes, (layer, pixels) in zip(line, found, strict=False):
            axes.set_title(f"layer {layer}", fontsize=8)
            low, high = common_range(pixels)
            _show(axes, as_tiles(pixels), low, high)
    save_figure(figure, path)
    return path


def _by_layer(
    features: Callable[..., dict[int, Tensor]], model: NamedDetector, image: Tensor, layers: Sequence[int]
) -> list[tuple[int, Tensor]]:
    return list(features(model, image, choose_layers(model, layers)).items())


def _show(axes: "Axes", values: Tensor, low: float | None = None, high: float | None = None) -> None:
    axes.imshow(values.numpy(), vmin=low, vmax=high, cmap="viridis", interpolation="nearest")


def require_size(models: Sequence[NamedDetector], size: Size) -> None:
    """Refuse a size that models would pad: padded cells would be drawn as if they were patches.

    Raises:
        BadInputError: a side that is no multiple of a model's.
    """
    for model in models:
        divisor = model.detector.size_divisibility
        if any(side % divisor or not side for side in size):
            raise BadInputError(f"--size {size[0]}x{size[1]}: the sides must be multiples of {divisor} for {model.name}")
