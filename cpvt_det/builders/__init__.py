# SPDX-License-Identifier: Apache-2.0
"""Build objects from a config, or from trained weights and the config in them. No other part of the core reads a config; every
class takes plain arguments.

Every function can be imported from here. Its module is loaded at first use, so data can be checked without importing torch.
"""

import importlib
from typing import Any

_NAMES = {
    "data": (
        "build_class_mapper build_evaluator build_test_loader build_test_mapper build_tiling build_train_loader check_evaluation "
        "load_checked load_for_tests load_for_training load_splits load_tests require_rgb"
    ),
    "datasets": "check_class_datasets check_datasets set_classes training_records",
    "detector": (
        "DETECTOR_REGISTRY PART_REGISTRIES build_detector build_output_decoder build_postprocessor detector_arguments "
        "is_classifier register_detector shared_arguments transformer_arguments"
    ),
    "parts": (
        "backbone_position build_backbone build_classification build_criterion build_device build_encoder_position require_patches"
    ),
    "trained": "load_for_evaluation load_model load_teacher load_trained",
    "training": "build_class_training_model build_ema build_optimizer build_schedule build_step build_training_model",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)  # cached for the next access
    return found
