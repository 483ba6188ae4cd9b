# SPDX-License-Identifier: Apache-2.0
"""Augmentations that are chosen by name, and that move boxes along with the pixels."""

from cpvt_det.data.augmentation import mixing  # noqa: F401, registers augmentations
from cpvt_det.data.augmentation.step import AUGMENTATION_REGISTRY, AugmentationStep, DrawScene, Scene

__all__ = ["AUGMENTATION_REGISTRY", "AugmentationStep", "DrawScene", "Scene"]
