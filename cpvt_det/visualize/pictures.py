# SPDX-License-Identifier: Apache-2.0
"""Pictures of detections, alone or next to the ground truth, and of a detector's input.

Place in the pipeline: after ``evaluation/answers.py``. The detections drawn here are the same ones that ``evaluation/coco.py``
gets.
"""

import colorsys
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from cpvt_det.common.boxes import cxcywh_to_xyxy
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Detections, Sample, Size
from cpvt_det.data.records import ImageRecord
from cpvt_det.visualize.fonts import Text, load_font

MIN_SIDE = 384  # pixels; images with a smaller short side are enlarged, so that labels fit into them
MAX_SIDE = 2048  # pixels: limit of the long side of an enlarged image
FEW = 3  # number of detections that are drawn if none passes the threshold
GAP = 8  # white pixels between pictures
SHEET_WIDTH = 1600  # pixels: width of a sheet of comparisons, chosen so that labels are readable when it fills a screen
SHEET_HEIGHT = 640  # pixels: largest height of an image on a sheet
INPUT_COLUMNS = 4  # pictures per row on a sheet of inputs
STRIPE = 12  # width of the padding's stripes in pixels

Color = tuple[int, int, int]
Corners = tuple[int, int, int, int]


class Compared(NamedTuple):
    """An image to draw next to its ground truth; the fields are arguments of :func:`draw_comparison`."""

    image: Tensor
    truth: Detections | None
    detections: Detections


