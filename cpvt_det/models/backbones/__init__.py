# SPDX-License-Identifier: Apache-2.0
"""Backbones: feature maps of an image, by stride."""

from cpvt_det.models.backbones.contract import BACKBONE_REGISTRY
from cpvt_det.models.backbones.resnet import ResNetBackbone, ResNetDBackbone
from cpvt_det.models.backbones.timm import TimmBackbone
from cpvt_det.models.backbones.timm_transformer import TimmTransformer
from cpvt_det.models.backbones.tnt import TransformerInTransformer
from cpvt_det.models.backbones.vit import VisionTransformer

__all__ = [
    "BACKBONE_REGISTRY",
    "ResNetBackbone",
    "ResNetDBackbone",
    "TimmBackbone",
    "TimmTransformer",
    "TransformerInTransformer",
    "VisionTransformer",
]
