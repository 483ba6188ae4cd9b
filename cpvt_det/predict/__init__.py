# SPDX-License-Identifier: Apache-2.0
"""Run a trained detector: images of any kind -> detections with class names."""

from cpvt_det.predict.detections import ImageDetections
from cpvt_det.predict.predictor import Predictor

__all__ = ["ImageDetections", "Predictor"]
