# SPDX-License-Identifier: Apache-2.0
"""Run a trained model, for detections with class names or for classes with scores."""

from cpvt_det.predict.detections import ImageClasses, ImageDetections
from cpvt_det.predict.predictor import ClassPredictor, Predictor

__all__ = ["ClassPredictor", "ImageClasses", "ImageDetections", "Predictor"]
