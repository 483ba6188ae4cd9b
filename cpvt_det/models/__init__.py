# SPDX-License-Identifier: Apache-2.0
"""Detectors: modules from normalised images and a padding mask to predictions. No losses, no config."""

from cpvt_det.models.backbone import ResNetBackbone
from cpvt_det.models.detr import DETR
from cpvt_det.models.transformer import Transformer

__all__ = ["DETR", "ResNetBackbone", "Transformer"]
