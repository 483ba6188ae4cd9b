# SPDX-License-Identifier: Apache-2.0
"""Pictures to judge a detector by: detections beside the ground truth, and the curves of a run.

On the road of one image: after ``postprocess.py``, beside ``evaluation/coco.py``. matplotlib is only needed for curves.
"""

import colorsys
import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from cpvt_det.errors import BadInputError, DataError
from cpvt_det.structures import Detections

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_SIDE = 384  # pixels: images whose short side is below are enlarged, so that labels fit in them
MAX_SIDE = 2048  # pixels: what the long side may be enlarged to
GAP = 8  # white pixels between pictures

Color = tuple[int, int, int]
Corners = tuple[int, int, int, int]

logger = logging.getLogger(__name__)


def class_color(label: int) -> Color:
    """The colour of a class, the same in every picture; neighbouring classes are a golden angle apart."""
    hue = (0.02 + label * 0.61803398875) % 1
    red, green, blue = colorsys.hsv_to_rgb(hue, (0.95, 0.6)[label // 8 % 2], (1.0, 0.75)[label // 4 % 2])
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_comparison(
    image: Tensor,
    truth: Detections | None,
    detections: Detections,
    class_names: Sequence[str],
    score_threshold: float,
) -> Tensor:
    """One image twice, side by side: with its detections, and with its ground truth.

    Args:
        image: (3, H, W) uint8, RGB. It is enlarged by the whole number that makes its short side at least 384,
            or less where the long side would exceed 2048.
        truth: what is right, with any scores; without it there is one panel only.
        detections: boxes in pixels of ``image``.
        class_names: the name of each class.
        score_threshold: detections below it are left out.

    Returns:
        (3, H', W') uint8, the panels on white, each under its title.

    Raises:
        TypeError: an image that is not uint8.
        ValueError: an image that is not (3, H, W), a box that is not finite, or a label without a name.
    """
    if image.dtype != torch.uint8:
        raise TypeError(f"expected an image of dtype uint8, got {image.dtype}; use (255 * image).byte() for [0, 1]")
    if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        raise ValueError(f"expected an image of shape (3, H, W), got {tuple(image.shape)}")
    detections = detections.cpu()
    keep = detections.scores >= score_threshold
    detections = Detections(detections.boxes_xyxy[keep], detections.scores[keep], detections.labels[keep])
    title = f"detections ({len(detections.scores)} with score >= {score_threshold:g})"
    panels = [_draw_panel(image, detections, class_names, title, scored=True)]
    if truth is not None:
        title = f"ground truth ({len(truth.labels)})"
        panels.append(_draw_panel(image, truth.cpu(), class_names, title, scored=False))
    return _to_tensor(_arrange(panels, columns=2))


def save_contact_sheet(panels: Sequence[Tensor], path: str | os.PathLike[str], columns: int = 2) -> None:
    """Write pictures of any sizes, row by row on white, as one PNG.

    Args:
        panels: each (3, h, w) uint8.
        path: the file; folders that are missing are made.
        columns: pictures in a row.

    Raises:
        ValueError: no pictures or no columns.
    """
    if not panels or columns < 1:
        raise ValueError(f"expected at least one picture and one column, got {len(panels)} and {columns}")
    sheet = _arrange([_to_picture(panel) for panel in panels], columns)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, format="PNG")


def draw_curves(metrics_json: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Draw losses, learning rate and AP over the iterations of a run.

    Args:
        metrics_json: what :func:`read_metrics` reads, with "total_loss", "loss_*", "lr", "bbox/AP" and "bbox/AP50".
        output: the picture; its suffix chooses the format, and folders that are missing are made.

    Raises:
        BadInputError: matplotlib is not installed.
        DataError: no such file, or no line of it has an iteration.
    """
    figure = curves_figure(read_metrics(metrics_json))
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100)


def curves_figure(records: dict[int, dict[str, float]]) -> "Figure":
    """The matplotlib figure of :func:`draw_curves`, of records as :func:`read_metrics` returns them.

    What was never measured has a note in its place.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot, which keeps global state
    except ImportError as error:
        raise BadInputError("drawing curves needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    losses, rate, precision = figure.subplots(1, 3)
    parts = {key for record in records.values() for key in record if key.startswith("loss_")}
    _draw_lines(losses, "losses", records, ["total_loss", *sorted(parts)])
    if any(value > 0 for line in losses.lines for value in line.get_ydata()):
        losses.set_yscale("log", nonpositive="mask")
    _draw_lines(rate, "learning rate", records, ["lr"])
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    _draw_lines(precision, "AP", records, ["bbox/AP", "bbox/AP50"], marker="o")
    if precision.lines:
        precision.set(ylim=(0, None), ylabel="percent")
    return figure


def read_metrics(metrics_json: str | os.PathLike[str]) -> dict[int, dict[str, float]]:
    """Read a metrics file of detectron2's format, from a run that may have been stopped and resumed.

    Where the iteration steps back a run was resumed, and what the abandoned one had written from there on is dropped;
    lines of the same iteration are merged, the later value wins. Lines that are not whole, as a killed run leaves them,
    are skipped with a warning. NaN and Infinity may stand bare; they and ``null`` are read as NaN.

    Returns:
        by rising iteration, the numbers that were written.

    Raises:
        DataError: no such file, or no line of it has an iteration.
    """
    try:
        lines = Path(metrics_json).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"cannot read metrics from {os.fspath(metrics_json)!r}: {error.strerror}") from error
    records: dict[int, dict[str, float]] = {}
    skipped = 0
    for line in filter(str.strip, lines):
        record = _parse_line(line)
        if record is None:
            skipped += 1
            continue
        iteration = int(record.pop("iteration"))
        if records and iteration < next(reversed(records)):
            records = {earlier: values for earlier, values in records.items() if earlier < iteration}
        records.setdefault(iteration, {}).update(record)
    if not records:
        raise DataError(f"no line of {os.fspath(metrics_json)!r} is a JSON object with an iteration")
    if skipped:
        logger.warning("%s: skipped %d of %d lines, which are broken", metrics_json, skipped, len(lines))
    return records


def _parse_line(line: str) -> dict[str, float] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        return None
    numbers = {key: value for key, value in record.items() if value is None or isinstance(value, int | float)}
    return {key: math.nan if value is None or math.isinf(value) else value for key, value in numbers.items()}


def _draw_lines(
    axes: "Axes", title: str, records: dict[int, dict[str, float]], keys: Iterable[str], marker: str | None = None
) -> None:
    """One line a key that has a finite value; the title counts the others, and a panel without lines says so."""
    lost = 0
    for key in keys:
        points = [(iteration, record[key]) for iteration, record in records.items() if key in record]
        lost += sum(math.isnan(value) for _, value in points)
        if any(math.isfinite(value) for _, value in points):
            # a single point makes no line
            axes.plot(*zip(*points, strict=True), label=key, marker=marker or ("." if len(points) == 1 else None))
    axes.set_title(title + (f" ({lost} not finite)" if lost else ""))
    if axes.lines:
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
        axes.legend()
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"no {title} in this file", ha="center", transform=axes.transAxes)


def _draw_panel(image: Tensor, objects: Detections, names: Sequence[str], title: str, scored: bool) -> Image.Image:
    """An enlarged image with labelled boxes, under its title."""
    if not objects.boxes_xyxy.isfinite().all():
        raise ValueError(f"cannot draw boxes that are not finite, in {title!r}")
    unnamed = [label for label in objects.labels.tolist() if not 0 <= label < len(names)]
    if unnamed:
        raise ValueError(f"label {unnamed[0]} has no name among {len(names)} classes, in {title!r}")
    scale = max(1, min(-(-MIN_SIDE // min(image.shape[1:])), MAX_SIDE // max(image.shape[1:])))
    picture = _to_picture(image.cpu().repeat_interleave(scale, 1).repeat_interleave(scale, 2))
    short_side = min(picture.size)
    font = ImageFont.load_default(max(14, short_side // 36))
    boxes = [_corners(box, scale, picture.size) for box in objects.boxes_xyxy.tolist()]
    draw = ImageDraw.Draw(picture)
    for box, label in zip(boxes, objects.labels.tolist(), strict=True):
        draw.rectangle(box, outline=class_color(label), width=max(2, short_side // 200))
    taken: list[Corners] = []
    for box, label, score in zip(boxes, objects.labels.tolist(), objects.scores.tolist(), strict=True):
        text = f"{names[label]} {score:.2f}" if scored else names[label]
        _draw_label(draw, text, box, class_color(label), font, picture.size, taken)
    return _with_title(picture, title)


def _pixels(low: float, high: float, scale: int, side: int) -> tuple[int, int]:
    """First and last pixel of an interval in an enlarged image with ``side`` pixels, inside of it and at least one."""
    first = min(max(math.floor(low * scale), 0), side - 1)
    return first, min(max(math.ceil(high * scale) - 1, first), side - 1)


def _corners(box_xyxy: list[float], scale: int, size: tuple[int, int]) -> Corners:
    (left, right), (top, bottom) = (_pixels(box_xyxy[i], box_xyxy[i + 2], scale, size[i]) for i in (0, 1))
    return left, top, right, bottom


def _draw_label(
    draw: ImageDraw.ImageDraw,
    text: str,
    box: Corners,
    color: Color,
    font: ImageFont.FreeTypeFont,
    size: tuple[int, int],
    taken: list[Corners],
) -> None:
    """Write on a ground of the box's colour, where no label is yet if there is such a place near the box."""
    left, top, right, bottom = (round(value) for value in draw.textbbox((0, 0), text, font=font))
    width, height = right - left + 6, bottom - top + 6
    places = []
    for y in (box[1] - height, box[1], box[3] - height + 1, box[3] + 1):
        for x in (box[0], box[2] - width + 1):
            x, y = max(0, min(x, size[0] - width)), max(0, min(y, size[1] - height))
            places.append((x, y, x + width - 1, y + height - 1))
    place = next((place for place in places if not any(_overlap(place, other) for other in taken)), places[0])
    taken.append(place)
    bright = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 128
    draw.rectangle(place, fill=color)
    draw.text((place[0] + 3 - left, place[1] + 3 - top), text, fill="black" if bright else "white", font=font)


def _overlap(one: Corners, other: Corners) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]


def _with_title(picture: Image.Image, title: str) -> Image.Image:
    font = ImageFont.load_default(max(16, min(picture.size) // 30))
    strip = round(1.6 * font.size)
    canvas = Image.new("RGB", (picture.width, picture.height + strip), "white")
    canvas.paste(picture, (0, strip))
    ImageDraw.Draw(canvas).text((4, strip // 2), title, fill="black", font=font, anchor="lm")
    return canvas


def _arrange(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Pictures row by row on white; a column is as wide as its widest, a row as high as its highest."""
    columns = min(columns, len(pictures))
    widths = [max(picture.width for picture in pictures[start::columns]) for start in range(columns)]
    rows = [pictures[start : start + columns] for start in range(0, len(pictures), columns)]
    heights = [max(picture.height for picture in row) for row in rows]
    sheet = Image.new("RGB", (sum(widths) + GAP * (columns - 1), sum(heights) + GAP * (len(rows) - 1)), "white")
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            sheet.paste(picture, (sum(widths[:j]) + GAP * j, sum(heights[:i]) + GAP * i))
    return sheet


def _to_picture(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().cpu().numpy())  # (3, H, W) -> (H, W, 3)


def _to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()  # (H, W, 3) -> (3, H, W)
