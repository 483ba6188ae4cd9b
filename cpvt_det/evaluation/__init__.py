# SPDX-License-Identifier: Apache-2.0
"""Detections -> COCO's metrics, confusion and precision-recall curves."""
