# SPDX-License-Identifier: Apache-2.0
"""Pictures of the terms that position encodings add to a detector's features, and of the kernels that PEG has learned."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as TF
from torchvision.utils import make_grid

from cpvt_det.common.structures import Size, level_padding_mask
from cpvt_det.data.images import read_image
from cpvt_det.data.listing import find_files
from cpvt_det.data.shapes.scene import ShapesSpec, draw_image
from cpvt_det.position.encoding import PositionEncoding
from cpvt_det.position.peg import PEGDetection
from cpvt_det.visualize.figures import new_grid, save_figure

GROUPS = 8  # number of groups of neighbouring channels
DIVERGING = "RdBu_r"
MOST_READ = 16
DRAWN = 4


@dataclass
class NamedDetector:
    """A detector in evaluation mode and its name in pictures."""

    name: str
    detector: nn.Module


@dataclass
class Added:
    """The maps that a position encoding adds at one place.

    Attributes:
        layer: index of the encoder layer before this place; -1 for the place before the first layer; ``None`` for maps that are
            added to the queries and keys of every layer.
        maps: (B, C, H_l, W_l) float per level.
    """

    layer: int | None
    maps: list[Tensor]

    @property
    def where(self) -> str:
        """The place in words."""
        if self.layer is None:
            return "to queries and keys"
        return "before the first layer" if self.layer < 0 else f"after layer {self.layer}"

    @property
    def seen_by(self) -> int:
        """The first layer whose attention sees the maps."""
        return 0 if self.layer is None else self.layer + 1


@contextlib.contextmanager
def record_added(position: PositionEncoding) -> Iterator[list[Added]]:
    """Within the block, record the maps that an encoding adds to queries and keys or to tokens.

    Yields:
        A list with one entry per place, in the order of the calls.
    """
    added: list[Added] = []

    def note_additive(_: nn.Module, args: tuple[Any, ...], maps: list[Tensor] | None) -> None:
        if maps is not None:
            added.append(Added(None, list(maps)))

    def inject(tokens: Tensor, padding_mask: Tensor, level_shapes: Sequence[Size], layer: int) -> Tensor:
        out = type(position).inject(position, tokens, padding_mask, level_shapes, layer)
        if out is not tokens:
            parts = (out - tokens).split([height * width for height, width in level_shapes], dim=1)
            maps = [part.unflatten(1, shape).permute(0, 3, 1, 2) for part, shape in zip(parts, level_shapes, strict=True)]
            added.append(Added(layer, maps))
        return out

    with position.register_forward_hook(note_additive):
        position.inject = inject  # only on this object, because the encoder calls its method
        try:
            yield added
        finally:
            del position.inject


def images_of_size(source: str, output: Path, size: Size) -> list[Tensor]:
    """Read or draw images, stretched to a size.

    Args:
        source: file, folder or glob; the first 16 images by name are read. If it is empty, four images are drawn.
        output: output folder; no images below it are read.
        size: (h, w) of the result.

    Returns:
        Images, (3, h, w) uint8 each.

    Raises:
        DataError: a source without images, or an image that cannot be read.
    """
    if source:
        found = [read_image(str(path)) for path in find_files(source, output)[0][:MOST_READ]]
    else:
        rng = np.random.default_rng(0)
        found = [torch.from_numpy(draw_image(ShapesSpec(), rng)[0]).permute(2, 0, 1) for _ in range(DRAWN)]
    return [TF.resize(image, list(size), antialias=True) for image in found]


@torch.no_grad()
def added_by(detector: nn.Module, images: Sequence[Tensor], beside: Tensor | None = None) -> tuple[list[Added], Tensor]:
    """The maps that the encoding adds to the features of images of one size, as the mean over the images.

    Args:
        detector: a detector in evaluation mode; not changed.
        images: (3, h, w) uint8 each.
        beside: (3, h', w') uint8, a larger image that is put into the same batch, so that the other images are padded.

    Returns:
        One entry per place where something is added, with maps (1, C, H_l, W_l); and the padding mask (1, H, W) of the images.
    """
    batch = detector.preprocess([*images, *([] if beside is None else [beside])])
    with record_added(detector.position) as added:
        detector(batch.images, batch.padding_mask)
    means = [Added(part.layer, [maps[: len(images)].mean(0, keepdim=True).cpu() for maps in part.maps]) for part in added]
    return means, batch.padding_mask[:1].cpu()


def draw_added(models: Sequence[NamedDetector], images: Sequence[Tensor], path: Path) -> Path:
    """Draw the maps that encodings add to the finest level. One row shows images alone, and one row shows the same images with
    padding.

    Args:
        models: detectors to compare.
        images: (3, h, w) uint8 each, all of one size.
        path: path of the picture.
    """
    height, width = images[0].shape[1:]
    beside = torch.zeros(3, -(-height * 4 // 3), -(-width * 4 // 3), dtype=torch.uint8)
    rows: list[tuple[str, dict[str, np.ndarray]]] = []
    for model in models:
        alone, padded = added_by(model.detector, images), added_by(model.detector, images, beside)
        if not alone[0]:
            rows.append((f"{model.name}\nadds nothing", {}))
        for name, (parts, mask) in (("alone", alone), ("padded", padded)):
            rows += [(f"{model.name}\n{part.where}\n{name}", _groups(part.maps[0], mask)) for part in parts]
    title = f"What is added: the mean of {GROUPS} groups of channels and {len(images)} images of {width} x {height}; grey: padding"
    figure, panels = new_grid(len(rows), GROUPS, (1.45, 1.45 * max(0.75, height / width) + 0.2), title)
    for (name, groups), line in zip(rows, panels, strict=True):
        line[0].set_ylabel(name, fontsize=7, rotation=0, ha="right", va="center")
        line[0].set(frame_on=bool(groups))
        for axes in line[max(1, len(groups)) :]:
            axes.set_axis_off()
        bound = max((float(np.nanmax(np.abs(group))) for group in groups.values()), default=0) or 1.0
        for axes, (channels, group) in zip(line, groups.items(), strict=False):
            axes.set_facecolor("0.75")
            axes.set_title(channels, fontsize=7)
            drawn = axes.imshow(group, cmap=DIVERGING, vmin=-bound, vmax=bound, interpolation="nearest")
        if groups:
            figure.colorbar(drawn, ax=line.tolist(), fraction=0.02, pad=0.01).ax.tick_params(labelsize=6)
    save_figure(figure, path)
    return path


def _groups(maps: Tensor, mask: Tensor) -> dict[str, np.ndarray]:
    """The mean (H, W) of each group of channels of (1, C, H, W) maps, by the group's channels; NaN under the padding."""
    padded = level_padding_mask(mask, mask.shape[1] // maps.shape[2])[0]
    count = min(GROUPS, maps.shape[1])
    borders = itertools.pairwise(round(number * maps.shape[1] / count) for number in range(count + 1))
    return {f"{a} to {b - 1}": maps[0, a:b].mean(0).masked_fill(padded, math.nan).numpy() for a, b in borders}


def draw_kernels(models: Sequence[NamedDetector], path: Path) -> Path | None:
    """Draw the kernels of every PEG, one per channel, and their mean; ``None`` if no detector has a PEG.

    Args:
        models: detectors to compare.
        path: path of the picture.
    """
    pegs = [
        (f"{model.name}\n{_place(name)}", module)
        for model in models
        for name, module in model.detector.position.named_modules()
        if isinstance(module, PEGDetection)
    ]
    if not pegs:
        return None
    title = "Kernels of PEG before its norm, one per channel, in rows; right: their mean"
    figure, panels = new_grid(len(pegs), 2, (4.2, 4.0), title)
    for (name, peg), (mosaic, mean) in zip(pegs, panels, strict=True):
        kernels = peg.depthwise.weight.detach()[:, 0].float().cpu()
        bound = kernels.abs().max().item() or 1.0
        columns = math.ceil(math.sqrt(len(kernels)))
        grid = make_grid(kernels[:, None], columns, padding=1, pad_value=math.nan)[0, 1:-1, 1:-1]  # NaN between kernels
        drawn = mosaic.imshow(grid.numpy(), cmap=DIVERGING, vmin=-bound, vmax=bound, interpolation="nearest")
        figure.colorbar(drawn, ax=mosaic, fraction=0.04)
        mosaic.set_ylabel(name, fontsize=8)
        mosaic.set_facecolor("0.6")
        center = kernels.mean(0)
        bound = center.abs().max().item() or 1.0
        mean.imshow(center.numpy(), cmap=DIVERGING, vmin=-bound, vmax=bound)
        for row, values in enumerate(center.tolist()):
            for column, value in enumerate(values):
                mean.text(column, row, f"{value:.3f}", ha="center", va="center", bbox={"fc": "white", "lw": 0, "pad": 1.5})
    save_figure(figure, path)
    return path


def _place(name: str) -> str:
    """Describe in words the place of a PEG, which is given by a name such as ``pegs.0.1`` (layer 0, level 1). If there is a third
    number, it is an index in a stack. If there is only one number, the PEG belongs to an encoding of queries and keys."""
    _, *layer, level = name.split(".")[:3]
    stacked = "".join(f", number {place}" for place in name.split(".")[3:])
    where = {"": "to queries and keys", "before": "before the first layer"}.get("".join(layer), f"after layer {''.join(layer)}")
    return f"{where}, level {level}{stacked}"
