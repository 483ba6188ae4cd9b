# SPDX-License-Identifier: Apache-2.0
"""Readers of data formats other than COCO JSON."""

from cpvt_det.data.formats import image_folder, xml_files, yolo  # noqa: F401, registers formats; if several match, the last is used
from cpvt_det.data.formats.format import FORMAT_REGISTRY, register_format

__all__ = ["FORMAT_REGISTRY", "register_format"]
