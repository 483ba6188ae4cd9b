# SPDX-License-Identifier: Apache-2.0
"""Where a detector looks: heat maps of DETR's attention, sampling points of Deformable-DETR's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpvt_det.visualize.curves import save_figure
from cpvt_det.visualize.figures import new_grid, show_faded
from cpvt_det.visualize.forward_record import Observation, Subject
from cpvt_det.visualize.pictures import class_color
from cpvt_det.visualize.recording import Samples, attention_weights, sampling_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKER = "#00e5ff"
LARGEST_POINT = 140.0  # square points, of a sample with all the weight of its head


def draw_attention(observation: Observation, points: Sequence[Subject], output: Path) -> list[Path]:
    """Draw ``encoder.png`` for tokens and ``decoder.png`` for detections by layer, and the last layer of each by head.

    Args:
        observation: of the image.
        points: tokens of the encoder.
        output: a folder.

    Returns:
        The files.
    """
    paths = []
    for part, subjects in (("encoder", points), ("decoder", observation.found)):
        layers = len(observation.layers[part])
        if not layers or not subjects:
            continue
        what = "attention" if observation.is_dense else "sampling points"
        mean = ", mean over heads" if observation.is_dense else ", all heads"
        by_layer = [(f"layer {n}", n, None) for n in range(layers)]
        heads = range(_num_heads(observation, part))
        by_head = [(f"head {head}", layers - 1, head) for head in heads]
        paths.append(_draw(observation, part, subjects, by_layer, f"{part}, {what}{mean}", output / f"{part}.png"))
        title = f"{part}, {what} of the last layer ({layers - 1}) by head"
        paths.append(_draw(observation, part, subjects, by_head, title, output / f"{part}_heads.png"))
    return paths


def _draw(
    observation: Observation,
    part: str,
    subjects: Sequence[Subject],
    columns: Sequence[tuple[str, int, int | None]],
    title: str,
    path: Path,
) -> Path:
    """Subjects in rows; in columns a name, a layer and a head, ``None`` for all."""
    height, width = observation.original_size
    side = max(2.4, min(4.0, 8 / len(columns)))  # inches, the long side of a panel
    panel = (side * min(1, width / height), side * min(1, height / width) + 0.35)
    figure, panels = new_grid(len(subjects), len(columns), panel, title)
    paint: Callable = _paint_weights if observation.is_dense else _paint_samples
    for column, (name, layer, head) in enumerate(columns):
        seen = _look(observation, part, layer, [subject.index for subject in subjects])
        for row, subject in enumerate(subjects):
            axes = panels[row, column]
            show_faded(axes, observation.image, observation.original_size)
            note = paint(axes, observation, seen, row, head)
            _mark(axes, subject)
            axes.set_title(f"{name}, {note}", fontsize=8)
            if column == 0:
                axes.set_ylabel(subject.name, fontsize=9)
    if not observation.is_dense:
        _name_levels(figure, panels[0, 0], observation, columns=min(len(observation.strides), 2 * len(columns)))
    save_figure(figure, path)
    return path


def _look(observation: Observation, part: str, layer: int, chosen: list[int]) -> Tensor | tuple[Samples, Tensor]:
    """(1, M, Q', N) weights; or samples and the (1, Q', L, 2 or 4) references they are around."""
    attention, inputs = observation.layers[part][layer], observation.inputs[part, layer]
    with torch.no_grad():
        if observation.is_dense:
            queries, keys, values, *mask = inputs
            return attention_weights(attention, queries[:, chosen], keys, values, *mask).cpu()
        queries, references, _, levels = inputs
        samples = sampling_points(attention, queries[:, chosen], references[:, chosen], levels)
        return Samples(samples.locations.cpu(), samples.weights.cpu()), references[:, chosen].cpu()


def _paint_weights(axes: "Axes", observation: Observation, weights: Tensor, row: int, head: int | None) -> str:
    """A heat map of what gets more than even attention; returns how much more the strongest cell gets."""
    shown = weights[0, :, row].mean(0) if head is None else weights[0, head, row]
    shape, stride, (x, y) = observation.shape_of(0), observation.strides[0], observation.scale
    # Padded cells have no weight, and lie beyond the image.
    rows, columns = (-(-side // stride) for side in observation.image.shape[1:])
    heat = shown.view(shape)[:rows, :columns].numpy() * (rows * columns)
    peak = heat.max()
    share = ((heat - 1) / max(peak - 1, 1e-6)).clip(0, 1)
    extent = (0, columns * stride * x, rows * stride * y, 0)
    drawn = axes.imshow(share, extent=extent, cmap="inferno", alpha=0.85 * share, vmin=0, vmax=1, interpolation="bilinear")
    height, width = observation.original_size  # the last cells reach into the padding
    drawn.set_clip_path(axes.fill([0, width, width, 0], [0, 0, height, height], fill=False, linewidth=0)[0])
    return f"peak {peak:.1f} x even"


def _paint_samples(axes: "Axes", observation: Observation, seen: tuple[Samples, Tensor], row: int, head: int | None) -> str:
    """Dots of the colour of their level and the area of their weight, and what they are around."""
    samples, references = seen
    heads = slice(None) if head is None else slice(head, head + 1)
    locations, weights = samples.locations[0, row, heads], samples.weights[0, row, heads]
    size = torch.tensor([observation.canvas[1] * observation.scale[0], observation.canvas[0] * observation.scale[1]])
    for level in range(locations.shape[1]):
        x, y = (locations[:, level].flatten(0, 1) * size).T.numpy()
        area = LARGEST_POINT * weights[:, level].flatten().numpy()
        axes.scatter(x, y, area, color=_level_color(level), linewidths=0.3, edgecolors="white")
    reference = references[0, row, 0]
    x, y = (reference[:2] * size).tolist()
    axes.plot(x, y, "+", color=MARKER, markersize=9, markeredgewidth=1.8)
    if len(reference) == 4:
        width, height = (reference[2:] * size).tolist()
        _outline(axes, (x - width / 2, y - height / 2, x + width / 2, y + height / 2), ":")
    shares = weights.sum(dim=(0, 2)) / len(weights)
    return "levels " + "/".join(f"{100 * share:.0f}" for share in shares.tolist()) + " %"


def _mark(axes: "Axes", subject: Subject) -> None:
    if subject.box is not None:
        _outline(axes, subject.box, "-")
    elif subject.point is not None:
        axes.plot(*subject.point, "o", color=MARKER, markersize=10, markeredgewidth=1.8, markerfacecolor="none")


def _outline(axes: "Axes", box_xyxy: Sequence[float], style: str) -> None:
    x1, y1, x2, y2 = box_xyxy
    axes.plot([x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1], style, color=MARKER, linewidth=1.4)


def _name_levels(figure: "Figure", axes: "Axes", observation: Observation, columns: int) -> None:
    for level, stride in enumerate(observation.strides):
        axes.scatter([], [], 30, color=_level_color(level), label=f"level {level}, stride {stride}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=8)


def _level_color(level: int) -> tuple[float, ...]:
    return tuple(value / 255 for value in class_color(level))


def _num_heads(observation: Observation, part: str) -> int:
    layer = observation.layers[part][-1]
    return layer.num_heads if observation.is_dense else layer.samples[0]
