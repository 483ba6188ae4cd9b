# SPDX-License-Identifier: Apache-2.0
"""A trained detector in use: images of any kind -> detections by name."""

from cpvt_det.predict.detections import ImageDetections
from cpvt_det.predict.predictor import Predictor

__all__ = ["ImageDetections", "Predictor"]
