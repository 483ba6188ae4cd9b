# SPDX-License-Identifier: Apache-2.0
"""Readers of data formats other than COCO JSON."""

from cpvt_det.data.formats import voc, yolo  # noqa: F401, registers formats
from cpvt_det.data.formats.registry import FORMAT_REGISTRY, register_format

__all__ = ["FORMAT_REGISTRY", "register_format"]
