# SPDX-License-Identifier: Apache-2.0
"""Pictures of a detector's input: batches as the loaders return them, with their padding and boxes."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from cpvt_det.common.boxes import cxcywh_to_xyxy
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Detections
from cpvt_det.data.mapper import Sample
from cpvt_det.data.records import ImageRecord
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
    for number, samples in enumerate(batches):
        for canvas, sample in zip(_canvases(samples, detector), samples[: count - len(panels)], strict=False):
            height, width = sample["image"].shape[1:]
            fed = f"{width} x {height} of {sample['width']} x {sample['height']}"
            title = f"batch {number}, image {sample['image_id']}: {fed}, on {canvas.shape[2]} x {canvas.shape[1]}"
            panels.append(draw_panel(canvas, _objects(sample, records), classes.names, title))
        if len(panels) == count:
            break
    try:
        save_contact_sheet(panels, path, COLUMNS)
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
