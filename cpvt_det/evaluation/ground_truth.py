# SPDX-License-Identifier: Apache-2.0
"""The objects that detections are compared with, as arrays: of a data set's records, or of a COCO dict."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cpvt_det.data.records import Records
from cpvt_det.data.table import BOX

COUNTED = 100
"""Detections per class and image that count, the best ones, as in COCO. Where an image has more objects of a class, all count."""


@dataclass(frozen=True)
class GroundTruth:
    """The images of a test set and their objects.

    Attributes:
        image_ids: (N,) int64.
        image_of: (A,) int64, rising: index of the image of each object.
        objects: (A,) of ``cpvt_det.data.table.BOX``.
    """

    image_ids: np.ndarray
    image_of: np.ndarray
    objects: np.ndarray

    @cached_property
    def most_of_a_class(self) -> int:
        """The largest number of objects of a class in an image, without crowds."""
        labels = self.objects["label"].astype(np.int64)
        pairs = (self.image_of * (labels.max(initial=0) + 1) + labels)[~self.objects["crowd"]]
        return int(np.unique(pairs, return_counts=True)[1].max(initial=0))

    @property
    def counted(self) -> int | None:
        """:data:`COUNTED`; ``None`` where all detections count."""
        return COUNTED if self.most_of_a_class <= COUNTED else None

    def annotations(self, class_ids: Sequence[int], labels: Sequence[int]) -> list[dict[str, Any]]:
        """Objects as COCO's annotations, with ids from 1: 0 means "no match".

        Args:
            class_ids: category id of each label.
            labels: labels whose objects are taken.
        """
        taken = np.isin(self.objects["label"], labels)
        objects, image_ids = self.objects[taken], self.image_ids[self.image_of[taken]]
        categories = np.array(class_ids)[objects["label"]]
        columns = [image_ids, categories, objects["xywh"], objects["area"], objects["crowd"].astype(int)]
        rows = enumerate(zip(*(column.tolist() for column in columns), strict=True), start=1)
        return [{"id": n, "image_id": i, "category_id": c, "bbox": b, "area": a, "iscrowd": k} for n, (i, c, b, a, k) in rows]


def ground_truth_of(source: Records | dict[str, Any], class_ids: Sequence[int]) -> GroundTruth:
    """The ground truth in a data set's records, or in a COCO dict.

    Args:
        source: records; or a dict with ``images``, ``annotations`` and ``categories``. Missing ``iscrowd`` means no crowd, missing
            ``area`` the area of the box.
        class_ids: category id of each label.

    Raises:
        ValueError: images without distinct integer ids; an annotation of an unknown image or category.
    """
    if isinstance(source, Records):
        return GroundTruth(source.image_ids, *source.boxes())
    image_ids = [image["id"] for image in source["images"]]
    index_of = {image_id: index for index, image_id in enumerate(image_ids)}
    label_of = {class_id: label for label, class_id in enumerate(class_ids)}
    if not image_ids or len(index_of) < len(image_ids) or not all(isinstance(key, int) for key in image_ids):
        raise ValueError(f"the ground truth needs images with distinct integer ids, got {image_ids[:3]}")
    rows = []
    for number, annotation in enumerate(source["annotations"]):
        image_id, class_id, area = annotation["image_id"], annotation["category_id"], annotation.get("area")
        if image_id not in index_of or class_id not in label_of:
            raise ValueError(
                f"annotation id {annotation.get('id')!r} has image id {image_id!r} and category id {class_id!r}; "
                "the image must be in the ground truth and the category in class_ids"
            )
        _, _, width, height = box = annotation["bbox"]
        area = float(width) * float(height) if area is None else area
        rows.append((index_of[image_id], (box, area, number, label_of[class_id], bool(annotation.get("iscrowd")))))
    rows.sort(key=lambda row: row[0])
    image_of, objects = zip(*rows, strict=True) if rows else ((), ())
    return GroundTruth(*(np.array(ids, dtype=np.int64) for ids in (image_ids, image_of)), np.array(list(objects), dtype=BOX))
