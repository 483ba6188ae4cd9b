# SPDX-License-Identifier: Apache-2.0
"""Backbones: feature maps of an image, by stride."""

from cpvt_det.models.backbones import resnet, timm, timm_transformer, tnt, vit  # noqa: F401, registers backbones
from cpvt_det.models.backbones.contract import BACKBONE_REGISTRY

__all__ = ["BACKBONE_REGISTRY"]
