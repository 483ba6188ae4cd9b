# SPDX-License-Identifier: Apache-2.0
"""Weights: read files without running code, convert other projects' names to ours, load what fits into a model."""

from cpvt_det.checkpoint.convert import convert_state_dict
from cpvt_det.checkpoint.load import WeightsReport, load_backbone_weights, load_weights
from cpvt_det.checkpoint.weights import read_weights

__all__ = ["WeightsReport", "convert_state_dict", "load_backbone_weights", "load_weights", "read_weights"]
