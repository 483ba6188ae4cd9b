# SPDX-License-Identifier: Apache-2.0
"""Read data sets in formats other than COCO JSON into COCO's sections, which are then checked by the same rules.

Invalid entries are passed on unchanged; ``data/validation/rules.py`` reports them.
"""

import math
from collections.abc import Iterable
from typing import Any

from cpvt_det.common.errors import DataError
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.formats.format import Sections, find_format
from cpvt_det.data.images import file_threads, read_header
from cpvt_det.data.validation.rules import FAULT, LARGEST_SHARE


def read_foreign(files: DatasetFiles) -> Sections:
    """The sections ``images``, ``annotations`` and ``categories`` of a data set in a registered format.

    Args:
        files: files of the data set: ``annotations`` is a path of the format, ``split`` the name of a split.

    Returns:
        The sections. If the annotations lack image sizes, these are read from the image files. A file that cannot be read gets
        the size 1 x 1, and is reported later, when images are checked. An annotation's ``source`` is its file and position.

    Raises:
        DataError: an unknown format, or a split that does not exist.
    """
    data_format = find_format(files.annotations)
    if data_format is None:
        raise DataError(
            f"{files.annotations} is not a data set: expected a COCO JSON file, a YOLO folder with data.yaml (or its YAML file by "
            "path), a Pascal VOC folder with Annotations/*.xml, a folder of images per class (SPLIT/CLASS/*.jpg), or a format "
            "registered by a module given with --import MODULE"
        )
    return complete(data_format.read(files.annotations, files.split))


def complete(content: Sections) -> Sections:
    """The same sections with missing image sizes, boxes in pixels, and notes added."""
    content.setdefault("notes", {})
    _add_sizes(content["images"])
    _add_boxes(content)
    return content


def _add_sizes(images: Iterable[dict[str, Any]]) -> None:
    missing = [image for image in images if FAULT not in image and not (image.get("height") and image.get("width"))]
    with file_threads() as pool:
        for image, (height, width) in zip(missing, pool.map(_size, (image["file_name"] for image in missing)), strict=True):
            image.update(height=height, width=width)


def _size(path: str) -> tuple[int, int]:
    try:
        header = read_header(path)
    except DataError:
        return 1, 1
    return header.height, header.width


def _add_boxes(content: Sections) -> None:
    """Convert boxes that are relative to their image to pixels. Boxes with numbers far outside [0, 1] are marked as faulty."""
    size_of = {image["id"]: (image.get("width", 1), image.get("height", 1)) for image in content["images"]}
    for annotation in content["annotations"]:
        relative = annotation.pop("relative_cxcywh", None)
        if relative is None or FAULT in annotation:
            continue
        if any(LARGEST_SHARE < abs(number) < math.inf for number in relative):
            why = f"{relative!r}; expected centre, width and height in [0, 1], not pixels"
            annotation[FAULT] = ["boxes that are not fractions of the image", why]
        else:
            (cx, cy, w, h), (width, height) = relative, size_of[annotation["image_id"]]
            annotation["bbox"] = [(cx - w / 2) * width, (cy - h / 2) * height, w * width, h * height]
