# SPDX-License-Identifier: Apache-2.0
"""Additional rules for image classification: each image has exactly one class, and each class has an image in every split."""

import numpy as np

from cpvt_det.data.coco import CocoDataset
from cpvt_det.data.records import Records
from cpvt_det.data.validation.check import CheckedData

SEVERAL = "images that do not have exactly one class"
WITHOUT = "classes without an image"


class ClassDataset(CocoDataset):
    """A data set whose images each have one class, the first label of the record."""

    def describe(self) -> str:
        """A summary in one line, for the log."""
        found = "".join(f"; {heading}: {count}" for heading, count in sorted(self.issues.counts().items()))
        return f"{self.name}: {len(self.records)} images of {len(self.classes)} classes{found}"


def check_image_classes(data: CheckedData) -> CheckedData:
    """Check data sets, and leave out images that do not have exactly one class.

    Args:
        data: data sets of any format; several boxes of one class count as one class.
    """
    made = {dataset.name: ClassDataset(**vars(dataset)) for dataset in (*data.train, *data.tests)}
    for dataset in made.values():
        _leave_out_several(dataset)
        counts = count_images(dataset.records, len(dataset.classes))
        for label in np.flatnonzero(counts == 0):
            dataset.issues.add_fault(WITHOUT, f"class {dataset.classes.names[label]!r}")
    train, tests = ([made[dataset.name] for dataset in split] for split in (data.train, data.tests))
    return CheckedData(train, tests, data.issues)


def count_images(records: Records, number: int) -> np.ndarray:
    """(number,) int64, number of images of each class; every image must have one class."""
    counts = np.zeros(number, dtype=np.int64)
    for block in records.blocks():
        image_of, _, labels = block.boxes_to_learn()
        counts += np.bincount(labels[np.unique(image_of, return_index=True)[1]], minlength=number)
    return counts


def _leave_out_several(dataset: ClassDataset) -> None:
    """Leave out the images that do not have exactly one class."""
    several = []
    for block in dataset.records.blocks():
        image_of, _, labels = block.boxes_to_learn()
        number = labels.max(initial=0) + 1
        classes = np.unique(image_of * number + labels) // number  # each image once for each of its classes
        for index in np.flatnonzero(np.bincount(classes, minlength=len(block)) != 1).tolist():
            record = block[index]
            names = [dataset.classes.names[label] for label in np.unique(record.labels)]
            where = f"image {record.image_id} ({record.file_name}): {', '.join(names) or 'none'}"
            dataset.issues.add_fault(SEVERAL, where)
            several.append(record.image_id)
    dataset.leave_out(several)
