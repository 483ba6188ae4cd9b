# SPDX-License-Identifier: Apache-2.0
"""Predictions and targets -> losses."""

from cpvt_det.losses.classification import FocalClassification, SoftmaxClassification, make_classification
from cpvt_det.losses.criterion import Losses, Normalizers, SetCriterion
from cpvt_det.losses.matcher import HungarianMatcher

__all__ = [
    "FocalClassification",
    "HungarianMatcher",
    "Losses",
    "Normalizers",
    "SetCriterion",
    "SoftmaxClassification",
    "make_classification",
]