def class_color(label: int) -> Color:
    """The colour of a class, the same in every picture; the hues of neighbouring classes differ by the golden angle."""
    hue = (0.02 + label * 0.61803398875) % 1
    red, green, blue = colorsys.hsv_to_rgb(hue, (0.95, 0.6)[label // 8 % 2], (1.0, 0.75)[label // 4 % 2])
    return round(255 * red), round(255 * green), round(255 * blue)


def hex_color(label: int) -> str:
    """The colour of a class as text, for CSS and matplotlib."""
    return "#{:02x}{:02x}{:02x}".format(*class_color(label))


def draw_panel(
    image: Tensor, objects: Detections, class_names: Sequence[str], title: str, scored: bool = False, height: int | None = None
) -> Image.Image:
    """Draw an image with the names of its objects, under a title.

    Args:
        image: (3, H, W) uint8, RGB.
        objects: boxes in pixels of ``image``.
        class_names: the name of each class.
        title: text above the image.
        scored, height: as in :func:`draw_objects`.
    """
    picture = draw_objects(image, objects, class_names, scored, height)
    size = max(16, min(picture.size) // 30)
    strip, (ascent, descent) = round(1.6 * size), load_font(None, size).getmetrics()
    canvas = Image.new("RGB", (picture.width, picture.height + strip), "white")
    canvas.paste(picture, (0, strip))
    Text(title, size).draw(ImageDraw.Draw(canvas), 4, (strip + ascent - descent) // 2, "black")
    return canvas


def draw_comparison(
    image: Tensor,
    truth: Detections | None,
    detections: Detections,
    class_names: Sequence[str],
    score_threshold: float,
    height: int | None = None,
) -> Image.Image:
    """Draw an image twice, side by side: once with its detections and once with its ground truth.

    If no detection passes the threshold, the best three are drawn and the title says so. For an image without objects, no
    detections are drawn in this case, because having none is correct.

    Args:
        image: (3, H, W) uint8, RGB. It is enlarged by the whole number that makes its short side at least 384, or by less if the
            long side would exceed 2048.
        truth: ground truth, whose scores are ignored; ``None`` for a single panel.
        detections: boxes in pixels of ``image``.
        class_names: the name of each class.
        score_threshold: lowest score of the drawn detections, which may be in any order.
        height: height that the image is resized to, instead of being enlarged.

    Returns:
        The panels on white, each below its title.
    """
    detections = detections.cpu()
    keep = detections.scores >= score_threshold
    count = int(keep.sum())
    title = f"detections ({count} with score >= {score_threshold:.3g})"
    if count == 0 and len(keep) and (truth is None or len(truth.labels)):
        keep = detections.scores.argsort(descending=True)[:FEW]
        title = f"best {len(keep)} detections (none with score >= {score_threshold:.3g})"
    detections = Detections(detections.boxes_xyxy[keep], detections.scores[keep], detections.labels[keep])
    panels = [draw_panel(image, detections, class_names, title, scored=True, height=height)]
    if truth is not None:
        title = f"ground truth ({len(truth.labels)})"
        panels.append(draw_panel(image, truth.cpu(), class_names, title, height=height))
    return _arrange(panels, columns=2)


def draw_objects(
    image: Tensor,
    objects: Detections,
    class_names: Sequence[str],
    scored: bool = True,
    height: int | None = None,
    notes: Sequence[str] | None = None,
) -> Image.Image:
    """Draw an image with labelled boxes.

    Args:
        image: (3, H, W) uint8, RGB; enlarged as by :func:`draw_comparison`.
        objects: boxes in pixels of ``image``.
        class_names: the name of each class.
        scored: whether to write scores next to the names.
        height: height that the image is resized to, instead of being enlarged.
        notes: text after the label of each object, such as its track.
    """
    if height is None:
        scale: float = max(1, min(-(-MIN_SIDE // min(image.shape[1:])), MAX_SIDE // max(image.shape[1:])))
        picture = to_pil_image(image.cpu().repeat_interleave(scale, 1).repeat_interleave(scale, 2))
        font_size = max(14, min(picture.size) // 36)
    else:
        scale = height / image.shape[1]
        picture = to_pil_image(image.cpu()).resize((max(1, round(image.shape[2] * scale)), height), Image.Resampling.LANCZOS)
        font_size = max(15, height // 30)
    line = max(2, min(picture.size) // 200)
    boxes = [_corners(box, scale, picture.size) for box in objects.boxes_xyxy.tolist()]
    draw = ImageDraw.Draw(picture)
    for box, label in zip(boxes, objects.labels.tolist(), strict=True):
        draw.rectangle(box, outline=class_color(label), width=line)
    taken: list[Corners] = []
    notes = [""] * len(boxes) if notes is None else notes
    for box, label, score, note in zip(boxes, objects.labels.tolist(), objects.scores.tolist(), notes, strict=True):
        text = Text((f"{class_names[label]} {score:.2f}" if scored else class_names[label]) + note, font_size)
        _draw_label(draw, text, box, class_color(label), picture.size, taken)
    return picture


def save_comparisons(
    compared: Sequence[Compared], class_names: Sequence[str], score_threshold: float, path: str | os.PathLike[str]
) -> None:
    """Write comparisons as one PNG in rows of full width, laid out by :func:`sheet_rows`.

    Args:
        compared: images with their ground truth and detections; at least one.
        class_names, score_threshold: as in :func:`draw_comparison`.
        path: path of the PNG; missing folders are created.
    """
    rows, left = [], iter(compared)
    for count, height in sheet_rows([tuple(one.image.shape[1:]) for one in compared]):
        panels = [draw_comparison(*one, class_names, score_threshold, height) for one in itertools.islice(left, count)]
        rows.append(_arrange(panels, count))
    save_contact_sheet(rows, path, columns=1)


def sheet_rows(sizes: Sequence[Size]) -> list[tuple[int, int]]:
    """Lay out comparisons in rows of equal width, without space at the sides.

    Args:
        sizes: (h, w) of each image; a comparison is twice as wide.

    Returns:
        For each row, the number of comparisons in the row and the height of their images. With this height, the row fills
        ``SHEET_WIDTH``. In the last row, the height is at most ``SHEET_HEIGHT``.
    """
    rows, count, aspect = [], 0, 0.0
    for place, (height, width) in enumerate(sizes, start=1):
        count, aspect = count + 1, aspect + 2 * width / height
        fitting = (SHEET_WIDTH - (2 * count - 1) * GAP) / aspect
        if fitting <= SHEET_HEIGHT or place == len(sizes):
            rows.append((count, max(1, round(min(fitting, SHEET_HEIGHT)))))
            count, aspect = 0, 0.0
    return rows


def save_contact_sheet(pictures: Sequence[Image.Image], path: str | os.PathLike[str], columns: int = 2) -> None:
    """Write pictures, row by row on white, as one PNG.

    Args:
        pictures: pictures of any sizes; at least one.
        path: path of the PNG; missing folders are created.
        columns: number of pictures per row.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    _arrange(pictures, columns).save(path, format="PNG")


def _corners(box_xyxy: list[float], scale: float, size: tuple[int, int]) -> Corners:
    """First and last pixels of a box in an enlarged image. They lie inside the image, and the box is never empty."""
    ends = []
    for low, high, side in zip(box_xyxy[:2], box_xyxy[2:], size, strict=True):
        first = min(max(math.floor(low * scale), 0), side - 1)
        ends.append((first, min(max(math.ceil(high * scale) - 1, first), side - 1)))
    (left, right), (top, bottom) = ends
    return left, top, right, bottom


def _draw_label(
    draw: ImageDraw.ImageDraw, text: Text, box: Corners, color: Color, size: tuple[int, int], taken: list[Corners]
) -> None:
    """Write a label on a background in the box's colour, if possible at a corner of the box where it covers no other label."""
    left, top, right, bottom = text.box
    width, height = right - left + 6, bottom - top + 6
    candidates = []
    for y in (box[1] - height, box[1], box[3] - height + 1, box[3] + 1):
        for x in (box[0], box[2] - width + 1):
            x, y = max(0, min(x, size[0] - width)), max(0, min(y, size[1] - height))
            candidates.append((x, y, x + width - 1, y + height - 1))
    place = next((one for one in candidates if not any(_overlap(one, other) for other in taken)), candidates[0])
    taken.append(place)
    bright = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 128
    draw.rectangle(place, fill=color)
    text.draw(draw, place[0] + 3 - left, place[1] + 3 - top, "black" if bright else "white")


def _overlap(one: Corners, other: Corners) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]


def _arrange(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Arrange pictures row by row on white; a column is as wide as its widest picture, and a row as high as its highest."""
    columns = min(columns, len(pictures))
    widths = [max(picture.width for picture in pictures[start::columns]) for start in range(columns)]
    rows = [pictures[start : start + columns] for start in range(0, len(pictures), columns)]
    heights = [max(picture.height for picture in row) for row in rows]
    sheet = Image.new("RGB", (sum(widths) + GAP * (columns - 1), sum(heights) + GAP * (len(rows) - 1)), "white")
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            sheet.paste(picture, (sum(widths[:j]) + GAP * j, sum(heights[:i]) + GAP * i))
    return sheet


def draw_batches(
    batches: Iterable[list[Sample]],
    records: Mapping[int, ImageRecord],
    detector: nn.Module,
    classes: Classes,
    count: int,
    path: Path,
) -> int:
    """Draw the first images of a loader.

    Args:
        batches: batches of samples; training samples have ``targets``.
        records: image id -> record with the boxes, for samples without targets.
        detector: the detector, which normalises and pads the images.
        classes: ids and names of the labels.
        count: largest number of images to draw.
        path: path of the picture.

    Returns:
        The number of images drawn.

    Raises:
        BadInputError: a path that cannot be written to.
    """
    panels: list[Image.Image] = []
    for number, samples in enumerate(batches):
        for canvas, sample in zip(_canvases(samples, detector), samples[: count - len(panels)], strict=False):
            height, width = sample["image"].shape[1:]
            fed = f"{width} x {height} of {sample['width']} x {sample['height']}"
            title = f"batch {number}, image {sample['image_id']}: {fed}, on {canvas.shape[2]} x {canvas.shape[1]}"
            panels.append(draw_panel(canvas, _objects(sample, records), classes.names, title))
        if len(panels) == count:
            break
    try:
        save_contact_sheet(panels, path, INPUT_COLUMNS)
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror}; give another --output") from error
    return len(panels)


def _canvases(samples: list[Sample], detector: nn.Module) -> Tensor:
    """(B, 3, H, W) uint8, the images of a batch as the detector receives them, with stripes on the padding."""
    batch = detector.preprocess([sample["image"] for sample in samples])
    pixels = (batch.images * detector.pixel_std + detector.pixel_mean).round().clamp(0, 255).byte().cpu()
    rows, columns = (torch.arange(side) for side in pixels.shape[2:])
    stripes = torch.where((rows[:, None] + columns) // STRIPE % 2 == 0, 235, 205).byte()
    return torch.where(batch.padding_mask[:, None].cpu(), stripes, pixels)


def _objects(sample: Sample, records: Mapping[int, ImageRecord]) -> Detections:
    """The objects of a sample, in pixels of the detector's input."""
    height, width = sample["image"].shape[1:]
    if "targets" in sample:
        labels = sample["targets"].labels
        boxes = cxcywh_to_xyxy(sample["targets"].boxes_cxcywh) * torch.tensor([width, height, width, height])
    else:
        record = records[sample["image_id"]]
        labels = torch.from_numpy(record.labels)
        x, y = width / record.width, height / record.height
        boxes = torch.from_numpy(record.boxes_xyxy) * torch.tensor([x, y, x, y])
    return Detections(boxes, torch.ones(len(labels)), labels)
