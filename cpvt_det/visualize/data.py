# SPDX-License-Identifier: Apache-2.0
"""Pictures of a detector's input: batches as the loaders return them, with their padding and boxes."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from PIL import Image
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
    panels: list[Image.Image] = []
    for number, (samples, canvases) in enumerate(_first_images(batches, detector, count)):
        for canvas, sample in zip(canvases, samples, strict=False):
            height, width = sample["image"].shape[1:]
            fed = f"{width} x {height} of {sample['width']} x {sample['height']}"
            title = f"batch {number}, image {sample['image_id']}: {fed}, on {canvas.shape[2]} x {canvas.shape[1]}"
            panels.append(draw_panel(canvas, _objects(sample, records), classes.names, title))
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
    panels: list[Image.Image] = []
    for number, (samples, canvases) in enumerate(_first_images(batches, detector, count)):
        groups = denoising.count([sample["targets"] for sample in samples])[0]
        objects, labels, boxes = denoising.draw_noise([sample["targets"] for sample in samples])
        for image, (canvas, sample) in enumerate(zip(canvases, samples, strict=False)):
            title = f"batch {number}, image {sample['image_id']}"
            panels.append(draw_panel(canvas, _objects(sample, {}), classes.names, f"{title}: objects"))
            for kind, name in enumerate(("positives", "negatives")):
                own = objects[image, 0, kind] >= 0
                noised = Targets(labels[image, 0, kind, own], boxes[image, 0, kind, own])
                drawn = _objects({**sample, "targets": noised}, {})
                panels.append(draw_panel(canvas, drawn, classes.names, f"{name} of group 1 of {groups}"))
    _save(panels, path, columns=3)
    return len(panels) // 3


def _save(panels: list[Image.Image], path: Path, columns: int = COLUMNS) -> None:
    try:
        save_contact_sheet(panels, path, columns)
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror}; give another --output") from error


def _first_images(batches: Iterable[list[Sample]], detector: nn.Module, count: int) -> Iterator[tuple[list[Sample], Tensor]]:
    """Batches until they have ``count`` images: all samples of a batch, and its images that are still wanted, (n, 3, H, W) uint8
    as the detector receives them, with stripes on the padding."""
    for samples in batches:
        batch = detector.preprocess([sample["image"] for sample in samples])
        pixels = (batch.images[:count] * detector.pixel_std + detector.pixel_mean).round().clamp(0, 255).byte().cpu()
        rows, columns = (torch.arange(side) for side in pixels.shape[2:])
        stripes = torch.where((rows[:, None] + columns) // STRIPE % 2 == 0, 235, 205).byte()
        yield samples, torch.where(batch.padding_mask[:count, None].cpu(), stripes, pixels)
        count -= len(pixels)
        if count <= 0:
            break


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
