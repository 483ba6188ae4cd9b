# SPDX-License-Identifier: Apache-2.0
"""From files to samples."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpvt_det.data.coco import CocoDataset


def read_folder(path: str | os.PathLike[str], data_format: str = "", new_split: bool = False) -> "list[CocoDataset]":
    """The data sets that ``cpvt-det train FOLDER`` would use, for training, validation and, if there is a test set, testing.

    Args:
        path: folder of images and annotations: COCO JSON, YOLO, Pascal VOC, CVAT's XML, or a registered format.
        data_format: format to read, needed if the folder has annotations in several formats.
        new_split: whether to draw a split even if the folder has one.

    Returns:
        Data sets, each with ``name``, ``classes.names`` and ``records``. Each record is one image and has three attributes:
        ``file_name``; ``labels``, (G,) int64 indices into the names; and ``boxes_xyxy``, (G, 4) float32 in pixels.
        ``issues.infos`` lists all corrections that were made.

    Raises:
        DataError: the folder has no data sets, or has faulty images or boxes.
    """
    import tempfile
    from pathlib import Path

    from cpvt_det.data.catalog import registered_datasets
    from cpvt_det.data.folders.prepare import name_datasets, refuse_overlap
    from cpvt_det.data.validation.check import check_data
    from cpvt_det.data.validation.issues import require_no_errors

    with tempfile.TemporaryDirectory() as drawn:
        found = name_datasets(Path(path).expanduser(), Path(drawn), data_format, new_split)
        train, *tests = registered_datasets(found.register)
        data = check_data([train], tests)
        for issues in data.issues:
            issues.source = found.source_of(issues.source)
        require_no_errors(data.issues, "error")
    refuse_overlap(data.train[0], data.tests[0])
    return data.train + data.tests
