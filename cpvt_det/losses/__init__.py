# SPDX-License-Identifier: Apache-2.0
"""From predictions and targets to losses."""

from cpvt_det.losses.classification import CLASSIFICATION_REGISTRY, FocalClassification, SoftmaxClassification, make_classification
from cpvt_det.losses.criterion import Losses, SetCriterion, TrainingModel
from cpvt_det.losses.matcher import HungarianMatcher
from cpvt_det.losses.overlap_classification import AlignClassification, MatchabilityClassification, VarifocalClassification
from cpvt_det.losses.terms import LOSS_REGISTRY, Matched, Normalizers

__all__ = [
    "CLASSIFICATION_REGISTRY",
    "LOSS_REGISTRY",
    "AlignClassification",
    "FocalClassification",
    "HungarianMatcher",
    "Losses",
    "MatchabilityClassification",
    "Matched",
    "Normalizers",
    "SetCriterion",
    "SoftmaxClassification",
    "TrainingModel",
    "VarifocalClassification",
    "make_classification",
]
