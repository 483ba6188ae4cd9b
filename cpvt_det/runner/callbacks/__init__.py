# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a training run: called when it starts, after steps and evaluations, and when it ends; the same in both runners."""

from cpvt_det.runner.callbacks.calls import RunCallbacks, build_callbacks
from cpvt_det.runner.callbacks.contract import CALLBACK_REGISTRY, Callback, TrainingRun
from cpvt_det.runner.callbacks.early_stopping import EarlyStopping

__all__ = ["CALLBACK_REGISTRY", "Callback", "EarlyStopping", "RunCallbacks", "TrainingRun", "build_callbacks"]
