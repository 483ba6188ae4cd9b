# SPDX-License-Identifier: Apache-2.0
"""Predictions -> detections -> COCO's metrics, with confusion and precision-recall curves."""
