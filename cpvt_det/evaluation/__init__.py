# SPDX-License-Identifier: Apache-2.0
"""From predictions to detections and COCO's metrics, with confusion and precision-recall curves."""
