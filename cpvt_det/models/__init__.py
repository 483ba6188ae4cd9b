# SPDX-License-Identifier: Apache-2.0
"""Detectors and classifiers: modules that turn normalised images and a padding mask into predictions. They know neither losses
nor configs.
"""

from cpvt_det.models.backbones import BACKBONE_REGISTRY
from cpvt_det.models.backbones.resnet import ResNetBackbone
from cpvt_det.models.backbones.vit import VisionTransformer
from cpvt_det.models.box_queries import AnchorQueries, MixedQueries
from cpvt_det.models.classifier import Classifier
from cpvt_det.models.deformable_detr import DeformableDETR, DeformableTransformer
from cpvt_det.models.detector import Detector
from cpvt_det.models.detr import DETR, Transformer
from cpvt_det.models.distribution_decoder import DistributionDecoder
from cpvt_det.models.image_model import ImageModel
from cpvt_det.models.necks import NECK_REGISTRY, SimplePyramid
from cpvt_det.models.queries import QUERY_REGISTRY
from cpvt_det.models.real_time_detr import HybridEncoder, HybridTransformer, RealTimeDETR

__all__ = [
    "BACKBONE_REGISTRY",
    "DETR",
    "NECK_REGISTRY",
    "QUERY_REGISTRY",
    "AnchorQueries",
    "Classifier",
    "DeformableDETR",
    "DeformableTransformer",
    "Detector",
    "DistributionDecoder",
    "HybridEncoder",
    "HybridTransformer",
    "ImageModel",
    "MixedQueries",
    "RealTimeDETR",
    "ResNetBackbone",
    "SimplePyramid",
    "Transformer",
    "VisionTransformer",
]
