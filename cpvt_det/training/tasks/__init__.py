# SPDX-License-Identifier: Apache-2.0
"""Tasks, the parts of a run that differ between detection and classification: data, model, metrics and pictures."""

from cpvt_det.training.tasks.classification import ClassificationTask
from cpvt_det.training.tasks.detection import DetectionTask
from cpvt_det.training.tasks.task import TASK_REGISTRY, Results, Task, build_task, figure_of, flatten

__all__ = ["TASK_REGISTRY", "ClassificationTask", "DetectionTask", "Results", "Task", "build_task", "figure_of", "flatten"]
