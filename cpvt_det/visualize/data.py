# SPDX-License-Identifier: Apache-2.0
"""Pictures of a detector's input: batches as the loaders return them, with their padding and boxes."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from cpvt_det.common.boxes import cxcywh_to_xyxy
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Detections, Targets
from cpvt_det.data.mapper import Sample
from cpvt_det.data.records import ImageRecord
from cpvt_det.models.denoising import ContrastiveDenoising
from cpvt_det.visualize.pictures import draw_panel, save_contact_sheet

COLUMNS = 4
STRIPE = 12  # width of the padding's stripes in pixels


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
    panels: list[Tensor] = []
    for number, samples in enumerate(batches):
        batch = detector.preprocess([sample["image"] for sample in samples])
        wanted = count - len(panels)
        canvases = _as_seen(detector, batch.images[:wanted], batch.padding_mask[:wanted])
        for canvas, sample, (height, width) in zip(canvases, samples, batch.image_sizes, strict=False):
            fed = f"{width} x {height} of {sample['width']} x {sample['height']}"
            title = f"batch {number}, image {sample['image_id']}: {fed}, on {canvas.shape[2]} x {canvas.shape[1]}"
            panels.append(draw_panel(canvas, _objects(sample, records), classes.names, title))
        if len(panels) >= count:
            break
    _save(panels, path)
    return len(panels)


def draw_denoising(
    batches: Iterable[list[Sample]], detector: nn.Module, denoising: ContrastiveDenoising, classes: Classes, count: int, path: Path
) -> int:
    """Draw objects next to their noised copies, both the copies that should find their object again and the copies that should find
    no object.

    Args:
        batches: batches of training samples.
        detector, classes, count, path: as in :func:`draw_batches`.
        denoising: module that draws the noise.

    Returns:
        The number of images drawn.

    Raises:
        BadInputError: a path that cannot be written to.
    """
    panels: list[Tensor] = []
    for number, samples in enumerate(batches):
        batch = detector.preprocess([sample["image"] for sample in samples])
        groups = denoising.count([sample["targets"] for sample in samples])[0]
        objects, labels, boxes = denoising.draw_noise([sample["targets"] for sample in samples])
        wanted = min(len(samples), count - len(panels) // 3)
        canvases = _as_seen(detector, batch.images[:wanted], batch.padding_mask[:wanted])
        for image, (canvas, sample) in enumerate(zip(canvases, samples, strict=False)):
            title = f"batch {number}, image {sample['image_id']}"
            panels.append(draw_panel(canvas, _objects(sample, {}), classes.names, f"{title}: objects"))
            for kind, name in enumerate(("positives", "negatives")):
                own = objects[image, 0, kind] >= 0
                noised = Targets(labels[image, 0, kind, own], boxes[image, 0, kind, own])
                drawn = _objects({**sample, "targets": noised}, {})
                panels.append(draw_panel(canvas, drawn, classes.names, f"{name} of group 1 of {groups}"))
        if len(panels) >= 3 * count:
            break
    _save(panels, path, columns=3)
    return len(panels) // 3


def _save(panels: list[Tensor], path: Path, columns: int = COLUMNS) -> None:
    try:
        save_contact_sheet(panels, path, columns)
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror}; give another --output") from error


def _as_seen(detector: nn.Module, images: Tensor, padding_mask: Tensor) -> Tensor:
    """Turn (B, 3, H, W) normalised images into uint8 pixels, with stripes on the padding."""
    pixels = (images * detector.pixel_std + detector.pixel_mean).round().clamp(0, 255).byte().cpu()
    rows, columns = (torch.arange(side) for side in images.shape[2:])
    stripes = torch.where((rows[:, None] + columns) // STRIPE % 2 == 0, 235, 205).byte()
    return torch.where(padding_mask[:, None].cpu(), stripes, pixels)


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
