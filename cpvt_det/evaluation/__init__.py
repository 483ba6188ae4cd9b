# SPDX-License-Identifier: Apache-2.0
"""Detections -> COCO figures and pictures."""
