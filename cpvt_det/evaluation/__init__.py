# SPDX-License-Identifier: Apache-2.0
"""From predictions to detections and COCO's metrics, with confusion matrices and precision-recall curves."""
