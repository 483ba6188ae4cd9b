# SPDX-License-Identifier: Apache-2.0
"""Other formats than COCO JSON, read into the same records."""

from cpvt_det.data.formats import voc, yolo  # noqa: F401, registers formats
from cpvt_det.data.formats.registry import FORMAT_REGISTRY, register_format

__all__ = ["FORMAT_REGISTRY", "register_format"]
