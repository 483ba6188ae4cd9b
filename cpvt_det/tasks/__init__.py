# SPDX-License-Identifier: Apache-2.0
"""Tasks: what a run reads, feeds, compares and measures, and which figure is its main one."""

from cpvt_det.tasks.classification import ClassificationTask
from cpvt_det.tasks.detection import DetectionTask
from cpvt_det.tasks.registry import TASK_REGISTRY, Results, build_task, flatten, main_value

__all__ = ["TASK_REGISTRY", "ClassificationTask", "DetectionTask", "Results", "build_task", "flatten", "main_value"]
