# SPDX-License-Identifier: Apache-2.0
"""Weights: files read without running code, other projects' names turned into ours, and what fits put into a model."""

from cpvt_det.checkpoint.convert import convert_state_dict
from cpvt_det.checkpoint.load import WeightsReport, load_backbone_weights, load_weights
from cpvt_det.checkpoint.weights import read_weights

__all__ = ["WeightsReport", "convert_state_dict", "load_backbone_weights", "load_weights", "read_weights"]
