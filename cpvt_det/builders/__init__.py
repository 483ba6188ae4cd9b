# SPDX-License-Identifier: Apache-2.0
"""Config -> objects. No other part of the core reads a config; every class takes plain arguments."""

from cpvt_det.builders.data import (
    build_evaluator,
    build_test_loader,
    build_test_mapper,
    build_train_loader,
    check_datasets,
    check_evaluation,
    load_splits,
    load_tests,
    set_classes,
    training_records,
)
from cpvt_det.builders.detector import (
    DETECTOR_REGISTRY,
    build_backbone,
    build_classification,
    build_criterion,
    build_detector,
    build_device,
    build_encoder_position,
    build_postprocessor,
    detector_arguments,
    register_detector,
    shared_arguments,
    transformer_arguments,
)
from cpvt_det.builders.training import build_ema, build_optimizer, build_schedule, build_step
from cpvt_det.builders.unused import load_cfg

__all__ = [
    "DETECTOR_REGISTRY",
    "build_backbone",
    "build_classification",
    "build_criterion",
    "build_detector",
    "build_device",
    "build_ema",
    "build_encoder_position",
    "build_evaluator",
    "build_optimizer",
    "build_postprocessor",
    "build_schedule",
    "build_step",
    "build_test_loader",
    "build_test_mapper",
    "build_train_loader",
    "check_datasets",
    "check_evaluation",
    "detector_arguments",
    "load_cfg",
    "load_splits",
    "load_tests",
    "register_detector",
    "set_classes",
    "shared_arguments",
    "training_records",
    "transformer_arguments",
]
